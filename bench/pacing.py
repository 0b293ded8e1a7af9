"""What pacing makes of an MTP head, by simulation: the engine's own ``Pacing``, the costs of a machine, and replies whose
drafts are right as often as told. No model, no clock; ``python -m bench pacing``.

The H200's costs were measured (docs/benchmarks/gpu.md). The others are made up: a machine whose first steps take
longer, and cards on which a changed step or a row costs less or more.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.acceptance import N_DRAFT, N_REPLY, AlwaysThree
from bench.measure import table
from everwarm.engine.speculation.draft_length import Pacing, Record, StepShape, computed_proposal
from everwarm.engine.speculation.model_drafter import HeadDrafter

N_REPLIES, N_SEEDS = 4, 40
OVERHEAD_S = 1e-4
Chance = Callable[[int], float]  # that a drafted token is right, by its place in the reply


@dataclass(frozen=True, slots=True)
class Machine:
    """Milliseconds."""

    one_row: float
    more_row: float
    changed: float  # more, where the step before had another number of rows
    changed_before: float  # more, where only the one before that had
    drafted: float  # for each token of a draft
    listening: float  # more, for a plain step with the head reading along
    slow_start: float = 0.0  # more, for each of an engine's first ten steps

    def step(self, n_rows: int, before: tuple[int, int]) -> float:
        changed = self.changed if n_rows != before[0] else self.changed_before if n_rows != before[1] else 0.0
        return self.one_row + self.more_row * (n_rows - 1) + changed


MACHINES = {
    "H200": Machine(13.9, 0.87, 5.0, 18.0, 1.35, 0.2),
    "H200, a slow start": Machine(13.9, 0.87, 5.0, 18.0, 1.35, 0.2, slow_start=15.0),
    "cheap rows": Machine(25.0, 0.7, 3.0, 3.0, 1.0, 0.4),
    "dear rows": Machine(18.0, 2.5, 5.0, 5.0, 1.5, 0.3),
}
TEXTS: dict[str, Chance] = {
    **{f"{share} %": lambda _, share=share: share / 100 for share in (0, 30, 50, 70, 90)},  # type: ignore[misc]
    "80 and 10 % in turn": lambda at: 0.8 if at // 96 % 2 == 0 else 0.1,
}


def run() -> None:
    for name, machine in MACHINES.items():
        rows = []
        for text, chance in TEXTS.items():
            always = _mean([tokens_per_s(machine, chance, seed, AlwaysThree()) for seed in range(N_SEEDS)])
            paced = _mean([tokens_per_s(machine, chance, seed, Pacing(N_DRAFT)) for seed in range(N_SEEDS)])
            plain = 1e3 / machine.one_row
            best = max(plain, statistics.mean(always))
            rows.append((text, f"{plain:.0f}", f"{statistics.mean(always):.0f}", *(f"{x / best:.2f}×" for x in paced)))
        replies = [f"reply {i + 1}" for i in range(N_REPLIES)]
        table(f"{name}: tokens/s, and of the better of the two", ("right", "plain", "always three", *replies), rows)
        print()


def tokens_per_s(machine: Machine, chance: Chance, seed: int, pacing: Pacing) -> list[float]:
    """Of every reply of an engine's life."""
    rng = random.Random(seed)
    speeds, before, n_steps = [], (0, 0), 0
    for _ in range(N_REPLIES):
        record, ms, n_written = Record(above=pacing.record), 0.0, 0
        while n_written < N_REPLY:
            pacing.begin_step()
            n = 0 if pacing.is_plain() else _length(pacing, record, N_REPLY - n_written - 1)
            step_ms = machine.step(1 + n, before) * rng.uniform(0.98, 1.02) + machine.slow_start * (n_steps < 10)
            before, n_steps = (1 + n, before[0]), n_steps + 1
            pacing.cost.learn(1 + n, step_ms / 1e3)
            n_right = 0
            while n_right < n and rng.random() < chance(n_written + n_right):
                n_right += 1
            if n:
                pacing.has_computed(n * machine.drafted / 1e3, n)
                pacing.judge(
                    computed_proposal(np.zeros(n, np.int32), HeadDrafter.confidence, "mtp"), record, n, n_right
                )
            ms += step_ms + (n * machine.drafted if n else machine.listening * pacing.is_computing)
            n_written += 1 + n_right
        speeds.append(1e3 * n_written / ms)
    return speeds


def _length(pacing: Pacing, record: Record, n_most: int) -> int:
    shape = StepShape(n_rows=1, n_replies=1, n_cut=N_DRAFT, overhead_s=OVERHEAD_S)
    return pacing.computed_length(HeadDrafter, n_most, record, shape) if n_most > 0 else 0  # type: ignore[arg-type]


def _mean(speeds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.mean(column) for column in zip(*speeds, strict=True)]
