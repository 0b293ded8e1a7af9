"""libllama's state blobs: checked, joined and cut, packed, and with an MTP head's part behind them. Pure.

A wrong header can abort the process, so each is checked before libllama sees it. KV is joined and cut cell by cell, without
libllama, so that no sequence has to hold it: the bytes are those that libllama would write for the same cells.

Recurrent states can be packed into half floats, or into blocks of 32 bytes with a scale. That is lossy, so only on request.
A blob of libllama's is a head and then records: a type, the bytes of a row, the row. Records of floats are packed, and
what has no finite packed form stays as it is. A packed blob says so at its beginning:

    magic "EWST" · head of libllama's blob · for each record: u8 how · i32 type · u64 bytes of the row · the row, packed

The part of a model's MTP head lies behind the model's own: KV of the same cells, or the row that its next token needs. A
blob without it is as good as one with it: the head then knows less of the text, and guesses worse for a while.

    the model's blob · the head's part · u64 its length · "EWHEAD01"
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from everwarm.config import StateType
from everwarm.errors import StateRejected
from everwarm.llama.model import MemoryKind
from everwarm.types import Blob, Mark, Place, heap

MAGIC = 0xAF143CD8
WORDS_PER_CELL = (3, 6)  # without and with what M-RoPE needs to know of a cell
_FLOAT = np.dtype("<f4")
_RECURRENT = struct.Struct("<IiIiI")  # magic, sequence, cells, position, sequences of the cell
_HEADER = struct.Struct("<Ii")  # magic, sequence
HEADER_BYTES = _HEADER.size
RECURRENT_HEAD_BYTES = _RECURRENT.size
_WINDOW = struct.Struct("<IiII")  # magic, sequence, streams, cells
CELLS = struct.Struct("<II")  # streams, cells
_STATE = struct.Struct("<IiI")  # cells, position, sequences of the cell
LAYERS = struct.Struct("<IIII")  # values transposed, layers, rotations of keys and of values
_ROWS = struct.Struct("<iQ")  # type, bytes of a cell
_COLUMNS = struct.Struct("<iII")  # type, bytes of an element, elements of a cell
MAX_LAYERS = 1 << 12
MAX_STREAMS = 256  # of libllama
_COUNT = struct.Struct("<I")
_NO_END = 1 << 31
_CELLS_AT = HEADER_BYTES + CELLS.size
Chosen = slice | NDArray[np.intp]

PACKED_MAGIC = b"EWST"
BLOCK = 32  # numbers with one scale
_RAW, _F16, _Q8_0 = range(3)
_HOW = {"f16": _F16, "q8_0": _Q8_0}
_RECORD = struct.Struct("<iQ")  # of libllama: type, bytes of the row
_PACKED = struct.Struct("<BiQ")
_HEAD = RECURRENT_HEAD_BYTES + 8  # and whether values are transposed, and the layers
_TYPE_F32 = 0  # of ggml
_MAX_BYTES = 1 << 40
_MOST_F16 = 65504.0

_END = struct.Struct("<Q8s")
_MARK = b"EWHEAD01"


def describes_cells(blob: Blob, n_cells: int, tail: Blob | None) -> bool:
    """Whether a full blob holds this many attention cells and nothing else: ``tail`` is what an empty state looks
    like."""
    if len(blob) < _WINDOW.size:
        return False
    magic, _, n_streams, found = _WINDOW.unpack_from(blob.data)
    if magic != MAGIC or n_streams != 1 or found != n_cells:
        return False
    if not any(_are_cells(blob[_WINDOW.size :], n_cells, words, _NO_END) for words in WORDS_PER_CELL):
        return False
    return tail is None or bool(np.array_equal(blob[-len(tail) :], tail))


def is_finite(blob: Blob) -> bool:
    """Whether every float in a state is a number. Other values in it are so small that they look like finite floats."""
    return bool(np.isfinite(_floats(blob)).all())


def without_nan(blob: Blob) -> Blob:
    """The same state with 0 for everything that is not a number."""
    clean = blob.copy()
    floats = _floats(clean)
    floats[~np.isfinite(floats)] = 0.0
    return clean


def _floats(blob: Blob) -> NDArray[np.float32]:
    start = _RECURRENT.size
    return blob[start : start + (len(blob) - start) // 4 * 4].view(_FLOAT)


def describes_end(blob: Blob, kind: MemoryKind, mark: Mark) -> bool:
    """Whether a partial blob is one sequence's state that ends right before ``mark``."""
    if kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT):
        if len(blob) < _RECURRENT.size:
            return False
        magic, _, n_cells, pos, n_seqs = _RECURRENT.unpack_from(blob.data)
        return bool(magic == MAGIC and n_cells == 1 and pos == mark.last_pos and n_seqs == 0)
    if len(blob) < _WINDOW.size:
        return False
    magic, _, n_streams, n_cells = _WINDOW.unpack_from(blob.data)
    if magic != MAGIC or n_streams != 1 or n_cells > mark.n_tokens:
        return False
    return any(_are_cells(blob[_WINDOW.size :], n_cells, words, mark.pos) for words in WORDS_PER_CELL)


