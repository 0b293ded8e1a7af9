"""A disk tier to test by itself: things to put on it, files that fail, and what must always hold."""

import os
from pathlib import Path

from everwarm.state.store.disk import Disk
from everwarm.state.store.files import TEMPORARY, Files
from support.crash_writer import Thing

PLENTY = 1 << 30


class OpenDisk:
    """Calling it opens a Disk in one place and waits until every file was looked at; the one before it is closed."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.disk: Disk | None = None

    def __call__(self, budget: int = PLENTY, **more) -> Disk:
        disk = self.at_once(budget, **more)
        disk.settle()
        return disk

    def at_once(self, budget: int = PLENTY, **more) -> Disk:
        """The pass over the files may have only begun."""
        self.close()
        self.disk = Disk(self.place, budget, **more)
        return self.disk

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
        self.disk = None


def object_files(place: Path) -> dict[str, int]:
    return {path.name: path.lstat().st_size for path in place.iterdir() if path.name.endswith(".ew")}


def put_all(disk: Disk, *things: Thing) -> None:
    for thing in things:
        assert thing.put(disk)


def check(disk: Disk) -> None:
    """The index says what the files say, and both are within the budget."""
    assert {kept.name: kept.size for kept in disk.objects()} == object_files(disk.directory)
    assert disk.n_bytes == sum(kept.size for kept in disk.objects()) <= disk.budget_bytes
    assert not [path for path in disk.directory.iterdir() if path.name.startswith(TEMPORARY)]


def replace_index(place: Path, data: bytes | None) -> None:
    for path in place.glob("index.sqlite*"):
        path.unlink()
    if data is not None:
        (place / "index.sqlite").write_bytes(data)


class Failing(Files):
    """Raises at the k-th call of one operation from now on, once; an append has then written a part."""

    def __init__(self) -> None:
        self.operation, self.countdown, self.error, self.has_failed = "", 0, 0, False

    def fail(self, operation: str, k: int, error: int) -> None:
        self.operation, self.countdown, self.error, self.has_failed = operation, k, error, False

    def _may_fail(self, operation: str) -> None:
        if operation == self.operation:
            self.countdown -= 1
            if self.countdown == 0:
                self.has_failed = True
                raise OSError(self.error, os.strerror(self.error))

    def create(self, path: Path) -> int:
        self._may_fail("create")
        return super().create(path)

    def append(self, fd: int, data: memoryview) -> int:
        try:
            self._may_fail("append")
        except OSError:
            os.write(fd, data[: len(data) // 2])
            raise
        return super().append(fd, data)

    def sync(self, fd: int) -> None:
        self._may_fail("sync")
        super().sync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._may_fail("rename")
        super().rename(old, new)

    def sync_directory(self, path: Path) -> None:
        self._may_fail("sync_directory")
        super().sync_directory(path)

    def unlink(self, path: Path) -> None:
        self._may_fail("unlink")
        super().unlink(path)

    def open(self, path: Path) -> int:
        self._may_fail("open")
        return super().open(path)
