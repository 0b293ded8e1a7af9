"""The token loop: one step admits, plans, decodes, picks and keeps. Single-threaded; owns the context.

    step:  admit → plan → make room → decode → commit (pick · cut · finish)

Requests are read and written the same way: a request has items, some of them decoded, and every step decodes some more of
them. The parts decide and keep their own state; here their effects are applied, in order. Knows no threads and no text.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from everwarm.engine.cache.prefix_cache import PrefixCache
from everwarm.engine.cache.prewarm import PrewarmQueue, is_worth_prewarming
from everwarm.engine.images import ImageCache
from everwarm.engine.lifecycle.keeping import Keeper
from everwarm.engine.lifecycle.starting import Starter, Unverified, new_request, stop_watch, with_own_namespace
from everwarm.engine.memory_plan import Sizes
from everwarm.engine.process.messages import Beat
from everwarm.engine.process.reply_text import probabilities_of
from everwarm.engine.request import Ask, Event, Finish, Finished, NewToken, Progress, Request, Started
from everwarm.engine.scheduling.admission import (
    Admission,
    RequestQueue,
    backlog_of,
    require_possible,
    seats_window,
)
from everwarm.engine.scheduling.scheduler import (
    MAX_ATTEMPTS,
    Grant,
    StallWatch,
    StepPlanner,
    describe_stall,
    fit,
    next_to_suspend,
    oldest_first,
    why_too_long,
)
from everwarm.engine.settings import EngineSettings
from everwarm.engine.slots import Slot
from everwarm.engine.speculation.draft_length import Proposal
from everwarm.engine.speculation.speculator import Picked, Speculator, pick, with_probs, written
from everwarm.engine.stats import EngineStats, Speed
from everwarm.engine.tiers.ram import Receipt
from everwarm.errors import ContextFull, DecodeFailed, EverwarmError, MemoryFault, StateRejected, WeightsTouched
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.media.media_model import Embedding
from everwarm.llama.model import Model
from everwarm.llama.sampler import PickPool, Sampler
from everwarm.llama.system.model_files import WatchedFiles
from everwarm.prompt.prompt import MediaItem
from everwarm.state.policy import CutKind

log = logging.getLogger("everwarm.engine")

OPEN_WAIT_S = 20.0  # for the disk tier to open, before stopping
NAP_S = 0.25  # between looks at whether it has opened
FILES_WAIT_S = 0.01  # at once, while a file is read again
DISK_WAIT_S = 0.002  # at once, while nothing else is to be done: a request may be cancelled
STATUS_S = 0.1  # between two published statuses while steps run
MAX_SHOWN = 16  # waiting requests, in the log of a stall


@dataclass(slots=True)
class Core:
    # the model, and the sequences of its context
    context: Context
    files: WatchedFiles  # of the model and its projector
    settings: EngineSettings
    sizes: Sizes
    slots: list[Slot]
    images: ImageCache | None  # None: the model sees no images
    cache: PrefixCache
    # requests: how they come, wait, start, run and leave
    unverified: Unverified
    queue: RequestQueue
    admission: Admission
    starter: Starter
    planner: StepPlanner
    speculator: Speculator
    picks: PickPool | None  # None: one request after the other picks its token
    keeper: Keeper
    prewarm: PrewarmQueue
    # what is learned on the way
    speed: Speed
    counts: EngineStats
    computes_aside: bool  # on a GPU: decoding returns before its results are there
    stall: StallWatch = field(default_factory=StallWatch)
    has_cancelled: bool = False  # a request was cancelled since the last step
    is_encoding: bool = False  # the last step encoded a window of a sound, and more follow
    # what any thread may read: of requests that run or wait, without what is read ahead, and of the tree
    status: Beat = field(init=False)
    is_status_old: bool = False  # a request has come, started or ended since
    status_due_at: float = 0.0

    def __post_init__(self) -> None:
        self._publish_status()

    def close(self) -> None:
        for request in self._requests():
            request.sampler.close()
        self.cache.close()
        for part in (self.images, self.picks, self.speculator, self.context, self.model):
            if part is not None:
                part.close()

    @property
    def model(self) -> Model:
        return self.context.model

    def require_same_model(self) -> None:
        """``ModelChanged``: a file was overwritten. Nothing computed here is valid for the file as it is now."""
        self.files.require_same()

    def _may_compute(self) -> bool:
        """False: a file seems to have been written to, and is being read again."""
        self.files.require_same()
        return self.files.may_be_used(FILES_WAIT_S)

    def put_away(self) -> None:
        """Before stopping: makes everything worth keeping durable, also of running requests."""
        tiers = self.cache.tiers
        tiers.wait_open(OPEN_WAIT_S)
        for slot in self.slots:
            if slot.request is not None:
                self.finish(slot, slot.request, Finish.CANCELLED, [])
        self.prewarm.waiting.clear()
        while self.tidy() or tiers.catch_up():
            pass
        self.cache.ram.flush()
        tiers.flush_all()

    # asking

    def submit(self, ask: Ask) -> Request:
        """Queue a request, or refuse it with a reason."""
        request = self.enqueue(ask)
        self.give_way()
        return request

    def enqueue(self, ask: Ask) -> Request:
        require_possible(ask, self.context, self.settings, self.images)
        ask = self.unverified.route(with_own_namespace(ask, self.model.scales))
        request = new_request(ask, self.model, self.settings.n_ctx_of_request(self.context.n_ctx))
        if ask.stop and self.speculator.is_on:  # no draft is verified beyond a stop string
            request.stop_watch = stop_watch(self.model.vocab, ask.stop)
        self.queue.add(request)
        self.is_status_old = True
        return request

    def give_way(self) -> None:
        """A request has come: prewarming stops, and continues later from the same point."""
        ahead = self.prewarm.give_way()
        if ahead is not None:
            self.cancel(ahead.id)
            self.counts.n_prewarms_interrupted += 1

    def offer_prewarm(self, ask: Ask) -> None:
        """A prompt to be read in idle time."""
        self.prewarm.offer(self.unverified.route(ask))

    def cancel(self, request_id: int) -> None:
        """Cancels a request at the next step. What was read until then is kept."""
        for request in self._requests():
            if request.id == request_id:
                request.cancelled = True
                self.has_cancelled = True

    def stop(self, request_id: int, finish: Finish = Finish.STOP) -> list[Event]:
        """End a running reply now, as if the model had ended it: its text holds a stop string, or its time is over."""
        events: list[Event] = []
        for slot in self.slots:
            if slot.request is not None and slot.request.id == request_id:
                self._catch_up(slot, slot.request, slot.request.n_items - 1)
                self.finish(slot, slot.request, finish, events)
        for request in [r for r in self.queue if r.id == request_id]:  # suspended right after that token
            self.drop_waiting(request, finish, events)
        return events

    def forget_ahead(self, namespace: str) -> None:
        """Cancels prewarming and loading for namespaces with this prefix, so that nothing of them enters the tree
        later, and forgets where their prompts parted and what replies may be drafted from."""
        self.starter.partings.forget(namespace)
        self.speculator.forget()
        ahead = self.prewarm.drop(namespace)
        if ahead is not None:
            self.cancel(ahead.id)
            self.stop(ahead.id)
        self.cache.loader.stop_arriving(namespace)
        self.admission.drop_fetches(request for request in self.queue if request.ask.namespace.startswith(namespace))

    @property
    def has_work(self) -> bool:
        return bool(self.queue) or any(slot.request is not None for slot in self.slots)

    @property
    def is_reading(self) -> bool:
        return bool(self.queue) or any(slot.request and slot.n_fed < slot.request.n_prompt for slot in self.slots)

    def _requests(self) -> Iterator[Request]:
        """All that wait or run."""
        yield from self.queue
        for slot in self.slots:
            if slot.request is not None:
                yield slot.request

    def _running(self) -> list[Slot]:
        """The slots of the running requests, by admission."""
        return [self.slots[i] for i in oldest_first(self.slots)]

    # idle time

    def tidy(self) -> bool:
        """One piece of idle work. False: there is none."""
        had_dropped = self.context.n_to_empty > 0
        self.context.finish_drop()
        done = had_dropped or self.cache.save_piece() or self.begin_prewarm() or self.cache.join_piece()
        if not done or self.is_status_old:
            self._publish_status()  # before the loop waits for a job
        return done

    def begin_prewarm(self) -> bool:
        """Start to read ahead the newest that is worth it. False: there is none."""
        cache = self.cache
        for waiting in self.prewarm.take_newest(time.monotonic()):
            following = waiting.ask.prompt
            cache.checkpointer.drop_left_aside(following, cache.tree.match(waiting.ask.namespace, following, 0))
            if not is_worth_prewarming(waiting.ask, cache.restorer, self.context):
                continue
            try:
                request = self.enqueue(waiting.ask)
            except EverwarmError:  # it fits no more
                continue
            self.prewarm.started(request, waiting)
            return True
        return False

    def tidy_overdue(self) -> None:
        """Work that cannot wait until nothing runs any more."""
        self.context.finish_drop()
        self.cache.tidy_overdue()

    @property
    def nap_s(self) -> float | None:
        """How long to wait for a job before looking for idle work again; None: until one comes."""
        return NAP_S if self.cache.tiers.is_unsettled else None

    # the step

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Event]:
        """Runs one step. Call ``keep_ends`` next, once the events are sent: it keeps the prompt ends that the step
        reached. ``meanwhile`` is called while a GPU computes; it must not touch the core."""
        self.keep_ends()
        events: list[Event] = []
        if self._step(events, meanwhile):
            self._watch_stall(events)
        if self.is_status_old:
            self._publish_status()
        return events

    def _step(self, events: list[Event], meanwhile: Callable[[], None]) -> bool:
        """False: nothing may be computed now. That does not count as a stall."""
        if self.has_cancelled:
            self._drop_cancelled(events)
        if self.queue:
            self._admit(events)
        if self.is_status_old or time.monotonic() >= self.status_due_at:
            self._publish_status()  # before what may take long
        if not self._may_compute():
            return False
        if self.images is not None:
            self._read_next_image(self.images, events)
        if not self._decode(events, meanwhile) and self.queue:
            self.admission.wait_for_disk(DISK_WAIT_S)
        return True

    def keep_ends(self) -> None:
        """Park the ends of prompts that the last step reached, after their first tokens have left."""
        self.keeper.keep_prompt_ends()

    def _publish_status(self) -> None:
        """What other threads may know of this core: an immutable value."""
        now = time.monotonic()
        self.cache.timed_pins.expire(now)
        running = [request for slot in self.slots if (request := slot.request) is not None]
        self.status = Beat(
            step_age_s=None,
            n_running=sum(not request.ask.ahead for request in running),
            n_queued=len(self.queue),
            version=self.cache.tree.version,
            backlog=backlog_of(self.slots, self.queue, self.speed, self.counts.new_share),
        )
        self.status_due_at = now + STATUS_S
        self.is_status_old = False

    def _decode(self, events: list[Event], meanwhile: Callable[[], None]) -> bool:
        """Decode what is planned. Younger requests are suspended until something fits, so a step with a running request
        never ends in vain. False: no request has text to read or to write."""
        may_draft = True
        while grants := self._with_room(self.planner.plan(time.monotonic()), events):
            drafts = self._drafts(grants) if may_draft else {}
            started = time.monotonic()
            worked = self.speculator.clock()
            feeds = [self._feed(grant, drafts.get(grant.slot)) for grant in grants]
            try:
                self._use_scales(self.slots[grants[0].slot])
                self.context.decode(feeds)
            except ContextFull as error:
                self.speculator.end()
                may_draft = False
                if not drafts:
                    self._make_way(error, events)
                continue
            except DecodeFailed as error:
                self.speculator.end()
                self._start_over([self.slots[grant.slot] for grant in grants], error, events)
                return True
            if self.computes_aside:
                meanwhile()
            self._learn_cost(worked, grants, feeds)
            seconds = time.monotonic() - started
            self._commit(feeds, drafts, events)
            self.speed.learn(sum(len(feed.tokens) for feed in feeds) - self.speculator.n_rejected, seconds)
            return True
        return False

    def _drafts(self, grants: list[Grant]) -> dict[int, Proposal]:
        """What the replies of this step may go on with, by slot. Drafts take only rows and cells that are free."""
        n_rows = sum(grant.n_tokens for grant in grants)
        n_left = self.planner.budget.n_step - n_rows
        if self.context.kind.has_attention:
            n_left = min(n_left, self.context.cells.free - n_rows)
        return self.speculator.draft(grants, self.slots, n_left)

    def _learn_cost(self, worked: float, grants: list[Grant], feeds: list[Feed]) -> None:
        """What a step costs by its rows decides which drafts pay."""
        if not self.speculator.is_on:
            return
        cost = self.speculator.pacing.cost
        n_rows = sum(len(feed.tokens) for feed in feeds)
        is_writing = [self._is_writing(grant) for grant in grants]
        if all(is_writing):
            self.context.logits(0)  # a GPU has not computed them before
            cost.learn(n_rows, self.speculator.clock() - worked)
        elif not any(is_writing):
            cost.learn_reading(n_rows, self.speculator.clock() - worked)
        else:
            cost.passed(n_rows)

    def _is_writing(self, grant: Grant) -> bool:
        """Whether the step brings this reply up to date."""
        slot = self.slots[grant.slot]
        request = slot.request
        return request is not None and request.n_prompt <= slot.n_fed == request.n_items - grant.n_tokens

    def _use_scales(self, slot: Slot) -> None:
        """Decodes from now on with the adapters as the slot's request wants them."""
        if self.model.adapters and slot.request is not None:
            lora = slot.request.ask.lora
            self.context.use_scales(self.model.scales if lora is None else lora)

    def _with_room(self, grants: list[Grant], events: list[Event]) -> list[Grant]:
        """The part of a plan that fits, after suspending as many of the youngest requests as needed. Empty only if
        nothing runs."""
        while grants and not self.cache.room.make_room(sum(grant.n_tokens for grant in grants)):
            kept = fit(grants, oldest_first(self.slots), self.context.cells.free)
            if kept:
                return kept
            self._make_way(ContextFull("every cell is taken by running requests"), events)
            grants = self.planner.plan(time.monotonic())
        return grants

    def _feed(self, grant: Grant, draft: Proposal | None) -> Feed:
        slot = self.slots[grant.slot]
        request = slot.request
        assert request is not None
        stop = slot.n_fed + grant.n_tokens
        tokens = request.tokens(slot.n_fed, stop)
        start = self.context.end(slot.seq)
        if draft is None:
            return Feed(slot.seq, tokens, start, stop == request.n_items, is_for_head=self._is_for_head(request))
        tokens = np.concatenate([tokens, draft.tokens])
        return Feed(slot.seq, tokens, start, True, len(draft.tokens), self._is_for_head(request))

    def _is_for_head(self, request: Request) -> bool:
        return request.may_draft and self.speculator.pacing.is_computing

    # after decoding

    def _commit(self, feeds: list[Feed], drafts: dict[int, Proposal], events: list[Event]) -> None:
        """Every row is read before anything else is decoded: what follows from a draft comes last."""
        if self.picks is not None and len(feeds) > 1:
            self._pick_ahead(self.picks, feeds, drafts)
        drafted: list[tuple[Feed, int]] = []
        for feed, row in _with_rows(feeds):
            slot = self.slots[feed.seq]
            request = slot.request
            if request is None:
                continue  # it starts over
            if feed.seq in drafts:
                drafted.append((feed, row))
            else:
                self.move_on(slot, request, len(feed.tokens), row if feed.wants_logits else None, events)
        self._verify(drafted, drafts, events)
        self.speculator.end()

    def _verify(self, drafted: list[tuple[Feed, int]], drafts: dict[int, Proposal], events: list[Event]) -> None:
        """What was picked is written even where the numbers of a later row were lost: samplers and constraints have taken
        note of it."""
        verified: list[tuple[Feed, list[Picked]]] = []
        for feed, row in drafted:
            slot = self.slots[feed.seq]
            request = slot.request
            if request is None:
                continue  # it starts over
            picked, error = pick(self.context, request, drafts[feed.seq], row)
            if error is not None:
                self._accept(verified, drafts, events)
                events += written(request, picked)
                return self._lose_numbers(slot, error, events)
            verified.append((feed, picked))
        return self._accept(verified, drafts, events)

    def _accept(
        self, verified: list[tuple[Feed, list[Picked]]], drafts: dict[int, Proposal], events: list[Event]
    ) -> None:
        for feed, picked in verified:
            slot = self.slots[feed.seq]
            request = slot.request
            assert request is not None
            events += self.speculator.accept(slot, request, feed, drafts[feed.seq], picked)
            self._go_on(slot, request, picked[-1], events)

    def _pick_ahead(self, picks: PickPool, feeds: list[Feed], drafts: dict[int, Proposal]) -> None:
        """The next tokens of the replies without drafts, all at once."""
        wanted: list[tuple[Sampler, int]] = []
        for feed, row in _with_rows(feeds):
            request = self.slots[feed.seq].request
            if request is not None and feed.wants_logits and feed.seq not in drafts and request.ask.max_tokens:
                wanted.append((request.sampler, row))
        picks.pick_ahead(self.context, wanted)

    def move_on(self, slot: Slot, request: Request, n_items: int, row: int | None, events: list[Event]) -> None:
        """Records that more items were decoded. ``row``: where the logits after the last item are."""
        slot.advance(n_items)
        if request.ask.deterministic and not self._seat_window(slot, request):
            return self._start_over([slot], StateRejected("its window was lost while it was seated anew"), events)
        if slot.n_fed <= request.n_prompt and request.before is None:
            events.append(Progress(request.id, request.n_tokens(slot.n_fed), request.n_prompt_tokens))
        cut = slot.pop_cut()
        if cut is not None and not self.keeper.take(slot, cut.kind):
            self._start_over([slot], StateRejected("its state was lost while it was being kept"), events)
        elif row is not None:
            self._advance(slot, request, row, events)

    def _seat_window(self, slot: Slot, request: Request) -> bool:
        """Seats the window anew wherever a deterministic request could be suspended, whether it is or not."""
        if self.context.kind.has_window and seats_window(slot, request):
            try:
                self.context.touch(slot.seq)
            except StateRejected as error:
                log.warning("a window could not be seated anew: %s", error)
                return False
            slot.note_window_seated()
        return True

    def _advance(self, slot: Slot, request: Request, row: int, events: list[Event]) -> None:
        """All items of a request are decoded: pick the next token."""
        at_prompt_end = slot.n_fed == request.n_prompt
        logits = self.context.logits(row).copy() if at_prompt_end else None
        try:
            token = None if request.ask.max_tokens == 0 else request.sampler.pick(self.context, row)
        except DecodeFailed as error:
            return self._lose_numbers(slot, error, events)
        picked = with_probs(self.context, request, row, token)
        request.watch_for_stop(token)
        if logits is not None:
            self.keeper.note_prompt_end(slot, logits)
        self._go_on(slot, request, picked, events)

    def _go_on_from_logits(self, slot: Slot, request: Request, logits: np.ndarray, events: list[Event]) -> None:
        """The whole prompt was known, and the logits after it."""
        token = None if request.ask.max_tokens == 0 else request.sampler.pick_from(logits)
        request.watch_for_stop(token)
        self._go_on(slot, request, Picked(token, probabilities_of(request, logits, token)), events)

    def _go_on(self, slot: Slot, request: Request, picked: Picked, events: list[Event]) -> None:
        """The reply has one more token, or ends."""
        token = picked.token
        if request.first_token_at is None:
            request.first_token_at = time.monotonic()
        if token is None:
            finish, error = request.without_token()
            self._catch_up(slot, request, request.n_items)
            return self.finish(slot, request, finish, events, error)
        if token in self.model.vocab.eog and not request.ask.ignore_eos:
            self._catch_up(slot, request, request.n_items)
            return self.finish(slot, request, Finish.STOP, events)
        request.append(token)
        events.append(NewToken(request.id, token, picked.probs))
        if (end := request.end()) is not None:
            self._catch_up(slot, request, request.n_items - 1)
            self._end(slot, request, end, events)

    def _end(
        self, slot: Slot, request: Request, finish: Finish, events: list[Event], error: EverwarmError | None = None
    ) -> None:
        """A reply has reached its end; one whose context is full may go on with less behind it."""
        n_ctx = self.settings.n_ctx_of_request(self.context.n_ctx)
        following = request.shifted(n_ctx) if finish is Finish.LENGTH else None
        if following is None:
            return self.finish(slot, request, finish, events, error)
        self.keeper.leave_to_next(slot, request)
        self._requeue(following)

    def _catch_up(self, slot: Slot, request: Request, n_items: int) -> None:
        """Decodes what a reply that ends was to decode again after a rejected draft, so that as much of it is kept as
        without drafts."""
        if not request.n_prompt <= slot.n_fed < n_items:
            return None
        tokens = request.tokens(slot.n_fed, n_items)
        try:
            end = self.context.end(slot.seq)
            feed = Feed(slot.seq, tokens, end, False, is_for_head=self._is_for_head(request))
            self.context.decode([feed])
        except ContextFull:
            return None  # what is decoded is kept
        except DecodeFailed as error:
            log.warning("the end of a reply is not kept: %s", error)
            return slot.vacate()
        return slot.advance(len(tokens))

    def finish(
        self, slot: Slot, request: Request, finish: Finish, events: list[Event], error: EverwarmError | None = None
    ) -> None:
        receipt = self.keeper.end(slot, request, finish)
        self.close_request(request, finish, events, error, receipt)

    def close_request(
        self,
        request: Request,
        finish: Finish,
        events: list[Event],
        error: EverwarmError | None = None,
        receipt: Receipt | None = None,
    ) -> None:
        request.sampler.close()
        if finish in (Finish.STOP, Finish.LENGTH) and not request.ask.ahead:
            self.speed.learn_reply(request.n_reply)
        self.is_status_old = True
        events.append(Finished(request.id, request.result(finish, error), receipt))

    # starting

    def _drop_cancelled(self, events: list[Event]) -> None:
        self.has_cancelled = False
        for request in [r for r in self.queue if r.cancelled]:
            self.drop_waiting(request, Finish.CANCELLED, events)
        for slot in self.slots:
            if slot.request is not None and slot.request.cancelled:
                self.finish(slot, slot.request, Finish.CANCELLED, events)

    def drop_waiting(
        self, request: Request, finish: Finish, events: list[Event], error: EverwarmError | None = None
    ) -> None:
        self.queue.remove(request)
        self.cache.ram_budget.awaited.pop(request.id, None)
        self.admission.forget(request)
        self.close_request(request, finish, events, error)

    def _admit(self, events: list[Event]) -> None:
        """A request that waits for a particular slot, for another's prefill or for its turn lets others pass."""
        running = self._running()
        if self.admission.ends_turn(self.queue, running):
            self.counts.n_turns += 1
            for slot in reversed(running):
                self._suspend(slot, "its turn is over")
        for request in self.admission.candidates(self.queue):
            verdict = self.admission.judge(request)
            if verdict == "full":
                return
            if verdict == "start":
                self._start(request, events)

    def _start(self, request: Request, events: list[Event]) -> None:
        self.admission.charge(request)
        self.queue.admit(request)
        is_first = request.started_at is None
        slot, restored = self.starter.start(request)
        self.is_status_old = True
        if is_first:
            n_cached = request.n_tokens(request.n_cached)
            events.append(Started(request.id, request.n_prompt_tokens, n_cached, slot.seq))
        if restored.logits is not None:
            self._go_on_from_logits(slot, request, restored.logits, events)

    # when a step does not fit or fails

    def _make_way(self, error: ContextFull, events: list[Event]) -> None:
        """The running requests fill the context."""
        running = self._running()
        youngest = next_to_suspend(running)
        if youngest is not None:
            self.counts.n_suspended += 1
            return self._suspend(youngest, str(error))
        slot = running[0]
        request = slot.request
        assert request is not None
        log.debug("request %d ends at %d tokens: %s", request.id, slot.n_fed, error)
        too_long = why_too_long(slot, request)
        self._end(slot, request, Finish.LENGTH if too_long is None else Finish.ERROR, events, too_long)

    def _suspend(self, slot: Slot, reason: str) -> None:
        """Moves a running request to RAM. It comes back in the order of admission and continues where it was."""
        request = slot.request
        assert request is not None
        log.debug("request %d waits at %d tokens: %s", request.id, slot.n_fed, reason)
        self.keeper.keep_end(slot, CutKind.CANCEL)
        request.n_furthest = max(request.n_furthest, slot.n_fed)
        if request.ask.deterministic:
            request.chunks = tuple(slot.chunks)
        slot.release()
        self.cache.ram_budget.awaited[request.id] = slot.node
        self.cache.room.vacate(slot)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self.queue.add_again(request)
        self.is_status_old = True

    def _start_over(
        self, slots: list[Slot], error: MemoryFault, events: list[Event], guilty: Slot | None = None
    ) -> None:
        """libllama failed: these slots are emptied, and their requests are read again or end. What they started from is
        suspect, and only ``guilty`` has failed, or all if that is not known; but none of that where only the weights may
        have been wrong during this step."""
        self.counts.n_decode_failures += 1
        log.warning("a request starts over: %s", error)
        is_innocent = isinstance(error, WeightsTouched)
        for slot in slots:
            request = slot.request
            assert request is not None
            if not is_innocent and slot.node.checkpoint is not None:
                self.cache.checkpointer.quarantine(slot.node, error)
            slot.vacate()
            slot.release()
            request.sampler.forget_ahead()
            request.attempts += guilty in (None, slot) and not is_innocent
            if request.attempts >= MAX_ATTEMPTS:
                self.close_request(request, Finish.ERROR, events, error)
            else:
                self._requeue(request)

    def _lose_numbers(self, slot: Slot, error: DecodeFailed, events: list[Event]) -> None:
        """The model's state overflowed. Nothing of it may stay: it spoils all that attends over it or reuses its cells.
        The requests that ran beside it start over as well; all others are moved out, and everything is zeroed."""
        self.speculator.end()
        self.cache.checkpointer.scrub(slot.node)
        running = [other for other in self.slots if other.request is not None]
        for other in running:
            self.context.scrub(other.seq)
        self._start_over(running, error, events, guilty=slot)
        self.cache.room.clear()
        self.context.clear()

    # images

    def _read_next_image(self, images: ImageCache, events: list[Event]) -> None:
        """One in each step, or one window of a sound: of the oldest request that has come to one."""
        self.is_encoding = False
        slot = next((slot for slot in self._running() if slot.next_image() is not None), None)
        if slot is not None:
            self._read_image(images, slot, events)

    def _read_image(self, images: ImageCache, slot: Slot, events: list[Event]) -> None:
        """Each is read whole and by itself, between two steps of text: it has embeddings instead of tokens."""
        request = slot.request
        item = slot.next_image()
        assert request is not None and item is not None
        embedding = self._encoded(images, slot, request, item, events)
        if embedding is None:
            return
        while slot.request is request and not self.cache.room.make_room(item.n_tokens, keep=slot):
            self._make_way(ContextFull(f"an image needs {item.n_tokens} cells"), events)
        if slot.request is not request:
            return
        ask = request.ask
        is_last = slot.n_fed + 1 == request.n_items
        try:
            end = ask.prompt.mark(slot.n_fed + 1)
            self._use_scales(slot)
            self.context.see(slot.seq, images.media, embedding, end, wants_logits=is_last)
        except ContextFull as error:
            self._make_way(error, events)
        except DecodeFailed as error:
            self._start_over([slot], error, events)
        except EverwarmError as error:
            self.finish(slot, request, Finish.ERROR, events, error)
        else:
            self.move_on(slot, request, 1, 0 if is_last else None, events)

    def _encoded(
        self, images: ImageCache, slot: Slot, request: Request, item: MediaItem, events: list[Event]
    ) -> Embedding | None:
        """None: there are more windows of a sound to encode, in later steps, or it failed and the request has an error."""
        try:
            embedding = images.advance(item, request.ask.images, request.ask.namespace)
        except DecodeFailed as error:
            self._start_over([slot], error, events)
        except EverwarmError as error:
            self.finish(slot, request, Finish.ERROR, events, error)
        else:
            self.is_encoding = embedding is None
            return embedding
        return None

    # when nothing moves

    def _watch_stall(self, events: list[Event]) -> None:
        n_fed = self.context.n_fed
        has_moved = n_fed != self.stall.n_fed or self._has_moved(events)
        self.stall.note(n_fed, has_moved=has_moved)
        if self.stall.is_stalled:
            self.counts.n_stalls += 1
            shown = (self.stall.n_steps, self._describe_stall())
            log.error("nothing has moved for %d steps, so all but the oldest are suspended: %s", *shown)
            for slot in reversed(self._running()[1:]):
                self._suspend(slot, "nothing moved")
        elif self.stall.is_hopeless:
            self.stall.n_steps = 0
            self._end_oldest(events)

    def _has_moved(self, events: list[Event]) -> bool:
        if any(isinstance(event, NewToken | Progress | Finished) for event in events):
            return True
        return not self.has_work or self.admission.is_waiting_for_disk or self.is_encoding

    def _describe_stall(self) -> str:
        first = itertools.islice(self.queue, MAX_SHOWN)
        waiting = [(request, self.admission.judge(request)) for request in first]
        return describe_stall(self.context.cells, self.slots, waiting)

    def _end_oldest(self, events: list[Event]) -> None:
        error = EverwarmError(
            "the engine could not go on with this request: nothing has moved for too long; send it again"
        )
        running = self._running()
        if running:
            request = running[0].request
            assert request is not None
            self.finish(running[0], request, Finish.ERROR, events, error)
            return
        waiting = next(iter(self.queue), None)
        if waiting is not None:
            self.drop_waiting(waiting, Finish.ERROR, events, error)


def _with_rows(feeds: list[Feed]) -> Iterator[tuple[Feed, int]]:
    """Each with the first row of its logits."""
    return zip(feeds, itertools.accumulate((feed.n_rows for feed in feeds), initial=0), strict=False)
