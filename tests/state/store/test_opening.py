"""A disk tier opens with what the index remembers, and a pass in the background puts that right.

Whatever the index says: what is found is right, nothing is lost, and when the pass is over the index says what the files
say. Each check is tried on a tier that believes its index, or that does not wait for its pass, and fails there.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from everwarm.prompt.prompt import Prompt
from everwarm.state.store import disk as disk_module
from everwarm.state.store.disk import Disk
from everwarm.state.store.files import TEMPORARY, Files
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import ALIGN, Damaged
from everwarm.state.tier import InSpaces
from support.crash_writer import ROOT, STEP, Thing, codes_of, conversation, kv, state
from support.disks import PLENTY, Failing, OpenDisk, check, object_files, put_all, replace_index

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_SEEDS = 300 if CAMPAIGN else 12
N_TALKS, N_KV = 4, 3
PASS = "everwarm-reconcile"


class Gated(Files):
    """The pass cannot open a file before ``gate`` is set; everybody else can."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.n_opened = 0

    def open(self, path: Path) -> int:
        if threading.current_thread().name == PASS:
            assert self.gate.wait(60)
        elif path.suffix == ".ew":
            self.n_opened += 1
        return super().open(path)


@pytest.fixture
def files() -> Iterator[Gated]:
    gated = Gated()
    yield gated
    gated.gate.set()


@pytest.fixture(autouse=True)
def no_head_start(monkeypatch) -> None:
    monkeypatch.setattr(disk_module, "HEAD_START_S", 0.0)


def talks() -> list[list[Thing]]:
    return [conversation(i, n_kv=N_KV) for i in range(N_TALKS)]


def everything() -> list[Thing]:
    return [thing for talk in talks() for thing in talk]


@pytest.fixture
def filled(open_disk: OpenDisk) -> OpenDisk:
    put_all(open_disk(), *everything())
    open_disk.close()
    return open_disk


def found(disk: Disk, i: int) -> str | None:
    kept = disk.find(ROOT, Prompt(codes_of(i, N_KV * STEP + 5)), 1000)
    return kept and kept.name


def is_in(thing: Thing, disk: Disk) -> bool:
    try:
        return thing.is_in(disk)
    except Damaged:
        return False


def wrong(disk: Disk, *, at_once: bool) -> list[str]:
    """What is wrong with a tier that has all conversations; ``at_once``: before its pass, when a miss is allowed."""
    trouble = []
    for i, talk in enumerate(talks()):
        name = found(disk, i)
        if name != talk[-1].name and not (at_once and name is None):
            trouble.append(f"{name} is found in place of {talk[-1].name}")
        trouble += [f"{thing.name} is lost" for thing in talk if not is_in(thing, disk)]
    if disk.counts.n_evicted or disk.counts.n_damaged or disk.counts.n_failures:
        trouble.append(f"something happened: {disk.counts}")
    return trouble


def wrong_all_along(disk: Disk, gate: threading.Event) -> list[str]:
    trouble = wrong(disk, at_once=True)
    gate.set()
    disk.settle()
    trouble += wrong(disk, at_once=False)
    sizes = {kept.name: kept.size for kept in disk.objects()}
    if sizes != object_files(disk.directory) or disk.n_bytes != sum(sizes.values()):
        trouble.append(f"it says that there are {sizes}")
    disk._objects.check()
    rows = disk._index._database.execute("SELECT name, kind, key, n_items, size, needs FROM objects").fetchall()
    wanted = {(k.name, k.kind, k.key, k.n_items, k.size, ",".join(k.needs)) for k in disk.objects()}
    if set(rows) != wanted:
        trouble.append(f"the index says {rows}")
    return trouble


# opening


def test_a_state_is_found_before_the_pass_and_only_its_own_header_is_read_for_that(filled, files):
    disk = filled.at_once(files=files)
    assert files.n_opened == 0 and disk.names() == {thing.name for thing in everything()}
    assert disk.n_bytes == sum(thing.size for thing in everything())
    assert [found(disk, i) for i in range(N_TALKS)] == [talk[-1].name for talk in talks()]
    assert files.n_opened == N_TALKS
    assert wrong_all_along(disk, files.gate) == []


