"""The file operations that durability depends on, one thin layer: tests put a failing or recording one in its place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

TEMPORARY = ".tmp-"
LEFT_S = 60.0  # a temporary file that was neither locked nor written for so long was left by a crash
LOCK_S = 5.0  # a directory is locked only while two files in it are renamed
SHARE = 16 << 20  # bytes that are worth a thread
MAX_WRITERS = 8

FilePiece: TypeAlias = "bytes | memoryview | list[memoryview]"  # a list: all of it, in its order

_FLAGS = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class Aside:
    """A whole file under a temporary name of its own, on its way to its real one."""

    path: Path
    size: int


class Files:
    def write(self, path: Path, pieces: Iterable[bytes | memoryview]) -> int:
        """Writes a new file that after any crash exists whole or not at all. Returns its size."""
        with self.aside(path, pieces) as new:
            self.rename(new.path, path)
            try:
                self.sync_directory(path.parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.unlink(path)
                raise
        return new.size

    @contextlib.contextmanager
    def aside(self, path: Path, pieces: Iterable[FilePiece], *, is_awaited: bool = False) -> Iterator[Aside]:
        """The file's content, durable under a temporary name of its own, for the caller to rename. ``is_awaited``: a
        client waits for it, so several threads write."""
        temporary = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(8)}")
        fd = self.create(temporary)
        try:
            _try_lock(fd, fcntl.LOCK_EX)  # so that no other process sweeps it away
            write = self.append_fast if is_awaited else self.append
            size = sum(
                self.append_all(fd, piece) if isinstance(piece, list) else write(fd, memoryview(piece))
                for piece in pieces
            )
            self.sync(fd)
            yield Aside(temporary, size)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise
        finally:
            os.close(fd)

    def create(self, path: Path) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        os.fchmod(fd, 0o600)
        return fd

    def append(self, fd: int, data: memoryview) -> int:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
        return len(data)

    def append_fast(self, fd: int, data: memoryview) -> int:
        """The same on several threads, because one does not saturate the memory."""
        if len(data) < 2 * SHARE:
            return self.append(fd, data)
        at = os.lseek(fd, 0, os.SEEK_CUR)
        in_shares(len(data), SHARE, MAX_WRITERS, lambda start, stop: _write_at(fd, data[start:stop], at + start))
        os.lseek(fd, at + len(data), os.SEEK_SET)
        return len(data)

    def append_all(self, fd: int, pieces: list[memoryview]) -> int:
        """Many pieces one after the other, also on several threads."""
        at = os.lseek(fd, 0, os.SEEK_CUR)
        with ThreadPoolExecutor(MAX_WRITERS, "everwarm-share") as threads:
            writing = []
            for piece in pieces:
                writing += [threads.submit(_write_at, fd, data, at + n) for n, data in _in_turn(piece)]
                at += len(piece)
            for done in writing:
                done.result()
        os.lseek(fd, at, os.SEEK_SET)
        return sum(map(len, pieces))

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a file")
        return fd

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


def in_shares(n_bytes: int, least: int, n_threads: int, work: Callable[[int, int], None]) -> None:
    """Does work on a range of bytes, from ``start`` to ``stop``, on several threads: each gets at least ``least`` of it."""
    share = max(least, -(-n_bytes // n_threads))
    with ThreadPoolExecutor(n_threads, "everwarm-share") as threads:
        starts = range(0, n_bytes, share)
        for done in [threads.submit(work, start, min(start + share, n_bytes)) for start in starts]:
            done.result()


def _in_turn(piece: memoryview) -> Iterator[tuple[int, memoryview]]:
    return ((start, piece[start : start + SHARE]) for start in range(0, len(piece), SHARE))


def _write_at(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)


@contextlib.contextmanager
def locked(directory: Path, *, shared: bool = False) -> Iterator[None]:
    """Holds a directory against other callers of this, in this and other processes; ``shared``: only against those that
    write. Continues without the lock where the file system has none, or another caller holds it for too long."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # the caller's own operation will raise the error
        return
    try:
        _wait_for_lock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _wait_for_lock(fd: int, how: int) -> None:
    deadline = time.monotonic() + LOCK_S
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            try:
                return fcntl.flock(fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.005)


def sweep(directory: Path) -> int:
    """Remove temporary files that a crash left; returns how many. One that another process is writing is held by it."""
    n = 0
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY) and entry.is_file(follow_symlinks=False):
                n += _remove_if_left(Path(entry.path))
    return n


def _remove_if_left(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | _FLAGS)
    except OSError:
        return False
    try:
        if not _try_lock(fd, fcntl.LOCK_EX) or time.time() - os.fstat(fd).st_mtime < LEFT_S:
            return False
        os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _try_lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def make_folder(directory: Path, files: Files) -> None:
    """Makes a folder for the owner alone, durable after a crash."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if missing:
        os.chmod(directory, 0o700)
    for path in missing:
        files.sync_directory(path.parent)
