"""The token loop: one step admits, plans, decodes, picks and keeps. Single-threaded; owns the context.

    step:  admit → plan → make room → decode → commit (pick · cut · finish)

Requests are read and written the same way: a request has items, some of them decoded, and every step decodes some more of
them. Knows no threads and no text.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.compaction import Joiner
from everwarm.engine.cache.device_room import DeviceRoom
from everwarm.engine.cache.drop import Dropper
from everwarm.engine.cache.offload import Offload
from everwarm.engine.cache.partings import Partings
from everwarm.engine.cache.prewarm import PrewarmQueue, is_worth_prewarming, unread_rest
from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.cache.restore import Goal, Restored, Restorer
from everwarm.engine.cache.timed_pins import TimedPins
from everwarm.engine.images import ImageCache
from everwarm.engine.inspect.read_reason import ReadFacts, explain
from everwarm.engine.inspect.stats import CheckpointStats, RequestStats
from everwarm.engine.memory_plan import Sizes
from everwarm.engine.process.messages import Backlog, ReadReason
from everwarm.engine.process.reply_text import items_text, left_probabilities, probabilities
from everwarm.engine.recovery import Remedy, StallWatch, Suspend, after_failure, when_full
from everwarm.engine.request import Ask, Event, Finish, Finished, NewToken, Probs, Progress, Request, Started
from everwarm.engine.scheduling.adapter_turns import AdapterTurns, with_own_namespace
from everwarm.engine.scheduling.admission import Admission, Verdict, backlog_of, require_possible
from everwarm.engine.scheduling.scheduler import Budget, Grant, Lane, fit, plan
from everwarm.engine.scheduling.turns import TurnTaking, can_pause, is_as_before, next_side, seats_window
from everwarm.engine.settings import EngineSettings
from everwarm.engine.slotfile.unverified import Unverified
from everwarm.engine.slots import Slot, Spares
from everwarm.engine.speculation.speculator import Draft, Speculator
from everwarm.engine.speculation.stop_watch import StopWatch
from everwarm.engine.speed import Speed
from everwarm.engine.tiers.loader import Brought, Loader
from everwarm.engine.tiers.ram import Ram, Receipt
from everwarm.engine.tiers.tier_writer import TierWriter
from everwarm.errors import ContextFull, DecodeFailed, EverwarmError, MemoryFault, ModelChanged, StateRejected
from everwarm.llama.constraints.thinking_limit import ThinkingLimit
from everwarm.llama.context import Context, Feed
from everwarm.llama.model import Model
from everwarm.llama.sampler import Sampler
from everwarm.llama.system.file_watch import FileWatch
from everwarm.state import policy
from everwarm.state.lineage import chunk_at, n_items_of
from everwarm.state.policy import Cut, CutKind
from everwarm.state.returns import Returns
from everwarm.state.tree import Match, Tree

log = logging.getLogger("everwarm.engine")

OPEN_WAIT_S = 20.0  # for the disk tier to open, before stopping
NAP_S = 0.25  # between looks at whether it has opened
FILES_WAIT_S = 0.01  # at once, while a file is read again
STATUS_S = 0.1  # between two published statuses while steps run
DISK_WAIT_S = 0.002  # at once, while nothing else is to be done: a request may be cancelled
MAX_SHOWN = 16  # waiting requests, in the log of a stall


class PromptEnd(NamedTuple):
    """Where a prompt ended in a slot, with the logits after it."""

    slot: Slot
    n_fed: int
    logits: np.ndarray


class Verified(NamedTuple):
    """A draft, and what the request's own sampler picked after each of its tokens, as far as they agree."""

    slot: Slot
    request: Request
    feed: Feed
    draft: Draft
    picked: list[tuple[int | None, Probs | None]]


class CoreStatus(NamedTuple):
    """What other threads may know of a core: published by the loop's thread, and never changed."""

    n_running: int  # without what is read ahead
    n_queued: int
    tree_version: int
    backlog: Backlog


