"""``python -m bench policy``: what every policy reads on traces whose conversations compete for memory.

A cell is a trace in one form, the curves of a model, and a budget: shares of what everything the trace ever reads would
take, with one state per request, for RAM and for the disk. The policy was chosen on seed ``TUNED``; what counts are the
seeds ``HELD_OUT``, and of the traces ``sub-agents`` and ``shifts``, which were written afterwards.

``python -m bench.policy FILE`` runs chosen cells one after the other and writes each to the file as it is done; those
that the file has are not run again. ``--show`` prints tables of a file.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from bench.workload.memory import FORMS, TRACES, trace
from everwarm.simulate.oracle import unavoidable_tokens
from everwarm.simulate.replay import DEFAULT_NAMES, replay
from everwarm.simulate.simulated_machine import KNOWN, Curves, MachineSize
from everwarm.simulate.trace import TraceTurn

TUNED, HELD_OUT = 1, (811,)
OTHERS = tuple(name for name in DEFAULT_NAMES if name != "ours")
CLOSE, FAR = 1.05, 1.15
DISK_BYTES_PER_S = 2e9


class Budget(msgspec.Struct, frozen=True):
    """As shares of what everything would take."""

    ram: float
    disk: float = 0.0

    def __str__(self) -> str:
        return f"{100 * self.ram:g} %" + (f" + {100 * self.disk:g} %" if self.disk else "")


RAM_ALONE = tuple(Budget(share) for share in (0.05, 0.1, 0.2, 0.4, 0.8))
WITH_DISK = (Budget(0.05, 0.2), Budget(0.05, 1.0), Budget(0.1, 0.4), Budget(0.2, 0.8))


class Cell(msgspec.Struct, frozen=True):
    trace: str
    form: str
    seed: int
    curves: str


class Found(msgspec.Struct, frozen=True):
    """What was read in a cell with one budget."""

    cell: Cell
    budget: Budget
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

    @property
    def seconds_ratio(self) -> float:
        return self.seconds["ours"] / min(self.seconds[name] for name in OTHERS)

    def hit_rate(self, name: str) -> float:
        return 1 - self.reads[name] / self.n_prompt


def run() -> None:
    cells = [Cell(*each) for each in itertools.product(TRACES, FORMS, HELD_OUT, KNOWN)]
    with ProcessPoolExecutor() as pool:
        found = [each for many in pool.map(measure, cells) for each in many]
    print(report(found))


def measure(cell: Cell, budgets: Sequence[Budget] = RAM_ALONE) -> list[Found]:
    turns, curves = trace(cell.trace, cell.form, cell.seed), KNOWN[cell.curves]
    n_new = unavoidable_tokens(turns)
    whole = whole_bytes(turns, n_new, curves)
    return [_measure(cell, turns, n_new, budget, whole) for budget in budgets]


def _measure(cell: Cell, turns: list[TraceTurn], n_new: list[int], budget: Budget, whole: int) -> Found:
    machine = MachineSize(disk_bytes=int(budget.disk * whole), disk_bytes_per_s=DISK_BYTES_PER_S)
    curves, n_ram = KNOWN[cell.curves], int(budget.ram * whole)
    costs = {name: replay(turns, name, curves, n_ram, machine, n_new) for name in DEFAULT_NAMES}
    reads = {name: cost.n_read for name, cost in costs.items()}
    seconds = {name: cost.seconds for name, cost in costs.items()}
    return Found(cell, budget, costs["ours"].n_prompt, sum(n_new), reads, seconds)


def whole_bytes(turns: list[TraceTurn], n_new: list[int], curves: Curves) -> int:
    n_tokens = sum(n_new) + sum(len(turn.reply) for turn in turns)
    return n_tokens * curves.kv_bytes_per_token + len(turns) * curves.state_bytes


# chosen cells


def main() -> None:
    chosen = _parser().parse_args()
    if not chosen.show:
        cells = [
            Cell(trace, form, seed, curves)
            for curves, form, trace, seed in itertools.product(chosen.curves, chosen.forms, chosen.traces, chosen.seeds)
        ]
        measure_into(chosen.file, cells, WITH_DISK if chosen.disk else RAM_ALONE)
    print(report(read_found(chosen.file)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.policy", description="Run chosen cells, or show a file of them."
    )
    parser.add_argument("file", type=Path, help="one line of JSON for each cell and budget")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--disk", action="store_true", help="budgets of RAM and disk instead of RAM alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(HELD_OUT))
    for name, known in (("traces", TRACES), ("forms", FORMS), ("curves", KNOWN)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(known), default=list(known))
    return parser


def measure_into(file: Path, cells: Iterable[Cell], budgets: Sequence[Budget]) -> None:
    """Measures what the file does not have, and adds it line by line."""
    done = {(each.cell, each.budget) for each in read_found(file)}
    for cell in cells:
        for found in measure(cell, [budget for budget in budgets if (cell, budget) not in done]):
            with file.open("ab") as out:
                out.write(msgspec.json.encode(found) + b"\n")


def read_found(file: Path) -> list[Found]:
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(line, type=Found) for line in lines]


# tables


def report(found: Sequence[Found]) -> str:
    parts = []
    for curves in KNOWN:
        for budgets in (RAM_ALONE, WITH_DISK):
            own = [each for each in found if each.cell.curves == curves and each.budget in budgets]
            if own:
                parts.append(
                    f"#### {curves}{', with a disk' if budgets is WITH_DISK else ''}\n\n{_table(own, budgets)}"
                )
    return "\n".join([*parts, summary(found)])


def summary(found: Sequence[Found]) -> str:
    ratios = sorted(each.ratio for each in found)
    totals = Counter[str]()
    for each in found:
        totals.update({name: n / each.n_prompt for name, n in each.reads.items()})
    sums = ", ".join(f"{name} {100 * total / len(found):.1f} %" for name, total in totals.most_common()[::-1])
    n_close, n_far = sum(r <= CLOSE for r in ratios), sum(r > FAR for r in ratios)
    n_slower = sum(each.seconds_ratio > CLOSE for each in found)
    lines = [
        f"{len(found)} cells: at most 5 % above the best of all others in {n_close} ({100 * n_close / len(found):.1f} %),"
        f" more than 15 % in {n_far}; median ratio {ratios[len(ratios) // 2]:.2f}, worst {ratios[-1]:.2f};"
        f" more than 5 % above the fewest seconds of all others in {n_slower}.",
        f"Mean share of prompt tokens that were read: {sums}.",
        *(_exception(each) for each in found if max(each.ratio, each.seconds_ratio) > CLOSE),
    ]
    return "\n".join(lines)


def _exception(each: Found) -> str:
    cell = each.cell
    return (
        f"- {cell.trace}, {cell.form}, seed {cell.seed}, {cell.curves}, {each.budget}: {each.ratio:.3f} of"
        f" {each.best} ({100 * each.hit_rate('ours'):.1f} beside {100 * each.hit_rate(each.best):.1f} %),"
        f" seconds {each.seconds_ratio:.3f}"
    )


def _table(found: Sequence[Found], budgets: Sequence[Budget]) -> str:
    """A line for every trace: ours, and in brackets the best of the others."""
    rows = {(each.cell, each.budget): each for each in found}
    head = ("trace", "form", "seed", "could be", *map(str, budgets))
    lines = [head, ("---",) * len(head)]
    for cell in dict.fromkeys(each.cell for each in found):
        own = [rows.get((cell, budget)) for budget in budgets]
        most = next(f"{100 * (1 - each.n_new / each.n_prompt):.1f}" for each in own if each is not None)
        lines.append((cell.trace, cell.form, str(cell.seed), most, *map(_shown, own)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _shown(each: Found | None) -> str:
    return "" if each is None else f"{100 * each.hit_rate('ours'):.1f} ({100 * each.hit_rate(each.best):.1f})"


if __name__ == "__main__":
    main()
