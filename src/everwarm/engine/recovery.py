"""Decides what happens to running requests when a step does not fit or fails. Pure: returns effects, and ``core``
applies them.

``StallWatch`` looks for a step without progress although requests wait. The scheduler's rule excludes that; it guards
against an unknown bug, because an endless loop looks alive from outside.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from everwarm.engine.request import Finish, Request
from everwarm.engine.scheduling.scheduler import next_to_suspend
from everwarm.engine.slots import Slot
from everwarm.errors import ContextFull, EverwarmError, MemoryFault, PromptTooLong, WeightsTouched
from everwarm.llama.cells import Cells

MAX_ATTEMPTS = 3
MAX_STEPS = 64  # in a row in which nothing was decoded and no request ended


class Suspend(NamedTuple):
    """Move the slot's request to RAM; it comes back in the order of admission."""

    slot: Slot
    reason: str


class End(NamedTuple):
    """End the slot's request; what it has read is kept."""

    slot: Slot
    finish: Finish
    error: EverwarmError | None = None


class StartOver(NamedTuple):
    """Empty the slot; its request waits to be read again, unless it has failed too often. ``is_suspect``: the checkpoint
    it stands at, if there is one, is not used again."""

    slot: Slot
    is_suspect: bool
    has_failed: bool
    gives_up: bool


def when_full(oldest_first: Sequence[Slot], error: ContextFull) -> Suspend | End:
    """The running requests fill the context: the youngest waits in RAM; a lone one has reached its length."""
    youngest = next_to_suspend(range(len(oldest_first)))
    if youngest is not None:
        return Suspend(oldest_first[youngest], str(error))
    slot = oldest_first[0]
    request = slot.request
    assert request is not None
    if slot.n_fed < request.n_prompt:  # it holds nothing that could be an answer
        too_long = PromptTooLong(request.n_prompt_tokens, request.n_tokens(slot.n_fed))
        return End(slot, Finish.ERROR, too_long)
    return End(slot, Finish.LENGTH)


def after_failure(slots: Sequence[Slot], error: MemoryFault, guilty: Slot | None = None) -> list[StartOver]:
    """libllama failed and the sequences of these slots are empty: what they started from is suspect. Only ``guilty`` has
    failed itself, or all if that is not known; none where only the weights may have been wrong during this step."""
    is_innocent = isinstance(error, WeightsTouched)
    effects = []
    for slot in slots:
        assert slot.request is not None
        has_failed = guilty in (None, slot) and not is_innocent
        gives_up = slot.request.attempts + has_failed >= MAX_ATTEMPTS
        effects.append(StartOver(slot, not is_innocent, has_failed, gives_up))
    return effects


def describe_stall(cells: Cells, slots: Sequence[Slot], waiting: Sequence[tuple[Request, str]]) -> str:
    """Which request waits for what, with counts of cells. ``waiting``: with what admission says of each."""
    parts = [f"{cells.used} of {cells.n_cells} cells are in use"]
    for slot in slots:
        if slot.request is not None:
            done = f"{slot.n_fed} of {slot.request.n_items} items"
            parts.append(f"request {slot.request.id} in slot {slot.seq} has {done} in {cells.count(slot.seq)} cells")
    for request, verdict in waiting:
        parts.append(f"request {request.id} waits for {request.n_tokens(request.n_items)} cells: {verdict}")
    return "; ".join(parts)


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
