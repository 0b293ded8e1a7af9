"""The disk tier: what is acknowledged stays, within the budget, whatever happens to the index, files or the disk."""

import contextlib
import errno
import os
import random
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import root_key
from everwarm.state.store import disk as disk_module
from everwarm.state.store import disk_eviction
from everwarm.state.store.disk import DirectoryTaken, Disk
from everwarm.state.store.files import TEMPORARY, Files
from everwarm.state.store.object import ALIGN, MAX_SECTIONS, Damaged
from support.crash_writer import ROOT, STEP, Thing, blob, codes_of, conversation, kv, state
from support.disks import PLENTY, Failing, OpenDisk, check, object_files, put_all, replace_index

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_STEPS = 20_000 if CAMPAIGN else 400


def found(disk: Disk, i: int, n_items: int = 10 * STEP, most: int = 1000, root: str = ROOT) -> str | None:
    kept = disk.find(root, Prompt(codes_of(i, n_items)), most)
    return kept and kept.name


# putting, reading, finding


def test_what_was_put_is_read_again_also_by_the_next_process(open_disk):
    disk = open_disk()
    things = conversation(1, n_kv=2)
    put_all(disk, *things)
    check(disk)
    for again in (disk, open_disk()):
        assert all(thing.is_in(again) for thing in things)
        assert again.names() == {thing.name for thing in things}
        check(again)


def test_putting_again_writes_nothing(open_disk):
    disk = open_disk()
    assert kv(1).put(disk) and kv(1).put(disk)
    assert (disk.counts.n_written, disk.counts.n_bytes_written) == (1, kv(1).size)
    check(disk)


def test_the_deepest_whole_state_is_found(open_disk):
    disk = open_disk()
    first, second, deep = conversation(1, n_kv=2)
    shallow = state(1, needs=[first.name])
    put_all(disk, first, second, shallow, deep, *conversation(2))
    assert found(disk, 1) == found(disk, 1, n_items=2 * STEP) == deep.name
    assert found(disk, 1, most=2 * STEP - 1) == found(disk, 1, n_items=2 * STEP - 1) == shallow.name
    assert found(disk, 1, most=STEP - 1) is None
    assert found(disk, 3) is None
    assert found(disk, 1, root=root_key("another model", "")) is None


def test_a_state_with_a_missing_need_is_never_found(open_disk):
    disk = open_disk()
    first, second, deep = conversation(1, n_kv=2)
    put_all(disk, second, deep)
    assert found(disk, 1) is None
    assert found(open_disk(), 1) is None
    put_all(disk := open_disk(), first)
    assert found(disk, 1) == deep.name


def test_a_state_is_found_again_when_its_last_need_comes_back(open_disk):
    disk = open_disk()
    need, whole = conversation(1)
    put_all(disk, need, whole)
    disk.drop(need.name)
    assert found(disk, 1) is None
    put_all(disk, need)
    assert found(disk, 1) == whole.name


def test_a_state_whose_kv_is_cut_otherwise_replaces_one_that_is_not_whole(open_disk):
    disk = open_disk()
    first, second, _ = conversation(1, n_kv=2)
    put_all(disk, state(1, 2 * STEP, needs=["kv-of-another-cut.ew"]), first, second)
    whole = state(1, 2 * STEP, needs=[first.name, second.name])
    assert not whole.put(disk) or found(disk, 1) == whole.name


def test_touching_is_remembered(open_disk, monkeypatch):
    disk = open_disk()
    put_all(disk, kv(1), kv(2))
    monkeypatch.setattr(disk_module, "time", SimpleNamespace(time=lambda: 5e9, monotonic=time.monotonic))
    disk.touch([kv(1).name, "nobody"])
    for again in (disk, open_disk()):
        kept = {k.name: k for k in again.objects()}
        assert (kept[kv(1).name].hits, kept[kv(1).name].used_at) == (1, 5e9)
        assert kept[kv(2).name].hits == 0


def test_a_dropped_object_is_gone_for_good(open_disk):
    disk = open_disk()
    put_all(disk, kv(1), kv(2))
    disk.drop(kv(1).name)
    disk.drop(kv(1).name)
    for again in (disk, open_disk()):
        assert again.names() == {kv(2).name}
        with pytest.raises(Damaged):
            kv(1).is_in(again)
        check(again)
    put_all(disk := open_disk(), kv(1))
    assert kv(1).is_in(disk)


