"""Runs a trace through policies and budgets, and sums the cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everwarm.config import require
from everwarm.simulate.fifo_cache import FifoMemory
from everwarm.simulate.oracle import unavoidable_tokens
from everwarm.simulate.policies import POLICIES, Policy
from everwarm.simulate.simulated_cache import SimulatedCache
from everwarm.simulate.simulated_machine import Curves, MachineSize
from everwarm.simulate.trace import TraceTurn

FIFO = "fifo-32"
NAMES = (*POLICIES, FIFO)
DEFAULT_NAMES = tuple(name for name in NAMES if name != "cold")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a trace under one policy and budget. ``n_regret``: tokens that an infinite cache would not have read."""

    policy: str
    budget_bytes: int
    n_requests: int
    n_prompt: int
    n_read: int
    n_regret: int
    seconds: float
    most_bytes: int
    written_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    reads: tuple[int, ...]  # of each request

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens that was not read."""
        return 1 - self.n_read / max(1, self.n_prompt)


def cache_for(policy: str | Policy, curves: Curves, budget: int, machine: MachineSize) -> SimulatedCache | FifoMemory:
    if isinstance(policy, Policy):
        return SimulatedCache(policy, curves, budget, machine)
    require(policy in NAMES, f"unknown policy {policy!r}; give any of: {', '.join(NAMES)}")
    if policy == FIFO:
        return FifoMemory(curves, budget, machine.n_slots)
    return SimulatedCache(POLICIES[policy], curves, budget, machine)


def replay(
    turns: Sequence[TraceTurn],
    policy: str | Policy,
    curves: Curves,
    budget: int,
    machine: MachineSize | None = None,
    unavoidable: Sequence[int] | None = None,
) -> Cost:
    """``unavoidable``: the result of ``unavoidable_tokens`` for the same turns, to compute it once."""
    machine = machine or MachineSize()
    store = cache_for(policy, curves, budget, machine)
    unavoidable = unavoidable_tokens(turns) if unavoidable is None else unavoidable
    reads: list[int] = []
    seconds, disk_bytes = 0.0, 0
    for turn in turns:
        outcome = store.serve(turn)
        reads.append(outcome.n_to - outcome.n_from)
        seconds += curves.read_s(outcome.n_from, outcome.n_to) + curves.load_s(outcome.loaded_bytes)
        seconds += outcome.disk_bytes / machine.disk_bytes_per_s
        disk_bytes += outcome.disk_bytes
    return Cost(
        policy=policy if isinstance(policy, str) else policy.name,
        budget_bytes=budget,
        n_requests=len(turns),
        n_prompt=sum(turn.prompt.n_tokens(turn.n_stop) for turn in turns),
        n_read=sum(reads),
        n_regret=sum(reads) - sum(unavoidable),
        seconds=seconds,
        most_bytes=store.most_bytes,
        written_bytes=store.written_bytes,
        disk_read_bytes=disk_bytes,
        disk_written_bytes=store.disk_written,
        reads=tuple(reads),
    )


def sweep(
    turns: Sequence[TraceTurn],
    policies: Iterable[str],
    curves: Curves,
    budgets: Iterable[int],
    machine: MachineSize | None = None,
) -> list[Cost]:
    unavoidable = unavoidable_tokens(turns)
    sizes = list(budgets)
    return [replay(turns, name, curves, size, machine, unavoidable) for name in policies for size in sizes]


_HEAD = ("policy", "budget", "read", "regret", "hit rate", "seconds", "held", "written", "from disk", "to disk")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def markdown(costs: Sequence[Cost]) -> str:
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, costs)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(cost: Cost) -> tuple[str, ...]:
    return (
        cost.policy,
        size_text(cost.budget_bytes),
        f"{cost.n_read:,}",
        f"{cost.n_regret:,}",
        f"{100 * cost.hit_rate:.1f} %",
        f"{cost.seconds:,.1f}",
        size_text(cost.most_bytes),
        size_text(cost.written_bytes),
        size_text(cost.disk_read_bytes),
        size_text(cost.disk_written_bytes),
    )


def size_text(n_bytes: float) -> str:
    unit = 0
    while n_bytes >= 1024 and unit < len(_UNITS) - 1:
        n_bytes = n_bytes / 1024
        unit = unit + 1
    return f"{n_bytes:.4g} {_UNITS[unit]}"
