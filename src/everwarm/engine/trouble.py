"""When a step does not fit or fails: whoever can goes on, whoever cannot waits or starts over, and nothing spoilt stays."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from everwarm.engine.request import Event, Finish
from everwarm.engine.scheduler import Grant
from everwarm.engine.slots import Slot
from everwarm.errors import ContextFull, DecodeFailed, MemoryFault
from everwarm.state.policy import CutKind

if TYPE_CHECKING:
    from everwarm.engine.core import Core

log = logging.getLogger("everwarm.engine")

MAX_ATTEMPTS = 3


def with_room(core: Core, grants: list[Grant], events: list[Event]) -> list[Grant]:
    n = sum(grant.n_tokens for grant in grants)
    if not grants or core.keeper.make_room(n):
        return grants
    free = core.context.cells.free
    kept: list[Grant] = []
    for grant in grants:  # what fits goes on; replies come first in a plan
        size = min(grant.n_tokens, free)
        if size > 0:
            kept.append(Grant(grant.slot, size))
            free -= size
    if not kept:
        suspend_or_finish(core, ContextFull("every cell is taken by running requests"), events)
    return kept


def suspend_or_finish(core: Core, error: ContextFull, events: list[Event]) -> None:
    """The context is full of running requests: the youngest waits in RAM; a lone one has reached its length."""
    running = [slot for slot in core.slots if slot.request is not None]
    youngest = max(running, key=lambda slot: slot.request.id if slot.request else 0)
    request = youngest.request
    assert request is not None
    if len(running) == 1:
        log.debug("request %d ends at %d tokens: %s", request.id, youngest.n_fed, error)
        return core.finish(youngest, request, Finish.LENGTH, events)
    log.debug("request %d waits: %s", request.id, error)
    core.counts.n_suspended += 1
    core.keep_end(youngest, CutKind.CANCEL)
    youngest.items = request.items(youngest.n_fed)
    youngest.request, youngest.cuts = None, []
    core.keeper.move_out_slot(youngest)
    core.queue.appendleft(request)


def lose_numbers(core: Core, slot: Slot, error: DecodeFailed, events: list[Event]) -> None:
    """The model's state overflowed. Nothing of it may stay: it spoils whoever attends over it or gets its place. Those
    that ran beside it start over as well; those that did not run are moved out, and everything is zeroed."""
    core.keeper.scrub(slot.node)
    running = [other for other in core.slots if other.request is not None]
    for other in running:
        core.context.scrub(other.seq)
    start_over(core, running, error, events, guilty=slot)
    core.move_everybody_out()
    core.context.clear()


def start_over(
    core: Core, slots: list[Slot], error: MemoryFault, events: list[Event], guilty: Slot | None = None
) -> None:
    """libllama failed and the sequences are empty: what they started from is suspect. Without a guilty one all are."""
    core.counts.n_decode_failures += 1
    log.warning("a request starts over: %s", error)
    for slot in slots:
        request = slot.request
        assert request is not None
        if slot.node.checkpoint is not None:
            core.keeper.quarantine(slot.node, error)
        core.keeper.seat(slot, slot.node.root())
        slot.request = None
        slot.clear()
        request.attempts += guilty in (None, slot)
        if request.attempts < MAX_ATTEMPTS:
            core.queue.appendleft(request)
        else:
            core.close_request(request, Finish.ERROR, events, error)