def test_an_object_being_read_survives_its_eviction(open_disk):
    disk = open_disk()
    put_all(disk, kv(1))
    with disk.reading(kv(1).name) as reader:
        disk.drop(kv(1).name)
        assert reader.read("kv").tobytes() == kv(1).parts["kv"].tobytes()
    check(disk)


def test_damage_is_found_when_it_is_read_and_the_object_is_gone(open_disk, place):
    disk = open_disk()
    put_all(disk, kv(1), kv(2))
    spoil(place / kv(1).name)
    with pytest.raises(Damaged, match="not what it was"):
        kv(1).is_in(disk)
    assert disk.names() == {kv(2).name} and disk.counts.n_damaged == 1
    assert disk.degraded is None
    check(disk)


def spoil(path: Path, at: int = ALIGN + 7) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_reading_a_damaged_object_inside_a_whole_one_loses_only_the_damaged_one(open_disk, place):
    disk = open_disk()
    put_all(disk, kv(1), kv(2))
    spoil(place / kv(2).name)
    with pytest.raises(Damaged), disk.reading(kv(1).name):
        kv(2).is_in(disk)
    assert disk.names() == {kv(1).name}


def test_an_error_of_the_reader_itself_costs_no_object(open_disk):
    disk = open_disk()
    put_all(disk, kv(1))
    with pytest.raises(ConnectionResetError), disk.reading(kv(1).name):
        raise ConnectionResetError
    assert disk.names() == {kv(1).name}


def test_an_object_evicted_between_finding_and_reading_is_a_miss_and_no_failure(open_disk):
    disk = open_disk()
    put_all(disk, kv(1))
    disk.drop(kv(1).name)
    with pytest.raises(Damaged):
        kv(1).is_in(disk)
    assert disk.degraded is None and disk.counts.n_failures == 0


def test_a_name_that_leads_elsewhere_is_neither_read_nor_removed(open_disk, place):
    disk = open_disk()
    elsewhere = place.parent / "precious.txt"
    elsewhere.write_text("not an object")
    with pytest.raises(Damaged), disk.reading("../precious.txt"):
        pass
    assert elsewhere.exists()


def test_an_object_with_too_long_a_header_is_not_kept(open_disk):
    disk = open_disk()
    assert not state(1, needs=[f"kv-{i:050}.ew" for i in range(20_000)]).put(disk)
    check(disk)


def test_an_object_that_could_not_be_read_is_not_acknowledged(open_disk):
    disk = open_disk()
    thing = Thing(kv(1).header, {str(i): blob(1) for i in range(MAX_SECTIONS + 1)})
    assert not thing.put(disk) or thing.is_in(disk)


# room


def test_the_budget_is_never_exceeded_and_the_sizes_are_those_of_the_files(open_disk):
    rng, budget = random.Random(1), 300_000
    disk = open_disk(budget)
    for _ in range(N_STEPS):
        i, n_kv = rng.randrange(30), rng.randrange(1, 4)
        things = conversation(i, n_kv, n_bytes=rng.choice([1, 4096, 20_000]))
        match rng.randrange(10):
            case 0:
                disk.drop(rng.choice(things).name)
            case 1:
                disk.touch([thing.name for thing in things])
            case 2 if rng.random() < 0.3:
                disk = open_disk(budget)
            case 3 if rng.random() < 0.3:
                disk = open_disk.at_once(budget)
            case 4 if (kept := disk.find(ROOT, Prompt(codes_of(i, n_kv * STEP)), n_kv * STEP)) is not None:
                for name in (kept.name, *kept.needs):
                    with disk.reading(name) as reader:
                        assert all(len(reader.read(s.name)) == s.length for s in reader.header.sections)
            case _:
                assert rng.choice(things).put(disk)
        disk.settle()
        check(disk)
    assert disk.counts.n_failures == disk.counts.n_damaged == 0


def test_a_smaller_budget_is_kept_to_from_the_start(open_disk):
    put_all(open_disk(), *(thing for i in range(5) for thing in conversation(i)))
    disk = open_disk(3 * state(1).size)
    check(disk)
    assert 0 < len(disk.names()) < 10
    assert open_disk(0).names() == frozenset()