def test_without_an_index_everything_is_found_when_the_pass_has_come_to_it(filled, files):
    replace_index(filled.place, None)
    disk = filled.at_once(files=files)
    assert [found(disk, i) for i in range(N_TALKS)] == [None] * N_TALKS
    assert wrong_all_along(disk, files.gate) == []
    disk = filled.at_once(files=(again := Gated()))
    assert [found(disk, i) for i in range(N_TALKS)] == [talk[-1].name for talk in talks()], (
        "and remembered from then on"
    )
    again.gate.set()


@pytest.mark.parametrize("is_indexed", [False, True])
def test_what_is_there_is_not_written_again_though_nobody_has_opened_it(filled, files, is_indexed):
    if not is_indexed:
        replace_index(filled.place, None)
    disk = filled.at_once(files=files)
    put_all(disk, *everything())
    assert disk.counts.n_written == 0
    assert wrong_all_along(disk, files.gate) == []


def test_what_the_index_remembers_of_use_is_kept_by_the_pass(filled):
    disk = filled()
    disk.touch([everything()[0].name])
    kept = {each.name: (each.used_at, each.hits) for each in disk.objects()}
    assert {each.name: (each.used_at, each.hits) for each in filled().objects()} == kept


def test_closing_ends_a_pass_that_has_hardly_begun(filled, files):
    filled.at_once(files=files)
    threading.Timer(0.05, files.gate.set).start()
    filled.close()
    check(filled())


def test_a_small_folder_is_known_whole_when_it_is_open(filled, monkeypatch):
    monkeypatch.setattr(disk_module, "HEAD_START_S", 60.0)
    assert len(filled.at_once().objects()) == len(everything())


# an index that says anything


COLUMNS = ("name", "kind", "key", "n_items", "size", "needs", "used_at", "hits")
VALUES = (None, -1, 0, 7, N_KV * STEP, 1 << 50, 1e300, float("inf"), "", "text", b"\x00\xff", "kv-nobody.ew", -1e9)


def lie(place: Path, rng: random.Random) -> None:
    """Changes some rows of the index at random."""
    index = sqlite3.connect(place / "index.sqlite")
    names = [row[0] for row in index.execute("SELECT name FROM objects")]
    for _ in range(rng.choice([1, 5, 50])):
        column, name = rng.choice(COLUMNS), rng.choice(names)
        value = rng.choice([*VALUES, rng.choice(names)])
        with index:
            match rng.randrange(5):
                case 0:
                    index.execute("DELETE FROM objects WHERE name = ?", (name,))
                case 1:
                    index.execute(f"UPDATE objects SET {column} = ?", (value,)) if column != "name" else None
                case 2:
                    row = index.execute("SELECT * FROM objects WHERE name = ?", (rng.choice(names),)).fetchone() or ()
                    index.execute(
                        "INSERT OR REPLACE INTO objects VALUES (?,?,?,?,?,?,?,?)", (name, *row[1:8])
                    ) if row else None
                case _:
                    index.execute(f"UPDATE OR IGNORE objects SET {column} = ? WHERE name = ?", (value, name))
    index.close()


def wrong_with_lies(filled: OpenDisk, kind: type[Disk]) -> Iterator[str]:
    good = {path.name: path.read_bytes() for path in filled.place.glob("index.sqlite*")}
    for seed in range(N_SEEDS):
        filled.close()
        replace_index(filled.place, None)
        for name, data in good.items():
            (filled.place / name).write_bytes(data)
        lie(filled.place, random.Random(seed))
        filled.disk = kind(filled.place, PLENTY, files=(files := Gated()))
        try:
            yield from (f"seed {seed}: {what}" for what in wrong_all_along(filled.disk, files.gate))
        finally:
            files.gate.set()


