"""A ledger of the unified KV cells: which sequence holds how many, which are shared, how many are used.

libllama does not tell how many cells are free or whether a sequence sits alone from the first cell on (only then are its
bits reproducible). This keeps count beside it. Pure bookkeeping: no ctypes.

A run is a batch of cells written together. Sequences hold prefixes of runs, so copying a sequence copies a short list and
trimming shortens it; a run's cells are used as far as its longest holder reaches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Run:
    """Cells written by one sequence, still growing while only that sequence holds them."""

    clean: bool  # written with no other sequence in the cells, after clean runs only
    n_holders: int = 1


@dataclass(slots=True)
class Span:
    """What one sequence holds of a run: its first ``n`` cells. Never shared between sequences."""

    run: Run
    n: int


class Cells:
    def __init__(self, n_cells: int, n_seqs: int) -> None:
        self.n_cells = n_cells
        self._spans: list[list[Span]] = [[] for _ in range(n_seqs)]
        self._count = [0] * n_seqs
        self._used: int | None = 0

    @property
    def used(self) -> int:
        if self._used is None:
            self._used = self.used_by(range(len(self._spans)))
        return self._used

    def used_by(self, seqs: Iterable[int]) -> int:
        """Cells held by any of these sequences, shared ones counted once."""
        return _n_distinct(span for seq in seqs for span in self._spans[seq])

    def used_with(self, seqs: Iterable[int], other: int, n: int) -> int:
        """Cells held by any of these sequences and the first ``n`` cells of one more."""
        return _n_distinct([*(span for seq in seqs for span in self._spans[seq]), *_first(self._spans[other], n)])

    @property
    def free(self) -> int:
        return self.n_cells - self.used

    def count(self, seq: int) -> int:
        return self._count[seq]

    def is_clean(self, seq: int) -> bool:
        return all(span.run.clean for span in self._spans[seq])

    def is_alone(self, seq: int) -> bool:
        """Whether every used cell is held by this sequence (others may share them, but add none)."""
        return self.used == self._count[seq]

    def append(self, seq: int, n: int, *, clean: bool) -> bool:
        """``n`` new cells for ``seq``. ``clean``: its batch was. Returns whether it was alone in the cells as well."""
        alone = clean and self.is_alone(seq)
        clean = alone and self.is_clean(seq)
        spans = self._spans[seq]
        if spans and spans[-1].run.clean == clean and spans[-1].run.n_holders == 1:
            spans[-1].n += n
        else:
            spans.append(Span(Run(clean), n))
        self._count[seq] += n
        if self._used is not None:
            self._used += n
        return alone

    def share(self, src: int, dst: int, n: int) -> None:
        """Give an empty sequence the first ``n`` cells of another."""
        assert not self._spans[dst], "the destination of a share must be empty"
        self._spans[dst] = _first(self._spans[src], n)
        for span in self._spans[dst]:
            span.run.n_holders += 1
        self._count[dst] = n

    def trim(self, seq: int, n: int) -> None:
        assert n <= self._count[seq], "a trim cannot lengthen a sequence"
        if n != self._count[seq]:
            kept = _first(self._spans[seq], n)
            for span in self._spans[seq][len(kept) :]:
                span.run.n_holders -= 1
            self._spans[seq] = kept
            self._count[seq] = n
            self._used = None

    def drop(self, seq: int) -> None:
        self.trim(seq, 0)

    def check(self) -> None:
        for spans, count in zip(self._spans, self._count, strict=True):
            assert sum(span.n for span in spans) == count
            assert all(span.n > 0 for span in spans)
            for span in spans:
                assert span.run.n_holders == sum(span.run is s.run for held in self._spans for s in held)
        known = self.used
        self._used = None
        assert known == self.used <= self.n_cells


def _first(spans: list[Span], n: int) -> list[Span]:
    kept: list[Span] = []
    for span in spans:
        if n <= 0:
            break
        kept.append(Span(span.run, min(span.n, n)))
        n -= span.n
    return kept


def _n_distinct(spans: Iterable[Span]) -> int:
    longest: dict[int, int] = {}
    for span in spans:
        key = id(span.run)
        longest[key] = max(longest.get(key, 0), span.n)
    return sum(longest.values())
