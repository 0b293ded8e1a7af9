"""What was acknowledged is there after any crash: a process killed at any moment, and a simulated loss of power.

EVERWARM_CAMPAIGN=1 kills 10,000 times and tries many more losses.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from everwarm.state.store.disk import Disk
from everwarm.state.store.files import TEMPORARY, Files
from everwarm.state.store.object import ALIGN, Damaged
from support import crash_writer
from support.crash_writer import Thing, conversation, in_memory, kv, numbered

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_KILLS = 10_000 if CAMPAIGN else 15
N_HISTORIES = 40 if CAMPAIGN else 2
N_LOSSES = 12 if CAMPAIGN else 5  # of power, after every operation
PLENTY = 1 << 40
TIGHT = 900_000


def object_files(place: Path) -> dict[str, int]:
    return {path.name: path.lstat().st_size for path in place.iterdir() if path.name.endswith(".ew")}


def wrong(place: Path, acknowledged: dict[str, Thing], everything: dict[str, Thing], budget: int = PLENTY) -> list[str]:
    """What a Disk opened here does wrong, at once and when it has looked at every file."""
    disk = Disk(place, budget)
    try:
        found = [f"{name} is not there at once" for name in acknowledged if not is_whole(acknowledged[name], disk)]
        disk.settle()
        found += [f"{path.name} is left" for path in place.iterdir() if path.name.startswith(TEMPORARY)]
        found += [f"{name} is lost" for name in acknowledged.keys() - disk.names()]
        found += [f"{name} cannot be read" for name in disk.names() if not is_whole(everything[name], disk)]
        if disk.n_bytes != sum(object_files(place).values()) or disk.n_bytes > budget:
            found.append(f"{disk.n_bytes} bytes are counted and {object_files(place)} are there")
    finally:
        disk.close()
    return found


def is_whole(thing: Thing, disk: Disk) -> bool:
    try:
        return thing.is_in(disk)
    except Damaged:
        return False


def test_the_check_itself_notices_what_is_lost_damaged_or_left(tmp_path):
    things = {kv(i).name: kv(i) for i in range(4)}
    disk = Disk(tmp_path, PLENTY)
    assert all(thing.put(disk) for thing in things.values())
    disk.close()
    assert wrong(tmp_path, things, things) == []
    lost, damaged = list(things)[:2]
    (tmp_path / lost).unlink()
    data = (tmp_path / damaged).read_bytes()
    (tmp_path / damaged).write_bytes(data[:ALIGN] + bytes(len(data) - ALIGN - 40) + data[-40:])
    at_once = [f"{name} is not there at once" for name in (lost, damaged)]
    assert sorted(wrong(tmp_path, things, things)) == sorted([*at_once, f"{lost} is lost", f"{damaged} is lost"])


# a killed process


class Writer:
    """The process of ``crash_writer``, which forks a writer for each round."""

    def __init__(self, place: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, crash_writer.__file__, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self, seed: int, first: int, budget: int, n_acks: int, wait_s: float) -> tuple[list[int], set[int]]:
        """Let it put objects from ``first`` on, kill it, and say which were acknowledged and which may be dropped."""
        self.process.stdin.write(f"{seed} {first} {budget}\n")
        self.process.stdin.flush()
        pid = int(self._line().removeprefix("pid "))
        lines = [self._line() for _ in range(n_acks)]
        time.sleep(wait_s)
        os.kill(pid, signal.SIGKILL)
        while (line := self._line()) != "dead":
            lines.append(line)
        orders = [line.split() for line in lines]
        return [int(i) for what, i in orders if what == "put"], {int(i) for what, i in orders if what == "drop"}

    def _line(self) -> str:
        line = self.process.stdout.readline()
        assert line.endswith("\n"), "the writer is gone"
        return line.rstrip()

    def close(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(20) == 0
        self.process.stdout.close()


@pytest.fixture
def writer(tmp_path) -> Iterator[Writer]:
    writer = Writer(tmp_path / "model")
    yield writer
    writer.close()


@pytest.mark.parametrize("budget", [PLENTY, TIGHT], ids=["plenty", "tight"])
def test_what_a_killed_process_had_acknowledged_is_there(writer, tmp_path, budget):
    rng, place = random.Random(budget), tmp_path / "model"
    kept: dict[str, Thing] = {}
    n_acknowledged = 0
    for seed in range((N_KILLS + (budget == PLENTY)) // 2):
        if seed % 10 == 0:
            shutil.rmtree(place, ignore_errors=True)
            kept, first = {}, 0
        put, dropped = writer.round(seed, first, budget, rng.choice([0, 0, 1, 5]), rng.random() * 0.06)
        kept |= {numbered(i).name: numbered(i) for i in put}
        for i in dropped:
            kept.pop(numbered(i).name, None)
        if budget == TIGHT:  # anything but the need of the one being put may have been evicted for it
            spared = {numbered(i).name for i in put[-1:] if numbered(i).header.kind == "kv"}
            kept = {name: thing for name, thing in kept.items() if name in spared}
        everything = {numbered(i).name: numbered(i) for i in range(first + len(put) + 60)}
        assert wrong(place, kept, everything, budget) == []
        n_acknowledged += len(put)
        first = max([first, *(i + 1 for i in put)])
    assert n_acknowledged > N_KILLS // 2


# a loss of power


class Op(NamedTuple):
    """One operation. ``file`` is a number that stays with a file whatever it is called."""

    what: str
    name: str = ""
    file: int = -1
    data: bytes = b""
    new_name: str = ""


class Recording(Files):
    """Does everything, and writes down what it did and what the index looked like then."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.indexes: list[dict[str, bytes]] = []
        self.place: Path | None = None
        self._numbers: dict[int, int] = {}

    def note(self, op: Op) -> None:
        self.ops.append(op)
        paths = self.place.glob("index.sqlite*") if self.place else ()
        self.indexes.append({path.name: path.read_bytes() for path in paths if not path.name.endswith("-shm")})

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._numbers[fd] = len(self.ops)
        self.note(Op("create", path.name, self._numbers[fd]))
        return fd

    def append(self, fd: int, data: memoryview) -> int:
        self.note(Op("append", file=self._numbers[fd], data=bytes(data)))
        return super().append(fd, data)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.note(Op("sync", file=self._numbers[fd]))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.note(Op("rename", old.name, new_name=new.name))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.note(Op("sync_directory", str(path)))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.note(Op("unlink", path.name))


