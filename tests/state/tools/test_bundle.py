"""States in one file: what comes out is what went in, and whatever is not exactly that writes nothing.

EVERWARM_CAMPAIGN=1 tries 100,000 changes.
"""

import contextlib
import gzip
import io
import os
import random
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from everwarm.errors import BadRequest
from everwarm.state.store.disk import Disk
from everwarm.state.store.folder_meta import ABOUT, FolderAbout, encode_about, folder_name, read_about, write_about
from everwarm.state.store.object import ObjectHeader
from everwarm.state.tools import bundle
from everwarm.state.tools.bundle import Imported, check_bundle, closure, open_bundle, write_bundle, write_members
from everwarm.state.tools.inventory import read_folder
from support.crash_writer import FINGERPRINT, Thing, conversation, in_memory, kv, state

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_MUTANTS = 100_000 if CAMPAIGN else 600
PLENTY = 1 << 30
FOLDER = folder_name(FINGERPRINT)
ABOUT_IT = FolderAbout(fingerprint=FINGERPRINT, model="m.gguf", path="somewhere/m.gguf", seconds_per_token=0.25)


def quiet(_: int) -> None:
    pass


def reaching(thing: Thing) -> Thing:
    """As an engine writes it: a state says how far it uses what it needs."""
    head = thing.header
    reaches = tuple(range(10, 10 * len(head.needs) + 1, 10))
    return Thing(msgspec.structs.replace(head, reaches=reaches), thing.parts)


def things_of(i: int, n_kv: int = 2) -> list[Thing]:
    return [reaching(thing) for thing in conversation(i, n_kv)]


@pytest.fixture
def directory() -> Iterator[Path]:
    with in_memory() as path:
        yield Path(path)


@pytest.fixture
def source(directory) -> Path:
    place = directory / "here" / FOLDER
    with contextlib.closing(Disk(place, PLENTY)) as disk:
        assert all(thing.put(disk) for i in (1, 2) for thing in things_of(i))
    write_about(place, ABOUT_IT)
    return place


def exported(source: Path, *names: str) -> bytes:
    file = source.parent.parent / "bundle.tar"
    folder = read_folder(source)
    size = write_bundle(file, folder, closure(folder, names), quiet)
    data = file.read_bytes()
    file.unlink()
    assert len(data) == size
    return data


def take(directory: Path, data: bytes) -> Imported:
    file = directory / "in.tar"
    file.write_bytes(data)
    with open_bundle(file) as fd:
        return write_members(fd, check_bundle(fd, directory / "there", quiet), directory / "there", quiet)


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.glob("*.ew")}


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.GNU_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, data: bytes, **more) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def whole(thing: Thing) -> tuple[tarfile.TarInfo, bytes]:
    return member(thing.name, thing.data())


def assert_refused(directory: Path, data: bytes, why: str | None = None) -> None:
    before = sorted(map(str, directory.rglob("*")))
    with pytest.raises(BadRequest, match=why):
        take(directory, data)
    (directory / "in.tar").unlink()
    assert sorted(map(str, directory.rglob("*"))) == before


# there and back


def test_what_was_exported_is_imported_byte_for_byte_and_an_engine_finds_it(directory, source):
    done = take(directory, exported(source))
    place = directory / "there" / FOLDER
    assert done == Imported(place, 6, 0, sum(path.stat().st_size for path in source.glob("*.ew")))
    assert contents(place) == contents(source)
    with contextlib.closing(Disk(place, PLENTY)) as disk:
        disk.settle()
        assert {name for name in disk.names() if disk.has(name)} == {
            thing.name for i in (1, 2) for thing in things_of(i)
        }
    assert [oct(path.stat().st_mode & 0o077) for path in (place, *place.iterdir())] == ["0o0"] * 10


def test_it_is_a_plain_tar_with_kv_before_the_states_that_need_it(source):
    with tarfile.open(fileobj=io.BytesIO(exported(source)), mode="r:") as tar:
        names = tar.getnames()
        assert names[0] == ABOUT and names == [ABOUT, *sorted(names[1:], key=lambda name: name.startswith("state"))]
        for name in names[1:]:
            assert tar.extractfile(name).read() == (source / name).read_bytes()