def with_header(data: Blob, seq: int) -> Blob:
    """A sequence from a file, in the layout that libllama reads from memory. Makes no copy if there is room for the
    header right before the data, also where more follows the data."""
    header = np.frombuffer(_HEADER.pack(MAGIC, seq), np.uint8)
    room = _room_before(data)
    if room is None:
        return np.concatenate([header, data])
    room[:HEADER_BYTES] = header
    return room


def _room_before(data: Blob) -> Blob | None:
    """The data with the room for a header right before it, if its array begins there."""
    whole = data.base
    if not isinstance(whole, np.ndarray) or whole.dtype != np.uint8 or not whole.flags.writeable:
        return None
    is_after_room = data.ctypes.data - whole.ctypes.data == HEADER_BYTES
    if not is_after_room or not data.flags.c_contiguous or not whole.flags.c_contiguous:
        return None
    return whole[: HEADER_BYTES + data.nbytes]


def in_streams(data: Blob, kind: MemoryKind, n_streams: int, stream: int) -> Blob:
    """A whole sequence as a context writes it whose KV has so many streams, in which it is this one: where KV is not
    unified, every slot of llama-server has its own. Data that is no such sequence is returned as it is."""
    parts = []
    rest = data
    n_caches = kind.has_attention + kind.has_window
    if not n_caches or n_streams == 1 == int.from_bytes(data[:4].tobytes(), "little"):
        return data
    for _ in range(n_caches):
        found = _stream(rest)
        if found is None:
            return data
        n_cells, body, rest = found
        counts = [n_streams, *(n_cells if i == stream else 0 for i in range(n_streams))]
        head = np.array(counts[: stream + 2], "<u4")
        tail = np.array(counts[stream + 2 :], "<u4")
        parts += [head.view(np.uint8), body, tail.view(np.uint8)]
    return np.concatenate([*parts, rest])


def _stream(data: Blob) -> tuple[int, Blob, Blob] | None:
    """The cells of one cache, with their numbers, and what follows it. None: more than one stream has some."""
    at, n_found, body = 4, 0, data[:0]
    try:
        (n_streams,) = _COUNT.unpack_from(data.data)
        for _ in range(min(n_streams, MAX_STREAMS + 1)):
            (n_cells,) = _COUNT.unpack_from(data.data, at)
            at += _COUNT.size
            if n_cells:
                fits = (words for words in WORDS_PER_CELL if _are_cells(data[at:], n_cells, words, _NO_END))
                words = next(fits, None)
                if n_found or words is None:
                    return None
                end = _after_numbers(data, at + 4 * words * n_cells, n_cells)
                at, n_found, body = end, n_cells, data[at:end]
    except (struct.error, OverflowError):
        return None
    return (n_found, body, data[at:]) if at <= len(data) and n_streams <= MAX_STREAMS else None


def begins_sequence(blob: Blob, kind: MemoryKind, mark: Mark) -> bool:
    """Whether a full blob's cells are what those of such a sequence must be, in every part of it; the numbers that follow
    libllama checks itself and refuses."""
    if kind is MemoryKind.RECURRENT:
        return describes_end(blob, kind, mark)
    if len(blob) < _HEADER.size or _HEADER.unpack_from(blob.data)[0] != MAGIC:
        return False
    return any(_is_whole(blob[_HEADER.size :], kind, mark, words) for words in WORDS_PER_CELL)


