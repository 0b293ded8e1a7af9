"""Looking at a state directory: what it says is what lies there, and looking changes nothing."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from everwarm.config import ContextOptions, ModelOptions
from everwarm.errors import BadRequest
from everwarm.state.store.disk import Disk
from everwarm.state.store.folder_meta import (
    ABOUT,
    MAX_ABOUT,
    FolderAbout,
    Way,
    decode_about,
    folder_name,
    read_about,
    write_about,
)
from everwarm.state.store.index import INDEX, peek_uses
from everwarm.state.store.object import Damaged, ObjectReader, Unreadable
from everwarm.state.tools import inventory
from everwarm.state.tools.inventory import inspect
from support.crash_writer import FINGERPRINT, STEP, Thing, conversation, in_memory, kv, state

PLENTY = 1 << 30
SPEED = 0.002


@pytest.fixture
def directory() -> Iterator[Path]:
    with in_memory() as path:
        yield Path(path)


@pytest.fixture
def place(directory) -> Path:
    return directory / folder_name(FINGERPRINT)


@pytest.fixture
def disk(place) -> Iterator[Disk]:
    """A directory that an engine holds."""
    opened = Disk(place, PLENTY)
    yield opened
    opened.close()


def put(disk: Disk, *things: Thing) -> None:
    assert all(thing.put(disk) for thing in things)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def everything(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in [directory, *directory.rglob("*")]}


def about(**more) -> FolderAbout:
    return FolderAbout(fingerprint=FINGERPRINT, model="m.gguf", seconds_per_token=SPEED, **more)


# what lies there


def test_a_state_is_listed_with_its_kv_what_it_shares_and_what_it_saves(disk, place):
    first, second, deep = conversation(1, n_kv=2)
    shallow = state(1, needs=[first.name])
    put(disk, first, second, deep, shallow, *conversation(2))
    disk.touch([shallow.name, first.name])
    disk.touch([shallow.name])
    write_about(place, about())
    folder = inventory.read_folder(place)
    listed = {lineage.state.name: lineage for lineage in folder.lineages()}
    assert len(listed) == 3 and next(iter(listed)) == shallow.name  # the last used first
    assert listed[deep.name].n_bytes == deep.size + first.size + second.size
    assert listed[deep.name].n_bytes_shared == listed[shallow.name].n_bytes_shared == first.size
    assert listed[conversation(2)[-1].name].n_bytes_shared == 0
    assert listed[deep.name].seconds_saved == 2 * STEP * SPEED
    assert (listed[shallow.name].state.hits, listed[deep.name].state.hits) == (2, 0)
    assert not any(lineage.missing for lineage in listed.values())
    assert folder.n_bytes == sum(thing.size for thing in (first, second, deep, shallow, *conversation(2)))


def test_what_a_state_needs_and_is_not_there_is_said(disk, place):
    first, second, deep = conversation(1, n_kv=2)
    put(disk, second, deep)
    (lineage,) = inventory.read_folder(place).lineages()
    assert lineage.missing == (first.name,) and [thing.name for thing in lineage.kv] == [second.name]


def test_looking_beside_a_running_engine_changes_nothing_and_sees_its_latest_use(disk, directory, place):
    put(disk, *conversation(1))
    disk.touch([conversation(1)[-1].name])
    before = everything(directory)
    folder = inventory.read_folder(place)
    assert folder.lineages()[0].state.hits == 1
    assert inventory.check_digests(folder.lineages()[0].state.path) is None
    assert inspect(folder.lineages()[0].state.path).is_whole
    assert everything(directory) == before


def test_looking_after_a_kill_changes_nothing_either(directory, place):
    """The index then has its newest rows in a log, which SQLite itself would work in and remove."""
    code = (
        "import sys; from pathlib import Path; from everwarm.state.store.disk import Disk\n"
        "from support.crash_writer import conversation\n"
        "disk = Disk(Path(sys.argv[1]), 1 << 30)\n"
        "for thing in conversation(1): thing.put(disk)\n"
        "disk.touch([conversation(1)[-1].name]); print('ready', flush=True); sys.stdin.read()\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    before = everything(directory)
    assert (place / f"{INDEX}-wal").stat().st_size > 0
    assert inventory.read_folder(place).lineages()[0].state.hits == 1
    assert everything(directory) == before


@pytest.mark.parametrize("harm", [b"", b"nonsense", b"SQLite format 3\0" + bytes(200)])
def test_an_index_that_cannot_be_read_costs_only_the_uses(place, harm):
    with contextlib.closing(Disk(place, PLENTY)) as disk:
        put(disk, *conversation(1))
    (place / INDEX).write_bytes(harm)
    assert peek_uses(place / INDEX) == {}
    (lineage,) = inventory.read_folder(place).lineages()
    assert lineage.state.hits == 0 and lineage.state.used_at == pytest.approx(lineage.state.path.stat().st_mtime)
    Disk(place, PLENTY).close()


def test_broken_files_are_told_from_those_that_cannot_be_read(disk, place):
    thing, link = kv(1), place / kv(2).name
    put(disk, thing, kv(3))
    flip(place / thing.name, 30)
    link.symlink_to(place / kv(3).name)
    folder = inventory.read_folder(place)
    assert set(folder.objects) == {kv(3).name} and set(folder.broken) == {thing.name, link.name}
    assert folder.broken[thing.name].is_lost and not folder.broken[link.name].is_lost


def test_only_folders_with_the_names_of_folders_count(directory, place):
    for name in ("v9-" + "a" * 24, "v1-short", "mine", "v1-" + "b" * 24):
        (directory / name).mkdir()
    (directory / ("v1-" + "c" * 24)).symlink_to(directory / "mine")
    (directory / ("v1-" + "d" * 24)).write_text("")
    assert [path.name for path in inventory.folders(directory)] == ["v1-" + "b" * 24]
    assert [path.name for path in inventory.foreign_folders(directory)] == ["v9-" + "a" * 24]
    assert inventory.folders(directory / "nowhere") == []
    with pytest.raises(BadRequest, match="no folder"):
        inventory.choose_folders(directory, "v1-a")


def test_an_object_is_found_by_the_beginning_of_its_name_or_key(disk, place):
    need, deep = conversation(1)
    put(disk, need, deep, *conversation(2))
    read = [inventory.read_folder(place)]
    for wanted in (deep.name, deep.name[:20], deep.header.key[:8], deep.header.key):
        assert inventory.find_one(read, wanted).name == deep.name  # and not the KV that ends there
    assert inventory.find_one(read, need.name).name == need.name
    with pytest.raises(BadRequest, match="4 objects begin"):
        inventory.find_one(read, "")
    with pytest.raises(BadRequest, match="nothing kept"):
        inventory.find_one(read, "zzz")


# digests


def test_pieces_are_the_file_itself_also_inside_of_another(tmp_path):
    thing = state(1, n_bytes=9_000_000)
    data = thing.data()
    path = tmp_path / "file"
    path.write_bytes(b"x" * 777 + data + b"y" * 99)
    with path.open("rb") as file:
        reader = ObjectReader(file.fileno(), 777, len(data))
        pieces = list(reader.pieces())
        assert b"".join(pieces) == data and max(map(len, pieces)) <= 4 << 20
        assert reader.read("state").tobytes() == thing.parts["state"].tobytes()
        for at, size in ((776, len(data)), (777, len(data) - 1), (777, len(data) + 1)):
            with pytest.raises(Damaged):
                ObjectReader(file.fileno(), at, size)


def test_every_flipped_byte_is_noticed(place, disk):
    thing = state(1, n_bytes=5000)
    put(disk, thing)
    path = place / thing.name
    assert inventory.check_digests(path) is None, "this test could not fail"
    for at in range(0, thing.size, 97):
        flip(path, at)
        assert inventory.check_digests(path) is not None, at
        flip(path, at)
    path.rename(place / kv(5).name)
    assert "another object" in str(inventory.check_digests(place / kv(5).name))


def test_what_is_gone_is_not_damaged_and_what_cannot_be_opened_is_only_unreadable(place, disk):
    assert inventory.check_digests(place / kv(1).name) is None
    (place / kv(1).name).mkdir()
    assert isinstance(inventory.check_digests(place / kv(1).name), Unreadable)


def test_inspecting_says_which_section_and_which_need_is_damaged(disk, place):
    first, second, deep = conversation(1, n_kv=2)
    put(disk, first, second, deep)
    path = place / deep.name
    assert inspect(path).is_whole
    flip(place / first.name, -8000)
    (place / second.name).unlink()
    flip(path, -8000)
    found = inspect(path)
    assert not found.is_whole and set(found.damaged) == {"state"}
    assert "not what it was" in found.needs[first.name] and "not there" in found.needs[second.name]
    (place / "plain").write_text("plain")
    for bad in (place / "plain", place / "nowhere", place):
        with pytest.raises(BadRequest):
            inspect(bad)


def test_a_need_that_is_no_name_of_an_object_is_never_opened(disk, place):
    (place.parent / "secret").write_text("secret")
    odd = state(1, needs=["../secret", "/dev/zero"])
    put(disk, odd)
    assert set(inspect(place / odd.name).needs.values()) == {"it is not the name of an object"}


# quarantine


def test_what_is_quarantined_is_never_offered_again_and_can_be_looked_at(place):
    need, deep = conversation(1)
    with contextlib.closing(Disk(place, PLENTY)) as disk:
        put(disk, need, deep)
        assert "running server" in inventory.quarantine(place, [deep.name])
        assert (place / deep.name).exists()
    assert inventory.quarantine(place, [deep.name]) == ""
    assert [path.read_bytes() for path in inventory.read_folder(place).quarantined()] == [deep.data()]
    with contextlib.closing(Disk(place, PLENTY)) as disk:
        assert disk.names() == {need.name}
    (place / "quarantine").rename(place / "moved")
    (place / "quarantine").write_text("in the way")
    assert "cannot be changed" in inventory.quarantine(place, [need.name]) and (place / need.name).exists()


# about


def test_what_a_folder_says_of_itself_is_read_again(place):
    place.mkdir()
    message = about(path="m.gguf", ways=(Way(ModelOptions(lora=(("a", 0.5),)), ContextOptions(n_threads=3)),))
    write_about(place, message)
    assert read_about(place) == message
    assert message.without_paths().path == "" and message.without_paths().ways[0].model.lora == ()
    assert message.without_paths().ways[0].context.n_threads == 3


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"fingerprint": 3}',
        b'{"fingerprint": "another"}',
        b'{"fingerprint": "\xff"}',
        msgspec.json.encode({"fingerprint": FINGERPRINT, "ways": [{"model": {}, "context": {"n_ctx": -1}}]}),
        msgspec.json.encode({"fingerprint": FINGERPRINT, "path": "x" * MAX_ABOUT}),
    ],
)
def test_a_file_that_cannot_be_understood_is_as_good_as_none(place, data):
    place.mkdir()
    (place / ABOUT).write_bytes(data)
    assert read_about(place) is None


@pytest.mark.parametrize("speed", ["0", "-1", "1e9", "1e-320"])
def test_a_speed_that_cannot_be_is_not_believed(speed):
    found = decode_about(f'{{"fingerprint": "x", "seconds_per_token": {speed}}}'.encode())
    assert found is not None and found.seconds_per_token is None
