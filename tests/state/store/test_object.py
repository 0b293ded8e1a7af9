"""The file format: what goes in comes out, and nothing that was changed on the way is taken for what it was.

EVERWARM_CAMPAIGN=1 flips every bit of the header and tries 700,000 other changes.
"""

import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

import blake3
import msgspec
import numpy as np
import pytest

from everwarm.state.store import object as object_module
from everwarm.state.store.object import (
    ALIGN,
    END,
    MAGIC,
    MAJOR,
    MAX_HEADER,
    MAX_SECTIONS,
    MINOR,
    Damaged,
    ObjectHeader,
    ObjectReader,
    fill,
    name_of,
)
from everwarm.types import Blob
from support.crash_writer import Thing, blob, contents, kv, state

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N, N_CHANGED = (20_000, 720_000) if CAMPAIGN else (600, 600)
FOOTER = 40
MIB = 1 << 20

Read = Callable[..., dict[str, bytes]]


@pytest.fixture
def read(tmp_path) -> Iterator[Read]:
    """``read(data)``: every section of a file with these bytes, verified."""
    fd = os.open(tmp_path / "object", os.O_RDWR | os.O_CREAT, 0o600)

    def read(data: bytes, reader: type[ObjectReader] = ObjectReader) -> dict[str, bytes]:
        os.ftruncate(fd, 0)
        os.pwrite(fd, data, 0)
        return contents(reader(fd))

    yield read
    os.close(fd)


def several() -> Thing:
    """Five sections: with a padding, without, empty."""
    header = kv(3).header
    return Thing(header, {"a": blob(5000, 1), "b": blob(4096, 2), "c": blob(0), "d": blob(1, 4), "e": blob(12_000, 5)})


# round trips


@pytest.mark.parametrize("n_bytes", [0, 1, 4095, 4096, 4097, 100_000])
def test_a_part_of_any_size_comes_back(read, n_bytes):
    thing = Thing(kv(1).header, {"kv": blob(n_bytes, 7)})
    assert read(thing.data()) == {"kv": thing.parts["kv"].tobytes()}


def test_several_sections_come_back_and_lie_on_pages(read):
    thing = several()
    data = thing.data()
    assert read(data) == {name: part.tobytes() for name, part in thing.parts.items()}
    assert (len(data) - FOOTER) % ALIGN == 0
    assert data[ALIGN : ALIGN + 5000] == thing.parts["a"].tobytes()


def test_no_section_at_all_and_the_most_there_may_be_come_back(read):
    assert read(Thing(kv(1).header, {}).data()) == {}
    parts = {f"part {i}": blob(i, i) for i in range(MAX_SECTIONS)}
    assert read(Thing(kv(1).header, parts).data()) == {name: part.tobytes() for name, part in parts.items()}


def test_the_header_comes_back_with_its_sections(tmp_path):
    thing = state(4, needs=["kv-one.ew", "kv-two.ew"])
    (tmp_path / "object").write_bytes(thing.data())
    with open(tmp_path / "object", "rb") as file:
        header = ObjectReader(file.fileno()).header
    assert msgspec.structs.replace(header, sections=()) == thing.header
    assert [section.name for section in header.sections] == ["items", "state"]
    assert name_of(header) == thing.name


def test_headers_of_every_length_around_the_end_of_a_page_come_back(read):
    for n in range(3480, 3700):
        thing = Thing(msgspec.structs.replace(kv(1).header, fingerprint="x" * n), {"kv": blob(9), "more": blob(3)})
        assert read(thing.data())["kv"] == bytes(blob(9))
    sizes = {thing_size(n) for n in (3480, 3699)}
    assert len(sizes) == 2  # the control: the lengths above do cross the end of the page


def thing_size(n_fingerprint: int) -> int:
    header = msgspec.structs.replace(kv(1).header, fingerprint="x" * n_fingerprint)
    return Thing(header, {"kv": blob(9), "more": blob(3)}).size


