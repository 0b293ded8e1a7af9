"""Decides what happens to running requests when a step does not fit or nothing moves. Pure: ``core`` acts.

``StallWatch`` looks for a step without progress although requests wait. The scheduler's rule excludes that; it guards
against an unknown bug, because an endless loop looks alive from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everwarm.engine.request import Request
from everwarm.engine.scheduling.scheduler import next_to_suspend
from everwarm.engine.slots import Slot
from everwarm.errors import PromptTooLong
from everwarm.llama.cells import Cells

MAX_ATTEMPTS = 3  # of one request, in which libllama fails
MAX_STEPS = 64  # in a row in which nothing was decoded and no request ended


def whom_to_suspend(oldest_first: Sequence[Slot]) -> Slot | None:
    """The running requests fill the context: the youngest waits in RAM. None: there is only one, and it has to end."""
    youngest = next_to_suspend(range(len(oldest_first)))
    return None if youngest is None else oldest_first[youngest]


def why_too_long(slot: Slot, request: Request) -> PromptTooLong | None:
    """Of a lone request that fills the context. None: it has written something, so it has reached its length."""
    if slot.n_fed >= request.n_prompt:
        return None
    return PromptTooLong(request.n_prompt_tokens, request.n_tokens(slot.n_fed))


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


@dataclass(slots=True)
class StallWatch:
    n_steps: int = 0  # since something last moved
    n_fed: int = 0  # sequences that the context had decoded for by then

    def note(self, n_fed: int, *, has_moved: bool) -> None:
        """After every step. ``n_fed``: sequences that the context has decoded for since the start."""
        if has_moved or n_fed != self.n_fed:
            self.n_steps = 0
            self.n_fed = n_fed
        else:
            self.n_steps += 1

    @property
    def is_stalled(self) -> bool:
        """Once: all but the oldest should make room."""
        return self.n_steps == MAX_STEPS

    @property
    def is_hopeless(self) -> bool:
        """That did not help: the oldest should end."""
        return self.n_steps >= 2 * MAX_STEPS
