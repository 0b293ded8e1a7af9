"""How long a step that writes replies takes by its rows, as measured here. Kept as a multiple of a step with one row: that
changes with the context's length and with the machine's load, the multiples hardly do."""

from __future__ import annotations

from bisect import bisect_left, insort

MOST_ROWS = 64  # of a step that is measured
SLOPE = 0.15  # more for each row, until it is measured
_EXACT = 17  # so many rows are measured one by one, more in groups
_GROUP = 8
_UP, _DOWN = 0.1, 0.4  # the weight of a new measurement: a step is often disturbed, and never too fast
_SPIKE = 2.0  # a step that takes so many times longer than expected was disturbed
_FIRST_SPIKE = 4.0  # the same where only a guess is known


class StepCost:
    def __init__(self) -> None:
        self._one_s: float | None = None  # for a step with one row
        self._multiples: dict[int, float] = {1: 1.0}  # by rows
        self._rows: list[int] = [1]  # the same, sorted
        self._n_seen: dict[int, int] = {}  # measurements, by rows

    def learn(self, n_rows: int, seconds: float) -> None:
        if n_rows > MOST_ROWS:
            return
        if self._one_s is None:
            self._one_s = seconds / self._multiple(n_rows)
        elif n_rows == 1:
            self._one_s = _mixed(self._one_s, seconds)
        else:
            rows = n_rows if n_rows <= _EXACT else -(-n_rows // _GROUP) * _GROUP
            known = self._multiple(rows)
            if rows not in self._multiples:
                insort(self._rows, rows)
            n_seen = self._n_seen.get(rows, 0)
            self._multiples[rows] = _mixed(known, seconds / self._one_s, n_seen)
            self._n_seen[rows] = n_seen + 1

    def seconds(self, n_rows: float) -> float | None:
        """None: no step was measured yet."""
        return None if self._one_s is None else self._one_s * self._multiple(n_rows)

    def _multiple(self, n_rows: float) -> float:
        i = bisect_left(self._rows, n_rows)
        if i < len(self._rows) and (self._rows[i] == n_rows or i == 0):
            return self._multiples[self._rows[i]]
        low = self._rows[i - 1]
        if i == len(self._rows):
            slope = (self._multiples[low] - 1) / (low - 1) if low > 1 else SLOPE
            return self._multiples[low] + (n_rows - low) * slope
        high = self._rows[i]
        share = (n_rows - low) / (high - low)
        return (1 - share) * self._multiples[low] + share * self._multiples[high]


def _mixed(known: float, new: float, n_seen: int = 1 << 10) -> float:
    """The first measurements count more: before them there is only a guess."""
    weight = max(_UP if new > known else _DOWN, 1 / (n_seen + 1))
    return known + weight * (min(new, (_SPIKE if n_seen else _FIRST_SPIKE) * known) - known)