def test_kv_that_no_state_needs_goes_first(open_disk):
    needed, whole = conversation(1)
    lonely, newest = kv(2), kv(3)
    disk = open_disk(needed.size + whole.size + 2 * lonely.size - 1)
    put_all(disk, lonely, needed, whole, newest)
    assert disk.names() == {needed.name, whole.name, newest.name}
    assert disk.counts.n_evicted == 1
    check(disk)


def test_a_state_that_is_not_whole_goes_before_one_that_is(open_disk):
    needed, whole = conversation(1)
    broken = conversation(2)[-1]
    disk = open_disk(needed.size + whole.size + broken.size)
    put_all(disk, needed, whole, broken, kv(3))
    assert disk.names() == {needed.name, whole.name, kv(3).name}


def test_of_whole_states_the_one_that_saves_least_goes(open_disk):
    short, long = state(1), state(2, 50 * STEP)
    disk = open_disk(short.size + long.size)
    put_all(disk, short, long, state(3, 40 * STEP))
    assert short.name not in disk.names() and long.name in disk.names()


def test_an_object_whose_file_is_over_the_budget_is_not_kept(open_disk):
    disk = open_disk(kv(1).size - 1)
    assert not kv(1).put(disk)
    check(disk)


def test_a_state_that_does_not_fit_with_its_needs_is_not_kept_over_the_budget(open_disk):
    first, second, whole = conversation(1, n_kv=2)
    disk = open_disk(first.size + second.size + whole.size - 1)
    for thing in (first, second, whole):
        thing.put(disk)
    check(disk)


def test_a_new_lineage_makes_room_for_itself_without_losing_its_own_kv(open_disk):
    old = [conversation(i, n_kv=3) for i in range(4)]
    disk = open_disk(sum(thing.size for things in old for thing in things))
    put_all(disk, *(thing for things in old for thing in things))
    new = conversation(9, n_kv=3)
    put_all(disk, *new)
    assert found(disk, 9) == new[-1].name


def test_no_more_is_evicted_than_the_budget_asks_for(open_disk):
    disk = open_disk(5 * kv(1).size)
    put_all(disk, *(kv(i) for i in range(6)))
    assert len(disk.names()) == 5


def test_an_eviction_survives_a_clock_that_went_back_to_1970(open_disk, monkeypatch):
    disk = open_disk(3 * state(1).size)
    put_all(disk, state(1), state(2), state(3))
    monkeypatch.setattr(disk_module, "time", SimpleNamespace(time=lambda: 0.0, monotonic=time.monotonic))
    put_all(disk, state(4))
    check(disk)


def test_no_more_is_written_in_a_day_than_allowed(open_disk, monkeypatch):
    now = [1e9]
    monkeypatch.setattr(disk_module, "time", SimpleNamespace(time=lambda: now[0], monotonic=time.monotonic))
    disk = open_disk(write_budget=2 * kv(1).size + 1000)
    assert kv(1).put(disk) and kv(2).put(disk)
    assert not kv(3).put(disk)
    assert kv(1).put(disk)  # there already: nothing to write
    assert disk.degraded is None and disk.counts.n_failures == 0
    now[0] += 86_399
    assert not kv(3).put(disk)
    now[0] += 2
    assert kv(3).put(disk) and kv(4).put(disk) and not kv(5).put(disk)
    check(disk)


def test_the_last_write_of_a_day_is_not_over_the_limit_either(open_disk):
    disk = open_disk(write_budget=2 * kv(1).size - 1)
    assert kv(1).put(disk)
    kv(2).put(disk)
    assert disk.counts.n_bytes_written <= 2 * kv(1).size - 1


def test_starting_anew_does_not_start_the_day_anew(open_disk):
    disk = open_disk(write_budget=2 * kv(1).size + 1000)
    assert kv(1).put(disk)
    disk = open_disk(write_budget=2 * kv(1).size + 1000)
    assert kv(2).put(disk) and not kv(3).put(disk)
    assert kv(3).put(open_disk()), "without a budget it must, or this test could not fail"


# the index is only a memory of the files


