"""The token loop: one step admits, plans, decodes, picks and keeps. Single-threaded; owns the context.

    step:  admit → plan → make room → decode → commit (pick · cut · finish)

Requests are read and written the same way: a request has items, some of them decoded, and every step decodes some more of
them. Knows no threads and no text.
"""

from __future__ import annotations

import collections
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from everwarm.engine.counts import Counts
from everwarm.engine.keeper import Keeper
from everwarm.engine.request import Ask, Event, Finish, Finished, NewToken, Progress, Request, Started
from everwarm.engine.restore import Goal, Restored, Restorer, Source
from everwarm.engine.scheduler import Budget, Grant, Lane, plan
from everwarm.engine.settings import EngineSettings
from everwarm.engine.sizes import Sizes, decide_sizes
from everwarm.engine.slots import Slot
from everwarm.errors import BadRequest, ContextFull, DecodeFailed, EverwarmError, PromptTooLong
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.llama.model import Progress as LoadProgress
from everwarm.llama.sampler import Sampler
from everwarm.state import policy
from everwarm.state.policy import CutKind
from everwarm.state.tree import Match, Tree
from everwarm.types import SeqId

log = logging.getLogger("everwarm.engine")

MAX_ATTEMPTS = 3
_SPEED_MEMORY = 0.8