class Believing(Disk):
    """Takes the index's word for what is in a file."""

    def _look(self, name: str) -> None:
        with self._lock:
            row = self._index._database.execute("SELECT * FROM objects WHERE name = ?", (name,)).fetchone()
            if row is not None and self._objects.is_unopened(name):
                kind, key, n_items, size, needs, used_at, hits = row[1:]
                self._remember(
                    IndexedObject(name, kind, key, n_items, size, tuple(str(needs or "").split(",")), used_at, hits)
                )


def test_an_index_that_lies_costs_time_and_nothing_else(filled):
    assert list(wrong_with_lies(filled, Disk)) == []


def test_a_tier_that_believed_its_index_would_be_noticed(filled):
    assert next(wrong_with_lies(filled, Believing), None) is not None


@pytest.mark.parametrize(
    "more",
    [
        "CREATE TRIGGER t AFTER INSERT ON objects BEGIN DELETE FROM objects; END",
        "CREATE TRIGGER t BEFORE INSERT ON objects BEGIN SELECT RAISE(ABORT, 'no'); END",
        "CREATE UNIQUE INDEX u ON objects(kind, key)",
        "CREATE VIEW v AS SELECT 1",
    ],
)
def test_an_index_with_more_in_it_than_ours_is_made_anew(filled, files, more):
    index = sqlite3.connect(filled.place / "index.sqlite")
    index.execute(more)
    index.commit()
    index.close()
    disk = filled.at_once(files=files)
    assert wrong_all_along(disk, files.gate) == []
    put_all(disk, kv(90), kv(91))
    assert disk.degraded is None and filled().names() == {thing.name for thing in (*everything(), kv(90), kv(91))}


# a folder that has changed since


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - ALIGN)


