"""Exponents of growth by least squares on logarithms, and whether they are what they ought to be. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Growth = Literal["constant", "linear"]
TOLERANCE = 0.25  # of an exponent: clocks, caches and other people's work


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size. ``should``: how it may grow at most; ``why``: what makes it grow."""

    name: str
    should: Growth
    why: str
    points: tuple[tuple[float, float], ...]

    @property
    def exponent(self) -> float:
        return exponent(self.points)

    @property
    def late_exponent(self) -> float:
        """Of the upper half, where what does not grow no longer hides what does."""
        return exponent(self.points[len(self.points) // 2 :])

    @property
    def is_as_it_should_be(self) -> bool:
        return max(self.exponent, self.late_exponent) <= {"constant": 0.0, "linear": 1.0}[self.should] + TOLERANCE


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """k of t = c·n^k; 0 for fewer than two sizes."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(max(y, 1e-9)) for _, y in points]
    n = len(points)
    if n < 2:
        return 0.0
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
