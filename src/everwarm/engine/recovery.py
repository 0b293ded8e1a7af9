"""When a step does not fit or fails: whoever can goes on, whoever cannot waits or starts over, and nothing spoilt stays."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from everwarm.engine.request import Event, Finish
from everwarm.engine.scheduling.scheduler import Grant, fit, next_to_suspend
from everwarm.engine.slots import Slot
from everwarm.errors import ContextFull, DecodeFailed, MemoryFault, PromptTooLong, WeightsTouched
from everwarm.state.policy import CutKind

if TYPE_CHECKING:
    from everwarm.engine.core import Core

log = logging.getLogger("everwarm.engine")

MAX_ATTEMPTS = 3


def with_room(core: Core, grants: list[Grant], events: list[Event]) -> list[Grant]:
    """What of a plan has room, once as many of the youngest as need be were suspended. Empty only if nobody runs."""
    while grants and not core.keeper.make_room(sum(grant.n_tokens for grant in grants)):
        kept = fit(grants, core.oldest_first(), core.context.cells.free)
        if kept:
            return kept
        suspend_or_finish(core, ContextFull("every cell is taken by running requests"), events)
        grants = core.plan()
    return grants


def suspend_or_finish(core: Core, error: ContextFull, events: list[Event]) -> None:
    """The context is full of running requests: the youngest waits in RAM; a lone one has reached its length."""
    order = core.oldest_first()
    youngest = next_to_suspend(order)
    if youngest is not None:
        core.counts.n_suspended += 1
        return suspend(core, core.slots[youngest], str(error))
    slot = core.slots[order[0]]
    request = slot.request
    assert request is not None
    log.debug("request %d ends at %d tokens: %s", request.id, slot.n_fed, error)
    if slot.n_fed < request.n_prompt:  # it holds nothing that could be an answer
        too_long = PromptTooLong(request.n_prompt_tokens, request.n_tokens(slot.n_fed))
        return core.finish(slot, request, Finish.ERROR, events, too_long)
    core.finish(slot, request, Finish.LENGTH, events)


def suspend(core: Core, slot: Slot, why: str) -> None:
    """Move a running request to RAM. It comes back in the order of admission and goes on where it was."""
    request = slot.request
    assert request is not None
    log.debug("request %d waits at %d tokens: %s", request.id, slot.n_fed, why)
    core.keep_end(slot, CutKind.CANCEL)
    request.n_furthest = max(request.n_furthest, slot.n_fed)
    if request.ask.deterministic:
        request.chunks = tuple(slot.chunks)
    slot.items = request.items(slot.n_fed)
    slot.request, slot.cuts = None, []
    core.keeper.move_out_slot(slot)
    core.requeue(request)


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
    """libllama failed and the sequences are empty: what they started from is suspect. Without a guilty one all are. Where
    only the weights may have been wrong during this step nobody is."""
    is_innocent = isinstance(error, WeightsTouched)
    core.counts.n_decode_failures += 1
    log.warning("a request starts over: %s", error)
    for slot in slots:
        request = slot.request
        assert request is not None
        if slot.node.checkpoint is not None and not is_innocent:
            core.keeper.quarantine(slot.node, error)
        core.keeper.seat(slot, slot.node.root())
        slot.request = None
        slot.clear()
        request.attempts += guilty in (None, slot) and not is_innocent
        if request.attempts < MAX_ATTEMPTS:
            core.requeue(request)
        else:
            core.close_request(request, Finish.ERROR, events, error)