def _is_whole(data: Blob, kind: MemoryKind, mark: Mark, words: int) -> bool:
    """Attention, then the window where there is one, then the recurrent state where there is one, and nothing else."""
    cells = data[CELLS.size :]
    n_cells, data = _section(data, words, mark)
    if n_cells != mark.n_tokens or (int(mark.n_tokens) == int(mark.pos) and not _is_each_once(cells, n_cells, words)):
        return False
    if kind.has_window:
        n_cells, data = _section(data, words, mark)
        if n_cells is None or n_cells > mark.n_tokens:
            return False
    if kind in (MemoryKind.HYBRID, MemoryKind.HYBRID_WINDOW):
        return len(data) >= _STATE.size and _STATE.unpack_from(data.data) == (1, mark.last_pos, 0)
    return len(data) == 0


def _section(data: Blob, words: int, mark: Mark) -> tuple[int | None, Blob]:
    """The number of cells of one attention cache, and what follows it. None: the data is not such a cache of one
    sequence."""
    try:
        n_streams, n_cells = CELLS.unpack_from(data.data)
        if n_streams != 1 or not _are_cells(data[CELLS.size :], n_cells, words, mark.pos):
            return None, data
        at = CELLS.size + 4 * words * n_cells
        if n_cells:
            at = _after_numbers(data, at, n_cells)
    except (struct.error, OverflowError):
        return None, data
    return (n_cells, data[at:]) if at <= len(data) else (None, data)


def _after_numbers(data: Blob, at: int, n_cells: int) -> int:
    """Where the keys and values of so many cells end; beyond the data where they would be cut off."""
    is_transposed, n_layers, *_ = LAYERS.unpack_from(data.data, at)
    at += LAYERS.size
    for is_value in (False, True):
        for _ in range(min(n_layers, MAX_LAYERS)):
            n_head, n_lines, width = numbers_head(data, at, is_columns=bool(is_value and is_transposed))
            at += n_head + n_lines * n_cells * width
    return at


def numbers_head(data: Blob, at: int, *, is_columns: bool) -> tuple[int, int, int]:
    """The head of one layer's keys or values: its bytes, the lines that follow, and a line's bytes per cell."""
    if is_columns:
        _, size, n_lines = _COLUMNS.unpack_from(data.data, at)
        return _COLUMNS.size, n_lines, size
    _, size = _ROWS.unpack_from(data.data, at)
    return _ROWS.size, 1, size


def first_position(blob: Blob, n_cells: int) -> int:
    """The least position of a full blob's cells, which ``describes_cells``."""
    words = next(words for words in WORDS_PER_CELL if _are_cells(blob[_WINDOW.size :], n_cells, words, _NO_END))
    cells = blob[_WINDOW.size : _WINDOW.size + 4 * n_cells * words].view("<i4").reshape(n_cells, words)
    return int(cells[:, 0].min())


def _is_each_once(data: Blob, n: int, words: int) -> bool:
    """Whether a text's cells have every position once."""
    positions = data[: 4 * n * words].view("<i4").reshape(n, words)[:, 0]
    return bool(np.array_equal(np.sort(positions), np.arange(n)))


def _are_cells(data: Blob, n: int, words: int, end: int) -> bool:
    """Whether ``n`` cells follow, each of one sequence and before position ``end``: position, sequences, (more), sequence.
    libllama never removes a cell before position 0, and the next user of the sequence would see it."""
    if len(data) < 4 * n * words:
        return False
    cells = data[: 4 * n * words].view("<i4").reshape(n, words)
    return bool((cells[:, 1] == 1).all() and (cells[:, 0] >= 0).all() and (cells[:, 0] < end).all())


