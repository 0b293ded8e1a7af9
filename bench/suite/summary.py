"""Figures out of rows: per server and scenario, and over all. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over rows, and quantiles of their times."""

    n_requests: int
    n_prompt: int
    n_avoidable: int
    n_regret: int
    n_regret_inside: int  # where a prompt parted in the midst of a message for the first time
    n_ahead: int
    ms_p50: float
    ms_p95: float
    restore_ms_p50: float | None
    prompt_tokens_per_s: float

    @property
    def regret_percent(self) -> float:
        return percent(self.n_regret, self.n_avoidable)

    @property
    def else_percent(self) -> float:
        """Without those that parted inside a message."""
        return percent(self.n_regret - self.n_regret_inside, self.n_avoidable)


def figures(rows: Sequence[Row]) -> Figures:
    answered = [row for row in rows if not row["cancelled"]]
    times = [row["ms"] for row in answered] or [0.0]
    restores = [row["restore_ms"] for row in answered if row["restore_ms"] and row["n_cached"]]
    seconds = sum(row["ms"] for row in rows) / 1e3
    n_prompt = sum(row["n_prompt"] for row in rows)
    return Figures(
        len(rows),
        n_prompt,
        sum(row["avoidable"] for row in rows),
        sum(row["regret"] for row in rows),
        sum(row["regret"] for row in rows if row["is_first_inside"]),
        sum(row["ahead"] for row in rows),
        statistics.median(times),
        quantile(times, 0.95),
        statistics.median(restores) if restores else None,
        n_prompt / seconds if seconds else 0.0,
    )


def percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float], shown: str = "{:.0f}") -> str:
    """The median, and the least and the most where there are several."""
    middle = shown.format(statistics.median(values))
    if len(values) < 2:
        return middle
    return f"{middle} ({shown.format(min(values))}–{shown.format(max(values))})"