def test_one_state_takes_along_what_it_needs_and_nothing_else(directory, source):
    *_, deep = things_of(1)
    take(directory, exported(source, deep.name))
    assert set(contents(directory / "there" / FOLDER)) == {thing.name for thing in things_of(1)}


def test_what_is_said_of_the_model_goes_along_without_paths(directory, source):
    take(directory, exported(source))
    assert read_about(directory / "there" / FOLDER) == msgspec.structs.replace(ABOUT_IT, path="")


def test_paths_in_a_foreign_file_are_not_believed(directory):
    evil = encode_about(msgspec.structs.replace(ABOUT_IT, path="/dev/zero"))
    take(directory, packed(member(ABOUT, evil), *map(whole, things_of(1))))
    assert read_about(directory / "there" / FOLDER).path == ""


def test_what_is_there_already_is_left_alone(directory, source):
    data = exported(source)
    take(directory, data)
    place = directory / "there" / FOLDER
    write_about(place, msgspec.structs.replace(ABOUT_IT, model="mine"))
    times = {path.name: path.stat().st_mtime_ns for path in place.glob("*.ew")}
    assert (take(directory, data).n_new, take(directory, data).n_known) == (0, 6)
    assert {path.name: path.stat().st_mtime_ns for path in place.glob("*.ew")} == times
    assert read_about(place).model == "mine"


def test_a_damaged_one_that_is_there_is_written_anew(directory, source):
    data = exported(source)
    take(directory, data)
    path = directory / "there" / FOLDER / things_of(1)[0].name
    path.write_bytes(b"damaged")
    assert take(directory, data).n_new == 1
    assert path.read_bytes() == things_of(1)[0].data()


def test_a_state_may_need_what_only_the_directory_has(directory, source):
    *needs, deep = things_of(1)
    assert_refused(directory, packed(whole(deep)), "needs")
    take(directory, packed(*map(whole, needs)))
    assert take(directory, packed(whole(deep))).n_new == 1


def test_a_running_engine_is_left_alone(directory, source):
    data = exported(source)
    held = contextlib.closing(Disk(directory / "there" / FOLDER, PLENTY))
    with held, pytest.raises(BadRequest, match="running server"):
        take(directory, data)
    assert contents(directory / "there" / FOLDER) == {}


def test_a_damaged_object_is_not_exported_and_leaves_no_file(source):
    victim = source / things_of(1)[0].name
    data = bytearray(victim.read_bytes())
    data[-8000] ^= 1
    victim.write_bytes(data)
    before = sorted(path.name for path in source.parent.parent.iterdir())
    with pytest.raises(BadRequest, match="damaged"):
        exported(source)
    assert sorted(path.name for path in source.parent.parent.iterdir()) == before


def test_what_is_not_whole_or_would_be_overwritten_is_not_exported(source):
    needs, deep = things_of(1)[:-1], things_of(1)[-1]
    (source / needs[0].name).unlink()
    folder = read_folder(source)
    with pytest.raises(BadRequest, match="not whole"):
        closure(folder, [deep.name])
    assert {thing.name for thing in closure(folder, [])} == {thing.name for thing in things_of(2)}
    with pytest.raises(BadRequest, match="there already"):
        write_bundle(source / ABOUT, folder, closure(folder, []), quiet)


def test_sizes_beyond_eight_gigabytes_can_be_said(source):
    info = tarfile.TarInfo.frombuf(bundle._tar_header("x", 1 << 40), "ascii", "strict")
    assert info.size == 1 << 40


# hostile files


def links() -> dict[str, Callable[[], bytes]]:
    name, data = kv(1).name, kv(1).data()
    kinds = {
        "symlink": tarfile.SYMTYPE,
        "hardlink": tarfile.LNKTYPE,
        "device": tarfile.CHRTYPE,
        "fifo": tarfile.FIFOTYPE,
        "directory": tarfile.DIRTYPE,
        "contiguous": tarfile.CONTTYPE,
        "sparse": tarfile.GNUTYPE_SPARSE,
        "pax": tarfile.XHDTYPE,
        "long name": tarfile.GNUTYPE_LONGNAME,
    }
    made = {what: lambda kind=kind: packed(member(name, data, type=kind)) for what, kind in kinds.items()}
    made["plain with a link"] = lambda: packed(member(name, data, linkname="/etc/passwd"))
    return made