def with_index(place: Path, *statements: str) -> None:
    index = sqlite3.connect(place / "index.sqlite")
    for statement in statements:
        index.execute(statement)
    index.commit()
    index.close()


TURNED = ("hits", "name TEXT PRIMARY KEY", "kind", "key", "n_items INTEGER", "size INTEGER", "needs", "used_at")
RENAMED = "ALTER TABLE objects RENAME TO old"
INDEX_DAMAGE = {
    "deleted": lambda place: replace_index(place, None),
    "empty": lambda place: replace_index(place, b""),
    "garbage": lambda place: replace_index(place, random.Random(1).randbytes(20_000)),
    "garbage behind the magic": lambda place: replace_index(place, b"SQLite format 3\0" + bytes(range(256)) * 40),
    "one byte": lambda place: replace_index(place, b"S"),
    "cut off": lambda place: os.truncate(place / "index.sqlite", 4096),
    "without rows": lambda place: with_index(place, "DELETE FROM objects"),
    "without its table": lambda place: with_index(place, "DROP TABLE objects"),
    "another table": lambda place: with_index(place, RENAMED, "CREATE TABLE objects (id INTEGER, data BLOB)"),
    "a view": lambda place: with_index(place, RENAMED, "CREATE VIEW objects AS SELECT 1 AS name"),
    "lies about sizes": lambda place: with_index(place, "UPDATE objects SET size = size + 1"),
    "sizes are text": lambda place: with_index(place, "UPDATE objects SET size = 'large'"),
    "rows of missing files": lambda place: with_index(
        place, "INSERT INTO objects SELECT 'x' || name, kind, 'x', n_items, size, needs, used_at, hits FROM objects"
    ),
    "a leftover log": lambda place: (place / "index.sqlite-wal").write_bytes(random.Random(2).randbytes(9000)),
    "a leftover log of nothing": lambda place: [
        replace_index(place, None),
        (place / "index.sqlite-wal").write_bytes(random.Random(2).randbytes(9000)),
    ],
    "one more column": lambda place: with_index(place, "ALTER TABLE objects ADD COLUMN more TEXT"),
    "columns in another order": lambda place: with_index(
        place,
        RENAMED,
        f"CREATE TABLE objects ({', '.join(TURNED)})",
        "INSERT INTO objects SELECT hits, name, kind, key, n_items, size, needs, used_at FROM old",
    ),
    "lies about needs": lambda place: with_index(place, "UPDATE objects SET needs = 'kv-nobody.ew'"),
    "says nothing of needs": lambda place: with_index(place, "UPDATE objects SET needs = NULL"),
    "lies about keys": lambda place: with_index(place, "UPDATE objects SET key = 'ff' || key"),
    "lies about kinds": lambda place: with_index(place, "UPDATE objects SET kind = 'kv'"),
    "lies about lengths": lambda place: with_index(place, "UPDATE objects SET n_items = -5"),
    "lengths are text": lambda place: with_index(place, "UPDATE objects SET n_items = 'ten'"),
    "a directory": lambda place: [replace_index(place, None), (place / "index.sqlite").mkdir()],
}


def check_rebuilding(open_disk: OpenDisk, damage: Callable[[Path], object]) -> None:
    """After the damage everything is as it was before."""
    talks = [conversation(i, n_kv=2) for i in range(3)]
    things = [thing for talk in talks for thing in talk]
    put_all(open_disk(), *things)
    open_disk.close()
    damage(open_disk.place)
    disk = open_disk()
    assert disk.names() == {thing.name for thing in things}
    assert [found(disk, i) for i in range(3)] == [talk[-1].name for talk in talks]
    assert all(thing.is_in(disk) for thing in things)
    assert kv(7).put(disk) and disk.degraded is None
    check(disk)
    disk = open_disk()
    assert len(disk.names()) == len(things) + 1 and disk.counts.n_failures == 0


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_a_bad_index_is_made_anew_from_the_files(open_disk, damage):
    check_rebuilding(open_disk, INDEX_DAMAGE[damage])


