"""One immutable, self-describing, verified file for a state or for the KV of an interval. The format, and reading
it on several threads.

    magic "EVERWARM" · u16 major · u16 minor · u32 header length (≤ 1 MiB) · JSON header · zeroes to 4096
    · sections, each at a multiple of 4096, zeroes between · footer: BLAKE3 of all before the first section, end mark

Every byte of a file is covered by a digest or must be zero. Sizes are checked against the file's before anything is
allocated. Any other file is ``Damaged``: a miss, never a guess.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeAlias

import blake3
import msgspec

from everwarm.errors import EverwarmError
from everwarm.state.lineage import short_key
from everwarm.state.store.files import in_shares
from everwarm.types import Blob, Place, heap

Kind = Literal["kv", "state", "slot"]

MAGIC, END = b"EVERWARM", b"MRAWREVE"
# 1.1: a section may end with the part of the model's MTP head (``llama.blobs``)
# 1.2: a checkpoint of a slot may lie in the main file, and the slot's header says how long the state there is
MAJOR, MINOR = 1, 2
ALIGN = 4096
MAX_HEADER = 1 << 20
MAX_SECTIONS = 1024
SUFFIX = ".ew"
MAX_COUNT = 1 << 40  # of items
OBJECT_NAME = re.compile(r"(?:kv|state)-[0-9a-f]{16}-[0-9a-f]{32}\.ew")

SHARE = 64 << 20  # bytes that are worth a thread
HASHED_SHARE = 16 << 20  # the same where a digest follows the readers
MAX_READERS = 8

_PREFIX = struct.Struct("<8sHHI")
_FOOTER = struct.Struct("<32s8s")
_ZEROES = bytes(ALIGN)
_PIECE = 4 << 20

Doubt = Callable[[Blob, str], bool]  # gets a section and the digest it must have; False: verify it yourself


@dataclass(frozen=True, slots=True)
class KvCut:
    """A part of an array that is copied out of it only when it is written."""

    whole: Blob
    nbytes: int
    copy: Callable[[], Blob]

    @property
    def data(self) -> memoryview:
        return self.copy().data


ObjectPart: TypeAlias = "Blob | KvCut"  # what goes into a section


def are_sound(parts: Iterable[ObjectPart], is_sound: Callable[[Blob], bool]) -> bool:
    """Whether the arrays behind these parts are unchanged."""
    return all(is_sound(part.whole if isinstance(part, KvCut) else part) for part in parts)


class Damaged(EverwarmError):
    """Not an object of this format, or changed since it was written."""

    name = ""  # of the object, once it is known


class Unreadable(Damaged):
    """The system could not read it."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    offset: int
    length: int
    blake3: str


class SlotPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpoint of a slot. Its state is in a section of the companion, behind the main file's own state, or is that
    state; the logits after it, if they were kept, are in a section."""

    n_items: int
    cut: str
    clean: bool
    chunks: tuple[tuple[int, int], ...]
    section: str
    logits: str = ""
    at: int = 0  # where its state begins in the main file; 0, and no section: it is the main file's own state
    n_bytes: int = 0  # of its state there
    tail: str = ""  # the section with the part of the MTP head, which is not in the main file
    digest: str = ""  # of the state there and the head's part


class ObjectHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``start`` and ``key`` name the lineage up to where the object begins and ends (see ``lineage.keys``). A state begins
    where it ends, and says which KV objects make it whole."""

    kind: Kind
    fingerprint: str
    key: str
    start: str
    n_start: int
    n_items: int
    cut: str = ""  # why a state was taken
    clean: bool = False
    chunks: tuple[tuple[int, int], ...] | None = None
    needs: tuple[str, ...] = ()
    reaches: tuple[int, ...] = ()  # up to which item each of them is used: beyond, it may belong to another branch
    points: tuple[SlotPoint, ...] = ()  # of a slot
    main: str = (
        ""  # of a slot: the digest of the main file's tokens and state, and of all behind if ``state_bytes`` is 0
    )
    state_bytes: int = 0  # of the state in the main file; 0: not said, as before 1.2
    owner: str = ""  # of a slot: a digest that only its namespace gives; "": from before files had one
    media: tuple[tuple[int, bytes, int, int, bool], ...] = ()  # of its items: see ``prompt.MediaRow``
    space: str = ""  # a name for its namespace that does not reveal it
    words: str = ""  # how the text begins and ends, for people
    sections: tuple[Section, ...] = ()