CHANGES = {
    "vanished": lambda place, thing: (place / thing.name).unlink(),
    "cut off": lambda place, thing: cut_off(place / thing.name),
    "grown": lambda place, thing: os.truncate(place / thing.name, thing.size + ALIGN),
    "zeroes": lambda place, thing: (place / thing.name).write_bytes(bytes(thing.size)),
    "another object": lambda place, thing: (place / thing.name).write_bytes(kv(77).data()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("what", [0, -1], ids=["KV", "state"])
def test_a_file_that_changed_is_a_miss_at_once_and_uncounted_after_the_pass(filled, files, change, what):
    changed = talks()[1][what]
    CHANGES[change](filled.place, changed)
    disk = filled.at_once(files=files)
    assert not is_in(changed, disk) and found(disk, 1) is None
    assert [found(disk, i) for i in (0, 2, 3)] == [talks()[i][-1].name for i in (0, 2, 3)]
    files.gate.set()
    disk.settle()
    assert disk.names() == {thing.name for thing in everything()} - {changed.name}
    check(disk)
    assert changed.put(disk) and found(disk, 1) == talks()[1][-1].name


def test_files_that_came_while_nobody_looked_are_found_by_the_pass(filled, files):
    new = conversation(50, n_kv=2)
    for thing in new:
        (filled.place / thing.name).write_bytes(thing.data())
    (filled.place / f"{TEMPORARY}{kv(51).name}-0011").write_bytes(kv(51).data()[:5000])
    disk = filled.at_once(files=files)
    assert not list(filled.place.glob(f"{TEMPORARY}*")), "what a killed writer left goes before anything is written"
    assert found(disk, 50) is None
    files.gate.set()
    disk.settle()
    assert found(disk, 50) == new[-1].name and all(thing.is_in(disk) for thing in new)
    check(disk)


# nothing is evicted or forgotten by what the index says


def put_one_more(filled: OpenDisk, files: Gated) -> Disk:
    """A full budget, KV that was opened, states that were not, and one more object."""
    disk = filled.at_once(sum(thing.size for thing in everything()), files=files)
    assert all(thing.is_in(disk) for thing in everything() if thing.header.kind == "kv")
    threading.Timer(0.2, files.gate.set).start()
    assert kv(60).put(disk)
    files.gate.set()
    disk.settle()
    return disk


def n_broken(disk: Disk) -> int:
    """States that are there without all of their KV."""
    return sum(not disk.has(kept.name) for kept in disk.objects() if kept.kind == "state")


def test_no_kv_is_evicted_before_it_is_known_that_no_state_needs_it(filled, files):
    disk = put_one_more(filled, files)
    assert n_broken(disk) == 0 and disk.counts.n_evicted > 0
    check(disk)


def test_a_tier_that_did_not_wait_for_its_pass_would_be_noticed(filled, files, monkeypatch):
    monkeypatch.setattr(Disk, "_read_all_headers", lambda _: None)
    assert n_broken(put_one_more(filled, files)) > 0


def test_forgetting_waits_for_the_pass(filled, files, monkeypatch):
    replace_index(filled.place, None)
    for waits in (False, True):
        disk = filled.at_once(files=(files := Gated()))
        with monkeypatch.context() as patched:
            if not waits:
                patched.setattr(Disk, "settle", lambda _: None)
            threading.Timer(0.1, files.gate.set).start()
            disk.forget(InSpaces(None))
        files.gate.set()
        disk.settle()
        assert bool(disk.names()) is not waits, "without waiting it would all have been left"


def test_the_space_that_files_take_counts_for_the_budget_though_the_index_is_gone(filled, files):
    """The budget is what is here and a share of what is free."""
    files.free_bytes = lambda _path: 1000
    replace_index(filled.place, None)
    disk = filled.at_once(files=files, free_share=0.5)
    files.gate.set()
    disk.settle()
    assert disk.budget_bytes == disk.n_bytes + 500 and disk.counts.n_evicted == 0
    assert wrong(disk, at_once=False) == []


# the pass beside other threads


def test_a_damaged_file_that_was_written_again_meanwhile_stays(filled, monkeypatch):
    """The pass reads a damaged file; before it can remove it, somebody has put a good one in its place."""
    thing = kv(0)
    for forgets_to_look in (True, False):
        filled.close()
        (filled.place / thing.name).write_bytes(bytes(thing.size))
        disk = filled.at_once(files=(files := Gated()))

        def write_again(*_: object, disk: Disk = disk, files: Gated = files) -> None:
            if threading.current_thread().name != PASS:
                Files().write(filled.place / thing.name, [thing.data()])

        with monkeypatch.context() as patched:
            if forgets_to_look:
                patched.setattr(Disk, "_is_replaced", lambda *_: False)
            patched.setattr(disk_module, "log", SimpleNamespace(warning=write_again))
            is_in(thing, disk)
        assert (filled.place / thing.name).exists() is not forgets_to_look
        files.gate.set()
        disk.settle()
        assert is_in(thing, disk) is not forgets_to_look
        put_all(disk, thing)


def test_what_could_not_be_opened_for_a_passing_reason_is_looked_at_again(filled):
    files = Failing()
    files.fail("open", 3, errno.EMFILE)  # the first is the file of pins
    disk = filled.at_once(files=files)
    disk.settle()
    assert files.has_failed and len(disk.objects()) == len(everything()) - 1
    disk.probe()
    disk.settle()
    assert len(disk.objects()) == len(everything()) and disk.degraded is None
    check(disk)


def test_a_life_beside_the_pass(open_disk):
    """Puts, drops, uses and reads while the pass is on its way: the books are right afterwards."""
    rng = random.Random(7)
    for _ in range(60 if CAMPAIGN else 8):
        open_disk.close()
        if open_disk.place.exists() and rng.random() < 0.5:
            replace_index(open_disk.place, None)
        budget = rng.choice([PLENTY, 400_000])
        disk = open_disk.at_once(budget)
        for _ in range(40):
            things = conversation(rng.randrange(12), rng.randrange(1, 4))
            match rng.randrange(5):
                case 0:
                    disk.drop(rng.choice(things).name)
                case 1:
                    disk.touch([thing.name for thing in things])
                case 2:
                    is_in(rng.choice(things), disk)
                case _:
                    assert rng.choice(things).put(disk)
        disk.settle()
        disk._objects.check()
        assert disk.counts.n_failures == disk.counts.n_damaged == 0
        check(disk)
    assert state(1).put(disk)