def test_a_header_may_be_a_mebibyte_and_no_more(read):
    header = msgspec.structs.replace(kv(1).header, fingerprint="x" * (MAX_HEADER - 1000))
    assert read(Thing(header, {"kv": blob(9)}).data()) == {"kv": bytes(blob(9))}
    with pytest.raises(ValueError, match="over the limit"):
        Thing(msgspec.structs.replace(header, fingerprint="x" * MAX_HEADER), {"kv": blob(9)}).data()


def test_encoding_is_deterministic_and_does_not_care_where_a_part_lies():
    thing = several()
    elsewhere = {name: np.concatenate([blob(3), part])[3:] for name, part in thing.parts.items()}
    for part in elsewhere.values():
        part.flags.writeable = False
    assert thing.data() == several().data() == Thing(thing.header, elsewhere).data()


@pytest.mark.parametrize(
    "change",
    [{"n_start": 11, "n_items": 10}, {"n_items": -1}, {"n_items": (1 << 40) + 1}, {"too many": "sections"}],
)
def test_what_could_not_be_read_back_is_not_encoded(change):
    parts = {str(i): blob(1) for i in range(MAX_SECTIONS + ("too many" in change))}
    header = msgspec.structs.replace(kv(1).header, **{k: v for k, v in change.items() if k != "too many"})
    assert refuses(lambda: Thing(header, parts).data())


def refuses(encoding: Callable[[], bytes]) -> bool:
    try:
        encoding()
    except ValueError:
        return True
    return False


# changes by chance


def originals() -> list[bytes]:
    parts = {"a": blob(5000, 11), "b": blob(4096, 12), "c": blob(0), "d": blob(2, 14), "e": blob(12_000, 15)}
    return [several().data(), Thing(kv(9).header, parts).data(), state(5).data(), Thing(kv(1).header, {}).data()]


def flipped(data: bytes, *bits: int) -> bytes:
    changed = bytearray(data)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def header_flips(data: bytes, rng: random.Random) -> Iterator[bytes]:
    every = range(8 * ALIGN) if CAMPAIGN else [*range(8 * 200), *rng.sample(range(8 * 200, 8 * ALIGN), 400)]
    yield from (flipped(data, bit) for bit in every)


def footer_flips(data: bytes) -> Iterator[bytes]:
    yield from (flipped(data, bit) for bit in range(8 * (len(data) - FOOTER), 8 * len(data)))


def padding_flips(data: bytes, thing: Thing) -> Iterator[bytes]:
    at = ALIGN
    for part in thing.parts.values():
        for byte in range(at + len(part), at + len(part) + -len(part) % ALIGN, 1 if CAMPAIGN else 97):
            yield flipped(data, 8 * byte + byte % 8)
        at += len(part) + -len(part) % ALIGN


def lengths(data: bytes, rng: random.Random) -> Iterator[bytes]:
    size = len(data)
    edges = [0, 1, 7, 8, 15, 16, 17, FOOTER, ALIGN, size - FOOTER, size - 8, size, *range(0, size, ALIGN)]
    wanted = {edge + d for edge in edges for d in (-FOOTER, -1, 0, 1, FOOTER)} | set(rng.sample(range(size), 50))
    yield from (data[:n] for n in sorted(wanted) if 0 <= n < size)
    yield from (data[:n] + data[-FOOTER:] for n in sorted(wanted) if 0 <= n < size)
    yield from (data + more for more in (b"\0", bytes(FOOTER), bytes(ALIGN), data[-FOOTER:], data, b"x" * ALIGN))


