"""The inside of libllama's state blobs, so that tests can damage exactly one thing.

A blob is [magic, sequence id] then [attention KV] and/or [recurrent state], each with a few words of structure and then,
per layer, type, row size and the numbers. Written from the format; shares no code with the product.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from everwarm.types import Blob

HEADER = 8
RECURRENT_POSITION = HEADER + 4  # after the cell count
_WINDOW_CELL = 12  # position, number of sequences (1), sequence
_NUMBERS = {0: np.dtype("<f4"), 1: np.dtype("<f2")}


@dataclass(frozen=True, slots=True)
class Numbers:
    """Where one layer's keys, values or states lie in a blob."""

    offset: int
    n_bytes: int
    dtype: np.dtype

    def of(self, blob: Blob) -> np.ndarray:
        return blob[self.offset : self.offset + self.n_bytes].view(self.dtype)


def recurrent_numbers(state: Blob) -> list[Numbers]:
    """The float parts of a recurrent state (what ``capture`` gives for hybrid and recurrent models)."""
    n_cells = _u32(state, HEADER)
    assert n_cells == 1, f"a sequence has one recurrent state, this blob has {n_cells}"
    return _layers(state, HEADER + 4 + 8 * n_cells + 8, n_cells)


def window_numbers(state: Blob) -> list[Numbers]:
    """The float parts of a sliding-window state (what ``capture`` gives for window models, without M-RoPE)."""
    n_streams, n_cells = _u32(state, HEADER), _u32(state, HEADER + 4)
    assert n_streams == 1 and n_cells > 0
    return _layers(state, HEADER + 8 + _WINDOW_CELL * n_cells + 16, n_cells)


def _layers(blob: Blob, at: int, n_cells: int) -> list[Numbers]:
    found = []
    while at < len(blob):
        kind, row_bytes = struct.unpack_from("<iQ", blob, at)
        found.append(Numbers(at + 12, n_cells * row_bytes, _NUMBERS[kind]))
        at += 12 + n_cells * row_bytes
    assert at == len(blob), "the blob does not end where its last layer does"
    return [numbers for numbers in found if numbers.n_bytes]


def _u32(blob: Blob, at: int) -> int:
    return int(struct.unpack_from("<I", blob, at)[0])


def with_position(state: Blob, position: int) -> Blob:
    """A recurrent state that claims to end elsewhere."""
    changed = state.copy()
    struct.pack_into("<i", changed, RECURRENT_POSITION, position)
    return changed


def zeroed(state: Blob, parts: list[Numbers]) -> Blob:
    """The same structure with all numbers zero."""
    changed = state.copy()
    for part in parts:
        part.of(changed)[:] = 0
    return changed


def with_flipped_bit(state: Blob, parts: list[Numbers], bit: int) -> Blob:
    """One bit of the whole state flipped: of the largest number below 2, counted from the top (0 is its sign)."""
    changed = state.copy()
    part = max(parts, key=lambda p: _below_two(p.of(changed)).max())
    at = int(_below_two(part.of(changed)).argmax())
    word = part.of(changed).view(f"<u{part.dtype.itemsize}")
    word[at] ^= 1 << (8 * part.dtype.itemsize - 1 - bit)
    return changed


def _below_two(numbers: np.ndarray) -> np.ndarray:
    sizes = np.abs(numbers)
    return np.where(sizes < 2, sizes, 0)


def with_shifted_window(state: Blob, by: int) -> Blob:
    """A sliding-window state whose cells claim to lie ``by`` positions later."""
    changed = state.copy()
    for cell in range(_u32(state, HEADER + 4)):
        at = HEADER + 8 + _WINDOW_CELL * cell
        struct.pack_into("<i", changed, at, struct.unpack_from("<i", state, at)[0] + by)
    return changed
