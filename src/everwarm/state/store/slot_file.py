"""Slot files: llama.cpp's own sequence file, and our companion beside it. Their formats, safe opening, and renaming both
into place.

    NAME               u32 "ggsq" · u32 version · u32 n · n × i32 tokens · libllama's sequence state
    NAME.checkpoints   an object (see ``object``) with the items, the checkpoints that are not in NAME, what the MTP head
                       knows, the owner, and the digest of NAME
    .ns-DIGEST/        the same of a namespace that the directory itself does not belong to

The first is llama-server's format. It writes its token list packed (−1, version, count, tokens, media) and may append
checkpoints of its own behind the state; both are read, and ours have a few such checkpoints, too. A name never leaves
its directory, and a symbolic link is never followed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import blake3
import numpy as np

from everwarm.errors import BadRequest
from everwarm.prompt.prompt import Codes
from everwarm.state.store.files import Aside, FilePiece, Files, locked
from everwarm.state.store.object import Damaged, ObjectHeader, ObjectReader, SlotPoint, fill, fill_hashed
from everwarm.state.store.slot_names import companion_of
from everwarm.types import Blob, Place, heap

MAGIC, VERSION = 0x67677371, 4
NO_FILE = "there is no file of that name that you have saved"  # the same for a file of another namespace
SEARCHED_BYTES = 4 << 20  # of a state at once
MAX_MARKS = 16  # places in a state that look like the beginning of an appendix
MAX_POINTS = 4096  # of an appendix; llama-server keeps 32 unless it is told otherwise

_HEAD = struct.Struct("<III")
_PACKED = struct.Struct("<iII")  # −1, version, tokens
_PACKED_VERSION = 1
_APPENDIX = struct.Struct("<II")
_APPENDIX_MAGIC = 0x504B4353
_APPENDIX_VERSION = 1
_COUNT, _POINT, _SIZE = struct.Struct("<I"), struct.Struct("<qii"), struct.Struct("<Q")  # a point: tokens, positions


@dataclass(frozen=True, slots=True)
class Appended:
    """A checkpoint behind the state, as llama-server writes it: after how many tokens, and libllama's partial state."""

    n_tokens: int
    state: Blob


