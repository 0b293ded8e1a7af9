"""A model file's identity and digest, and whether a file that is in use was written to meanwhile.

Reading 28 GB takes seconds, which is too long for every start. A digest is computed once per identity (path, inode, times
and size), and remembered in a small JSON file in the user's cache directory, which may be deleted at any time. A file is
read, not mapped: one that is truncated meanwhile causes no SIGBUS.

Weights are mapped: overwriting a model file in place changes the numbers of the next step. Every write changes a file's
times before its bytes, so a step is right if ``look`` says the same before and after it. Once something has changed, a
thread reads the files again. If the digests are the same, the files were only touched, linked or renamed, and work goes on.
If they differ, or there is nothing to compare with, ``is_changed`` stays true and the files must be opened anew.

Results may leave the process when ``is_right`` says so afterwards: then nothing had changed until that moment, or every
change was proved harmless.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import blake3

from everwarm.config import cache_directory
from everwarm.errors import ModelChanged, ModelFileError
from everwarm.llama.lib import Closing

_MAX_REMEMBERED = 256
_PART = re.compile(r"(.+)-00001-of-(\d{5})\.gguf")
_CHUNK = 16 << 20
_TICK_NS, _COARSE_TICK_NS = 30_000_000, 2_000_000_000  # how long two writes may have the same time
log = logging.getLogger("everwarm.files")

MAX_TRIES = 5  # to read files that are written to all the time
STILL_S, STILL_STEP_S = 0.5, 0.05  # a file counts as completely written after so long without a change

Stats = tuple[os.stat_result, ...]


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


class FileMark(NamedTuple):
    """What a write changes: any program can set ``written_ns``, only the kernel sets ``changed_ns``."""

    device: int
    inode: int
    size: int
    written_ns: int
    changed_ns: int


Marks = tuple[FileMark, ...]


_Verdict = Literal["right", "doubted", "changed"]


class FileWatch(Closing):
    """Make it before the files are opened elsewhere, and call ``require_same_names`` after that."""

    def __init__(self, paths: Sequence[Path], on_same: Callable[[], None] = lambda: None) -> None:
        """``on_same`` is called when they were touched and are the same."""
        self.paths = list(dict.fromkeys(paths))
        self._fds: list[int] = []
        try:
            self._fds.extend(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self.paths)
            for fd in self._fds:
                wait_settled(fd)
            self._resolved = [path.resolve() for path in self.paths]
        except BaseException:
            self.close()
            raise
        self._lock = threading.Lock()
        stats = self._stats()
        self._seen = self._right = _marks(stats)
        self._n_links = [stat.st_nlink for stat in stats]
        self._identities = self._identify(stats)
        self._digests: list[str] | None = None
        self._verdict: _Verdict = "right"
        self._used_in_doubt = False
        self._is_decided = threading.Event()
        self.reason = ""  # of a change
        self._on_same = on_same

    # what they are

    def identity(self, path: Path) -> str:
        return self._identities[self.paths.index(path)]

    def digest(self, path: Path) -> str:
        """Of the file that was opened, which may have lost its name. ``ModelFileError``: it has changed since."""
        if self._digests is None:
            digests = [open_file_digest(fd, name) for fd, name in zip(self._fds, self._resolved, strict=True)]
            with self._lock:
                if self._look() == self._right:
                    self._digests = digests
        if self._digests is None:
            raise ModelFileError(f"{path.name} was changed while it was open")
        return self._digests[self.paths.index(path)]

    def require_same_names(self) -> None:
        """Raise ModelChanged unless the names still lead to the watched files, unchanged: then what was opened by name
        since this was made is the same."""
        try:
            named = _marks(tuple(path.stat() for path in self.paths))
        except OSError as error:
            raise ModelChanged(f"a file was taken away while it was opened: {error.strerror}") from None
        if not named == self._right == self.look():
            raise ModelChanged(f"{self.paths[0].name} was changed while it was opened")

    # questions, from any thread

    def look(self) -> Marks:
        with self._lock:
            return self._look()

    def before_use(self) -> Marks:
        """The marks seen last, for a computation that starts now. Its result is right if ``look`` returns the same
        afterwards: one look per step is enough."""
        with self._lock:
            self._used_in_doubt |= self._verdict == "doubted"
            return self._seen

    @property
    def is_changed(self) -> bool:
        """As of the last look."""
        return self._verdict == "changed"

    @property
    def may_be_used(self) -> bool:
        """While it is unknown whether they changed: true only if sizes and modification times are the same."""
        if self._verdict != "doubted":
            return self._verdict == "right"
        pairs = zip(self._seen, self._right, strict=True)
        return all((a.size, a.written_ns) == (b.size, b.written_ns) for a, b in pairs)

    def is_right(self) -> bool:
        """Whether everything that was computed until now is right. Waits until that is known."""
        while True:
            with self._lock:
                self._look()
                if self._verdict != "doubted":
                    return self._verdict == "right"
            self._is_decided.wait()

    def wait_decided(self, seconds: float) -> None:
        if self._verdict == "doubted":
            self._is_decided.wait(seconds)

    def wait_still(self, seconds: float) -> None:
        """Wait until the files behind the names were not written to for ``STILL_S``, at most ``seconds``."""
        now = time.monotonic()
        until = now + seconds
        still_until = now + STILL_S
        before = self._named()
        while (now := time.monotonic()) < min(until, still_until):
            time.sleep(STILL_STEP_S)
            after = self._named()
            if after != before:
                before = after
                still_until = time.monotonic() + STILL_S

    def _named(self) -> list[FileMark | None]:
        found: list[FileMark | None] = []
        for path in self.paths:
            try:
                found.append(_mark(path.stat()))
            except OSError:
                found.append(None)
        return found

    # inside: with the lock held

    def _look(self) -> Marks:
        found = _marks(self._stats()) if self._fds else self._seen  # closed: nothing is computed any more
        if found != self._seen and self._verdict != "changed":
            self._doubt(found)
        return found

    def _stats(self) -> Stats:
        return tuple(map(os.fstat, self._fds))

    def _identify(self, stats: Stats) -> list[str]:
        return [identity_text(name, stat) for name, stat in zip(self._resolved, stats, strict=True)]

    def _doubt(self, found: Marks) -> None:
        self._seen = found
        names = ", ".join(p.name for p, a, b in zip(self.paths, found, self._right, strict=True) if a != b)
        if any(a.size != b.size for a, b in zip(found, self._right, strict=True)):
            return self._decide("changed", f"{names} was changed while it was in use: it has another size")
        if self._used_in_doubt:
            return self._decide("changed", f"{names} was changed more than once while it was in use")
        if self._verdict == "right":
            self._verdict = "doubted"
            self._is_decided.clear()
            log.warning("%s was touched: nothing is kept until it is known whether it changed", names)
            threading.Thread(target=self._examine, name="everwarm-files", daemon=True).start()

    def _decide(self, verdict: _Verdict, reason: str = "") -> None:
        self._verdict = verdict
        self.reason = reason
        self._used_in_doubt = False
        self._is_decided.set()

    # the thread

    def _examine(self) -> None:
        with self._lock:
            fds = [os.dup(fd) for fd in self._fds]  # otherwise, after close, a number could be another file's
        try:
            before = self._known_digests()
            if before is None:
                if not self._only_names_changed():
                    self._give_up("was touched while it was in use, and what it was is not known")
                return
            for _ in range(MAX_TRIES):
                if self._is_examined(fds, before):
                    return
            self._give_up("is written to all the time")
        except Exception as error:  # noqa: BLE001 - threads that wait for the verdict must get one
            self._give_up(f"cannot be read again ({error})")
        finally:
            for fd in fds:
                os.close(fd)

    def _only_names_changed(self) -> bool:
        """Without known digests: whether only links were added or removed and nothing was written. A removed file stays
        usable."""
        with self._lock:
            stats = self._stats() if self._fds else ()
            now = _marks(stats)
            n_links = [stat.st_nlink for stat in stats]
            changed = [i for i, (a, b) in enumerate(zip(now, self._right, strict=False)) if a != b]
            is_written = any(now[i][:4] != self._right[i][:4] for i in changed)
            if is_written or any(n_links[i] == self._n_links[i] for i in changed) or self._verdict == "changed":
                return False
            self._seen = self._right = now
            self._n_links, self._identities = n_links, self._identify(stats)
        self._on_same()
        with self._lock:
            is_same = self._look() == now and not self.is_changed
            if is_same:
                self._decide("right")
            return is_same

    def _known_digests(self) -> list[str] | None:
        if self._digests is not None:
            return self._digests
        known = [remembered(identity) for identity in self._identities]
        return [digest for digest in known if digest is not None] if None not in known else None

    def _is_examined(self, fds: list[int], before: list[str]) -> bool:
        """False: they were touched again meanwhile."""
        for fd in fds:
            wait_settled(fd)
        target = self.look()
        if [read_digest(fd) for fd in fds] != before:
            self._give_up("was changed while it was in use")
            return True
        with self._lock:
            if self._look() != target or self._verdict == "changed":
                return self._verdict == "changed"
            self._right, self._identities, self._digests = target, self._identify(tuple(map(os.fstat, fds))), before
        for identity, digest in zip(self._identities, before, strict=True):
            remember(identity, digest)
        self._on_same()
        with self._lock:
            if self._verdict == "doubted" and self._look() == target:
                log.warning("%s is unchanged", ", ".join(path.name for path in self.paths))
                self._decide("right")
            return self._verdict != "doubted"

    def _give_up(self, what: str) -> None:
        with self._lock:
            if self._verdict != "changed":
                self._decide("changed", f"{', '.join(path.name for path in self.paths)} {what}")

    def close(self) -> None:
        fds = self._fds
        self._fds = []
        for fd in fds:
            os.close(fd)


class WatchedFiles:
    """The files of a model and those of its projector, together."""

    def __init__(self, watches: Sequence[FileWatch]) -> None:
        self._watches = tuple(watches)

    def look(self) -> bool:
        """Whether any is known to have changed, after a look at all of them."""
        for watch in self._watches:
            watch.look()
        return any(watch.is_changed for watch in self._watches)

    def require_same(self) -> None:
        """``ModelChanged``: a file was overwritten. Nothing computed with it is valid for the file as it is now."""
        for watch in self._watches:
            if watch.is_changed:
                raise ModelChanged(watch.reason)

    def may_be_used(self, wait_s: float) -> bool:
        """False: a file seems to have been written to and is being read again; waits for the outcome, at most so long."""
        held = [watch for watch in self._watches if not watch.may_be_used]
        for watch in held:
            watch.wait_decided(wait_s)
        return not held

    def is_right(self) -> bool:
        """Whether everything that was computed until now is right. Waits until that is known."""
        return all(watch.is_right() for watch in self._watches)

    def wait_still(self, seconds: float) -> None:
        for watch in self._watches:
            watch.wait_still(seconds)


def _mark(stat: os.stat_result) -> FileMark:
    return FileMark(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _marks(stats: Stats) -> Marks:
    return tuple(map(_mark, stats))