@dataclass(slots=True)
class Core:
    model: Model
    settings: EngineSettings
    sizes: Sizes
    context: Context
    tree: Tree
    keeper: Keeper
    restorer: Restorer
    slots: list[Slot]
    queue: collections.deque[Request] = field(default_factory=collections.deque)
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def open(cls, path: Path, settings: EngineSettings, progress: LoadProgress | None = None) -> Core:
        model = Model(path, settings.model, progress)
        try:
            sizes = decide_sizes(model, settings)
            context = Context(model, settings.context(sizes.n_spares))
        except BaseException:
            model.close()
            raise
        tree = Tree()
        slots = [Slot(SeqId(i), tree.root("")) for i in range(settings.n_slots)]
        for slot in slots:
            tree.hold(slot.node)
        keeper = Keeper(context, tree, slots, sizes.spacing, sizes.ram_bytes, seconds_per_token=1e-3)
        keeper.spares = {SeqId(settings.n_slots + i): None for i in range(sizes.n_spares)}
        return cls(model, settings, sizes, context, tree, keeper, Restorer(keeper), slots)

    def close(self) -> None:
        for slot in self.slots:
            if slot.request is not None:
                slot.request.sampler.close()
        self.context.close()
        self.model.close()

    # asking

    def submit(self, ask: Ask) -> Request:
        """Queue a request, or refuse it with a reason. Nothing that gets past here can abort libllama."""
        n_prompt = len(ask.prompt)
        if n_prompt >= self.context.n_ctx:
            raise PromptTooLong(n_prompt, self.context.n_ctx)
        if int(ask.prompt.codes.max()) >= self.model.vocab.n_tokens:
            top = self.model.vocab.n_tokens - 1
            raise BadRequest(f"token {int(ask.prompt.codes.max())} is not in the vocabulary; give 0 to {top}")
        sampler = Sampler(self.model, ask.sampling, ask.prompt.codes)
        room = min(n_prompt + ask.max_tokens, self.context.n_ctx)
        request = Request(ask, sampler, room, time.monotonic())
        self.queue.append(request)
        return request

    def cancel(self, request_id: int) -> None:
        """Takes effect at the next step. What was read until then is kept."""
        for request in (*self.queue, *(slot.request for slot in self.slots if slot.request)):
            if request.id == request_id:
                request.cancelled = True

    @property
    def has_work(self) -> bool:
        return bool(self.queue) or any(not slot.is_idle for slot in self.slots)

    def tidy(self) -> bool:
        """One piece of idle work. False: there is none."""
        return self.keeper.tidy()

    # the step

    def step(self) -> list[Event]:
        events: list[Event] = []
        self._drop_cancelled(events)
        self._admit(events)
        grants = plan(self._lanes(), self._budget())
        grants = self._with_room(grants, events)
        if grants:
            started = time.monotonic()
            feeds = [self._feed(grant) for grant in grants]
            try:
                self.context.decode(feeds)
            except ContextFull as error:
                self._suspend_or_finish(error, events)
                return events
            except DecodeFailed as error:
                self._start_over([self.slots[grant.slot] for grant in grants], error, events)
                return events
            self._learn_speed(feeds, time.monotonic() - started)
            self._commit(grants, feeds, events)
        return events

    def _lanes(self) -> list[Lane]:
        lanes = []
        for i, slot in enumerate(self.slots):
            request = slot.request
            if request is not None:
                lanes.append(Lane(i, slot.next_stop() - slot.n_fed, slot.n_fed >= request.n_prompt))
        return lanes

    def _budget(self) -> Budget:
        return Budget(min(self.settings.n_ubatch, self.context.n_batch), self.settings.prefill_beside_decode)

    def _feed(self, grant: Grant) -> Feed:
        slot = self.slots[grant.slot]
        request = slot.request
        assert request is not None
        stop = slot.n_fed + grant.n_tokens
        tokens = request.tokens(slot.n_fed, stop)
        return Feed(slot.seq, tokens, self.context.end(slot.seq), stop == request.n_items)

    def _learn_speed(self, feeds: list[Feed], seconds: float) -> None:
        n = sum(len(feed.tokens) for feed in feeds)
        if n >= 32:
            old = self.keeper.seconds_per_token
            self.keeper.seconds_per_token = _SPEED_MEMORY * old + (1 - _SPEED_MEMORY) * seconds / n

    # after decoding

    def _commit(self, grants: list[Grant], feeds: list[Feed], events: list[Event]) -> None:
        row = 0
        for grant, feed in zip(grants, feeds, strict=True):
            slot = self.slots[grant.slot]
            request = slot.request
            assert request is not None
            slot.n_fed += grant.n_tokens
            slot.record_chunk(grant.n_tokens)
            if slot.n_fed <= request.n_prompt:
                events.append(Progress(request.id, slot.n_fed, request.n_prompt))
            if slot.cuts and slot.n_fed == slot.cuts[-1].at:
                self.keeper.take(slot, slot.cuts.pop().kind)
            if feed.wants_logits:
                self._advance(slot, request, row, events)
                row += 1

    def _advance(self, slot: Slot, request: Request, row: int, events: list[Event]) -> None:
        """Everything a request has is decoded: pick what comes next."""
        at_prompt_end = slot.n_fed == request.n_prompt
        logits = self.context.logits(row).copy() if at_prompt_end else None
        token = None if request.ask.max_tokens == 0 else request.sampler.pick(self.context, row)
        self._after_pick(slot, request, token, logits, events)

    def _after_pick(
        self, slot: Slot, request: Request, token: int | None, logits: np.ndarray | None, events: list[Event]
    ) -> None:
        if request.first_token_at is None:
            request.first_token_at = time.monotonic()
        if logits is not None:
            self.keeper.take(slot, CutKind.END, logits=logits)
        if token is None:
            return self._finish(slot, request, Finish.LENGTH, events)
        if token in self.model.vocab.eog and not request.ask.ignore_eos:
            return self._finish(slot, request, Finish.STOP, events)
        request.append(token)
        events.append(NewToken(request.id, token))
        if request.is_full:
            self._finish(slot, request, Finish.LENGTH, events)

    def _finish(
        self, slot: Slot, request: Request, finish: Finish, events: list[Event], error: EverwarmError | None = None
    ) -> None:
        if slot.n_fed > request.n_prompt:
            self._keep_end(slot, CutKind.REPLY)
        elif slot.n_fed < request.n_prompt:
            self._keep_end(slot, CutKind.CANCEL)
        elif not self.context.kind.needs_checkpoints:
            self.keeper.mark_end(slot)
        slot.items = request.items(slot.n_fed)
        slot.request, slot.cuts, slot.used_at = None, [], time.monotonic()
        self._close(request, finish, events, error)

    def _keep_end(self, slot: Slot, kind: CutKind) -> None:
        if not self.context.kind.needs_checkpoints:
            if slot.n_fed:
                self.keeper.mark_end(slot)
        elif slot.n_fed > slot.node.n_items:
            self.keeper.take(slot, kind)

    def _close(self, request: Request, finish: Finish, events: list[Event], error: EverwarmError | None = None) -> None:
        request.sampler.close()
        events.append(Finished(request.id, request.result(finish, time.monotonic(), error)))

    # starting

    def _drop_cancelled(self, events: list[Event]) -> None:
        for request in [r for r in self.queue if r.cancelled]:
            self.queue.remove(request)
            self._close(request, Finish.CANCELLED, events)
        for slot in self.slots:
            if slot.request is not None and slot.request.cancelled:
                self._finish(slot, slot.request, Finish.CANCELLED, events)

    def _admit(self, events: list[Event]) -> None:
        while self.queue and self._may_start(self.queue[0]):
            self._start(self.queue.popleft(), events)

    def _may_start(self, request: Request) -> bool:
        running = [slot for slot in self.slots if slot.request is not None]
        if not running:
            return True
        alone = request.ask.deterministic or any(s.request and s.request.ask.deterministic for s in running)
        if alone or len(running) == len(self.slots):
            return False
        return self._fits_beside(request, running)

    def _fits_beside(self, request: Request, running: list[Slot]) -> bool:
        """Whether its new cells fit beside those of the running ones, once everybody else has made room."""
        if not self.context.kind.has_attention:
            return True
        prompt = request.items(request.n_items)
        shared = 0
        if self.context.kind.can_share_cells:
            shared = max(int(prompt.common_prefix(slot.resident())) for slot in running)
        used = self.context.cells.used_by(slot.seq for slot in running)
        return used + len(prompt) - shared + len(running) + 1 <= self.context.n_ctx

    def _start(self, request: Request, events: list[Event]) -> None:
        is_first = request.started_at is None
        request.started_at = request.started_at or time.monotonic()
        if request.ask.deterministic:
            self._move_everybody_out()
        prompt = request.items(request.n_items)
        goal = Goal(prompt, request.ask.namespace, clean_only=request.ask.deterministic)
        sources = self.restorer.sources(prompt, goal.namespace) if request.ask.use_cache else []
        slot = self._seat(sources)
        match = self.restorer.match(prompt, goal.namespace, sources)
        if request.ask.use_cache:
            restored = self.restorer.bring(slot, goal, match, sources)
        else:
            restored = self.restorer.start_cold(slot, goal)
        self._plan_cuts(slot, request, match, restored)
        slot.request = request
        request.restored_at = time.monotonic()
        if is_first:
            self.counts.add(request, match, restored, self.keeper.spacing)
            events.append(Started(request.id, request.n_prompt, request.n_cached))
        if restored.logits is not None:
            self._go_on_from_logits(slot, request, restored.logits, events)

    def _go_on_from_logits(self, slot: Slot, request: Request, logits: np.ndarray, events: list[Event]) -> None:
        token = None if request.ask.max_tokens == 0 else request.sampler.pick_from(logits)
        self._after_pick(slot, request, token, None, events)

    def _seat(self, sources: list[Source]) -> Slot:
        common = {source.seq: source.n_common for source in sources}
        seats = [
            policy.Seat(i, slot.n_fed, common.get(slot.seq, 0), slot.used_at)
            for i, slot in enumerate(self.slots)
            if slot.is_idle
        ]
        return self.slots[policy.seat(seats)]

    def _plan_cuts(self, slot: Slot, request: Request, match: Match, restored: Restored) -> None:
        known = match.n_shared if match.n_shared - restored.n_items > policy.GUARD else None
        found = policy.cuts(
            request.n_prompt,
            self.keeper.spacing,
            n_ubatch=self.settings.n_ubatch,
            boundaries=request.ask.boundaries,
            stable=request.ask.stable,
            branch=known,
        )
        needed = self.context.kind.needs_checkpoints
        slot.cuts = [cut for cut in reversed(found) if needed and cut.at > restored.n_items]

    def _move_everybody_out(self) -> None:
        """A deterministic request runs alone, from the first cell on."""
        for spare in list(self.keeper.spares):
            self.keeper.move_out_spare(spare)
        for slot in self.slots:
            assert slot.is_idle
            self.keeper.move_out_slot(slot)

    # when it does not fit, or fails

    def _with_room(self, grants: list[Grant], events: list[Event]) -> list[Grant]:
        n = sum(grant.n_tokens for grant in grants)
        if not grants or self.keeper.make_room(n):
            return grants
        free = self.context.cells.free
        kept: list[Grant] = []
        for grant in grants:  # what fits goes on; replies come first in a plan
            size = min(grant.n_tokens, free)
            if size > 0:
                kept.append(Grant(grant.slot, size))
                free -= size
        if not kept:
            self._suspend_or_finish(ContextFull("every cell is taken by running requests"), events)
        return kept

    def _suspend_or_finish(self, error: ContextFull, events: list[Event]) -> None:
        """The context is full of running requests: the youngest waits in RAM; a lone one has reached its length."""
        running = [slot for slot in self.slots if slot.request is not None]
        youngest = max(running, key=lambda slot: slot.request.id if slot.request else 0)
        request = youngest.request
        assert request is not None
        if len(running) == 1:
            log.info("request %d ends at %d tokens: %s", request.id, youngest.n_fed, error)
            return self._finish(youngest, request, Finish.LENGTH, events)
        log.info("request %d waits: %s", request.id, error)
        self.counts.n_suspended += 1
        self._keep_end(youngest, CutKind.CANCEL)
        youngest.items = request.items(youngest.n_fed)
        youngest.request, youngest.cuts = None, []
        self.keeper.move_out_slot(youngest)
        self.queue.appendleft(request)

    def _start_over(self, slots: list[Slot], error: DecodeFailed, events: list[Event]) -> None:
        """libllama failed inside a batch and the sequences are empty: what they started from is suspect."""
        self.counts.n_decode_failures += 1
        log.warning("a batch failed, its requests start over: %s", error)
        for slot in slots:
            request = slot.request
            assert request is not None
            if slot.node.checkpoint is not None:
                self.keeper.quarantine(slot.node, error)
            self.keeper.seat(slot, slot.node.root())
            slot.request = None
            slot.clear()
            request.attempts += 1
            if request.attempts < MAX_ATTEMPTS:
                self.queue.appendleft(request)
            else:
                self._close(request, Finish.ERROR, events, error)
