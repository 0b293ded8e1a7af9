"""Taking turns: a deterministic request runs alone, all others run together, and neither keeps the other waiting for long.

What is suspended at the end of a turn comes back bit for bit, so turns change when a reply comes and never what it says.
Reads slots and changes nothing but its own record of whose turn it is. Knows no clock.

A deterministic request is suspended only where an uninterrupted run would seat its window anew, too, and it continues
with the chunks it had: from its own state, or, if that was lost, by reading everything again in the same chunks. Bits
depend on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everwarm.engine.request import Request
from everwarm.engine.slots import Slot
from everwarm.state.lineage import SEATED, is_begun_by, is_seated_at, n_items_of

TURN_S = 3.0  # how long one side runs on while the other waits
SEAT_EVERY = 256  # tokens of a reply


@dataclass(slots=True)
class TurnTaking:
    """Whose turn it is, since when, and since when the other side waits."""

    turn_s: float = TURN_S
    is_alone: bool = False  # a deterministic request has it
    began_at: float = 0.0
    others_since: float | None = None

    def begin(self, *, is_alone: bool, now: float) -> None:
        self.is_alone = is_alone
        self.began_at = now
        self.others_since = None

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
    """Whose turn it is when nothing runs: the other side's if it waits, so that neither starves."""
    return (not was_alone) if (not was_alone) in waiting else was_alone


def can_pause(slot: Slot) -> bool:
    """Whether a running request with a sliding window can be suspended here; without a window any can be anywhere, and
    with one those that are not deterministic."""
    request = slot.request
    if request is None or not request.ask.deterministic:
        return True
    return bool(slot.chunks) and slot.chunks[-1][0] == SEATED


def seats_window(slot: Slot, request: Request) -> bool:
    """Whether the window is seated anew after what was just decoded: at fixed places of a reply, or where it was."""
    if slot.n_fed <= n_items_of(request.chunks):
        return is_seated_at(request.chunks, slot.n_fed)
    return slot.n_fed > request.n_prompt and (slot.n_fed - request.n_prompt) % SEAT_EVERY == 0


def is_as_before(slot: Slot, request: Request, *, is_clean: bool) -> bool:
    """Whether what was restored for a request is, bit for bit, the beginning of what it had decoded itself.
    ``is_clean``: a cold replay would reproduce the slot's sequence."""
    if not request.chunks or not slot.n_fed:
        return True
    return is_clean and is_begun_by(request.chunks, slot.chunks)
