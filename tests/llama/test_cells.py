"""The ledger of cells against a naive one that knows every cell by name."""

import os
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everwarm.llama.cells import Cells

N_SEQS = 4
seqs = st.integers(0, N_SEQS - 1)
CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))


@dataclass(frozen=True)
class Cell:
    """A cell of its own identity: equal only to itself by ``name``."""

    name: int
    clean: bool


class NaiveCells:
    """Which cells each sequence holds, one by one."""

    def __init__(self) -> None:
        self.held: list[list[Cell]] = [[] for _ in range(N_SEQS)]
        self.n_written = 0

    def used(self, among: tuple[int, ...] = tuple(range(N_SEQS))) -> int:
        return len({cell.name for seq in among for cell in self.held[seq]})

    def is_alone(self, seq: int) -> bool:
        own = {cell.name for cell in self.held[seq]}
        return all(cell.name in own for cells in self.held for cell in cells)

    def is_clean(self, seq: int) -> bool:
        return all(cell.clean for cell in self.held[seq])

    def append(self, seq: int, n: int, clean: bool) -> None:
        really = clean and self.is_alone(seq) and self.is_clean(seq)
        self.held[seq] += [Cell(self.n_written + i, really) for i in range(n)]
        self.n_written += n


class Ledgers(RuleBasedStateMachine):
    @initialize(n_cells=st.integers(100, 400))
    def start(self, n_cells: int) -> None:
        self.cells, self.naive = Cells(n_cells, N_SEQS), NaiveCells()

    @rule(seq=seqs, n=st.integers(1, 40), clean=st.sampled_from([True, True, True, False]))
    def append(self, seq: int, n: int, clean: bool) -> None:
        if n <= self.cells.free:
            self.cells.append(seq, n, clean=clean)
            self.naive.append(seq, n, clean)

    @rule(src=seqs, dst=seqs, share=st.floats(0, 1))
    def share(self, src: int, dst: int, share: float) -> None:
        if src != dst and not self.naive.held[dst]:
            n = round(share * len(self.naive.held[src]))
            self.cells.share(src, dst, n)
            self.naive.held[dst] = self.naive.held[src][:n]

    @rule(seq=seqs, share=st.floats(0, 1))
    def trim(self, seq: int, share: float) -> None:
        n = round(share * len(self.naive.held[seq]))
        self.cells.trim(seq, n)
        self.naive.held[seq] = self.naive.held[seq][:n]

    @precondition(lambda self: self.naive.used())
    @rule(seq=seqs)
    def drop(self, seq: int) -> None:
        self.cells.drop(seq)
        self.naive.held[seq] = []

    @rule(among=st.sets(seqs))
    def count_a_few(self, among: set[int]) -> None:
        assert self.cells.used_by(among) == self.naive.used(tuple(among))

    @invariant()
    def agree(self) -> None:
        self.cells.check()
        assert self.cells.used == self.naive.used() == self.cells.n_cells - self.cells.free
        for seq in range(N_SEQS):
            assert self.cells.count(seq) == len(self.naive.held[seq])
            assert self.cells.is_alone(seq) == self.naive.is_alone(seq)
            assert self.cells.is_clean(seq) == self.naive.is_clean(seq)


Ledgers.TestCase.settings = settings(
    max_examples=3000 if CAMPAIGN else 60, stateful_step_count=40, deadline=None, derandomize=not CAMPAIGN
)
TestLedgers = Ledgers.TestCase


def test_a_lone_sequence_is_alone_and_clean() -> None:
    cells = Cells(100, 2)
    cells.append(0, 30, clean=True)
    cells.append(0, 1, clean=True)
    assert cells.is_alone(0) and cells.is_clean(0)
    assert not cells.is_alone(1) and cells.is_clean(1), "an empty sequence is clean, but not alone beside another"


def test_company_spoils_what_is_written_beside_it_and_nothing_before() -> None:
    cells = Cells(100, 2)
    cells.append(0, 30, clean=True)
    cells.append(1, 5, clean=True)
    assert cells.is_clean(0) and not cells.is_clean(1)
    cells.append(0, 1, clean=True)
    assert not cells.is_clean(0)
    cells.trim(0, 30)
    assert cells.is_clean(0)


def test_what_follows_an_unclean_run_is_unclean_even_alone() -> None:
    cells = Cells(100, 2)
    cells.append(0, 10, clean=False)
    cells.append(0, 10, clean=True)
    assert cells.is_alone(0) and not cells.is_clean(0)


def test_shared_cells_count_once_and_belong_to_both() -> None:
    cells = Cells(100, 3)
    cells.append(0, 30, clean=True)
    cells.share(0, 1, 20)
    assert (cells.used, cells.count(0), cells.count(1)) == (30, 30, 20)
    assert cells.is_alone(0) and not cells.is_alone(1)
    cells.drop(0)
    assert (cells.used, cells.free) == (20, 80)
    assert cells.is_alone(1) and cells.is_clean(1)
    cells.append(1, 5, clean=True)
    assert cells.is_clean(1)


def test_growing_after_a_share_does_not_grow_the_other() -> None:
    cells = Cells(100, 2)
    cells.append(0, 10, clean=True)
    cells.share(0, 1, 10)
    cells.append(0, 5, clean=True)
    cells.append(1, 7, clean=True)
    assert (cells.count(0), cells.count(1), cells.used) == (15, 17, 22)
    cells.check()
