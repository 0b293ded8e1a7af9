"""A model file's identity (path, inode, times and size), and its digest, computed once per identity and remembered.

Reading 28 GB takes seconds, which is too long for every start. The digests are remembered in a small JSON file in the
user's cache directory, which may be deleted at any time. A file is read, not mapped: one that is truncated meanwhile causes
no SIGBUS.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from pathlib import Path

import blake3

from everwarm.config import cache_directory

_MAX_REMEMBERED = 256
_PART = re.compile(r"(.+)-00001-of-(\d{5})\.gguf")
_CHUNK = 16 << 20
_TICK_NS, _COARSE_TICK_NS = 30_000_000, 2_000_000_000  # how long two writes may have the same time


def parts_of(path: Path) -> list[Path]:
    """All files of a model that was split into several, the first of which is given."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    return [path.with_name(f"{found[1]}-{i + 1:05}-of-{found[2]}.gguf") for i in range(int(found[2]))]


def file_identity(path: Path) -> str:
    """Changes whenever the file changes."""
    return identity_text(path.resolve(), path.stat())


def identity_text(resolved: Path, stat: os.stat_result) -> str:
    return f"{resolved}|{stat.st_dev}|{stat.st_ino}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_size}"


def file_digest(path: Path, memory: Path | None = None) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return open_file_digest(fd, path.resolve(), memory)
    finally:
        os.close(fd)


def open_file_digest(fd: int, resolved: Path, memory: Path | None = None) -> str:
    """The digest of an open file, even if its name leads elsewhere now. Not remembered if the file changes meanwhile."""
    memory = memory or cache_directory() / "digests.json"
    found = remembered(identity_text(resolved, os.fstat(fd)), memory)
    if found is not None:
        return found
    wait_settled(fd)
    key = identity_text(resolved, os.fstat(fd))
    digest = read_digest(fd)
    if identity_text(resolved, os.fstat(fd)) == key:
        remember(key, digest, memory)
    return digest


def wait_settled(fd: int) -> None:
    """A file system's clock ticks: until its next tick another write could leave every time as it is."""
    changed_ns = os.fstat(fd).st_ctime_ns
    tick_ns = _TICK_NS if changed_ns % 1_000_000_000 else _COARSE_TICK_NS
    age_ns = time.time_ns() - changed_ns
    if 0 <= age_ns < tick_ns:
        time.sleep((tick_ns - age_ns) / 1e9)


def read_digest(fd: int) -> str:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    at = 0
    buffer = memoryview(bytearray(min(_CHUNK, max(1, os.fstat(fd).st_size))))
    while n := os.preadv(fd, [buffer], at):
        hasher.update(buffer[:n])
        at += n
    return hasher.hexdigest()


def remembered(key: str, memory: Path | None = None) -> str | None:
    """The digest of a file with this identity, if it was ever computed."""
    found = _read(memory or cache_directory() / "digests.json").get(key)
    return found if isinstance(found, str) and len(found) == 64 else None


def remember(key: str, digest: str, memory: Path | None = None) -> None:
    memory = memory or cache_directory() / "digests.json"
    known = _read(memory)
    _write(memory, dict(list(known.items())[-_MAX_REMEMBERED + 1 :]) | {key: digest})


def _read(memory: Path) -> dict[str, object]:
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(memory: Path, known: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # with a read-only home directory, only the next start takes longer
        memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, delete=False) as file:
            json.dump(known, file)
        os.replace(file.name, memory)