class WithoutSync(Recording):
    def sync(self, fd: int) -> None:
        pass


class WithoutSyncDirectory(Recording):
    def sync_directory(self, path: Path) -> None:
        pass


class RenamedFirst(Recording):
    """Gives a file its name before it is synced."""

    def sync(self, fd: int) -> None:
        self._late = self._numbers[fd]

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        if self.ops[-2:-1] and self.ops[-2].what == "rename":
            self.note(Op("sync", file=self._late))


@dataclass
class Platter:
    """What is on the disk for sure, and what may be."""

    written: dict[int, bytes] = field(default_factory=dict)
    synced: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)  # for sure
    seen: dict[str, int] = field(default_factory=dict)  # by the process that writes
    pending: list[Op] = field(default_factory=list)  # changes of names since the directory was synced

    def do(self, op: Op) -> None:
        match op.what:
            case "create":
                self.written[op.file], self.synced[op.file] = b"", b""
                self._name(op)
            case "append":
                self.written[op.file] += op.data
            case "sync":
                self.synced[op.file] = self.written[op.file]
            case "rename":
                self._name(op._replace(file=self.seen[op.name]))
            case "unlink":
                self._name(op)
            case "sync_directory":
                self.names, self.pending = dict(self.seen), []

    def _name(self, op: Op) -> None:
        change(self.seen, op)
        self.pending.append(op)

    def after_loss(self, rng: random.Random, happened: str) -> dict[str, bytes]:
        """The files after the power came back. Which of the pending changes have happened is not known."""
        names = dict(self.names)
        for op in self.pending:
            if happened == "all" or (happened == "some" and rng.random() < 0.5):
                change(names, op)
        return {name: self._content(file, rng) for name, file in names.items()}

    def _content(self, file: int, rng: random.Random) -> bytes:
        sure, maybe = self.synced[file], self.written[file]
        if sure == maybe:
            return sure
        cut = rng.randrange(len(sure), len(maybe) + 1)
        page = rng.randrange(0, len(maybe), ALIGN)
        return rng.choice(
            [
                maybe,
                sure,
                maybe[:cut],
                maybe[:cut] + bytes(len(maybe) - cut),
                bytes(len(maybe)),
                maybe[:page] + bytes(min(ALIGN, len(maybe) - page)) + maybe[page + ALIGN :],
            ]
        )