@pytest.mark.parametrize("what", links())
def test_anything_but_a_plain_member_is_refused(directory, what):
    assert_refused(directory, links()[what](), "only plain object files")


@pytest.mark.parametrize(
    "name",
    [
        "../" + kv(1).name,
        "/" + kv(1).name,
        "./" + kv(1).name,
        "a/" + kv(1).name,
        kv(1).name.upper(),
        kv(1).name + " ",
        kv(1).name[:-3],
        "lock",
        "index.sqlite",
        ".tmp-" + kv(1).name,
        "slot-" + kv(1).name[3:],
        "",
    ],
)
def test_any_other_name_is_refused(directory, name):
    assert_refused(directory, packed(member(name, kv(1).data())))


def changed(thing: Thing, **more) -> Thing:
    return Thing(msgspec.structs.replace(thing.header, **more), thing.parts)


@pytest.mark.parametrize(
    ("why", "members"),
    [
        ("twice", [whole(kv(1)), whole(kv(1))]),
        ("twice", [whole(kv(1)), member(ABOUT, encode_about(ABOUT_IT)), member(ABOUT, encode_about(ABOUT_IT))]),
        ("no states", []),
        ("no states", [member(ABOUT, encode_about(ABOUT_IT))]),
        ("understood", [member(ABOUT, b"{"), whole(kv(1))]),
        ("understood", [member(ABOUT, encode_about(ABOUT_IT) + b" " * (1 << 20)), whole(kv(1))]),
        ("another object", [member(kv(2).name, kv(1).data())]),
        ("another model", [whole(kv(1)), whole(changed(kv(2), fingerprint="another"))]),
        ("needs", [whole(reaching(conversation(1)[-1])), whole(kv(1))]),
        ("needs", [whole(kv(1)), whole(reaching(state(1, needs=[kv(1).name, "../x"])))]),
        ("no sense", [whole(kv(1)), whole(state(1, needs=[kv(1).name]))]),
        ("no sense", [whole(kv(1)), whole(changed(kv(2), needs=(kv(1).name,), reaches=(1,)))]),
        ("short", [member(kv(1).name, b"")]),
        ("bytes instead", [member(kv(1).name, kv(1).data()[:-4136] + kv(1).data()[-40:])]),
    ],
)
def test_what_does_not_fit_together_is_refused(directory, why, members):
    assert_refused(directory, packed(*members), why)


def test_a_slots_companion_is_not_taken_up(directory):
    slot = Thing(ObjectHeader(kind="slot", fingerprint=FINGERPRINT, key="", start="", n_start=0, n_items=0), {})
    assert_refused(directory, packed(member(kv(1).name, slot.data())), "another object")