@dataclass(slots=True)
class Core:
    # the model, and the sequences of its context
    model: Model
    files: list[FileWatch]  # of the model and its projector
    is_right: Callable[[], bool]  # whether all that was computed matches them; any thread may ask, and may have to wait
    settings: EngineSettings
    sizes: Sizes
    context: Context
    slots: list[Slot]
    spares: Spares
    images: ImageCache | None  # None: the model sees no images
    # what is kept of prompts
    tree: Tree
    checkpointer: Checkpointer
    checkpoint_stats: CheckpointStats
    returns: Returns
    restorer: Restorer
    room: DeviceRoom
    joiner: Joiner
    dropper: Dropper
    # RAM, disk and the remote store
    ram: Ram
    ram_budget: RamBudget
    ram_writer: RamWriter
    tier_writer: TierWriter
    loader: Loader
    offload: Offload | None  # None: nothing outlives this engine but what is on disk
    # requests: which may start, and how fast they go
    admission: Admission
    unverified: Unverified
    step_budget: Budget
    speed: Speed
    speculator: Speculator
    queue: collections.deque[Request] = field(default_factory=collections.deque)
    prewarm: PrewarmQueue = field(default_factory=PrewarmQueue)
    partings: Partings = field(default_factory=Partings)
    turns: TurnTaking = field(default_factory=TurnTaking)
    adapter_turns: AdapterTurns = field(default_factory=AdapterTurns)
    stall: StallWatch = field(default_factory=StallWatch)
    counts: RequestStats = field(default_factory=RequestStats)
    n_admitted: int = 0  # requests, each once
    has_cancelled: bool = False  # a request was cancelled since the last step
    ends: list[PromptEnd] = field(default_factory=list)  # of prompts, reached in the last step and not kept yet
    timed_pins: TimedPins = field(init=False)
    # what other threads may know
    status: CoreStatus = field(init=False)
    _status_due_at: float = 0.0
    _is_status_old: bool = False  # a request has come, started or ended since

    def __post_init__(self) -> None:
        self.timed_pins = TimedPins(self.tree)
        self._publish_status()

    def close(self) -> None:
        for request in (*self.queue, *(slot.request for slot in self.slots if slot.request)):
            request.sampler.close()
        for part in (self.loader, self.tier_writer, self.ram, self.images, self.speculator, self.context, self.model):
            if part is not None:
                part.close()

    # the files it was opened from

    def require_same_model(self) -> None:
        """``ModelChanged``: a file was overwritten. Nothing computed here is valid for the file as it is now."""
        for files in self.files:
            if files.is_changed:
                raise ModelChanged(files.reason)

    def _may_compute(self) -> bool:
        """False: a file seems to have been written to, and is being read again."""
        self.require_same_model()
        held = [files for files in self.files if not files.may_be_used]
        for files in held:
            files.wait_decided(FILES_WAIT_S)
        return not held

    def put_away(self) -> None:
        """Before stopping: makes everything worth keeping durable, also of running requests."""
        self.tier_writer.wait_open(OPEN_WAIT_S)
        for slot in self.slots:
            if slot.request is not None:
                self.finish(slot, slot.request, Finish.CANCELLED, [])
        self.prewarm.waiting.clear()
        while self.tidy() or self.tier_writer.catch_up():
            pass
        self.ram.flush()
        self.tier_writer.flush_all()

    # asking

    def submit(self, ask: Ask) -> Request:
        """Queue a request, or refuse it with a reason."""
        request = self.enqueue(ask)
        self.give_way()
        return request

    def give_way(self) -> None:
        """A request has come: prewarming stops, and continues later from the same point."""
        ahead = self.prewarm.give_way()
        if ahead is not None:
            self.cancel(ahead.id)
            self.counts.n_prewarms_interrupted += 1

    def enqueue(self, ask: Ask) -> Request:
        """Queues a request, after checks that keep it from aborting libllama."""
        require_possible(ask, self.context, self.settings, self.images)
        ask = self.unverified.route(with_own_namespace(ask, self.model.scales))
        matcher = None if ask.constraint is None else ask.constraint.matcher(ignore_eos=ask.ignore_eos)
        sampler = Sampler(
            self.model,
            ask.sampling,
            ask.prompt.tokens,
            matcher,
            ignore_eos=ask.ignore_eos,
            limit=None if ask.thinking is None else ThinkingLimit(self.model.vocab, ask.thinking),
            n_candidates=ask.n_probs if ask.post_sampling else None,
        )
        n_more = ask.prompt.n_tokens(len(ask.prompt)) - len(ask.prompt)  # cells of images beyond one each
        room = min(len(ask.prompt) + ask.max_tokens, self.settings.n_ctx_of_request(self.context.n_ctx) - n_more)
        request = Request(ask, sampler, room, time.monotonic())
        if ask.stop and self.speculator.is_on:
            request.stop_watch = StopWatch(self.model.vocab, ask.stop)
        self.queue.append(request)
        self._is_status_old = True
        return request

    def cancel(self, request_id: int) -> None:
        """Cancels a request at the next step. What was read until then is kept."""
        for request in (*self.queue, *(slot.request for slot in self.slots if slot.request)):
            if request.id == request_id:
                request.cancelled = self.has_cancelled = True

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
        self.partings.forget(namespace)
        self.speculator.forget()
        ahead = self.prewarm.drop(namespace)
        if ahead is not None:
            self.cancel(ahead.id)
            self.stop(ahead.id)
        self.admission.drop_fetches(request for request in self.queue if request.ask.namespace.startswith(namespace))

    @property
    def has_work(self) -> bool:
        return bool(self.queue) or any(slot.request is not None for slot in self.slots)

    @property
    def is_reading(self) -> bool:
        return bool(self.queue) or any(slot.request and slot.n_fed < slot.request.n_prompt for slot in self.slots)

    def tidy(self) -> bool:
        """One piece of idle work. False: there is none."""
        done = self.ram_writer.tidy() or self.tier_writer.tidy(self.slots)
        done = done or self.begin_prewarm() or self.joiner.tidy(self.slots)
        if not done or self._is_status_old:
            self._publish_status()  # before the loop waits for a job
        return done

    def begin_prewarm(self) -> bool:
        """Start to read ahead the newest that is worth it. False: there is none."""
        for waiting in self.prewarm.take_newest(time.monotonic()):
            following = waiting.ask.prompt
            self.checkpointer.drop_left_aside(following, self.tree.match(waiting.ask.namespace, following, 0))
            if not is_worth_prewarming(waiting.ask, self.restorer, self.context):
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
        if self.offload is not None:
            self.offload.copy_piece(self.slots)
        self.tier_writer.tidy_overdue(self.slots, time.monotonic())

    @property
    def nap_s(self) -> float | None:
        """How long to wait for a job before looking for idle work again; None: until one comes."""
        return NAP_S if self.tier_writer.is_unsettled else None

    # the step

    def step(self) -> list[Event]:
        """Runs one step. Call ``keep_ends`` next, once the events are sent: it keeps the prompt ends that the step
        reached."""
        self.keep_ends()
        events: list[Event] = []
        if self._step(events):
            self._watch_stall(events)
        if self._is_status_old:
            self._publish_status()
        return events

    def _publish_status(self) -> None:
        self.timed_pins.expire(time.monotonic())
        running = [request for slot in self.slots if (request := slot.request) is not None]
        self.status = CoreStatus(
            n_running=sum(not request.ask.ahead for request in running),
            n_queued=len(self.queue),
            tree_version=self.tree.census.version,
            backlog=backlog_of(self.slots, self.queue, self.speed, self.counts.new_share),
        )
        self._status_due_at = time.monotonic() + STATUS_S
        self._is_status_old = False

    def _step(self, events: list[Event]) -> bool:
        """False: nothing may be computed now. That does not count as a stall."""
        if self.has_cancelled:
            self._drop_cancelled(events)
        if self.queue:
            self._admit(events)
        if self._is_status_old or time.monotonic() >= self._status_due_at:
            self._publish_status()  # before what may take long
        if not self._may_compute():
            return False
        if self.images is not None:
            slot = next((slot for slot in self._running() if slot.next_image() is not None), None)
            if slot is not None:
                self._read_image(self.images, slot, events)
        if not self._decode(events) and self.queue:
            self.admission.wait_for_disk(DISK_WAIT_S)
        return True

    def _decode(self, events: list[Event]) -> bool:
        """Decode what is planned. Younger requests are suspended until something fits, so a step with a running request
        never ends in vain. False: no request has text to read or to write."""
        may_draft = True
        while grants := self._with_room(self.plan(), events):
            drafts = self._drafts(grants) if may_draft else {}
            started, worked = time.monotonic(), self.speculator.clock()
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
            self._learn_cost(worked, grants, feeds)
            seconds = time.monotonic() - started
            self._commit(feeds, drafts, events)
            self.speed.learn(sum(len(feed.tokens) for feed in feeds) - self.speculator.n_rejected, seconds)
            return True
        return False

    def _drafts(self, grants: list[Grant]) -> dict[int, Draft]:
        """What the replies of this step may go on with, by slot. Drafts take only rows and cells that are free."""
        n_rows = sum(grant.n_tokens for grant in grants)
        n_left = self.step_budget.n_step - n_rows
        if self.context.kind.has_attention:
            n_left = min(n_left, self.context.cells.free - n_rows)
        return self.speculator.draft(grants, self.slots, n_left)

    def _learn_cost(self, worked: float, grants: list[Grant], feeds: list[Feed]) -> None:
        """What a step that only writes costs by its rows decides which drafts pay."""
        if self.speculator.is_on and all(map(self._is_writing, grants)):
            self.context.logits(0)  # a GPU has not computed them before
            n_rows = sum(len(feed.tokens) for feed in feeds)
            self.speculator.pacing.cost.learn(n_rows, self.speculator.clock() - worked)

    def _is_writing(self, grant: Grant) -> bool:
        """Whether the step brings this reply up to date."""
        slot = self.slots[grant.slot]
        request = slot.request
        return request is not None and request.n_prompt <= slot.n_fed == request.n_items - grant.n_tokens

    def plan(self) -> list[Grant]:
        order, lanes = self.oldest_first(), self._lanes()
        if self.model.adapters:
            scales = {i: request.ask.lora for i in order if (request := self.slots[i].request) is not None}
            chosen = self.adapter_turns.choose(list(scales.values()), time.monotonic())
            order = [i for i in order if scales.get(i) == chosen]
            lanes = [lane for lane in lanes if lane.slot in order]
        budget = self.step_budget
        if not all(lane.is_writing for lane in lanes):  # how much is read beside replies depends on how fast that is
            budget = budget.within(self.settings.max_step_ms / 1e3, self.speed.seconds_per_token)
        return plan(lanes, budget, order[0] if order else None)

    def _use_scales(self, slot: Slot) -> None:
        """Decodes from now on with the adapters as the slot's request wants them."""
        if self.model.adapters and slot.request is not None:
            lora = slot.request.ask.lora
            self.context.use_scales(self.model.scales if lora is None else lora)

    def _with_room(self, grants: list[Grant], events: list[Event]) -> list[Grant]:
        """The part of a plan that fits, after suspending as many of the youngest requests as needed. Empty only if
        nothing runs."""
        while grants and not self.room.make_room(sum(grant.n_tokens for grant in grants)):
            kept = fit(grants, self.oldest_first(), self.context.cells.free)
            if kept:
                return kept
            self._make_way(ContextFull("every cell is taken by running requests"), events)
            grants = self.plan()
        return grants

    def oldest_first(self) -> list[int]:
        """The slots of the running requests, by admission."""
        running = [(slot.request.admitted or 0, i) for i, slot in enumerate(self.slots) if slot.request is not None]
        return [i for _, i in sorted(running)]

    def _running(self) -> list[Slot]:
        """The same slots themselves."""
        return [self.slots[i] for i in self.oldest_first()]

    def requeue(self, request: Request) -> None:
        """Queues a request that was admitted before: ahead of those that never were, in the order of admission. A
        deterministic one goes to the end of the queue, so that each of them has its turn."""
        assert request.admitted is not None
        together = [] if request.ask.deterministic else [r for r in self.queue if not r.ask.deterministic]
        younger = (r for r in together if r.admitted is None or r.admitted > request.admitted)
        first = next(younger, None)
        self.queue.insert(len(self.queue) if first is None else self.queue.index(first), request)
        self._is_status_old = True

    def keep_ends(self) -> None:
        """Park the ends of prompts that the last step reached, after their first tokens have left."""
        while self.ends:
            slot, n_fed, logits = self.ends.pop()
            if slot.n_fed == n_fed:  # else it was lost in the same step
                self.checkpointer.take(slot, CutKind.END, logits=logits)  # parks or does nothing

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
        return min(n, self.settings.prefill_beside_decode) if request.ask.ahead else n  # a request may come any moment

    def _feed(self, grant: Grant, draft: Draft | None) -> Feed:
        slot = self.slots[grant.slot]
        request = slot.request
        assert request is not None
        stop = slot.n_fed + grant.n_tokens
        tokens = request.tokens(slot.n_fed, stop)
        start = self.context.end(slot.seq)
        if draft is None:
            return Feed(slot.seq, tokens, start, stop == request.n_items, is_for_head=self._is_for_head(request))
        return Feed(slot.seq, np.concatenate([tokens, draft.tokens]), start, True, len(draft.tokens))

    def _is_for_head(self, request: Request) -> bool:
        return request.may_draft and self.speculator.pacing.is_computing

    # after decoding

    def _commit(self, feeds: list[Feed], drafts: dict[int, Draft], events: list[Event]) -> None:
        """Every row is read before anything else is decoded: what follows from a draft comes last."""
        row, verified = 0, []
        for feed in feeds:
            slot = self.slots[feed.seq]
            request, draft = slot.request, drafts.get(feed.seq)
            if request is None:
                continue  # it starts over
            if draft is None:
                self.move_on(slot, request, len(feed.tokens), row if feed.wants_logits else None, events)
            elif (picked := self._pick_drafted(slot, request, draft, row, events)) is not None:
                verified.append(Verified(slot, request, feed, draft, picked))
            row += feed.n_rows
        for each in verified:
            if each.slot.request is each.request:
                self._accept(each, events)
        self.speculator.end()

    def _pick_drafted(
        self, slot: Slot, request: Request, draft: Draft, row: int, events: list[Event]
    ) -> list[tuple[int | None, Probs | None]] | None:
        """The next tokens, one after each row, until one is not as drafted or ends the reply. None: the numbers were
        lost."""
        picked: list[tuple[int | None, Probs | None]] = []
        for i, drafted in enumerate([*draft.tokens.tolist(), None]):
            try:
                token = request.sampler.pick(self.context, row + i)
            except DecodeFailed as error:
                self._lose_numbers(slot, error, events)
                return None
            picked.append((token, self._probs(request, row + i, token)))
            if self._is_end(request, token) or token != drafted:
                break
        return picked

    def _is_end(self, request: Request, token: int | None) -> bool:
        """Whether the reply ends with this token, or at it: nothing may be decoded after it."""
        if token is None or (token in self.model.vocab.eog and not request.ask.ignore_eos):
            return True
        matcher = request.sampler.matcher
        return request.ends_text(token) or (matcher is not None and matcher.is_complete)

    def _accept(self, verified: Verified, events: list[Event]) -> None:
        """Keeps what was picked as drafted, takes the rest of the draft out of the context, and goes on with the tokens."""
        slot, request, feed, draft, picked = verified
        n_accepted = len(picked) - 1
        self.speculator.judge(request, draft, n_accepted)
        n_kept = len(feed.tokens) - feed.n_draft + n_accepted
        if n_accepted < feed.n_draft:
            n_kept = self.speculator.rollback.cut(feed, n_kept)
        if n_kept:
            slot.advance(n_kept)
        for drafted, (_, probs) in zip(draft.tokens[:n_accepted].tolist(), picked, strict=False):
            request.append(drafted)
            events.append(NewToken(request.id, drafted, probs))
        self._go_on(slot, request, *picked[-1], events)

    def move_on(self, slot: Slot, request: Request, n_items: int, row: int | None, events: list[Event]) -> None:
        """Records that more items were decoded. ``row``: where the logits after the last item are."""
        slot.advance(n_items)
        if request.ask.deterministic and not self._seat_window(slot, request):
            return self._start_over([slot], StateRejected("its window was lost while it was seated anew"), events)
        if slot.n_fed <= request.n_prompt:
            events.append(Progress(request.id, request.n_tokens(slot.n_fed), request.n_prompt_tokens))
        cut = slot.pop_cut()
        if cut is not None and not self._take(slot, cut.kind):
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
        probs = self._probs(request, row, token)
        request.ends_text(token)
        if logits is not None:
            self.ends.append(PromptEnd(slot, slot.n_fed, logits))
        self._go_on(slot, request, token, probs, events)

    def _probs(self, request: Request, row: int, token: int | None) -> Probs | None:
        """What the request wants to know of the token that was picked from this row."""
        return None if request.ask.n_probs is None else _probs(request, self.context.logits(row), token)

    def _go_on(self, slot: Slot, request: Request, token: int | None, probs: Probs | None, events: list[Event]) -> None:
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
        events.append(NewToken(request.id, token, probs))
        if (end := request.end()) is not None:
            self._catch_up(slot, request, request.n_items - 1)
            self.finish(slot, request, end, events)

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
        request.ended_at = time.monotonic()
        if request.ask.ahead:
            return self._finish_ahead(slot, request, finish, events)
        if request.ask.is_background:
            return self._finish_background(slot, request, finish, events, error)
        if finish is Finish.CANCELLED and self.settings.finish_prefill_s:
            rest = unread_rest(request, slot.n_fed)
            if rest is not None:
                self.prewarm.offer(rest, request.ended_at + self.settings.finish_prefill_s)
        if slot.n_fed < request.n_prompt:
            self.keep_end(slot, CutKind.CANCEL)
        elif slot.n_fed > request.n_prompt and self.returns.keeps_replies:
            self.keep_end(slot, CutKind.REPLY)
        elif slot.n_fed:
            self.checkpointer.mark_end(slot)
        self.returns.leave(slot.node, request.n_prompt, request.continuation)
        slot.release()
        slot.remember(request.ask.namespace)
        slot.touch(time.monotonic())
        self.close_request(request, finish, events, error, self._offload_rest(slot, request))

    def _offload_rest(self, slot: Slot, request: Request) -> Receipt | None:
        if self.offload is None or request.ended_at is None:
            return None
        return self.offload.finish(slot, request.n_prompt, request.ended_at)

    def _finish_ahead(self, slot: Slot, request: Request, finish: Finish, events: list[Event]) -> None:
        """Keeps what was read ahead; it belongs to no conversation yet."""
        self.counts.n_prewarm_tokens += slot.n_fed - request.n_cached
        self.counts.n_prewarms += self.prewarm.ended(request)
        if slot.n_fed:
            self._take(slot, CutKind.PREWARM)
        slot.release()
        slot.touch(time.monotonic())
        self.close_request(request, finish, events)

    def _finish_background(
        self, slot: Slot, request: Request, finish: Finish, events: list[Event], error: EverwarmError | None
    ) -> None:
        """Keeps little: a retry continues from what was read. It is no visit that may return, and is not written to
        disk; its slot is the next to be given up."""
        if slot.n_fed < request.n_prompt:
            self.keep_end(slot, CutKind.BACKGROUND)
        elif slot.n_fed:
            self.checkpointer.mark_end(slot)
        slot.release()
        slot.remember(request.ask.namespace)
        slot.touch(0.0)
        slot.note_archived()
        self.close_request(request, finish, events, error)

    def keep_end(self, slot: Slot, kind: CutKind) -> None:
        if slot.n_fed > slot.node.n_items:
            self.checkpointer.mark_end(slot)
            self._take(slot, kind)

    def _take(self, slot: Slot, kind: CutKind) -> bool:
        """Takes a checkpoint. False: the state was lost by that, and the slot is empty now."""
        try:
            self.checkpointer.take(slot, kind)
        except StateRejected as error:
            log.warning("a state was lost while it was being kept: %s", error)
            slot.vacate()
            return False
        return True

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
        self._is_status_old = True
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
        self.ram_budget.awaited.pop(request.id, None)
        self.admission.forget(request)
        self.close_request(request, finish, events, error)

    def _admit(self, events: list[Event]) -> None:
        """Admits in the order of ``Admission.in_order``, but a request that waits for a particular slot, for another's
        prefill or for its turn lets others pass."""
        self._take_turns()
        is_full = sum(r.ask.deterministic and r.admitted is not None for r in self.queue) >= len(self.slots)
        for request in self.admission.in_order(self.queue, time.monotonic()):
            if request.ask.deterministic != self.turns.is_alone:
                continue
            if request.ask.deterministic and is_full and request.admitted is None:
                continue  # no more of them take turns than there are slots: each keeps a state in RAM
            verdict = self.admission.judge(request)
            if verdict is Verdict.FULL:
                return
            if verdict is Verdict.START:
                self.queue.remove(request)
                self._start(request, events)

    def _take_turns(self) -> None:
        """A deterministic request and all the others do not run together: when one side's time is over it is suspended."""
        now = time.monotonic()
        waiting = [request.ask.deterministic for request in self.queue]
        running = self.oldest_first()
        if not running:
            return self.turns.begin(is_alone=next_side(self.turns.is_alone, waiting), now=now)
        self.turns.note_waiting(waiting, now)
        oldest = self.slots[running[0]]
        assert oldest.request is not None
        has_advanced = oldest.n_fed > oldest.request.n_furthest
        if self.turns.is_over(now, has_advanced=has_advanced) and self._can_pause(oldest):
            self.counts.n_turns += 1
            for i in reversed(running):
                self._suspend(self.slots[i], "its turn is over")
            self.turns.begin(is_alone=not self.turns.is_alone, now=now)

    def _start(self, request: Request, events: list[Event]) -> None:
        if request.admitted is None:
            self.n_admitted += 1
            request.admitted = self.n_admitted
        self.ram_budget.awaited.pop(request.id, None)
        is_first = request.started_at is None
        request.started_at = request.started_at or time.monotonic()
        if request.ask.deterministic:
            self.room.clear()  # it runs alone, from the first cell on
        prompt = request.items(request.n_items)
        brought = self.admission.lay_fetched(request)
        goal = Goal(prompt, request.ask.namespace, request.ask.deterministic, brought.n_items, brought.tier)
        sources = self.restorer.sources(prompt, goal.namespace) if request.ask.use_cache else []
        slot = self.admission.seat(request, sources)
        match = self.restorer.match(prompt, goal.namespace, sources)
        if is_first and not request.ask.ahead and not request.ask.is_background:
            request.continuation = self.returns.arrive(match, time.monotonic())
        if request.ask.use_cache:
            restored = self.restorer.bring(slot, goal, match, sources)
        else:
            restored = self.restorer.start_cold(slot, goal)
        if not is_as_before(slot, request, is_clean=self.context.is_clean(slot.seq)):
            restored = self.restorer.start_cold(slot, goal)  # its suspended state was lost: it is read again
        slot.seat(request, self._plan_cuts(request, match, restored))
        self._is_status_old = True
        if not request.ask.ahead:
            self.room.limit_idle(self.settings.idle_cells)
        self.ram_budget.enforce()  # what was pinned meanwhile may go now
        for other in self.slots:
            if slot.session is not None and other.session == slot.session:
                other.touch(time.monotonic())
        if is_first:
            request.note_start(restored.n_items, match.n_shared, restored.use)
            if not request.ask.ahead:
                request.why = self._why(request, match, restored, brought)
                self.counts.add(request, request.why)
            n_cached = request.n_tokens(request.n_cached)
            events.append(Started(request.id, request.n_prompt_tokens, n_cached, slot.seq))
        if restored.logits is not None:
            self._go_on_from_logits(slot, request, restored.logits, events)

    def _why(self, request: Request, match: Match, restored: Restored, brought: Brought) -> ReadReason:
        """Why a request read what it read. Looks up only what the reason may depend on."""
        ask = request.ask
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
            forgotten=None if is_known else self.tree.forgotten.parting(ask.namespace, ask.prompt),
            use_cache=ask.use_cache,
            deterministic=ask.deterministic,
            has_attention=self.context.kind.has_attention,
            needs_checkpoints=self.context.kind.needs_checkpoints,
            max_checkpoints=self.checkpointer.spacing.max_checkpoints,
            eviction=partial(self.tree.forgotten.eviction, ask.namespace, ask.prompt),
            now=time.monotonic(),
        )
        return explain(facts, partial(items_text, self.model.vocab))

    def _go_on_from_logits(self, slot: Slot, request: Request, logits: np.ndarray, events: list[Event]) -> None:
        token = None if request.ask.max_tokens == 0 else request.sampler.pick_from(logits)
        request.ends_text(token)
        self._go_on(slot, request, token, _probs(request, logits, token), events)

    def _plan_cuts(self, request: Request, match: Match, restored: Restored) -> list[Cut]:
        """Where the prompt is cut, the nearest last."""
        known = match.n_shared if match.n_shared - restored.n_items > policy.GUARD else None
        found = policy.cuts(
            request.n_prompt,
            self.checkpointer.spacing,
            n_ubatch=self.settings.n_ubatch,
            boundaries=request.ask.boundaries,
            stable=request.ask.stable,
            branch=known,
            media=request.ask.prompt.media,
            stables=request.ask.stables,
            breakpoints=request.ask.breakpoints,
            learned=self._learned_places(request, restored.n_items, known),
            volatile=request.ask.volatile,
            joints=request.ask.joints if self._may_guess(request) else (),
            kept=0 if request.ask.deterministic else self._n_kept(match, restored),
        )
        needed = self.context.kind.needs_checkpoints
        if request.chunks:
            found = request.cuts  # as before it was suspended
        elif request.ask.deterministic:
            request.cuts = tuple(found)
        n_passed = max(restored.n_items, n_items_of(request.chunks))
        ahead = [cut for cut in reversed(found) if needed and cut.at > n_passed]
        if request.ask.ahead:  # of that only the end is kept, and where a guess begins
            ahead = [Cut(cut.at, CutKind.PREWARM) for cut in ahead if cut.at == request.ask.stable]
        elif request.ask.is_background and not request.ask.deterministic:
            ahead = [Cut(cut.at, CutKind.BACKGROUND) for cut in ahead if cut.kind is CutKind.STABLE]
        return [cut for cut in ahead if request.ask.deterministic or self.checkpointer.is_worth_a_cut(cut.kind)]

    @staticmethod
    def _n_kept(match: Match, restored: Restored) -> int:
        """Where a request goes on, if another one could go on there as well; else 0."""
        return restored.n_items if any(node.n_items == restored.n_items for node in match.usable) else 0

    def _learned_places(self, request: Request, n_restored: int, branch: int | None) -> list[int]:
        ask = request.ask
        if ask.deterministic or not ask.use_cache:
            return []
        if branch is not None and not any(0 <= branch - end <= policy.GUARD for end in ask.boundaries):
            self.partings.note(ask.namespace, ask.prompt, branch)  # inside a message
        found = self.partings.places(ask.namespace, ask.prompt, n_restored)
        return [*self.returns.places(request.n_prompt, self.checkpointer.spacing), *found]

    def _may_guess(self, request: Request) -> bool:
        """Whether to stop at joints. They are worth little, so only while RAM has room to spare; and the chunks of a
        deterministic request must not depend on that."""
        return not request.ask.deterministic and self.ram_budget.is_roomy(request.ask.namespace)

    # when a step does not fit or fails

    def _can_pause(self, slot: Slot) -> bool:
        return not self.context.kind.has_window or can_pause(slot)

    def _make_way(self, error: ContextFull, events: list[Event]) -> None:
        """The running requests fill the context."""
        effect = when_full(self._running(), error)
        if isinstance(effect, Suspend):
            self.counts.n_suspended += 1
            return self._suspend(effect.slot, effect.reason)
        request = effect.slot.request
        assert request is not None
        log.debug("request %d ends at %d tokens: %s", request.id, effect.slot.n_fed, error)
        self.finish(effect.slot, request, effect.finish, events, effect.error)

    def _suspend(self, slot: Slot, reason: str) -> None:
        """Moves a running request to RAM. It comes back in the order of admission and continues where it was."""
        request = slot.request
        assert request is not None
        log.debug("request %d waits at %d tokens: %s", request.id, slot.n_fed, reason)
        self.keep_end(slot, CutKind.CANCEL)
        request.n_furthest = max(request.n_furthest, slot.n_fed)
        if request.ask.deterministic:
            request.chunks = tuple(slot.chunks)
        slot.release()
        self.ram_budget.awaited[request.id] = slot.node
        self.room.vacate(slot)
        self.requeue(request)

    def _start_over(
        self, slots: list[Slot], error: MemoryFault, events: list[Event], guilty: Slot | None = None
    ) -> None:
        """libllama failed: these slots are emptied, and their requests are read again or end."""
        self.counts.n_decode_failures += 1
        log.warning("a request starts over: %s", error)
        for effect in after_failure(slots, error, guilty):
            request = effect.slot.request
            assert request is not None
            if effect.is_suspect and effect.slot.node.checkpoint is not None:
                self.checkpointer.quarantine(effect.slot.node, error)
            effect.slot.vacate()
            effect.slot.release()
            request.attempts += effect.has_failed
            if effect.gives_up:
                self.close_request(request, Finish.ERROR, events, error)
            else:
                self.requeue(request)

    def _lose_numbers(self, slot: Slot, error: DecodeFailed, events: list[Event]) -> None:
        """The model's state overflowed. Nothing of it may stay: it spoils all that attends over it or reuses its cells.
        The requests that ran beside it start over as well; all others are moved out, and everything is zeroed."""
        self.speculator.end()
        self.checkpointer.scrub(slot.node)
        running = [other for other in self.slots if other.request is not None]
        for other in running:
            self.context.scrub(other.seq)
        self._start_over(running, error, events, guilty=slot)
        self.room.clear()
        self.context.clear()

    def _read_image(self, images: ImageCache, slot: Slot, events: list[Event]) -> None:
        """Each is read whole and by itself, between two steps of text: it has embeddings instead of tokens."""
        request, item = slot.request, slot.next_image()
        assert request is not None and item is not None
        while slot.request is request and not self.room.make_room(item.n_tokens, keep=slot):
            self._make_way(ContextFull(f"a picture needs {item.n_tokens} cells"), events)
        if slot.request is not request:
            return
        ask, is_last = request.ask, slot.n_fed + 1 == request.n_items
        try:
            embedding = images.embedding(item, ask.images, ask.namespace)
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

    def _watch_stall(self, events: list[Event]) -> None:
        n_fed = self.context.n_fed
        has_moved = n_fed != self.stall.n_fed or self._has_moved(events)
        match self.stall.note(n_fed, has_moved=has_moved):
            case Remedy.SUSPEND_YOUNGER:
                self.counts.n_stalls += 1
                shown = (self.stall.n_steps, self._describe_stall())
                log.error("nothing has moved for %d steps, so all but the oldest are suspended: %s", *shown)
                for slot in reversed(self._running()[1:]):
                    self._suspend(slot, "nothing moved")
            case Remedy.END_OLDEST:
                self._end_oldest(events)

    def _has_moved(self, events: list[Event]) -> bool:
        if any(isinstance(event, NewToken | Progress | Finished) for event in events):
            return True
        return not self.has_work or self.admission.is_waiting_for_disk

    def _describe_stall(self) -> str:
        """Which request waits for what, with counts of cells."""
        cells = self.context.cells
        parts = [f"{cells.used} of {cells.n_cells} cells are in use"]
        for slot in self.slots:
            if slot.request is not None:
                done = f"{slot.n_fed} of {slot.request.n_items} items"
                parts.append(
                    f"request {slot.request.id} in slot {slot.seq} has {done} in {cells.count(slot.seq)} cells"
                )
        for request in list(self.queue)[:MAX_SHOWN]:
            n_cells = request.n_tokens(request.n_items)
            parts.append(f"request {request.id} waits for {n_cells} cells: {self.admission.judge(request).value}")
        return "; ".join(parts)

    def _end_oldest(self, events: list[Event]) -> None:
        error = EverwarmError(
            "the engine could not go on with this request: nothing has moved for too long; send it again"
        )
        running = self._running()
        if running:
            request = running[0].request
            assert request is not None
            self.finish(running[0], request, Finish.ERROR, events, error)
        elif self.queue:
            self.drop_waiting(self.queue[0], Finish.ERROR, events, error)


def _probs(request: Request, logits: np.ndarray, token: int | None) -> Probs | None:
    if request.ask.post_sampling:
        return left_probabilities(token, request.sampler.candidates)
    return probabilities(logits, token, request.ask.n_probs)