_encoder = msgspec.json.Encoder(order="sorted")
_decoder = msgspec.json.Decoder(ObjectHeader)


def encode(
    header: ObjectHeader, parts: Mapping[str, ObjectPart], *, max_threads: int = 1
) -> Iterator[bytes | memoryview]:
    """The file, piece by piece; arrays are not copied. ``max_threads`` for the digests: more where a caller waits."""
    views = {name: part.data for name, part in parts.items()}
    head, end = _head(header, views, max_threads)
    yield head
    for view in views.values():
        yield view
        yield _ZEROES[: -view.nbytes % ALIGN]
    yield end


def file_size(header: ObjectHeader, parts: Mapping[str, ObjectPart]) -> int:
    """The size of the whole file, without reading the parts. ``ValueError``: the file could not be read back."""
    sizes = {name: part.nbytes for name, part in parts.items()}
    head = _laid_out(header, sizes, dict.fromkeys(parts, "0" * 64))
    return len(head) + sum(map(_aligned, sizes.values())) + _FOOTER.size


def size_of(header: ObjectHeader) -> int:
    """The size of the file that this was read from."""
    return max(section.offset + _aligned(section.length) for section in header.sections) + _FOOTER.size


def _head(header: ObjectHeader, views: Mapping[str, memoryview], max_threads: int) -> tuple[bytes, bytes]:
    digests = {name: blake3.blake3(view, max_threads=max_threads).hexdigest() for name, view in views.items()}
    head = _laid_out(header, {name: view.nbytes for name, view in views.items()}, digests)
    return head, _FOOTER.pack(blake3.blake3(head).digest(), END)


def _laid_out(header: ObjectHeader, sizes: Mapping[str, int], digests: Mapping[str, str]) -> bytes:
    if len(sizes) > MAX_SECTIONS or not _makes_sense(header):
        raise ValueError("an object with such a header could not be read back")
    n_pages = 1
    while True:  # the header's length decides where sections begin, and their offsets are in the header
        at = n_pages * ALIGN
        sections = []
        for name, size in sizes.items():
            sections.append(Section(name, at, size, digests[name]))
            at += _aligned(size)
        body = _encoder.encode(msgspec.structs.replace(header, sections=tuple(sections)))
        if _PREFIX.size + len(body) <= n_pages * ALIGN:
            break
        n_pages += 1
    if len(body) > MAX_HEADER:
        raise ValueError(f"a header of {len(body)} bytes is over the limit of {MAX_HEADER}")
    return (_PREFIX.pack(MAGIC, MAJOR, MINOR, len(body)) + body).ljust(n_pages * ALIGN, b"\0")


def _makes_sense(header: ObjectHeader) -> bool:
    names = {section.name for section in header.sections}
    return len(names) == len(header.sections) <= MAX_SECTIONS and 0 <= header.n_start <= header.n_items <= MAX_COUNT


def name_of(header: ObjectHeader) -> str:
    """The file name of an object: the same content always has the same name."""
    return _name(header.kind, header.start, header.key)


def state_name(key: str) -> str:
    """The name of the state at the end of this lineage: a state begins where it ends."""
    return _name("state", key, key)


def _name(kind: Kind, start: str, key: str) -> str:
    return f"{kind}-{short_key(start)}-{key[:32]}{SUFFIX}"


