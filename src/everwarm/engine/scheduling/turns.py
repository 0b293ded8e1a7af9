"""Taking turns: a deterministic request runs alone, all others run together, and neither keeps the other waiting for long.

What is suspended at the end of a turn comes back bit for bit, so turns change when a reply comes and never what it says.
Pure: knows no slots and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TURN_S = 3.0  # how long one side runs on while the other waits


@dataclass(slots=True)
class Turns:
    """Whose turn it is, since when, and since when the other side waits."""

    turn_s: float = TURN_S
    is_alone: bool = False  # a deterministic request has it
    began_at: float = 0.0
    others_since: float | None = None

    def begin(self, *, is_alone: bool, now: float) -> None:
        self.is_alone, self.began_at, self.others_since = is_alone, now, None

    def note_waiting(self, waiting: Sequence[bool], now: float) -> None:
        """Who waits now: for each request whether it runs alone."""
        if (not self.is_alone) not in waiting:
            self.others_since = None
        elif self.others_since is None:
            self.others_since = now

    def is_over(self, now: float, *, has_advanced: bool) -> bool:
        """Whether the other side's turn has come. Never before the oldest of this side is further than it ever was: else
        one whose state was lost while it was suspended would read the same again in every turn."""
        if self.others_since is None or not has_advanced:
            return False
        return now - max(self.began_at, self.others_since) >= self.turn_s


def next_side(was_alone: bool, waiting: Sequence[bool]) -> bool:
    """Whose turn it is when nobody runs: the other side's if it waits, so that a stream of either keeps nobody out."""
    return (not was_alone) if (not was_alone) in waiting else was_alone
