"""A watch over the steps: if nothing moves although somebody waits, it says once who waits for what, and clears the way.

The scheduler's rule excludes this (see ``scheduler``). It is here for the mistake that nobody has thought of: a loop that
turns without end is the worst thing that an engine can do, because it looks alive from outside.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everwarm.engine.recovery import suspend
from everwarm.engine.request import Event, Finish, Finished, NewToken, Progress
from everwarm.errors import EverwarmError

if TYPE_CHECKING:
    from everwarm.engine.core import Core

log = logging.getLogger("everwarm.engine")

MAX_STEPS = 64  # in a row in which nothing was decoded and nobody ended
MAX_SAID = 16  # waiting requests, in the log


@dataclass(slots=True)
class StallWatch:
    n_steps: int = 0
    n_fed: int = 0  # sequences the context had decoded for when something last moved

    def note(self, core: Core, events: list[Event]) -> None:
        """After every step. First everybody but the oldest makes room; if that does not help, the oldest ends."""
        if self._has_moved(core, events):
            self.n_steps, self.n_fed = 0, core.context.n_fed
            return
        self.n_steps += 1
        if self.n_steps == MAX_STEPS:
            core.counts.n_stalls += 1
            log.error("nothing has moved for %d steps, so all but the oldest are suspended: %s", MAX_STEPS, about(core))
            for i in reversed(core.oldest_first()[1:]):
                suspend(core, core.slots[i], "nothing moved")
        elif self.n_steps == 2 * MAX_STEPS:
            self.n_steps = 0
            _end_oldest(core, events)

    def _has_moved(self, core: Core, events: list[Event]) -> bool:
        if core.context.n_fed != self.n_fed or any(
            isinstance(event, NewToken | Progress | Finished) for event in events
        ):
            return True
        return not core.has_work or core.admission.is_waiting_for_disk


def about(core: Core) -> str:
    """Who waits for what, with counts of cells."""
    cells = core.context.cells
    said = [f"{cells.used} of {cells.n_cells} cells are in use"]
    for slot in core.slots:
        if slot.request is not None:
            done = f"{slot.n_fed} of {slot.request.n_items} items"
            said.append(f"request {slot.request.id} in slot {slot.seq} has {done} in {cells.count(slot.seq)} cells")
    for request in list(core.queue)[:MAX_SAID]:
        n_cells, verdict = request.n_tokens(request.n_items), core.admission.judge(request).value
        said.append(f"request {request.id} waits for {n_cells} cells: {verdict}")
    return "; ".join(said)


def _end_oldest(core: Core, events: list[Event]) -> None:
    error = EverwarmError("the engine could not go on with this request: nothing has moved for too long; send it again")
    order = core.oldest_first()
    if order:
        slot = core.slots[order[0]]
        assert slot.request is not None
        core.finish(slot, slot.request, Finish.ERROR, events, error)
    elif core.queue:
        core.drop_waiting(core.queue[0], Finish.ERROR, events, error)
