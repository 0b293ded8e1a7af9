"""Joining and cutting KV inside of libllama's blobs, cell by cell: the bytes are those that libllama would write for the
same cells. Without libllama, so that no sequence has to hold them. Pure."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from everwarm.errors import StateRejected
from everwarm.llama.blobs import CELLS, HEADER_BYTES, LAYERS, MAX_LAYERS, WORDS_PER_CELL, numbers_head
from everwarm.types import Blob, Place

_CELLS_AT = HEADER_BYTES + CELLS.size

Chosen = slice | NDArray[np.intp]


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
