"""The plan of the next step: which running requests have text to read or to write, and what ``scheduler`` grants them.

Requests with other scales of LoRA adapters do not decode in one step: the scales belong to the whole context.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from everwarm.engine.request import Request
from everwarm.engine.scheduling.scheduler import Budget, Grant, Lane, plan
from everwarm.engine.slots import Slot
from everwarm.engine.stats import Speed
from everwarm.state.lineage import chunk_at

ADAPTERS_S = 0.2  # how long a group with the same scales of adapters runs on while another waits

LoraScales = tuple[float, ...]


@dataclass(slots=True)
class AdapterTurns:
    """Which scales of LoRA adapters are decoded with, and when each group of requests with the same scales last was.

    Groups take turns, each for a short while, since another graph has to be made at every change. Of a group the oldest
    request gets a token in every step of its turn, and every group has its turn, so all end."""

    scales: LoraScales | None = None  # None: the model's own
    began_at: float = 0.0
    _ran_at: dict[LoraScales | None, float] = field(default_factory=dict)

    def choose(self, running: Sequence[LoraScales | None], now: float) -> LoraScales | None:
        """``running``: the scales of the running requests, the oldest first."""
        others = [scales for scales in dict.fromkeys(running) if scales != self.scales]
        if not others or (self.scales in running and now - self.began_at < ADAPTERS_S):
            return self.scales
        self._ran_at = {scales: at for scales, at in self._ran_at.items() if scales in running}
        self._ran_at[self.scales] = now
        self.scales = min(others, key=lambda scales: self._ran_at.get(scales, 0.0))
        self.began_at = now
        return self.scales


@dataclass(slots=True)
class StepPlanner:
    slots: Sequence[Slot]
    budget: Budget
    speed: Speed
    max_step_s: float
    n_ahead: int  # tokens of a step that reads ahead: a request may come any moment
    has_adapters: bool
    adapter_turns: AdapterTurns = field(default_factory=AdapterTurns)

    def plan(self) -> list[Grant]:
        order = oldest_first(self.slots)
        lanes = self._lanes()
        if self.has_adapters:
            scales = {i: request.ask.lora for i in order if (request := self.slots[i].request) is not None}
            chosen = self.adapter_turns.choose(list(scales.values()), time.monotonic())
            order = [i for i in order if scales.get(i) == chosen]
            lanes = [lane for lane in lanes if lane.slot in order]
        budget = self.budget
        if not all(lane.is_writing for lane in lanes):  # how much is read beside replies depends on how fast that is
            budget = budget.within(self.max_step_s, self.speed.seconds_per_token)
        return plan(lanes, budget, order[0] if order else None)

    def _lanes(self) -> list[Lane]:
        """The requests that have text to read or to write; an image is read by itself."""
        slots = enumerate(self.slots)
        return [self._lane(i, s, s.request) for i, s in slots if s.request is not None and s.next_image() is None]

    def _lane(self, i: int, slot: Slot, request: Request) -> Lane:
        is_writing = slot.n_fed >= request.n_prompt
        n_again = request.n_items - slot.n_fed - 1 if is_writing and not request.ask.deterministic else 0
        return Lane(
            i,
            self._n_wanted(slot, request),
            is_writing,
            n_left=request.n_prompt - slot.n_fed,
            n_again=max(0, n_again),
            admitted=request.admitted or 0,
            priority=request.ask.priority,
        )

    def _n_wanted(self, slot: Slot, request: Request) -> int:
        n = (chunk_at(request.chunks, slot.n_fed) if request.chunks else None) or slot.next_stop() - slot.n_fed
        return min(n, self.n_ahead) if request.ask.ahead else n


def oldest_first(slots: Sequence[Slot]) -> list[int]:
    """The places of the running requests, by admission."""
    running = [(slot.request.admitted or 0, i) for i, slot in enumerate(slots) if slot.request is not None]
    return [i for _, i in sorted(running)]
