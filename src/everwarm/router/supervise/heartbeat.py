"""How long an engine has been silent, as far as its watcher was there to hear it. Pure: whoever watches brings the time.

A watcher that was stopped (SIGSTOP, ``docker pause``, a suspended laptop) or whose event loop was busy cannot tell whether
the engine spoke meanwhile: what it said may lie unread, or it was stopped as well. So time counts in ticks of the watcher,
and a tick that came late begins the count anew.
"""

from __future__ import annotations

from dataclasses import dataclass

TICK_S = 0.1  # how often the watcher looks
LATE_S = 0.5  # a tick later than this says nothing about the engine
MOST_LATE = 10  # late ticks in a row that are forgiven; a loop that is always late must still notice a hang


@dataclass(slots=True)
class Silence:
    """``silent_s`` since the last message, ``step_s`` since the running step was first seen."""

    at: float
    silent_s: float = 0.0
    step_s: float = 0.0
    has_spoken: bool = False
    _n_late: int = 0
    _step_age_s: float | None = None

    def heard(self) -> None:
        self.silent_s, self._n_late, self.has_spoken = 0.0, 0, True

    def tick(self, at: float, step_age_s: float | None) -> None:
        """Some time has passed; the running step's age is what the engine last said of it."""
        passed_s, self.at = at - self.at, at
        is_late = passed_s > LATE_S
        self._n_late += is_late
        if is_late and self._n_late <= MOST_LATE:
            self.silent_s = passed_s = 0.0
        self.silent_s += passed_s
        is_same_step = None not in (step_age_s, self._step_age_s) and (step_age_s or 0.0) >= (self._step_age_s or 0.0)
        self.step_s = self.step_s + passed_s if is_same_step else 0.0
        self._step_age_s = step_age_s
