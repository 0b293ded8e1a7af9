"""A request starts, or continues after it was suspended: it gets a slot, and the slot what is known of its prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from everwarm.engine.cache.prefix_cache import PrefixCache
from everwarm.engine.cache.restore import Goal, Restored
from everwarm.engine.inspect.read_reason import ReadFacts, explain
from everwarm.engine.inspect.stats import RequestStats
from everwarm.engine.lifecycle.cut_plan import CutPlanner
from everwarm.engine.process.messages import ReadReason
from everwarm.engine.process.reply_text import items_text
from everwarm.engine.request import Request
from everwarm.engine.scheduling.admission import Admission
from everwarm.engine.scheduling.turns import is_as_before
from everwarm.engine.slots import Slot
from everwarm.engine.tiers.loader import Brought
from everwarm.llama.context import Context
from everwarm.state import policy
from everwarm.state.tree import Match


class Seated(NamedTuple):
    """Where a request runs from now on. ``is_first``: it has not run before."""

    slot: Slot
    restored: Restored
    is_first: bool


@dataclass(frozen=True, slots=True)
class Starter:
    context: Context
    slots: Sequence[Slot]
    cache: PrefixCache
    admission: Admission
    cut_planner: CutPlanner
    counts: RequestStats
    idle_cells: int  # of idle conversations, for each running request

    def start(self, request: Request) -> Seated:
        """For a request that was judged ``START``."""
        cache = self.cache
        ask = request.ask
        cache.ram_budget.awaited.pop(request.id, None)
        is_first = request.started_at is None
        request.started_at = request.started_at or time.monotonic()
        if ask.deterministic:
            cache.room.clear()  # it runs alone, from the first cell on
        prompt = request.items(request.n_items)
        brought = self.admission.lay_fetched(request)
        goal = Goal(prompt, ask.namespace, ask.deterministic, brought.n_items, brought.tier)
        sources = cache.restorer.sources(prompt, goal.namespace) if ask.use_cache else []
        slot = self.admission.seat(request, sources)
        match = cache.restorer.match(prompt, goal.namespace, sources)
        if is_first and not ask.ahead and not ask.is_background:
            request.continuation = cache.returns.arrive(match, time.monotonic())
        if ask.use_cache:
            restored = cache.restorer.bring(slot, goal, match, sources)
        else:
            restored = cache.restorer.start_cold(slot, goal)
        if not is_as_before(slot, request, is_clean=self.context.is_clean(slot.seq)):
            restored = cache.restorer.start_cold(slot, goal)  # its suspended state was lost: it is read again
        slot.seat(request, self.cut_planner.cuts(request, match, restored))
        if not ask.ahead:
            cache.room.limit_idle(self.idle_cells)
        cache.ram_budget.enforce()  # what was pinned meanwhile may go now
        self._touch_session(slot)
        if is_first:
            self._note_first(request, match, restored, brought)
        return Seated(slot, restored, is_first)

    def _touch_session(self, slot: Slot) -> None:
        """Slots of an active session are reused last."""
        for other in self.slots:
            if slot.session is not None and other.session == slot.session:
                other.touch(time.monotonic())

    def _note_first(self, request: Request, match: Match, restored: Restored, brought: Brought) -> None:
        request.note_start(restored.n_items, match.n_shared, restored.use)
        if not request.ask.ahead:
            request.why = self._why(request, match, restored, brought)
            self.counts.add(request, request.why)

    def _why(self, request: Request, match: Match, restored: Restored, brought: Brought) -> ReadReason:
        """Why a request read what it read. Looks up only what the reason may depend on."""
        ask = request.ask
        forgotten = self.cache.tree.forgotten
        is_known = request.n_prompt - match.n_shared <= policy.GUARD
        facts = ReadFacts(
            ask.prompt,
            match,
            request.n_cached,
            n_refused=restored.n_refused,
            n_passed=brought.n_passed,
            n_spoilt=brought.n_spoilt,
            n_elsewhere=brought.n_elsewhere,
            first=policy.first_message(ask.opening, ask.boundaries),
            forgotten=None if is_known else forgotten.parting(ask.namespace, ask.prompt),
            use_cache=ask.use_cache,
            deterministic=ask.deterministic,
            has_attention=self.context.kind.has_attention,
            needs_checkpoints=self.context.kind.needs_checkpoints,
            max_checkpoints=self.cache.checkpointer.spacing.max_checkpoints,
            eviction=partial(forgotten.eviction, ask.namespace, ask.prompt),
            now=time.monotonic(),
        )
        return explain(facts, partial(items_text, self.context.model.vocab))
