"""Where a deterministic request can be suspended, and how it goes on as if it had never been.

Bits depend on the chunks that a sequence was decoded in and, with a sliding window, on where the window was seated anew. So
it is suspended only where an uninterrupted run would seat its window, too, and it goes on with the chunks it had: from its
own state, or, if that was lost, by reading everything again in the same chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everwarm.engine.request import Request
from everwarm.engine.slots import Slot
from everwarm.state.history import SEATED, is_begun_by, is_seated_at, n_items_of

if TYPE_CHECKING:
    from everwarm.engine.core import Core

SEAT_EVERY = 256  # tokens of a reply


def can_pause(core: Core, slot: Slot) -> bool:
    """Whether a running request can be suspended here. One that is not deterministic can be anywhere."""
    request = slot.request
    if request is None or not request.ask.deterministic or not core.context.kind.has_window:
        return True
    return bool(slot.chunks) and slot.chunks[-1][0] == SEATED


def seats_window(core: Core, slot: Slot, request: Request) -> bool:
    """Whether the window is seated anew after what was just decoded: at fixed places of a reply, or where it was."""
    if not core.context.kind.has_window:
        return False
    if slot.n_fed <= n_items_of(request.chunks):
        return is_seated_at(request.chunks, slot.n_fed)
    return slot.n_fed > request.n_prompt and (slot.n_fed - request.n_prompt) % SEAT_EVERY == 0


def is_as_before(core: Core, slot: Slot, request: Request) -> bool:
    """Whether what a request was brought back to is the beginning of what it had decoded itself, to the bit."""
    if not request.chunks or not slot.n_fed:
        return True
    return core.context.is_clean(slot.seq) and is_begun_by(request.chunks, slot.chunks)
