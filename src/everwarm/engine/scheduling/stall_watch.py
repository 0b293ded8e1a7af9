"""A watch over the steps: if nothing moves although requests wait, it says how to clear the way. Pure; ``core`` does it.

The scheduler's rule excludes this (see ``scheduler``). It is here for an unknown mistake: a loop that
turns without end is the worst thing that an engine can do, because it looks alive from outside.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_STEPS = 64  # in a row in which nothing was decoded and no request ended


class Remedy(enum.Enum):
    SUSPEND_YOUNGER = enum.auto()  # all but the oldest make room
    END_OLDEST = enum.auto()  # that did not help


@dataclass(slots=True)
class StallWatch:
    n_steps: int = 0  # since something last moved
    n_fed: int = 0  # sequences that the context had decoded for by then

    def note(self, n_fed: int, *, has_moved: bool) -> Remedy | None:
        """After every step. ``n_fed``: sequences that the context has decoded for since the start."""
        if has_moved or n_fed != self.n_fed:
            self.n_steps = 0
            self.n_fed = n_fed
            return None
        self.n_steps += 1
        if self.n_steps == MAX_STEPS:
            return Remedy.SUSPEND_YOUNGER
        if self.n_steps == 2 * MAX_STEPS:
            self.n_steps = 0
            return Remedy.END_OLDEST
        return None
