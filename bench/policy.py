"""``python -m bench policy``: what every policy reads on traces whose conversations compete for memory.

A cell is a trace in one form, the curves of a model, and a budget: a share of what everything the trace ever reads would
take, with one state per request. The policy was chosen on seed ``TUNED``; what counts are the seeds ``HELD_OUT``, and of
the traces ``sub-agents`` and ``shifts``, which were written afterwards. ``EVERWARM_BENCH_SEEDS=101`` runs others.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from bench.workload.memory import FORMS, TRACES, trace
from everwarm.simulate.curves import KNOWN, Curves
from everwarm.simulate.oracle import SharedPrefix, shares
from everwarm.simulate.replay import DEFAULT_NAMES, replay, size_text
from everwarm.simulate.trace import TraceTurn

TUNED, HELD_OUT = 1, (101, 102, 103)
BUDGETS = (0.05, 0.1, 0.2, 0.4, 0.8)
OTHERS = tuple(name for name in DEFAULT_NAMES if name != "ours")
CLOSE, FAR = 1.05, 1.15


@dataclass(frozen=True, slots=True)
class Cell:
    trace: str
    form: str
    seed: int
    curves: str


@dataclass(frozen=True, slots=True)
class Found:
    """What was read in a cell with one budget."""

    cell: Cell
    budget: int
    n_prompt: int
    n_new: int
    reads: dict[str, int]  # by policy
    seconds: dict[str, float]

    @property
    def best(self) -> str:
        return min(OTHERS, key=lambda name: self.reads[name])

    @property
    def ratio(self) -> float:
        """Of what ours reads to what the best of the others reads."""
        return self.reads["ours"] / self.reads[self.best]

    def hit_rate(self, name: str) -> float:
        return 1 - self.reads[name] / self.n_prompt


def run() -> None:
    seeds = os.environ.get("EVERWARM_BENCH_SEEDS", "")
    chosen = [int(seed) for seed in seeds.split(",") if seed] or list(HELD_OUT)
    cells = [Cell(*each) for each in itertools.product(TRACES, FORMS, chosen, KNOWN)]
    with ProcessPoolExecutor() as pool:
        found = [each for many in pool.map(measure, cells) for each in many]
    for curves in KNOWN:
        print(f"## Curves of {curves}: share of prompt tokens that were not read again, %\n")
        print(_table([each for each in found if each.cell.curves == curves]))
    print(summary(found))


def measure(cell: Cell, budgets: Sequence[float] = BUDGETS) -> list[Found]:
    turns, curves = trace(cell.trace, cell.form, cell.seed), KNOWN[cell.curves]
    known = shares(turns)
    whole = _whole_bytes(turns, known, curves)
    return [_measure(cell, turns, known, int(share * whole)) for share in budgets]


def _measure(cell: Cell, turns: list[TraceTurn], known: list[SharedPrefix], budget: int) -> Found:
    costs = {name: replay(turns, name, KNOWN[cell.curves], budget, known=known) for name in DEFAULT_NAMES}
    reads = {name: cost.n_read for name, cost in costs.items()}
    seconds = {name: cost.seconds for name, cost in costs.items()}
    n_new = sum(each.n_unavoidable for each in known)
    return Found(cell, budget, costs["ours"].n_prompt, n_new, reads, seconds)


def _whole_bytes(turns: list[TraceTurn], known: list[SharedPrefix], curves: Curves) -> int:
    n_tokens = sum(each.n_unavoidable for each in known) + sum(len(turn.reply) for turn in turns)
    return n_tokens * curves.kv_bytes_per_token + len(turns) * curves.state_bytes


def summary(found: list[Found]) -> str:
    ratios = sorted(each.ratio for each in found)
    totals = Counter[str]()
    for each in found:
        totals.update({name: n / each.n_prompt for name, n in each.reads.items()})
    sums = ", ".join(f"{name} {100 * total / len(found):.1f} %" for name, total in totals.most_common()[::-1])
    n_close, n_far = sum(r <= CLOSE for r in ratios), sum(r > FAR for r in ratios)
    lines = [
        f"{len(found)} cells: at most 5 % above the best of all others in {n_close} ({100 * n_close / len(found):.1f} %),"
        f" more than 15 % in {n_far}; median ratio {ratios[len(ratios) // 2]:.2f}, worst {ratios[-1]:.2f}.",
        f"Mean share of prompt tokens that were read: {sums}.",
        *(_exception(each) for each in found if each.ratio > CLOSE),
    ]
    return "\n".join(lines)


def _exception(each: Found) -> str:
    cell = each.cell
    return (
        f"- {cell.trace}, {cell.form}, seed {cell.seed}, {cell.curves}, {size_text(each.budget)}: {each.ratio:.3f} of"
        f" {each.best} ({100 * each.hit_rate('ours'):.1f} beside {100 * each.hit_rate(each.best):.1f} %)"
    )


def _table(found: list[Found]) -> str:
    head = ("trace", "form", "seed", "budget", "could be", *DEFAULT_NAMES, "ours ÷ best")
    rows = [head, ("---",) * len(head)]
    for each in found:
        cell = each.cell
        rates = (f"{100 * each.hit_rate(name):.1f}" for name in DEFAULT_NAMES)
        most = f"{100 * (1 - each.n_new / each.n_prompt):.1f}"
        shown = (cell.trace, cell.form, str(cell.seed), size_text(each.budget), most, *rates, f"{each.ratio:.2f}")
        rows.append(shown)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