def random_change(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at, n = rng.randrange(len(data)), rng.randrange(1, 300)
    page, page_2 = (ALIGN * rng.randrange(1 + len(data) // ALIGN) for _ in range(2))
    match rng.randrange(9):
        case 0:
            return flipped(data, rng.randrange(8 * len(data)))
        case 1:
            return flipped(data, *(rng.randrange(8 * len(data)) for _ in range(n)))
        case 2:
            return data[:at] + rng.choice([bytes(n), b"\xff" * n, rng.randbytes(n)]) + data[at + n :]
        case 3:
            return data[:at] + other[at:]
        case 4:
            return data[:page] + other[page:]
        case 5:
            return data[:page] + data[page + ALIGN :]
        case 6:
            return data[:page] + data[page_2 : page_2 + ALIGN] + data[page + ALIGN :]
        case 7:
            return data[:page] + data[page : page + ALIGN] + data[page:]
        case _:
            return data[:at] + rng.randbytes(n) + data[at:]


def swapped_sections(thing: Thing, data: bytes) -> bytes:
    a, e = thing.parts["a"].tobytes(), thing.parts["e"].tobytes()
    return data.replace(a, b"?" * len(a)).replace(e[: len(a)], a).replace(b"?" * len(a), e[: len(a)])


def changed_files() -> Iterator[bytes]:
    rng, thing, known = random.Random(1), several(), originals()
    data = thing.data()
    for source in (
        header_flips(data, rng),
        footer_flips(data),
        padding_flips(data, thing),
        lengths(data, rng),
        [swapped_sections(thing, data), b"", bytes(len(data)), data[::-1]],
        (data[:ALIGN] + other[ALIGN:] for other in known),
        (data[:-FOOTER] + other[-FOOTER:] for other in known),
        (random_change(rng.choice(known), rng.choice(known), rng) for _ in range(N_CHANGED)),
    ):
        yield from (changed for changed in source if changed not in known)


def accepted(files: Iterable[bytes], read: Read, **how: type[ObjectReader]) -> tuple[int, int]:
    """How many of how many. Anything but ``Damaged`` is raised."""
    n_accepted = n_tried = 0
    for data in files:
        n_tried += 1
        began = time.process_time()
        try:
            read(data, **how)
            n_accepted += 1
        except Damaged:
            pass
        assert time.process_time() - began < 1
    return n_accepted, n_tried


def test_no_changed_file_is_accepted(read):
    for data in originals():
        read(data)  # the control: none of these is refused
    n_accepted, n_tried = accepted(changed_files(), read)
    assert n_accepted == 0
    assert n_tried > (600_000 if CAMPAIGN else 3_000)


class Gullible(ObjectReader):
    """Believes the sections whatever their digests are."""

    def read(self, name: str) -> Blob:
        section = next(section for section in self.header.sections if section.name == name)
        return np.frombuffer(os.pread(self._fd, section.length, section.offset), np.uint8)


def test_a_reader_without_digests_would_accept_changed_files(read):
    n_accepted, n_tried = accepted(changed_files(), read, reader=Gullible)
    assert 100 < n_accepted < n_tried


def test_a_changed_file_costs_no_more_memory_than_its_size(read):
    rng, known = random.Random(2), originals()
    big = Thing(kv(1).header, {"kv": blob(8 * MIB, 3), "more": blob(3 * MIB)}).data()
    files = [random_change(rng.choice(known), rng.choice(known), rng) for _ in range(100)]
    files += [flipped(big, bit) for bit in (70, 8 * ALIGN, 8 * 9 * MIB, 8 * len(big) - 1)]
    files += forgeries().values()
    tracemalloc.start()
    try:
        for data in files:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            accepted([data], read)
            assert tracemalloc.get_traced_memory()[1] - before <= len(data) + 16 * MIB
    finally:
        tracemalloc.stop()


# changes by somebody who knows the format: the header's digest is right


def forged(body: bytes, rest: bytes, *, length: int | None = None, prefix: bytes | None = None, pad: bytes = b"\0"):
    made = struct.pack("<8sHHI", MAGIC, MAJOR, MINOR, len(body) if length is None else length)
    head = (prefix or made) + body
    head += pad * (-len(head) % ALIGN)
    return head + rest + blake3.blake3(head).digest() + END


def split(thing: Thing) -> tuple[dict, bytes]:
    data = thing.data()
    n = struct.unpack_from("<I", data, 12)[0]
    return json.loads(data[16 : 16 + n]), data[ALIGN:-FOOTER]


def test_a_forgery_without_a_lie_is_accepted(read):
    header, rest = split(several())
    assert read(forged(json.dumps(header).encode(), rest)) == {n: bytes(p) for n, p in several().parts.items()}
    assert len(read(empty_sections(header, MAX_SECTIONS))) == MAX_SECTIONS


def empty_sections(header: dict, n: int) -> bytes:
    """As many sections of nothing, each where it should be."""
    empty, offset = header["sections"][2], 0
    while True:
        sections = [{**empty, "name": str(i), "offset": offset} for i in range(n)]
        data = forged(json.dumps({**header, "sections": sections}).encode(), b"")
        if len(data) - FOOTER == offset:
            return data
        offset = len(data) - FOOTER


def without(header: dict, name: str) -> dict:
    return {key: value for key, value in header.items() if key != name}


def forgeries() -> dict[str, bytes]:
    header, rest = split(several())
    body = json.dumps(header).encode()
    lies: dict[str, bytes] = {}

    def lie(what: str, **changes: object) -> None:
        lies[what] = forged(json.dumps({**header, **changes}).encode(), rest)

    def section_lie(what: str, i: int, **changes: object) -> None:
        sections = [dict(s) for s in header["sections"]]
        sections[i].update(changes)
        lie(f"section {i}: {what}", sections=sections)

    for length in (0, 1, len(body) - 1, len(body) + 1, ALIGN, 10**6, MAX_HEADER, MAX_HEADER + 1, 2**31, 2**32 - 1):
        lies[f"header length {length}"] = forged(body, rest, length=length)
    for major in (0, MAJOR + 1, 256, 65535):
        lies[f"major {major}"] = forged(body, rest, prefix=struct.pack("<8sHHI", MAGIC, major, MINOR, len(body)))
    for i in (0, 2, 4):
        for offset in (-ALIGN, -1, 0, 1, 16, 4095, 4097, 65536, 2**31, 2**63, 2**64, -(2**63), 10**40):
            section_lie(f"offset {offset}", i, offset=offset)
        for n in (-1, -4096, 3, 4999, 4097, 8193, 12_289, 10**6, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 10**40):
            section_lie(f"length {n}", i, length=n)
        for digest in ("", "0" * 64, header["sections"][1]["blake3"], "é", header["sections"][i]["blake3"].upper()):
            section_lie(f"digest {digest[:4]!r}", i, blake3=digest)
    section_lie("unknown field", 0, color="red")
    for what in (None, 1, "x", [], [[]], [None], {}):
        lie(f"sections {what}", sections=what)
    lie("one section less", sections=header["sections"][:-1])
    lie("one section twice", sections=[*header["sections"], header["sections"][-1]])
    lie("sections in another order", sections=header["sections"][::-1])
    lies["one section too many"] = empty_sections(header, MAX_SECTIONS + 1)
    for n_start, n_items in ((-1, 10), (11, 10), (0, -1), (0, 2**41), (0, 2**63), (0, 10**40), (0.5, 1), ("0", 10)):
        lie(f"items {n_start} to {n_items}", n_start=n_start, n_items=n_items)
    for field in msgspec.structs.fields(ObjectHeader):
        if field.required:
            lies[f"no {field.name}"] = forged(json.dumps(without(header, field.name)).encode(), rest)
        lie(f"{field.name} is an object", **{field.name: {}})
        if field.name != "chunks":  # null is what it says when nothing is known
            lie(f"{field.name} is null", **{field.name: None})
    lie("unknown kind", kind="video")
    lie("unknown field", surprise=1)
    lie("needs a number", needs=[1])
    for text in ("NaN", "Infinity", "-Infinity", "1e400", "-1", "1.0", "0x1", "01", "true", "1" * 5000, "[" * 100_000):
        lies[f"n_items {text[:12]}"] = forged(body.replace(b'"n_items": 10', b'"n_items": ' + text.encode()), rest)
    for what, other in {
        "nothing": b"",
        "null": b"null",
        "a list": b"[]",
        "half": body[:-9],
        "twice": body + body,
        "spaces and more": body + b"  x",
        "a byte order mark": b"\xef\xbb\xbf" + body,
        "UTF-16": body.decode().encode("utf-16"),
        "half a surrogate": body.replace(b'"cut": ""', b'"cut": "\\ud800"'),
        "a bare control character": body.replace(b'"cut": ""', b'"cut": "\x01"'),
        "depth": b'{"chunks": ' + b"[" * 500_000,
        "depth in an unknown field": b'{"x": ' + b"[" * 500_000,
    }.items():
        lies[f"the header is {what}"] = forged(other, rest)
    return lies


FORGERIES = forgeries()


@pytest.mark.parametrize("what", FORGERIES)
def test_a_lie_with_a_right_digest_is_refused(read, what):
    assert accepted([FORGERIES[what]], read) == (0, 1)


def test_whatever_a_header_with_a_right_digest_says_is_read_or_damaged(read):
    rng = random.Random(3)
    header, rest = split(several())
    bodies = []
    for _ in range(N):
        body = bytearray(json.dumps(header).encode())
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(body))
            body[at : at + rng.randrange(3)] = rng.choice(b'0123456789-eE.,:{}[]"nulltrue\\ ').to_bytes()
        bodies.append(forged(bytes(body), rest))
    n_accepted, n_tried = accepted(bodies, read)
    assert 0 < n_accepted < n_tried


@pytest.mark.parametrize(
    ("good", "bad"), [(b'"cut": ""', b'"cut": "\xff"'), (b'"kv"', b'"\xed\xa0\x80"'), (b'"cut"', b'"\xff"')]
)
def test_a_header_that_is_not_utf_8_is_refused(read, good, bad):
    header, rest = split(several())
    assert accepted([forged(json.dumps(header).encode().replace(good, bad), rest)], read) == (0, 1)


def test_two_sections_of_one_name_are_refused(read):
    header, rest = split(several())
    header["sections"][4]["name"] = "a"
    data = forged(json.dumps(header).encode(), rest)
    in_the_last_section = 8 * (len(data) - FOOTER - 3 * ALIGN)
    assert accepted([flipped(data, in_the_last_section)], read) == (0, 1)


def test_something_behind_the_header_is_refused_although_the_digest_covers_it(read):
    header, rest = split(several())
    assert accepted([forged(json.dumps(header).encode(), rest, pad=b"x")], read) == (0, 1)


def test_a_file_that_is_no_file_is_an_error_of_the_system_not_a_guess(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises((OSError, Damaged)):
            ObjectReader(fd)
    finally:
        os.close(fd)


def test_a_file_that_shrinks_while_it_is_open_is_damaged(tmp_path):
    path = tmp_path / "object"
    path.write_bytes(several().data())
    with open(path, "rb") as file:
        reader = ObjectReader(file.fileno())
        os.truncate(path, 2 * ALIGN)
        with pytest.raises(Damaged, match="ends early"):
            reader.read("e")


def test_the_same_content_has_the_same_name_and_different_lineages_different_ones():
    assert kv(1).name == kv(1).name
    things = [kv(1), kv(2), kv(1, at=10), state(1), state(1, 20), state(2)]
    assert len({thing.name for thing in things}) == len(things)


def test_what_is_large_is_read_by_several_and_is_the_same(tmp_path, monkeypatch):
    data = np.random.default_rng(0).integers(0, 256, 100_003, np.uint8)
    path = tmp_path / "large"
    path.write_bytes(b"before" + data.tobytes())
    monkeypatch.setattr(object_module, "SHARE", 10_000)
    got = np.zeros(len(data), np.uint8)
    with path.open("rb") as file:
        fill(file.fileno(), got.data, 6)
        assert np.array_equal(got, data)
        with pytest.raises(Damaged):
            fill(file.fileno(), got.data, 7)
