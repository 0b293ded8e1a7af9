"""How long a step takes by its rows, from what was measured on this machine. Pure.

Where a GPU repeats steps ready-made, a step that is unlike the two before it takes longer, and so do the next ones:
``RepeatedStepCost`` knows what such a change costs.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MOST_ROWS = 64  # of a step that is measured
SLOPE = 0.15  # more for each row, until anything is measured
LONG = 64  # rows of a step that reads: so many take the time of each that all further ones take
_EXACT = 17  # so many rows are measured one by one, more in groups
_GROUP = 8
N_SLOW = 64  # measurements of an engine that may be of a slow start
_LEAST_S = 1e-6  # of a step: a clock may stand still
_UP, _DOWN = 0.1, 0.4  # the weight of a new measurement: a step is often disturbed, and never too fast
_STEP_SPIKE = 2.0  # a step that takes so many times longer than expected was disturbed
_FIRST_SPIKE = 4.0  # the same where only a guess is known
N_CHANGES = 3  # of a sort that must have been seen before others are corrected by them
FIRST_RUN = 3.0  # unusual steps in a row, until any were seen
_MOST_RUN, _RUN_WEIGHT = 16, 0.2
_MOST_CHANGE = 4.0  # of a step with one row: what takes longer was disturbed
_CHANGE_WEIGHT = 0.1  # of a new measurement


class StepCost:
    """How long a step that writes replies takes by its rows. Kept as a multiple of a step with one row: that changes with
    the context's length and with the machine's load, the multiples hardly do. The first steps of an engine may be slow:
    there, one row that seems to take longer than several is taken to take as long as they do."""

    def __init__(self) -> None:
        self._one_s: float | None = None  # for a step with one row
        self._multiples: dict[int, float] = {1: 1.0}  # by rows
        self._rows: list[int] = [1]  # the same, sorted
        self._n_seen: dict[int, int] = {}  # measurements, by rows
        self._n_learned = 0  # measurements of all
        self._read_s: float | None = None  # for each row of a long step that reads a prompt

    def passed(self, n_rows: int) -> None:
        """A step with so many rows was run, of which nothing is learned."""

    def learn_reading(self, n_rows: int, seconds: float) -> None:
        """A step that reads a prompt costs what a step that verifies as long a draft would, or little less."""
        if n_rows >= LONG:
            new = seconds / n_rows
            self._read_s = new if self._read_s is None else _mixed(self._read_s, new)

    def learn(self, n_rows: int, seconds: float) -> None:
        """Learns from a step that only writes replies."""
        if n_rows > MOST_ROWS:
            return
        self._n_learned += 1
        seconds = max(seconds, _LEAST_S)
        if self._one_s is None:
            self._one_s = seconds / self._multiple(n_rows)
        elif n_rows == 1:
            self._one_s = _mixed(self._one_s, seconds)
        else:
            rows = n_rows if n_rows <= _EXACT else -(-n_rows // _GROUP) * _GROUP
            known = self._multiple(rows)
            if rows not in self._multiples:
                insort(self._rows, rows)
            if self._n_learned <= N_SLOW:
                self._one_s = min(self._one_s, seconds)
            n_seen = self._n_seen.get(rows, 0)
            self._multiples[rows] = _mixed(known, seconds / self._one_s, n_seen)
            self._n_seen[rows] = n_seen + 1

    def seconds(self, n_rows: float) -> float | None:
        """None: no step was measured yet."""
        return None if self._one_s is None else self._one_s * self._multiple(n_rows)

    def seconds_with_change(self, n_rows: float, usual: int) -> float | None:
        """The same, with what it costs that steps are not alike any more: this one, and those behind it, which are as
        ``usual`` again. What would have to be paid in any case does not count."""
        del usual  # here any step may follow any other
        return self.seconds(n_rows)

    def _multiple(self, n_rows: float) -> float:
        i = bisect_left(self._rows, n_rows)
        if i < len(self._rows) and (self._rows[i] == n_rows or i == 0):
            return self._multiples[self._rows[i]]
        low = self._rows[i - 1]
        if i == len(self._rows):
            return self._multiples[low] + (n_rows - low) * self._slope(low)
        high = self._rows[i]
        share = (n_rows - low) / (high - low)
        return (1 - share) * self._multiples[low] + share * self._multiples[high]

    def _slope(self, low: int) -> float:
        """Of rows beyond the most that were measured. A second row is often dear and the ones after it are not, so long
        drafts would never be tried if all cost as much as the second."""
        if self._read_s is not None and self._one_s is not None:
            return self._read_s / self._one_s
        return SLOPE if low == 1 else max(0.0, min(SLOPE, (self._multiples[low] - 1) / (low - 1)))


class RepeatedStepCost(StepCost):
    """Of a GPU that repeats a step ready-made where the two before it had as many rows. The first step of another size
    builds its graph anew, the second records it, and only from the third on a step takes the time that all further ones
    take. So a draft now and then costs three such changes: of its own step, and of the two plain ones behind it. Drafts in
    a row share the last two."""

    def __init__(self) -> None:
        super().__init__()
        self._before = (0, 0)  # rows of the last step, and of the one before it
        self._changes = [0.0, 0.0]  # what a first and a second step take longer, as multiples of a step with one row
        self._n_changes = [0, 0]
        self._settled: set[int] = set()  # numbers of rows of which a third step was measured
        self._usual = 0  # rows, as last told
        self._n_unusual = 0  # steps in a row with other rows
        self._run = FIRST_RUN  # of them in a row, as a rule

    def passed(self, n_rows: int) -> None:
        self._before = (n_rows, self._before[0])
        if n_rows != self._usual:
            self._n_unusual += 1
        elif self._n_unusual:
            self._run += _RUN_WEIGHT * (min(self._n_unusual, _MOST_RUN) - self._run)
            self._n_unusual = 0

    def learn_reading(self, n_rows: int, seconds: float) -> None:
        """Nothing: it is not computed yet when it returns, and other kernels compute it."""
        del seconds
        self.passed(n_rows)

    def learn(self, n_rows: int, seconds: float) -> None:
        last, one_before = self._before
        self.passed(n_rows)
        if n_rows == last == one_before:
            self._settled.add(n_rows)
            super().learn(n_rows, seconds)
        else:
            self._learn_unlike(n_rows, seconds, 0 if n_rows != last else 1)

    def _learn_unlike(self, n_rows: int, seconds: float, sort: int) -> None:
        """From the first step of its size (``sort`` 0), or from the second (1). Where it is known what such a step takes
        otherwise, it shows what a change costs; elsewhere it shows what such a step takes, once changes are known."""
        known = self.seconds(n_rows)
        if known is None or self._one_s is None:
            return
        if n_rows in self._settled:
            more = min(max(0.0, seconds - known) / self._one_s, _MOST_CHANGE)
            self._n_changes[sort] += 1
            weight = max(_CHANGE_WEIGHT, 1 / self._n_changes[sort])
            self._changes[sort] += weight * (more - self._changes[sort])
        elif min(self._n_changes) >= N_CHANGES:
            super().learn(n_rows, max(self._one_s, seconds - self._changes[sort] * self._one_s))

    def seconds_with_change(self, n_rows: float, usual: int) -> float | None:
        self._usual = usual
        steady_s = self.seconds(n_rows)
        if steady_s is None or self._one_s is None or n_rows == usual:
            return steady_s
        first, second = self._changes
        last, one_before = self._before
        more = first if n_rows != last else second if n_rows != one_before else 0.0
        if last == usual:  # else the way back has to be paid in any case
            more += (first + second - (second if one_before != usual else 0.0)) / self._run
        return steady_s + more * self._one_s


def _mixed(known: float, new: float, n_seen: int = 1 << 10) -> float:
    """The first measurements count more: before them there is only a guess."""
    weight = max(_UP if new > known else _DOWN, 1 / (n_seen + 1))
    return known + weight * (min(new, (_STEP_SPIKE if n_seen else _FIRST_SPIKE) * known) - known)
