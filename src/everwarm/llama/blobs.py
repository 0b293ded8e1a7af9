"""Checks the headers of libllama's state blobs, because a wrong one can abort the process."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from everwarm.llama.model import MemoryKind
from everwarm.types import Blob, Mark

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