# joined and cut, cell by cell


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The keys or values of one layer: a head, then so many bytes of each cell, on each of its lines."""

    at: int
    n_head: int
    n_lines: int
    width: int


@dataclass(frozen=True, slots=True)
class _Source:
    """A blob of attention alone, and where in it everything lies."""

    blob: Blob
    n_cells: int
    words: int
    layers: tuple[_Numbers, ...]

    @property
    def cells(self) -> Blob:
        size = 4 * self.words
        return self.blob[_CELLS_AT : _CELLS_AT + self.n_cells * size].reshape(self.n_cells, size)

    @property
    def layers_head(self) -> Blob:
        at = _CELLS_AT + 4 * self.words * self.n_cells
        return self.blob[at : at + LAYERS.size]

    def head_of(self, layer: _Numbers) -> Blob:
        return self.blob[layer.at - layer.n_head : layer.at]

    def numbers_of(self, layer: _Numbers) -> Blob:
        size = layer.n_lines * self.n_cells * layer.width
        return self.blob[layer.at : layer.at + size].reshape(layer.n_lines, self.n_cells, layer.width)


Copying = Generator[int, None, Blob]  # yields the bytes of each piece that was copied, and returns the whole


def finished(copying: Copying) -> Blob:
    """Copies all of it at once."""
    while True:
        try:
            next(copying)
        except StopIteration as end:
            return cast(Blob, end.value)


def joined(blobs: Sequence[Blob], n_tail: int, place: Place) -> Copying:
    """All cells of these, in their order. ``n_tail``: the bytes behind the attention, the same in all."""
    sources = [_read(blob, n_tail) for blob in blobs]
    return _write([(source, slice(0, source.n_cells), source.n_cells) for source in sources], n_tail, place)


def cut(blob: Blob, start: int, stop: int, n_tail: int, place: Place) -> Copying:
    """The cells at these positions."""
    source = _read(blob, n_tail)
    positions = source.cells[:, :4].copy().view("<i4").ravel()
    chosen = np.flatnonzero((positions >= start) & (positions < stop))
    n = len(chosen)
    if n == 0:
        raise StateRejected(f"a segment of {len(blob)} bytes has no cells from {start} to {stop}")
    is_run = chosen[-1] - chosen[0] == n - 1
    return _write([(source, slice(chosen[0], chosen[0] + n) if is_run else chosen, n)], n_tail, place)


def scattered(parts: Sequence[tuple[Blob, int, int]], n_tail: int, seq: int) -> list[Blob]:
    """The cells of these blobs, each from one position to another, as libllama writes a sequence into a file: the bytes in
    their order, where they lie. ``StateRejected`` where that would be very many pieces."""
    chosen = [(source, _run_of(source, start, stop)) for source, start, stop in _reading(parts, n_tail)]
    sources = [source for source, _ in chosen]
    first, n = sources[0], sum(run.stop - run.start for _, run in chosen)
    _require_alike(sources, n_tail)
    cells = np.concatenate([source.cells[run] for source, run in chosen])
    cells[:, -4:] = np.frombuffer(struct.pack("<i", seq), np.uint8)
    found = [np.frombuffer(CELLS.pack(1, n), np.uint8), cells.reshape(-1), first.layers_head]
    for i, layer in enumerate(first.layers):
        if layer.n_lines != 1:
            raise StateRejected("values that are stored by element lie in too many pieces")
        found.append(first.head_of(layer))
        found += [source.numbers_of(source.layers[i])[0, run].reshape(-1) for source, run in chosen]
    return found


def _reading(parts: Sequence[tuple[Blob, int, int]], n_tail: int) -> Iterator[tuple[_Source, int, int]]:
    return ((_read(blob, n_tail), start, stop) for blob, start, stop in parts)


def _run_of(source: _Source, start: int, stop: int) -> slice:
    """The cells at these positions, which lie beside each other."""
    positions = source.cells[:, :4].copy().view("<i4").ravel()
    chosen = np.flatnonzero((positions >= start) & (positions < stop))
    if len(chosen) == 0 or chosen[-1] - chosen[0] != len(chosen) - 1:
        raise StateRejected(f"the cells from {start} to {stop} do not lie beside each other")
    return slice(int(chosen[0]), int(chosen[-1]) + 1)


def cut_bytes(blob: Blob, n_cells: int, n_tail: int) -> int:
    """The bytes of this many of a blob's cells."""
    return _n_bytes(_read(blob, n_tail), n_cells, n_tail)


def _n_bytes(source: _Source, n: int, n_tail: int) -> int:
    sizes = (layer.n_head + layer.n_lines * n * layer.width for layer in source.layers)
    return _CELLS_AT + 4 * source.words * n + LAYERS.size + sum(sizes) + n_tail


def _read(blob: Blob, n_tail: int) -> _Source:
    for words in WORDS_PER_CELL:
        try:
            found = _parsed(blob, words, len(blob) - n_tail)
        except struct.error:
            found = None
        if found is not None:
            return found
    raise StateRejected(f"{len(blob)} bytes are not the cells of one sequence")