class ObjectReader:
    """An open object: the header is checked on opening, each section when it is read. It may lie inside of a larger file,
    ``size`` bytes from ``at`` on."""

    def __init__(self, fd: int, at: int = 0, size: int | None = None) -> None:
        self._fd = fd
        self._at = at
        self._size = os.fstat(fd).st_size - at if size is None else size
        self.header = self._read_header()

    def _read_header(self) -> ObjectHeader:
        length, head = self._raw_head()
        head_size = len(head)
        digest, end = _FOOTER.unpack(self._bytes(self._size - _FOOTER.size, _FOOTER.size))
        if end != END or blake3.blake3(head).digest() != digest:
            raise Damaged("its header is not what it was")
        if any(head[_PREFIX.size + length :]):
            raise Damaged("there is something behind its header")
        try:
            header = _decoder.decode(head[_PREFIX.size : _PREFIX.size + length])
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise Damaged(f"its header cannot be read: {error}") from None
        self._check(header, head_size)
        self._head = head
        return header

    def _raw_head(self) -> tuple[int, bytes]:
        """The header's length, and all bytes before the first section: not verified yet."""
        magic, major, _minor, length = _PREFIX.unpack(self._bytes(0, _PREFIX.size))
        if magic != MAGIC or major != MAJOR:
            raise Damaged("not an object of this format")
        if length > MAX_HEADER:
            raise Damaged(f"its header of {length} bytes is over the limit")
        head_size = _aligned(_PREFIX.size + length)
        if head_size + _FOOTER.size > self._size:
            raise Damaged("it ends inside its header")
        return length, self._bytes(0, head_size)

    def _check(self, header: ObjectHeader, at: int) -> None:
        """Sections lie one after the other, and the footer right behind the last."""
        if not _makes_sense(header):
            raise Damaged("its header makes no sense")
        for section in header.sections:
            if section.offset != at or not 0 <= section.length <= self._size:
                raise Damaged(f"its section {section.name!r} is not where it should be")
            at += _aligned(section.length)
        if at + _FOOTER.size != self._size:
            raise Damaged(f"it has {self._size} bytes instead of {at + _FOOTER.size}")

    def read(self, name: str, place: Place = heap, doubt: Doubt = lambda _blob, _digest: False) -> Blob:
        """A section; ``place`` gives the memory for it. It is verified, unless ``doubt`` accepts it for verification
        before its use."""
        section = next((s for s in self.header.sections if s.name == name), None)
        if section is None:
            raise Damaged(f"it has no section {name!r}")
        blob = place(_aligned(section.length))
        self._fill(blob.data, section.offset)
        data = blob[: section.length]
        if blob[section.length :].any():
            raise Damaged(f"there is something behind its section {name!r}")
        # a request waits for this, so all cores may help
        is_left = doubt(data, section.blake3)
        if not is_left and blake3.blake3(data.data, max_threads=blake3.blake3.AUTO).hexdigest() != section.blake3:
            raise Damaged(f"its section {name!r} is not what it was")
        return data

    def pieces(self) -> Iterator[bytes]:
        """The whole file, verified on the way, in little memory: with the last piece all of it is as it was written."""
        yield self._head
        for section in self.header.sections:
            yield from self.section_pieces(section)
        yield _FOOTER.pack(blake3.blake3(self._head).digest(), END)

    def section_pieces(self, section: Section) -> Iterator[bytes]:
        hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
        stop = section.offset + section.length
        for at in range(section.offset, stop, _PIECE):
            piece = self._bytes(at, min(_PIECE, stop - at))
            hasher.update(piece)
            yield piece
        if hasher.hexdigest() != section.blake3:
            raise Damaged(f"its section {section.name!r} is not what it was")
        padding = self._bytes(stop, -section.length % ALIGN)
        if any(padding):
            raise Damaged(f"there is something behind its section {section.name!r}")
        yield padding

    def _bytes(self, offset: int, size: int) -> bytes:
        if offset + size > self._size:
            raise Damaged("it is too short")
        buffer = bytearray(size)
        self._fill(memoryview(buffer), offset)
        return bytes(buffer)

    def _fill(self, view: memoryview, offset: int) -> None:
        fill(self._fd, view, self._at + offset)


def fill(fd: int, view: memoryview, offset: int) -> None:
    """Reads until the view is full; several threads read large ones, because one thread does not saturate the
    memory."""
    if len(view) < 2 * SHARE:
        return _fill(fd, view, offset)
    in_shares(len(view), SHARE, MAX_READERS, lambda start, stop: _fill(fd, view[start:stop], offset + start))
    return None


def fill_hashed(fd: int, view: memoryview, offset: int, hasher: blake3.blake3) -> None:
    """The same, and every byte goes through a hasher in its order while later ones are being read."""
    shares = [(start, min(start + HASHED_SHARE, len(view))) for start in range(0, len(view), HASHED_SHARE)]
    with ThreadPoolExecutor(MAX_READERS, "everwarm-share") as threads:
        reading = [threads.submit(_fill, fd, view[start:stop], offset + start) for start, stop in shares]
        for (start, stop), done in zip(shares, reading, strict=True):
            done.result()
            hasher.update(view[start:stop])


def _fill(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        try:
            n = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise Unreadable(f"it cannot be read: {error.strerror}") from error
        if n == 0:
            raise Damaged("it ends early")
        done += n


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
