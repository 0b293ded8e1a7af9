"""The file operations that durability depends on, one thin layer: tests put a failing or recording one in its place."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

TEMPORARY = ".tmp-"

_FLAGS = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


class Files:
    def write(self, path: Path, pieces: Iterable[bytes | memoryview]) -> int:
        """A new file that is either there whole, after any crash, or not at all. Returns its size."""
        temporary = path.with_name(f"{TEMPORARY}{path.name}")
        with contextlib.suppress(FileNotFoundError):
            self.unlink(temporary)
        fd = self.create(temporary)
        try:
            size = sum(self.append(fd, memoryview(piece)) for piece in pieces)
            self.sync(fd)
            self.rename(temporary, path)
            self.sync_directory(path.parent)
        except BaseException:
            for left in (temporary, path):
                with contextlib.suppress(OSError):
                    self.unlink(left)
            raise
        finally:
            os.close(fd)
        return size

    def create(self, path: Path) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        os.fchmod(fd, 0o600)
        return fd

    def append(self, fd: int, data: memoryview) -> int:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
        return len(data)

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