def test_an_index_with_one_damaged_page_is_made_anew(open_disk, place):
    things = [kv(i, n_bytes=1) for i in range(60)]
    put_all(open_disk(), *things)
    open_disk.close()
    good = (place / "index.sqlite").read_bytes()
    for at in range(ALIGN, len(good), ALIGN):
        replace_index(place, good[:at] + random.Random(1).randbytes(ALIGN) + good[at + ALIGN :])
        open_disk()
        disk = open_disk()
        assert disk.names() == {thing.name for thing in things}
        assert disk.degraded is None, f"page {at // ALIGN} of {len(good) // ALIGN}: {disk.degraded}"
        check(disk)
        open_disk.close()


def test_what_the_index_remembers_of_use_survives_a_restart_and_not_its_loss(open_disk, place):
    put_all(disk := open_disk(), kv(1))
    disk.touch([kv(1).name])
    assert open_disk().objects()[0].hits == 1
    open_disk.close()
    replace_index(place, None)
    assert open_disk().objects()[0].hits == 0


def test_an_index_that_cannot_be_written_costs_no_object(open_disk):
    """SQLite cannot write: what is on disk stays, and comes back with the next start."""
    disk = open_disk()
    put_all(disk, kv(1))
    disk._index._database.execute("PRAGMA query_only = ON")
    assert kv(2).put(disk)
    assert disk.degraded is not None
    assert kv(1).is_in(disk) and kv(2).is_in(disk)
    disk._index._database.execute("PRAGMA query_only = OFF")
    assert kv(3).put(disk) and disk.degraded is None
    disk = open_disk()
    assert disk.names() == {kv(i).name for i in (1, 2, 3)}
    check(disk)


# what is put in a file's place