@pytest.mark.parametrize("size", [1 << 33, (1 << 62), -1, -(1 << 40)])
def test_a_size_that_is_a_lie_takes_no_memory(directory, size):
    info = member(kv(1).name, b"")[0]
    info.size = size
    tracemalloc.start()
    try:
        assert_refused(directory, info.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_large_bundle_takes_little_memory(directory):
    large = kv(1, n_bytes=64 << 20)
    file = directory / "in.tar"
    file.write_bytes(packed(whole(large)))
    tracemalloc.start()
    try:
        with open_bundle(file) as fd:
            write_members(fd, check_bundle(fd, directory / "there", quiet), directory / "there", quiet)
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()
    assert (directory / "there" / FOLDER / large.name).stat().st_size == large.size


def test_what_is_not_a_file_or_a_compressed_one_is_refused(directory, source):
    assert_refused(directory, gzip.compress(exported(source)), "not a bundle")
    assert_refused(directory, b"", "ends early")
    assert_refused(directory, exported(source)[:-10_000])
    for odd in (Path("/dev/zero"), directory, directory / "nowhere"):
        with pytest.raises(OSError), open_bundle(odd):
            pass


def test_a_file_that_is_changed_between_looking_and_writing_lands_nothing_wrong(directory, source):
    file = directory / "in.tar"
    file.write_bytes(exported(source))
    with open_bundle(file) as fd:
        found = check_bundle(fd, directory / "there", quiet)
        last = found.members[-1]
        with file.open("r+b") as changing:
            changing.seek(last.offset_data + last.size - 8000)
            changing.write(b"!")
        with pytest.raises(BadRequest, match="damaged"):
            write_members(fd, found, directory / "there", quiet)
    landed = contents(directory / "there" / FOLDER)
    assert last.name not in landed and all(data == (source / name).read_bytes() for name, data in landed.items())


def test_a_disk_without_room_is_refused_before_anything_is_written(directory, source, monkeypatch):
    monkeypatch.setattr(bundle.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    data = exported(source)
    with pytest.raises(BadRequest, match="free"):
        take(directory, data)
    assert contents(directory / "there" / FOLDER) == {}


# mutants


def mutant(rng: random.Random, data: bytes) -> bytes:
    """A change that somebody or something could make: bits, blocks, headers with right checksums, lengths."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(out))
        block = at // 512 * 512
        kind = rng.randrange(8)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + rng.randrange(1, 600)] = b""
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.choice((1, 512, 1024)))
        elif kind == 3:
            out[block : block + 512] = bytes(512)
        elif kind == 4:
            other = rng.randrange(len(out)) // 512 * 512
            out[block : block + 512], out[other : other + 512] = out[other : other + 512], out[block : block + 512]
        elif kind == 5:
            del out[at:]
            out += bytes(rng.choice((0, 1024)))
        else:
            _change_header(rng, out)
        if not out:
            break
    return bytes(out)


def _change_header(rng: random.Random, out: bytearray) -> None:
    """One that a tar reader takes for good: its checksum is right."""
    whole = range(0, len(out) - 511, 512)
    heads = [at for at in whole if out[at + 257 : at + 262] == b"ustar"]
    if not heads:
        return
    at = rng.choice(heads)
    start, stop = rng.choice(((0, 100), (100, 108), (124, 136), (148, 156), (156, 157), (157, 257), (345, 500)))
    out[at + rng.randrange(start, stop)] = rng.choice((0, 0x2F, 0x2E, 0x37, 0x80, 0xFF, rng.randrange(256)))
    block = bytes(out[at : at + 148]) + b" " * 8 + bytes(out[at + 156 : at + 512])
    out[at + 148 : at + 156] = b"%06o\0 " % sum(block)


def test_mutants_write_what_was_exported_or_nothing(directory, source):
    rng, right = random.Random(4711), contents(source)
    data = exported(source)
    n_taken = 0
    for i in range(N_MUTANTS):
        changed_data = mutant(rng, data)
        there = directory / "there"
        try:
            take(directory, changed_data)
        except BadRequest:
            assert not there.exists(), i
            continue
        n_taken += 1
        landed = contents(there / FOLDER)
        assert landed.items() <= right.items(), f"mutant {i} wrote something that was never exported"
        assert [path.name for path in there.iterdir()] == [FOLDER]
        assert {path.name for path in (there / FOLDER).iterdir()} <= {*right, ABOUT, "lock"}
        _remove(there)
    assert {path.name for path in directory.iterdir()} == {"here", "in.tar"}
    assert n_taken < N_MUTANTS / 4


def _remove(there: Path) -> None:
    for path in sorted(there.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    there.rmdir()


def test_without_digests_some_of_these_mutants_would_be_taken(directory, source, monkeypatch):
    """The negative control: the same mutants against a reader that believes everything."""

    def believing(fd, member, _tick):
        return bundle._open_member(fd, member).header

    def copying(fd, member, _fingerprint, _tick):
        yield os.pread(fd, member.size, member.offset_data)

    monkeypatch.setattr(bundle, "_verified", believing)
    monkeypatch.setattr(bundle, "_again", copying)
    rng, right, data = random.Random(4711), contents(source), exported(source)
    for _ in range(600):
        with contextlib.suppress(BadRequest):
            take(directory, mutant(rng, data))
            if not contents(directory / "there" / FOLDER).items() <= right.items():
                return
            _remove(directory / "there")
    raise AssertionError("the mutants are too harmless")