def change(names: dict[str, int], op: Op) -> None:
    match op.what:
        case "create":
            names[op.name] = op.file
        case "rename":
            names.pop(op.name, None)
            names[op.new_name] = op.file
        case "unlink":
            names.pop(op.name, None)


def live(place: Path, files: Recording, rng: random.Random) -> dict[str, Thing]:
    """A short life of a disk; what was acknowledged is noted in between. Returns all that was ever put."""
    things = [thing for i in range(3) for thing in conversation(i, n_kv=2)] + [kv(i, n_bytes=1) for i in range(5, 9)]
    if CAMPAIGN:
        rng.shuffle(things)
    files.place = place
    disk = Disk(place, 110_000, files=files)
    for thing in [*things, things[0], things[-1]]:
        if thing.put(disk):
            files.note(Op("ack", thing.name))
        if rng.random() < 0.2:
            disk.drop(rng.choice(things).name)
    assert disk.counts.n_evicted > 0
    disk.close()
    return {thing.name: thing for thing in things}


def losses(place: Path, files: Recording, everything: dict[str, Thing], rng: random.Random) -> Iterator[str]:
    """Everything that goes wrong when the power is lost after any of the operations."""
    platter, acknowledged = Platter(), set()
    for n_done, op in enumerate(files.ops, start=1):
        platter.do(op)
        if op.what == "ack":
            acknowledged.add(op.name)
        elif op.what == "unlink":
            acknowledged.discard(op.name)
        for happened in ("none", "all", *["some"] * (N_LOSSES - 2)):
            index = files.indexes[rng.choice([n_done, rng.randrange(n_done) + 1]) - 1] if rng.random() < 0.8 else {}
            rebuild(place, {**platter.after_loss(rng, happened), **index})
            for what in wrong(place, {name: everything[name] for name in acknowledged}, everything):
                yield f"{what} after {n_done} operations, the last {op.what} {op.name}"


def rebuild(place: Path, content: dict[str, bytes]) -> None:
    if place.exists():
        for path in place.iterdir():
            path.unlink()
    place.mkdir(exist_ok=True)
    for name, data in content.items():
        (place / name).write_bytes(data)


@pytest.fixture
def memory() -> Iterator[Path]:
    with in_memory() as path:
        yield Path(path)


def all_losses(memory: Path, kind: type[Recording], seeds: Sequence[int]) -> Iterator[str]:
    for seed in seeds:
        rng, files = random.Random(seed), kind()
        everything = live(memory / f"life-{seed}", files, rng)
        yield from losses(memory / "after", files, everything, rng)


def test_what_was_acknowledged_survives_any_loss_of_power_and_the_rest_is_whole_or_gone(memory):
    assert list(all_losses(memory, Recording, range(N_HISTORIES))) == []


@pytest.mark.parametrize("kind", [WithoutSync, WithoutSyncDirectory, RenamedFirst])
def test_without_the_syncs_in_their_order_something_would_be_lost(memory, kind):
    assert next(all_losses(memory, kind, range(5)), None) is not None


def test_the_name_of_the_directory_itself_is_durable_before_anything_is_acknowledged(tmp_path):
    files = Recording()
    disk = Disk(tmp_path / "states" / "model", PLENTY, files=files)
    assert kv(1).put(disk)
    disk.close()
    synced = {op.name for op in files.ops if op.what == "sync_directory"}
    assert {str(tmp_path), str(tmp_path / "states"), str(tmp_path / "states" / "model")} <= synced


def test_a_file_is_synced_before_it_gets_its_name_and_its_name_before_it_is_acknowledged(tmp_path):
    files = Recording()
    disk = Disk(tmp_path / "model", PLENTY, files=files)
    files.ops.clear()
    assert kv(1).put(disk)
    disk.close()
    whats = [op.what for op in files.ops if op.what != "append"]
    assert whats == ["create", "sync", "rename", "sync_directory"]
    assert b"".join(op.data for op in files.ops if op.what == "append") == kv(1).data()
