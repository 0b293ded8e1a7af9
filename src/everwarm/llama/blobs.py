"""Reading the beginning of libllama's state blobs, because some that it does not like abort the process."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from everwarm.llama.model import MemoryKind
from everwarm.types import Mark

MAGIC = 0xAF143CD8
_WORDS_PER_CELL = (3, 6)  # without and with what M-RoPE needs to know of a cell
_FLOAT = np.dtype("<f4")
_RECURRENT = struct.Struct("<IiIiI")  # magic, sequence, cells, position, sequences of the cell
_WINDOW = struct.Struct("<IiII")  # magic, sequence, streams, cells


def describes_cells(blob: NDArray[np.uint8], n_cells: int, tail: NDArray[np.uint8] | None) -> bool:
    """Whether a full blob is so many cells of attention and nothing else: ``tail`` is what an empty state looks like."""
    if len(blob) < _WINDOW.size:
        return False
    magic, _, n_streams, found = _WINDOW.unpack_from(blob.data)
    if magic != MAGIC or n_streams != 1 or found != n_cells:
        return False
    return tail is None or bool(np.array_equal(blob[-len(tail) :], tail))


def is_finite(blob: NDArray[np.uint8]) -> bool:
    """Whether every float in a state is a number. What is not a float in it is small enough to look like one."""
    return bool(np.isfinite(_floats(blob)).all())


def without_nan(blob: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same state with 0 for everything that is not a number."""
    clean = blob.copy()
    floats = _floats(clean)
    floats[~np.isfinite(floats)] = 0.0
    return clean


def _floats(blob: NDArray[np.uint8]) -> NDArray[np.float32]:
    start = _RECURRENT.size
    return blob[start : start + (len(blob) - start) // 4 * 4].view(_FLOAT)


def describes_end(blob: NDArray[np.uint8], kind: MemoryKind, mark: Mark) -> bool:
    """Whether a partial blob is one sequence's state that ends right before ``mark``."""
    if kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT):
        if len(blob) < _RECURRENT.size:
            return False
        magic, _, n_cells, pos, n_seqs = _RECURRENT.unpack_from(blob.data)
        return bool(magic == MAGIC and n_cells == 1 and pos == mark.last_pos and n_seqs == 0)
    if len(blob) < _WINDOW.size:
        return False
    magic, _, n_streams, n_cells = _WINDOW.unpack_from(blob.data)
    return bool(magic == MAGIC and n_streams == 1 and n_cells <= mark.n_tokens)


def with_header(data: NDArray[np.uint8], seq: int) -> NDArray[np.uint8]:
    """What a file holds of a sequence, as libllama wants it from memory."""
    return np.concatenate([np.frombuffer(struct.pack("<Ii", MAGIC, seq), np.uint8), data])


def begins_sequence(blob: NDArray[np.uint8], kind: MemoryKind, mark: Mark) -> bool:
    """Whether a full blob begins as one of so many cells must; what follows libllama checks itself and refuses."""
    if kind is MemoryKind.RECURRENT:
        return describes_end(blob, kind, mark)
    if len(blob) < _WINDOW.size:
        return False
    magic, _, n_streams, n_cells = _WINDOW.unpack_from(blob.data)
    if magic != MAGIC or n_streams != 1 or n_cells != mark.n_tokens:
        return False
    return any(_are_cells_of_one(blob[_WINDOW.size :], n_cells, words) for words in _WORDS_PER_CELL)


def _are_cells_of_one(data: NDArray[np.uint8], n: int, words: int) -> bool:
    """Whether ``n`` cells follow, every position once, each of one sequence: position, sequences, (more), sequence."""
    if len(data) < 4 * n * words:
        return False
    cells = data[: 4 * n * words].view("<i4").reshape(n, words)
    return bool((cells[:, 1] == 1).all()) and bool(np.array_equal(np.sort(cells[:, 0]), np.arange(n)))