@dataclass(frozen=True, slots=True)
class Scattered:
    """A sequence's state whose bytes lie in several arrays, in their order."""

    parts: tuple[Blob, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def tobytes(self) -> bytes:
        return b"".join(part.tobytes() for part in self.parts)


SequenceState: TypeAlias = "Blob | Scattered"


def parts_of(state: SequenceState) -> tuple[Blob, ...]:
    return state.parts if isinstance(state, Scattered) else (state,)


def encode_main(tokens: Codes, state: SequenceState, points: Sequence[Appended] = ()) -> Iterator[FilePiece]:
    yield _HEAD.pack(MAGIC, VERSION, len(tokens))
    yield np.ascontiguousarray(tokens, "<i4").tobytes()
    yield state.data if isinstance(state, np.ndarray) else [part.data for part in state.parts]
    yield from _appendix(points)


def _appendix(points: Sequence[Appended]) -> Iterator[bytes | memoryview]:
    *frames, end = _frames([(point.n_tokens, len(point.state)) for point in points])
    for frame, point in zip(frames, points, strict=True):
        yield frame
        yield point.state.data
    yield end


def _frames(points: Sequence[tuple[int, int]]) -> list[bytes]:
    """What stands before each of these checkpoints (tokens, bytes) and behind the last. Only for states at one position,
    that of their last token."""
    if not points:
        return [b""]
    before = _APPENDIX.pack(_APPENDIX_MAGIC, _APPENDIX_VERSION) + _COUNT.pack(len(points))
    frames = []
    for n_tokens, n_bytes in points:
        frames.append(before + _POINT.pack(n_tokens, n_tokens - 1, n_tokens - 1) + _SIZE.pack(n_bytes))
        before = 2 * _SIZE.pack(0)
    return [*frames, before]


def appended_at(n_cells: int, state_bytes: int, points: Sequence[Appended]) -> dict[int, int]:
    """Where in the file the states of these checkpoints begin, by their tokens."""
    found, at = {}, _HEAD.size + 4 * n_cells + state_bytes
    for frame, point in zip(_frames([(point.n_tokens, len(point.state)) for point in points]), points, strict=False):
        at += len(frame)
        found[point.n_tokens] = at
        at += len(point.state)
    return found


def require_appendix(fd: int, n_cells: int, state_bytes: int, points: Sequence[SlotPoint]) -> None:
    """``Damaged``, unless exactly these checkpoints follow a state of so many bytes, up to the end of the file. Reads no
    state."""
    at = _HEAD.size + 4 * n_cells + state_bytes
    *frames, end = _frames([(point.n_items, point.n_bytes) for point in points])
    for frame, point in zip(frames, points, strict=True):
        if os.pread(fd, len(frame), at) != frame or at + len(frame) != point.at or point.n_bytes <= 0:
            raise Damaged("its checkpoints are not where they should be")
        at = point.at + point.n_bytes
    if os.pread(fd, len(end) + 1, at) != end:
        raise Damaged("it does not end where it should")


def main_digest(tokens: Codes, state: SequenceState) -> str:
    """The digest by which a companion recognises its main file."""
    hasher = _hasher(tokens)
    for part in parts_of(state):
        hasher.update(part.data)
    return str(hasher.hexdigest())


def _hasher(tokens: Codes) -> blake3.blake3:
    return blake3.blake3(np.ascontiguousarray(tokens, "<i4").tobytes(), max_threads=blake3.blake3.AUTO)


def split_appendix(state: Blob) -> tuple[Blob, tuple[Appended, ...]]:
    """The state alone, and what llama-server appended to it. Only what can be read up to the end of the file counts, and
    only if few places before it look like the beginning: by chance hardly one does."""
    for at in itertools.islice(_marks(state), MAX_MARKS):
        points = _appended(state[at + _APPENDIX.size :])
        if points is not None:
            return state[:at], points
    return state, ()


def _marks(state: Blob) -> Iterator[int]:
    """Where an appendix may begin. Looked for in pieces, because other threads wait while one is searched."""
    mark = _APPENDIX.pack(_APPENDIX_MAGIC, _APPENDIX_VERSION)
    for start in range(0, len(state), SEARCHED_BYTES):
        piece = state[start : start + SEARCHED_BYTES + len(mark) - 1].tobytes()
        at = piece.find(mark)
        while at >= 0:
            yield start + at
            at = piece.find(mark, at + 1)


def _appended(data: Blob) -> tuple[Appended, ...] | None:
    """So many checkpoints, and nothing else; None: that is not what it is."""
    points: list[Appended] = []
    try:
        (count,) = _COUNT.unpack_from(data.data)
        if count > MAX_POINTS:
            return None
        at = _COUNT.size
        for _ in range(count):
            n_tokens, _, _ = _POINT.unpack_from(data.data, at)
            at += _POINT.size
            parts = []
            for _ in range(3):  # the state, and two of its own drafter
                (size,) = _SIZE.unpack_from(data.data, at)
                at += _SIZE.size
                if size > len(data) - at:
                    return None
                parts.append(data[at : at + size])
                at += size
            if not len(parts[0]):
                return None
            points.append(Appended(n_tokens, parts[0]))
    except struct.error:
        return None
    return tuple(points) if at == len(data) else None


class UnknownOrigin(Damaged):
    """A file that may be whole, but without a companion that says what it is."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The namespace that reads or writes a slot file, and the fingerprint that its state must have."""

    fingerprint: str
    namespace: str
    owns_unbound: bool = False  # files from before they were bound to a namespace count as the caller's
    trusts_origin: bool = False  # a file without a companion is taken on the caller's word

    def owns(self, header: ObjectHeader) -> bool:
        if not header.owner:
            return self.owns_unbound
        mine = owner_digest(header.fingerprint, header.main, self.namespace)
        return secrets.compare_digest(_bytes(header.owner), _bytes(mine))


def owner_digest(fingerprint: str, main: str, namespace: str) -> str:
    """The digest by which a companion recognises its namespace; it reveals neither the namespace nor that two files
    share one."""
    hasher = blake3.blake3(derive_key_context="everwarm: the owner of a slot file")
    for part in map(_bytes, (fingerprint, main, namespace)):
        hasher.update(struct.pack("<I", len(part)) + part)
    return str(hasher.hexdigest())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Pair:
    """A main file and its companion as they lay beside each other at one moment."""

    main: int
    companion: int | None


@contextlib.contextmanager
def open_pair(path: Path) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        with locked(path.parent, shared=True):
            main = open_plain(path)
            stack.callback(os.close, main)
            companion = _open_companion(companion_of(path))
            if companion is not None:
                stack.callback(os.close, companion)
        yield Pair(main, companion)


def _open_companion(path: Path) -> int | None:
    try:
        return Files().open(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnknownOrigin(f"its companion {path.name} cannot be opened: {error.strerror}") from None


def publish(path: Path, main: Aside, companion: Aside, claim: Claim, files: Files) -> None:
    """Renames both files into place. A crash in between leaves two that do not belong together, which a read detects;
    two engines that save at the same time take turns."""
    with locked(path.parent):
        _require_own(path, claim)
        files.rename(main.path, path)
        files.rename(companion.path, companion_of(path))
        files.sync_directory(path.parent)


def _require_own(path: Path, claim: Claim) -> None:
    """Refuse to write over another namespace's file."""
    try:
        fd = open_plain(companion_of(path))
    except Damaged:
        return
    try:
        header = ObjectReader(fd).header
    except Damaged:
        return  # it cannot be restored anyhow
    finally:
        os.close(fd)
    if header.kind == "slot" and not claim.owns(header):
        raise BadRequest(f"{path.name} is another's file; choose another filename")


@dataclass(frozen=True, slots=True)
class Main:
    """llama.cpp's file: the token of every cell, and the sequence's state."""

    cells: Codes
    state: Blob
    n_bytes: int  # of the file
    digest: str  # of tokens and state

    @property
    def has_images(self) -> bool:
        return int(self.cells.min()) < 0


def read_open_main(fd: int, max_tokens: int, n_before: int = 0, place: Place = heap, state_bytes: int = 0) -> Main:
    """Sizes are checked before anything is allocated. Room for ``n_before`` bytes is left before the state; ``place`` gives
    the memory for it. ``state_bytes``: of the state; 0: all that follows the tokens."""
    size = os.fstat(fd).st_size
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        raise Damaged("it is too short")
    magic, version, n = _HEAD.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise Damaged("it is not a sequence file of this libllama")
    start = _HEAD.size + 4 * n
    if start > size or n > 2 * max_tokens + 1024:
        raise Damaged(f"it says that it has {n} tokens")
    if state_bytes > size - start:
        raise Damaged("it ends early")
    cells = _unpacked(np.frombuffer(os.pread(fd, 4 * n, _HEAD.size), "<i4"))
    n_state = state_bytes or size - start
    state = place(n_before + n_state)[n_before:]
    hasher = _hasher(cells)
    fill_hashed(fd, state.data, start, hasher)
    return Main(cells, state, size, str(hasher.hexdigest()))


def is_main_of(path: Path, companion: ObjectReader) -> bool:
    """Whether every byte of a main file is what its companion says. ``Damaged``: it cannot be read."""
    fd = open_plain(path)
    try:
        head = companion.header
        main = read_open_main(fd, head.n_items, state_bytes=head.state_bytes)
        if not head.state_bytes:
            return main.digest == head.main
        appended = [point for point in head.points if point.at]
        require_appendix(fd, len(main.cells), head.state_bytes, appended)
        return main.digest == head.main and all(_is_as_saved(fd, companion, point) for point in appended)
    finally:
        os.close(fd)


def _is_as_saved(fd: int, companion: ObjectReader, point: SlotPoint) -> bool:
    state = heap(point.n_bytes)
    fill(fd, state.data, point.at)
    hasher = blake3.blake3(state.data, max_threads=blake3.blake3.AUTO)
    if point.tail:
        hasher.update(companion.read(point.tail).data)
    return bool(hasher.hexdigest() == point.digest)


def _unpacked(packed: Codes) -> Codes:
    """A plain list of tokens (-1 for cells of images), or llama-server's packed one without media."""
    tokens = packed
    if len(packed) > 1 and (packed[0], packed[1]) == (-1, _PACKED_VERSION):
        data = packed.tobytes()
        if len(data) < _PACKED.size + 4:
            raise Damaged("its token list is too short")
        _, _, n = _PACKED.unpack_from(data)
        if len(packed) != n + 4 or packed[-1] != 0:
            raise Damaged("its token list cannot be read, or holds media")
        tokens = packed[3 : 3 + n]
        if len(tokens) and int(tokens.min()) < 0:
            raise Damaged("it has tokens that are none")
    if len(tokens) == 0 or int(tokens.min()) < -1:
        raise Damaged("it has no tokens, or some that are none")
    return np.ascontiguousarray(tokens, np.int32)


def open_plain(path: Path) -> int:
    """A regular file, never through a symbolic link."""
    try:
        return Files().open(path)
    except FileNotFoundError:
        raise Damaged(NO_FILE) from None
    except OSError as error:
        raise Damaged(f"it cannot be opened: {error.strerror}") from None
