"""What a model file is: its identity (path, inode, time and size), and its digest, computed once and remembered by that.

Reading 28 GB takes seconds; reading it at every start would be felt. The memory is a small JSON file in the user's cache
directory and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path

import blake3

from everwarm.config import cache_directory

_MAX_REMEMBERED = 256
_PART = re.compile(r"(.+)-00001-of-(\d{5})\.gguf")


def parts_of(path: Path) -> list[Path]:
    """All files of a model that was split into several, the first of which is given."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    return [path.with_name(f"{found[1]}-{i + 1:05}-of-{found[2]}.gguf") for i in range(int(found[2]))]


def file_identity(path: Path) -> str:
    """Another whenever the file is another."""
    stat = path.stat()
    return f"{path.resolve()}|{stat.st_dev}|{stat.st_ino}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_size}"


def file_digest(path: Path, memory: Path | None = None) -> str:
    memory = memory or cache_directory() / "digests.json"
    key = file_identity(path)
    known = _read(memory)
    found = known.get(key)
    if isinstance(found, str) and len(found) == 64:
        return found
    digest = blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()
    kept = dict(list(known.items())[-_MAX_REMEMBERED + 1 :]) | {key: digest}
    _write(memory, kept)
    return digest


def _read(memory: Path) -> dict[str, object]:
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(memory: Path, known: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # a read-only home costs time at the next start, nothing else
        memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, delete=False) as file:
            json.dump(known, file)
        os.replace(file.name, memory)