def _parsed(blob: Blob, words: int, end: int) -> _Source | None:
    n_streams, n_cells = CELLS.unpack_from(blob.data, HEADER_BYTES)
    at = _CELLS_AT + 4 * words * n_cells
    is_transposed, n_layers, *_ = LAYERS.unpack_from(blob.data, at)
    if n_streams != 1 or n_cells == 0 or n_layers > MAX_LAYERS:
        return None
    at += LAYERS.size
    layers = []
    for is_value in (False, True):
        for _ in range(n_layers):
            n_head, n_lines, width = numbers_head(blob, at, is_columns=bool(is_value and is_transposed))
            layers.append(_Numbers(at + n_head, n_head, n_lines, width))
            at += n_head + n_lines * n_cells * width
            if at > end:
                return None
    return _Source(blob, n_cells, words, tuple(layers)) if at == end else None


def _write(sources: Sequence[tuple[_Source, Chosen, int]], n_tail: int, place: Place) -> Copying:
    """The chosen cells of each source, one after the other; a piece is what one layer's keys or values take."""
    first = sources[0][0]
    n = sum(n for _, _, n in sources)
    _require_alike([source for source, _, _ in sources], n_tail)
    out = place(_n_bytes(first, n, n_tail))
    out[:HEADER_BYTES] = first.blob[:HEADER_BYTES]
    out[HEADER_BYTES:_CELLS_AT] = np.frombuffer(CELLS.pack(1, n), np.uint8)
    at = _CELLS_AT + 4 * first.words * n
    _fill(out[_CELLS_AT:at].reshape(1, n, -1), [(s.cells[None], chosen, k) for s, chosen, k in sources])
    out[at : at + LAYERS.size] = first.layers_head
    at += LAYERS.size
    for i, layer in enumerate(first.layers):
        out[at : at + layer.n_head] = first.head_of(layer)
        at = at + layer.n_head
        size = layer.n_lines * n * layer.width
        lines = out[at : at + size].reshape(layer.n_lines, n, layer.width)
        _fill(lines, [(s.numbers_of(s.layers[i]), chosen, k) for s, chosen, k in sources])
        at += size
        yield size
    out[at:] = first.blob[len(first.blob) - n_tail :]
    return out


def _fill(out: Blob, parts: Sequence[tuple[Blob, Chosen, int]]) -> None:
    at = 0
    for lines, chosen, n in parts:
        out[:, at : at + n] = lines[:, chosen]
        at += n


def _require_alike(sources: Sequence[_Source], n_tail: int) -> None:
    first = sources[0]
    for other in sources[1:]:
        same = first.words == other.words and len(first.layers) == len(other.layers)
        same = same and np.array_equal(first.layers_head, other.layers_head)
        same = same and all(map(np.array_equal, map(first.head_of, first.layers), map(other.head_of, other.layers)))
        if (
            not same
            or first.blob[len(first.blob) - n_tail :].tobytes() != other.blob[len(other.blob) - n_tail :].tobytes()
        ):
            raise StateRejected("segments of different layouts cannot be joined")


# states in fewer bytes


def is_packed(blob: Blob) -> bool:
    return bytes(blob[: len(PACKED_MAGIC)]) == PACKED_MAGIC


def pack(blob: Blob, kind: StateType, place: Place = heap) -> Blob:
    """The same blob where it has another form than expected, or where packing would save nothing."""
    records = list(_records(blob))
    if kind == "f32" or not records:
        return blob
    parts = [np.frombuffer(PACKED_MAGIC, np.uint8), blob[:_HEAD]]
    for number, row in records:
        how, packed = _packed_row(row, _HOW[kind]) if number == _TYPE_F32 and not len(row) % 4 else (_RAW, row)
        parts += [np.frombuffer(_PACKED.pack(how, number, len(row)), np.uint8), packed]
    size = sum(map(len, parts))
    if size >= len(blob):
        return blob
    out = place(size)
    np.concatenate(parts, out=out)
    return out


def unpack(blob: Blob) -> Blob:
    """libllama's blob again; ``StateRejected``: it is not a packed one."""
    parts = [blob[len(PACKED_MAGIC) : len(PACKED_MAGIC) + _HEAD]]
    at = len(PACKED_MAGIC) + _HEAD
    total = _HEAD
    while at < len(blob):
        if at + _PACKED.size > len(blob):
            raise StateRejected("a packed state ends inside a record")
        how, number, size = _PACKED.unpack_from(blob.data, at)
        at += _PACKED.size
        n_packed = _packed_bytes(how, size)
        total += size
        if n_packed is None or at + n_packed > len(blob) or total > _MAX_BYTES:
            raise StateRejected("a packed state has a record that makes no sense")
        parts += [np.frombuffer(_RECORD.pack(number, size), np.uint8), _row(how, blob[at : at + n_packed], size)]
        at += n_packed
    return np.concatenate(parts)