def swap(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def outside(path: Path) -> Path:
    """A whole object of the right name, but not in the directory."""
    target = path.parent.parent / path.name
    target.write_bytes(kv(1).data())
    return target


IMPOSTORS = {
    "a directory": lambda path: path.mkdir(),
    "a full directory": lambda path: [path.mkdir(), (path / "file").write_text("x")],
    "a symlink to a whole object": lambda path: path.symlink_to(outside(path)),
    "a symlink to nowhere": lambda path: path.symlink_to("nowhere"),
    "a symlink to itself": lambda path: path.symlink_to(path.name),
    "another object": lambda path: path.write_bytes(kv(2).data()),
    "an empty file": lambda path: path.write_bytes(b""),
    "a file of zeroes": lambda path: path.write_bytes(bytes(kv(1).size)),
    "half of itself": lambda path: path.write_bytes(kv(1).data()[: kv(1).size // 2]),
    "a huge sparse file": lambda path: [path.write_bytes(kv(1).data()[:-40]), os.truncate(path, 1 << 40)],
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("impostor", IMPOSTORS)
def test_what_is_put_in_an_objects_place_is_a_miss_and_nothing_more(open_disk, place, impostor, reopened):
    disk = open_disk()
    put_all(disk, kv(1), kv(3))
    swap(place / kv(1).name, IMPOSTORS[impostor])
    if reopened:
        disk = open_disk()
    with pytest.raises(Damaged):
        kv(1).is_in(disk)
    assert disk.names() == {kv(3).name} and kv(3).is_in(disk)
    assert kv(4).put(disk) and disk.degraded is None
    assert disk.n_bytes == kv(3).size + kv(4).size
    if "directory" not in impostor:
        assert kv(1).put(disk) and kv(1).is_in(disk)
        check(disk)


def test_a_symlink_is_replaced_and_its_target_left_alone(open_disk, place):
    disk = open_disk()
    target = place.parent / "target"
    target.write_text("precious")
    (place / kv(1).name).symlink_to(target)
    (place / f"{TEMPORARY}{kv(1).name}").symlink_to(target)
    assert kv(1).put(disk)
    assert target.read_text() == "precious"
    assert kv(1).is_in(open_disk()) and not (place / kv(1).name).is_symlink()


def test_a_fifo_in_an_objects_place_stops_nothing(open_disk, place):
    put_all(open_disk(), kv(1))
    path = place / kv(1).name
    swap(path, os.mkfifo)
    thread = threading.Thread(target=open_disk)
    thread.start()
    thread.join(1)
    waits = thread.is_alive()
    if waits:
        os.close(os.open(path, os.O_WRONLY))
    thread.join()
    assert not waits


def test_foreign_files_are_left_alone(open_disk, place):
    open_disk()
    (place / "notes.txt").write_text("mine")
    (place / "folder").mkdir()
    put_all(disk := open_disk(), kv(1))
    assert disk.names() == {kv(1).name}
    assert (place / "notes.txt").read_text() == "mine" and (place / "folder").is_dir()


def test_half_written_files_are_gone_after_opening(open_disk, place):
    open_disk()
    (place / f"{TEMPORARY}{kv(1).name}").write_bytes(kv(1).data()[:5000])
    check(open_disk())


def test_a_temporary_file_that_cannot_be_removed_stops_nothing(open_disk, place):
    put_all(open_disk(), kv(1))
    (place / f"{TEMPORARY}folder").mkdir()
    assert kv(1).is_in(open_disk())


# one process, and nobody else


def test_a_second_disk_on_the_same_directory_is_refused_until_the_first_is_closed(open_disk, place):
    put_all(open_disk(), kv(1))
    with pytest.raises(DirectoryTaken, match="--state-dir"):
        Disk(place, PLENTY)
    assert kv(1).is_in(open_disk.disk)  # the first did not notice
    open_disk.close()
    assert kv(1).is_in(open_disk())


def test_another_process_is_refused_too(open_disk, place):
    open_disk()
    code = f"from everwarm.state.store.disk import Disk; from pathlib import Path; Disk(Path({str(place)!r}), 1)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode and "DirectoryTaken" in run.stderr


def test_a_refused_disk_leaves_no_descriptor_open(open_disk, place):
    open_disk()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(DirectoryTaken):
            Disk(place, PLENTY)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "umask",
    [0, 0o002, 0o022, 0o077, 0o277],
)
def test_only_the_owner_may_look_whatever_the_umask(open_disk, place, umask):
    before = os.umask(umask)
    try:
        disk = open_disk()
        put_all(disk, *conversation(1))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()}
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {"lock", "index.sqlite", "index.sqlite-wal", kv(1).name} <= modes.keys()
    assert set(modes.values()) == {0o600}


# a disk that fails


OPERATIONS = ("create", "append", "sync", "rename", "sync_directory", "unlink", "open")
WRITING = OPERATIONS[:5]
ERRORS = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES)


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failure_is_told_truthfully_and_costs_nothing_acknowledged(open_disk, place, operation, error):
    for k in range(1, 12 if CAMPAIGN else 5):
        open_disk.close()
        for path in place.glob("*"):
            path.unlink()
        disk = open_disk(files=(files := Failing()))
        acknowledged = [*conversation(1), kv(8)]
        put_all(disk, *acknowledged)
        files.fail(operation, k, error)
        for thing in (kv(2), kv(3, n_bytes=50_000), state(4)):
            before, failed = disk.degraded, files.has_failed
            if thing.put(disk):
                acknowledged.append(thing)
                assert disk.degraded is None
            else:
                assert files.has_failed and not failed and before is None
                assert os.strerror(error) in disk.degraded
        with contextlib.suppress(Damaged):
            assert all(thing.is_in(disk) for thing in acknowledged)
        disk.drop(kv(8).name)
        acknowledged = [thing for thing in acknowledged if thing.name != kv(8).name]
        files.fail("", 0, 0)
        put_all(disk, kv(5))
        assert disk.degraded is None
        disk = open_disk()
        assert all(thing.is_in(disk) for thing in (*acknowledged, kv(5)))
        assert found(disk, 1) == conversation(1)[-1].name
        check(disk)


@pytest.mark.parametrize("operation", WRITING)
def test_a_failed_put_succeeds_when_it_is_tried_again(open_disk, operation):
    disk = open_disk(files=(files := Failing()))
    files.fail(operation, 1, errno.ENOSPC)
    assert not kv(1).put(disk)
    assert disk.degraded and disk.counts.n_failures == 1 and disk.names() == frozenset()
    assert kv(1).put(disk)
    assert disk.degraded is None and kv(1).is_in(disk)
    check(disk)


@pytest.mark.parametrize(
    "operation",
    [
        *WRITING[:3],
        "rename",
        "sync_directory",
    ],
)
def test_a_failed_put_leaves_nothing_that_nobody_counts(open_disk, operation):
    disk = open_disk(files=(files := Failing()))
    files.fail(operation, 1, errno.EIO)
    assert not kv(1).put(disk)
    check(disk)


def test_a_file_that_cannot_be_removed_is_still_counted(open_disk):
    disk = open_disk(files=(files := Failing()))
    put_all(disk, kv(1))
    files.fail("unlink", 1, errno.EIO)
    disk.drop(kv(1).name)
    assert disk.n_bytes == sum(object_files(disk.directory).values())


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_passing_shortage_makes_nobody_forget_an_object(open_disk, error):
    disk = open_disk(files=(files := Failing()))
    put_all(disk, kv(1))
    files.fail("open", 1, error)
    with pytest.raises(Damaged):
        kv(1).is_in(disk)
    assert disk.degraded
    assert kv(1).name in disk.names() and kv(1).is_in(disk)
    check(disk)


def test_a_read_that_succeeds_ends_the_degradation_by_a_read_that_failed(open_disk):
    disk = open_disk(files=(files := Failing()))
    put_all(disk, kv(1), kv(2))
    files.fail("open", 1, errno.EIO)
    with pytest.raises(Damaged):
        kv(1).is_in(disk)
    assert disk.degraded and kv(2).is_in(disk)
    assert disk.degraded is None


@pytest.mark.parametrize(
    ("operation", "k"),
    [("open", 1), ("open", 2), ("unlink", 1)],
)
def test_a_failure_while_opening_stops_nothing(open_disk, place, operation, k):
    put_all(open_disk(), kv(1), kv(2), kv(3))
    open_disk.close()
    replace_index(place, None)
    (place / f"{TEMPORARY}x").write_text("half")
    files = Failing()
    files.fail(operation, k, errno.EIO)
    disk = open_disk(files=files)
    assert files.has_failed and disk.counts.n_failures == 1
    put_all(disk, kv(4))
    assert disk.degraded is None
    disk = open_disk()
    assert all(kv(i).is_in(disk) for i in (1, 2, 3, 4))
    check(disk)


def test_a_failure_of_every_write_for_a_while_is_survived(open_disk):
    rng = random.Random(5)
    disk = open_disk(files=(files := Failing()))
    acknowledged = []
    for i in range(N_STEPS // 4):
        files.fail(rng.choice(OPERATIONS), rng.randrange(1, 6), rng.choice(ERRORS))
        if kv(i).put(disk):
            acknowledged.append(kv(i))
        if rng.random() < 0.05:
            files.fail("", 0, 0)
            disk = open_disk(files=files)
            check(disk)
    disk = open_disk()
    assert len(acknowledged) > N_STEPS // 16
    assert all(thing.is_in(disk) for thing in acknowledged)


# several threads


class Interrupted(Files):
    """Another thread does something just before one operation, once; it may have to wait for the end of it all."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.interruption: threading.Thread | None = None

    def _interrupt(self, operation: str) -> None:
        if operation == self.operation and self.interruption is not None and self.interruption.ident is None:
            self.interruption.start()
            self.interruption.join(0.2)

    def create(self, path: Path) -> int:
        self._interrupt("create")
        return super().create(path)

    def sync(self, fd: int) -> None:
        self._interrupt("sync")
        super().sync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._interrupt("rename")
        super().rename(old, new)

    def sync_directory(self, path: Path) -> None:
        self._interrupt("sync_directory")
        super().sync_directory(path)


@pytest.mark.parametrize(
    "operation",
    [
        "create",
        "sync",
        "rename",
        "sync_directory",
    ],
)
def test_two_puts_of_one_object_at_a_time_count_it_once(open_disk, operation):
    disk = open_disk(files=(files := Interrupted(operation)))
    files.interruption = threading.Thread(target=kv(1).put, args=(disk,))
    kv(1).put(disk)
    files.interruption.join()
    assert kv(1).is_in(disk)
    check(disk)


@pytest.mark.parametrize("operation", ["create", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_pass_during_a_put_changes_nothing(open_disk, place, operation, is_there):
    """It may see the temporary file, the old file of the same name, or the new one before it is acknowledged."""
    if is_there:
        put_all(open_disk(), state(1, needs=["kv-of-another-cut.ew"]))
        open_disk.close()
        replace_index(place, None)
    disk = open_disk(files=(files := Interrupted(operation)))
    files.interruption = threading.Thread(target=disk._look, args=(state(1).name,))
    assert state(1).put(disk)
    files.interruption.join()
    assert state(1).is_in(disk)
    check(disk)


def test_many_threads_at_a_time_keep_the_books_right(open_disk):
    disk = open_disk(20 * kv(0).size)
    errors: list[Exception] = []
    end = time.monotonic() + (20 if CAMPAIGN else 0.7)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < end:
                thing = rng.choice(conversation(100 * seed + rng.randrange(10)))
                thing.put(disk)
                disk.touch([thing.name])
                found(disk, rng.randrange(400))
                with contextlib.suppress(Damaged):
                    assert rng.choice(conversation(100 * rng.randrange(4) + rng.randrange(10))).is_in(disk)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    check(disk)


# a full file system, a tier that heals, and many objects


class Small(Files):
    """A file system of so many bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def free_bytes(self, path: Path) -> int:
        return max(0, self.capacity - sum(each.lstat().st_size for each in path.iterdir() if each.name.endswith(".ew")))

    def write(self, path: Path, pieces) -> int:
        data = [bytes(piece) for piece in pieces]
        if sum(map(len, data)) > self.free_bytes(path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(path, data)


def test_a_full_file_system_takes_the_new_in_place_of_what_saves_least(open_disk, monkeypatch):
    monkeypatch.setattr(disk_module, "_FULL_SLACK", 0)
    size = state(1, 50 * STEP).size
    disk = open_disk(files=(files := Small(4 * size)))
    for i in range(12):
        assert state(i, 50 * STEP).put(disk) and disk.degraded is None
    assert disk.counts.n_evicted == 8 and state(11, 50 * STEP).is_in(disk)
    check(disk)
    files.capacity = 0  # everything is somebody else's now
    assert not state(20, 50 * STEP).put(disk) and "space" in disk.degraded
    files.capacity = 4 * size
    assert state(21, 50 * STEP).put(disk) and disk.degraded is None


def test_a_refusal_that_is_not_for_want_of_room_evicts_nothing(open_disk):
    disk = open_disk(files=(files := Failing()))
    put_all(disk, *conversation(1))
    files.fail("append", 1, errno.ENOSPC)  # but the file system says that there is room
    assert not kv(7).put(disk) and disk.counts.n_evicted == 0 and disk.degraded


def test_a_tier_that_refused_something_heals_when_it_is_probed(open_disk):
    disk = open_disk(files=(files := Failing()))
    files.fail("sync", 1, errno.EIO)
    assert not kv(1).put(disk)
    files.fail("create", 1, errno.EROFS)
    disk.probe()
    assert os.strerror(errno.EROFS) in disk.degraded
    disk.probe()
    assert disk.degraded is None
    check(disk)


def test_choosing_a_victim_lets_others_have_the_lock_in_between(open_disk, monkeypatch):
    monkeypatch.setattr(disk_eviction, "MAX_MATCHES", 1)
    disk = open_disk(20 * state(1).size)
    n_locked, real, now = [0], disk._victims.advance, [2e9]
    monkeypatch.setattr(disk_module, "time", SimpleNamespace(time=lambda: now[0], monotonic=time.monotonic))

    def advance(*arguments):
        free = []
        n_locked[0] += 1
        thread = threading.Thread(target=lambda: free.append(disk._lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        assert free == [False], "the table may change while it is looked at"
        return real(*arguments)

    monkeypatch.setattr(disk._victims, "advance", advance)
    for i in range(30):
        now[0] -= 1  # a clock that is set back: no earlier result holds
        put_all(disk, state(i))
    assert disk.counts.n_evicted == 10 < n_locked[0], "it was chosen in one go"
    check(disk)


def test_what_could_not_be_removed_is_said_and_removed_when_the_tier_is_probed(open_disk, place):
    disk = open_disk(files=(files := Failing()))
    put_all(disk, *conversation(1))
    name = conversation(1)[-1].name
    files.fail("unlink", 1, errno.EROFS)
    assert not disk.drop(name) and disk.degraded and (place / name).exists()
    disk.probe()
    assert disk.degraded is None and not (place / name).exists()
    assert disk.drop(name), "what is gone is gone"
    check(disk)