def _records(blob: Blob) -> Iterator[tuple[int, Blob]]:
    """Types and rows; none where they do not fill the blob exactly."""
    found, at = [], _HEAD
    while at + _RECORD.size <= len(blob):
        number, size = _RECORD.unpack_from(blob.data, at)
        at += _RECORD.size + size
        if at > len(blob):
            return
        found.append((number, blob[at - size : at]))
    if at == len(blob):
        yield from found


def _packed_row(row: Blob, how: int) -> tuple[int, Blob]:
    numbers = np.frombuffer(row.tobytes(), "<f4")
    most = float(np.abs(numbers).max(initial=0.0))
    if not most <= (_MOST_F16 if how == _F16 else 127 * _MOST_F16):  # also where it is not a number
        return _RAW, row
    if how == _F16:
        return how, numbers.astype("<f2").view(np.uint8)
    blocks = np.pad(numbers, (0, -len(numbers) % BLOCK)).reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(axis=1) / 127).astype("<f2")
    steps = scales.astype(np.float32)[:, None]
    whole = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps != 0)
    whole = np.rint(whole).clip(-127, 127).astype(np.int8)
    return how, np.concatenate([scales.view(np.uint8), whole.reshape(-1).view(np.uint8)])


def _packed_bytes(how: int, size: int) -> int | None:
    """None: there is no such row."""
    if size > _MAX_BYTES or (how != _RAW and size % 4):
        return None
    n_blocks = -(-(size // 4) // BLOCK)
    return {_RAW: size, _F16: size // 2, _Q8_0: n_blocks * (2 + BLOCK)}.get(how)


def _row(how: int, packed: Blob, size: int) -> Blob:
    if how == _RAW:
        return packed
    if how == _F16:
        numbers = np.frombuffer(packed.tobytes(), "<f2").astype("<f4")
    else:
        n_blocks = len(packed) // (2 + BLOCK)
        scales = np.frombuffer(packed[: 2 * n_blocks].tobytes(), "<f2").astype(np.float32)
        whole = packed[2 * n_blocks :].view(np.int8).reshape(n_blocks, BLOCK).astype(np.float32)
        numbers = (whole * scales[:, None]).reshape(-1).astype("<f4")
    return numbers.view(np.uint8)[:size]


# with the part of an MTP head


def split(blob: Blob) -> tuple[Blob, Blob | None]:
    """The model's blob, and the head's part if there is one."""
    if len(blob) < _END.size:
        return blob, None
    length, mark = _END.unpack_from(blob.data, len(blob) - _END.size)
    n_trunk = len(blob) - _END.size - length
    if mark != _MARK or n_trunk <= 0:
        return blob, None
    return blob[:n_trunk], blob[n_trunk : n_trunk + length]


def trunk(blob: Blob) -> Blob:
    return split(blob)[0]


def tail_bytes(n_tail: int) -> int:
    """What a part of so many bytes adds to a blob."""
    return n_tail + _END.size


class Room:
    """A place for a blob and the part behind it, so that the blob is written once."""

    def __init__(self, place: Place, tail: Blob | None) -> None:
        self._place = place
        self._tail = tail
        self._whole: Blob | None = None

    def __call__(self, n_bytes: int) -> Blob:
        if self._tail is None:
            return self._place(n_bytes)
        self._whole = self._place(n_bytes + tail_bytes(len(self._tail)))
        return self._whole[:n_bytes]

    def closed(self, blob: Blob) -> Blob:
        """The whole: ``blob``, which was placed here last or lies elsewhere, with the part behind it."""
        if self._tail is None:
            return blob
        whole, n = self._whole, len(blob)
        if whole is None or len(whole) != n + tail_bytes(len(self._tail)) or blob.ctypes.data != whole.ctypes.data:
            self(n)[:] = blob
            whole = self._whole
        assert whole is not None
        whole[n : n + len(self._tail)] = self._tail
        whole[n + len(self._tail) :] = np.frombuffer(_END.pack(len(self._tail), _MARK), np.uint8)
        return whole
