"""The requests that wait, who of them starts next, and whether it may: is it its turn, is there a slot, is there room, is
another request reading its prefix? And how much work is ahead of a new one.

**Turns.** A deterministic request runs alone, all others run together, and neither keeps the other waiting for long. What
is suspended at the end of a turn comes back bit for bit, so turns change when a reply comes and never what it says. A
deterministic request is suspended only where an uninterrupted run would seat its window anew, too, and it continues
with the chunks it had: from its own state, or, if that was lost, by reading everything again in the same chunks. Bits
depend on both.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from everwarm.engine.cache.restore import Goal, Restorer, Sources
from everwarm.engine.images import ImageCache
from everwarm.engine.process.messages import Backlog, SentSound
from everwarm.engine.request import Ask, Request
from everwarm.engine.settings import EngineSettings
from everwarm.engine.slots import Slot
from everwarm.engine.stats import Speed
from everwarm.engine.tiers.loader import Fetch, Loader, LoadOutcome
from everwarm.errors import BadRequest, PromptTooLong
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state import policy
from everwarm.state.lineage import SEATED, is_begun_by, is_seated_at, n_items_of
from everwarm.state.policy import GUARD, Cut, CutKind
from everwarm.state.returns import Returns
from everwarm.state.tree import Tree

TURN_S = 3.0  # how long one side runs on while the other waits
SEAT_EVERY = 256  # tokens of a deterministic reply, after which its window is seated anew
RETURN_STEPS = 32  # that all can take once a suspended request has come back
MAX_READING = 2  # long prompts that are read at a time: more only take slots and cells from others
LONG_TOKENS = 512  # to be read; a shorter prompt never waits for long ones
PATIENCE_S, PATIENCE = 5.0, 4.0  # a request is due after so long, and so many times as long as reading it takes
MAX_SOUND_TOKENS = 4096  # of one sound
ESTIMATE_S = 1.0  # how long an estimate of what is to be read holds
USUAL_REPLY = 256  # tokens


class RequestQueue:
    """The requests that wait to start or to continue, and the numbers of those that were admitted."""

    def __init__(self) -> None:
        self._waiting: collections.deque[Request] = collections.deque()
        self._n_admitted = 0  # requests, each once

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    @property
    def n_suspended_alone(self) -> int:
        """Deterministic requests that have started and wait for their next turn."""
        return sum(request.ask.deterministic and request.admitted is not None for request in self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def add_again(self, request: Request) -> None:
        """Queues a request that was admitted before: ahead of those that never were, in the order of admission. A
        deterministic one goes to the end of the queue, so that each of them has its turn."""
        assert request.admitted is not None
        together = [] if request.ask.deterministic else [r for r in self._waiting if not r.ask.deterministic]
        younger = (r for r in together if r.admitted is None or r.admitted > request.admitted)
        first = next(younger, None)
        self._waiting.insert(len(self._waiting) if first is None else self._waiting.index(first), request)

    def admit(self, request: Request) -> None:
        """Removes a request that starts now, or continues. It keeps the number that it got the first time."""
        self._waiting.remove(request)
        if request.admitted is None:
            self._n_admitted += 1
            request.admitted = self._n_admitted

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)


@dataclass(slots=True)
class TurnTaking:
    """Whose turn it is, since when, and since when the other side waits."""

    turn_s: float = TURN_S
    is_alone: bool = False  # a deterministic request has it
    began_at: float = 0.0
    others_since: float | None = None

    def begin(self, *, is_alone: bool, now: float) -> None:
        self.is_alone = is_alone
        self.began_at = now
        self.others_since = None

    def note_waiting(self, waiting: Sequence[bool], now: float) -> None:
        """Who waits now: for each request whether it runs alone."""
        if (not self.is_alone) not in waiting:
            self.others_since = None
        elif self.others_since is None:
            self.others_since = now

    def is_over(self, now: float, *, has_advanced: bool) -> bool:
        """Whether the other side's turn has come. Never before the oldest of this side is further than it ever was: else
        one whose state was lost while it was suspended would read the same again in every turn."""
        if self.others_since is None or not has_advanced:
            return False
        return now - max(self.began_at, self.others_since) >= self.turn_s


def next_side(was_alone: bool, waiting: Sequence[bool]) -> bool:
    """Whose turn it is when nothing runs: the other side's if it waits, so that neither starves."""
    return (not was_alone) if (not was_alone) in waiting else was_alone


def can_pause(slot: Slot) -> bool:
    """Whether a running request with a sliding window can be suspended here; without a window any can be anywhere, and
    with one those that are not deterministic."""
    request = slot.request
    if request is None or not request.ask.deterministic:
        return True
    return bool(slot.chunks) and slot.chunks[-1][0] == SEATED


def seats_window(slot: Slot, request: Request) -> bool:
    """Whether the window is seated anew after what was just decoded: at fixed places of a reply, or where it was."""
    if slot.n_fed <= n_items_of(request.chunks):
        return is_seated_at(request.chunks, slot.n_fed)
    return slot.n_fed > request.n_prompt and (slot.n_fed - request.n_prompt) % SEAT_EVERY == 0


def is_as_before(slot: Slot, request: Request, *, is_clean: bool) -> bool:
    """Whether what was restored for a request is, bit for bit, the beginning of what it had decoded itself.
    ``is_clean``: a cold replay would reproduce the slot's sequence."""
    if not request.chunks or not slot.n_fed:
        return True
    return is_clean and is_begun_by(request.chunks, slot.chunks)


# Whether a request may start; "wait": for a particular slot or reader, so others may pass; "full": none may pass.
Verdict = Literal["start", "wait", "full"]


class Shares:
    """Start-time fair queueing over namespaces: the one that was given least starts next, and one that was away brings no
    credit with it."""

    def __init__(self) -> None:
        self._now = 0.0  # virtual: where the last request started
        self._ends: dict[str, float] = {}  # by namespace, those beyond now

    def start(self, namespace: str) -> float:
        """Where the next request of a namespace would start; the smallest goes first."""
        return max(self._now, self._ends.get(namespace, 0.0))

    def charge(self, namespace: str, n_tokens: int) -> None:
        self._now = self.start(namespace)
        self._ends[namespace] = self._now + n_tokens
        self._ends = {name: end for name, end in self._ends.items() if end > self._now}


class Admission:
    def __init__(
        self,
        context: Context,
        tree: Tree,
        slots: list[Slot],
        restorer: Restorer,
        loader: Loader,
        returns: Returns,
        speed: Speed,
        *,
        cuts: bool,
    ) -> None:
        """``cuts``: checkpoints are taken, so a prompt that is being read can stop for another request."""
        self._speed = speed
        self._shares = Shares()
        self._estimates: dict[
            int, tuple[int, float]
        ] = {}  # by request: what it has to read, and when that was estimated
        self._context = context
        self._tree = tree
        self._slots = slots
        self._takes_cuts = cuts
        self._restorer = restorer
        self._loader = loader
        self._returns = returns
        self._fetches: dict[int, Fetch | LoadOutcome] = {}  # by request; what is being read, or what there is instead
        self.turns = TurnTaking()

    def ends_turn(self, queue: RequestQueue, running: Sequence[Slot]) -> bool:
        """A deterministic request and all the others do not run together. True: the time of those that run is over; they
        are to be suspended, and the other side's turn begins. ``running``: the oldest first."""
        now = time.monotonic()
        waiting = [request.ask.deterministic for request in queue]
        if not running:
            self.turns.begin(is_alone=next_side(self.turns.is_alone, waiting), now=now)
            return False
        self.turns.note_waiting(waiting, now)
        oldest = running[0]
        has_advanced = oldest.request is not None and oldest.n_fed > oldest.request.n_furthest
        is_over = self.turns.is_over(now, has_advanced=has_advanced) and self._can_pause(oldest)
        if is_over:
            self.turns.begin(is_alone=not self.turns.is_alone, now=now)
        return is_over

    def _can_pause(self, slot: Slot) -> bool:
        return not self._context.kind.has_window or can_pause(slot)

    def candidates(self, queue: RequestQueue) -> list[Request]:
        """The requests whose turn it is, in the order in which they are judged. No more deterministic ones take turns than
        there are slots: each keeps a state in RAM."""
        is_full = queue.n_suspended_alone >= len(self._slots)
        own = [r for r in self.in_order(queue, time.monotonic()) if r.ask.deterministic == self.turns.is_alone]
        return [r for r in own if not (r.ask.deterministic and is_full and r.admitted is None)]

    def in_order(self, queue: Iterable[Request], now: float) -> list[Request]:
        """Who is judged first. Requests that were admitted before keep their order, ahead of all others, and so do
        deterministic ones. Of the others: by priority, those that are due, the namespace that was served least, and
        within it the one with least to read."""
        waiting = list(queue)
        fresh = [r for r in waiting if r.admitted is None and not r.ask.deterministic]
        if len(fresh) < 2:
            return waiting
        first = [r for r in waiting if r.admitted is not None or r.ask.deterministic]
        return [*first, *sorted(fresh, key=lambda request: self._rank(request, now))]

    def _rank(self, request: Request, now: float) -> tuple[float, ...]:
        n_to_read = self._n_to_read(request, now)
        patience_s = PATIENCE_S + PATIENCE * n_to_read * self._speed.seconds_per_token
        if now - request.submitted_at >= patience_s:
            return request.ask.priority, 0, request.submitted_at
        return request.ask.priority, 1, self._shares.start(request.ask.namespace), n_to_read, request.submitted_at

    def judge(self, request: Request) -> Verdict:
        verdict = self._judge_place(request)
        return "wait" if verdict == "start" and self._waits_for_load(request) else verdict

    def charge(self, request: Request) -> None:
        """Counts a request that starts in its namespace's share; one that was suspended has been counted."""
        if request.admitted is None:
            n_to_read, _ = self._estimates.pop(request.id, (request.n_prompt, 0.0))
            self._shares.charge(request.ask.namespace, n_to_read + min(request.ask.max_tokens, USUAL_REPLY))

    def _judge_place(self, request: Request) -> Verdict:
        slots = self._slots
        running = [slot for slot in slots if slot.request is not None]
        if not running:
            return "start"
        alone = request.ask.deterministic or any(s.request and s.request.ask.deterministic for s in running)
        if alone or len(running) == len(slots):
            return "full"
        if request.ask.slot is not None and not slots[request.ask.slot].is_idle:
            return "wait"
        prompt = request.items(request.n_items)
        if not self._fits_beside(request, prompt, running):
            return "full"
        if request.ask.use_cache and self._waits_for_reader(request, prompt, running):
            return "wait"
        if request.admitted is None and self._are_enough_read(request, running):
            return "wait"
        return "start"

    def _are_enough_read(self, request: Request, running: list[Slot]) -> bool:
        """Whether a long prompt waits until others are read."""
        reading = sum(slot.request.n_prompt - slot.n_fed > LONG_TOKENS for slot in running if slot.request is not None)
        return reading >= MAX_READING and self._n_to_read(request, time.monotonic()) > LONG_TOKENS

    def _n_to_read(self, request: Request, now: float) -> int:
        """How much of its prompt is not known, as far as RAM and the device tell."""
        n_to_read, at = self._estimates.get(request.id, (0, float("-inf")))
        if now - at > ESTIMATE_S:
            prompt = request.items(request.n_items)
            n_to_read = request.n_prompt - (
                self._restorer.known(prompt, request.ask.namespace) if request.ask.use_cache else 0
            )
            self._estimates[request.id] = n_to_read, now
        return n_to_read

    # the disk

    def _waits_for_load(self, request: Request) -> bool:
        """Whether a load from disk is still running for it. The first call starts the load."""
        if not request.ask.use_cache:
            return False
        fetch = self._fetches.get(request.id)
        while fetch is None or (isinstance(fetch, Fetch) and fetch.is_lost):
            if fetch is None and not self._loader.is_on:
                return False
            if fetch is None and self._are_many_loaded():
                return True
            self._fetches[request.id] = fetch = self._sought(request)
        return isinstance(fetch, Fetch) and not fetch.is_done

    def _are_many_loaded(self) -> bool:
        """What is loaded for requests that wait lies in RAM."""
        return sum(isinstance(fetch, Fetch) for fetch in self._fetches.values()) > len(self._slots)

    def _sought(self, request: Request) -> Fetch | LoadOutcome:
        prompt, namespace = request.items(request.n_items), request.ask.namespace
        match = self._restorer.match(prompt, namespace, self._restorer.sources(prompt, namespace))
        ends = (
            *request.ask.hints.boundaries,
            *(() if request.ask.hints.stable is None else (request.ask.hints.stable,)),
        )
        return self._loader.seek(prompt, namespace, match, ends, exact=request.ask.deterministic)

    def lay_fetched(self, request: Request) -> LoadOutcome:
        """Adds what was loaded for a request to the tree."""
        fetch = self._fetches.pop(request.id, LoadOutcome())
        return fetch if isinstance(fetch, LoadOutcome) else self._loader.lay(fetch)

    def forget(self, request: Request) -> None:
        self._fetches.pop(request.id, None)
        self._estimates.pop(request.id, None)

    def drop_fetches(self, requests: Iterable[Request]) -> None:
        """Discards what was loaded from other tiers for these requests: it is to be forgotten."""
        for request in requests:
            if request.id in self._fetches:
                self._fetches[request.id] = LoadOutcome()

    @property
    def is_waiting_for_disk(self) -> bool:
        return any(isinstance(fetch, Fetch) and not fetch.is_done for fetch in self._fetches.values())

    def wait_for_disk(self, seconds: float) -> None:
        """When there is nothing else to do."""
        reading = (fetch for fetch in self._fetches.values() if isinstance(fetch, Fetch) and not fetch.is_done)
        fetch = next(reading, None)
        if fetch is not None:
            fetch.wait(seconds)

    # room and readers

    def _fits_beside(self, request: Request, prompt: Prompt, running: list[Slot]) -> bool:
        """Whether its new cells fit beside those of the running ones, once all others have made room. First checks the
        largest possible sharing, which is cheap; then what a restore will really share."""
        if not self._context.kind.has_attention:
            return True
        shared = 0
        if self._context.kind.can_share_cells and request.ask.use_cache:
            root = self._tree.root(request.ask.namespace)
            kin = [slot for slot in running if slot.node.root() is root]
            shared = max((int(prompt.common_prefix(slot.resident())) for slot in kin), default=0)
        used = self._context.cells.used_by(slot.seq for slot in running)
        new = prompt.n_tokens(len(prompt)) - prompt.n_tokens(shared)
        room = self._context.n_ctx - self._n_to_grow(request, len(running))
        return used + new <= room and (not shared or self._n_cells_beside(request, prompt, running) <= room)

    def _n_to_grow(self, request: Request, n_running: int) -> int:
        """Cells that stay free for the next steps. A suspended request does not come back for a few tokens only: moving
        it costs as much as decoding many."""
        if request.admitted is None:
            return n_running + 1
        return RETURN_STEPS * n_running + min(RETURN_STEPS, request.n_left + 1)

    def _n_cells_beside(self, request: Request, prompt: Prompt, running: list[Slot]) -> int:
        slot = self.seat(request, self._restorer.sources(prompt, request.ask.namespace))
        goal = Goal(prompt, request.ask.namespace)
        return self._restorer.n_cells_beside(slot, goal, [other.seq for other in running])

    def _waits_for_reader(self, request: Request, prompt: Prompt, running: list[Slot]) -> bool:
        """Whether waiting for another request that is being read saves reading the same twice. If so, that one is told to
        stop where the two part, to keep the state that this one will start from."""
        root = self._tree.root(request.ask.namespace)
        for slot in running:
            reader = slot.request
            if reader is None or slot.n_fed >= reader.n_prompt or slot.node.root() is not root:
                continue
            n_common = int(prompt.common_prefix(reader.items(reader.n_prompt)))
            if n_common - slot.n_fed > GUARD and n_common - self._restorer.known(prompt, request.ask.namespace) > GUARD:
                self._cut_at(slot, min(n_common, len(prompt) - 1))  # the last item is always read
                return True
        return False

    def _cut_at(self, slot: Slot, at: int) -> None:
        reader = slot.request
        if reader is not None and at < reader.n_prompt and self._takes_cuts:
            slot.add_cut(Cut(at, CutKind.BRANCH))

    def seat(self, request: Request, sources: Sources) -> Slot:
        """The idle slot that a request gets."""
        slots = self._slots
        if request.ask.slot is not None:
            return slots[request.ask.slot]
        now = time.monotonic()
        seats = [
            policy.Seat(i, slot.n_fed, sources.get(slot.seq, 0), slot.used_at)
            for i, slot in enumerate(slots)
            if slot.is_idle
        ]
        return slots[policy.seat(seats, lambda i: self._returns.worth(slots[i].node, now - slots[i].used_at))]


def require_possible(ask: Ask, context: Context, settings: EngineSettings, images: ImageCache | None = None) -> None:
    """Refuse what can never be answered, with what would be right."""
    n_tokens = ask.prompt.n_tokens(len(ask.prompt))
    n_slots = settings.n_slots
    if n_tokens >= (n_ctx := settings.n_ctx_of_request(context.n_ctx)):
        raise PromptTooLong(n_tokens, n_ctx)
    if ask.prompt.media and images is None:
        raise BadRequest("this model reads text only: start it with --mmproj and its projector file")
    _require_short_sounds(ask)
    seen = (item for item in ask.prompt.media.values() if not isinstance(ask.images.get(item.digest), SentSound))
    largest = max((int(item.n_tokens) for item in seen), default=0)
    if images is not None and not images.media.is_causal and largest > context.options.n_ubatch:
        raise BadRequest(
            f"an image takes {largest} tokens and this model reads each at once; "
            f"send a smaller one, or start with a --ubatch-size of at least {largest}"
        )
    top = context.model.vocab.n_tokens - 1
    if int(ask.prompt.codes.max()) > top:
        raise BadRequest(f"token {int(ask.prompt.codes.max())} is not in the vocabulary; give 0 to {top}")
    if ask.slot is not None and not 0 <= ask.slot < n_slots:
        raise BadRequest(f"slot {ask.slot} does not exist; give 0 to {n_slots - 1}")


def _require_short_sounds(ask: Ask) -> None:
    """A sound is read in one step, for which all other requests wait."""
    for item in ask.prompt.media.values():
        if isinstance(ask.images.get(item.digest), SentSound) and item.n_tokens > MAX_SOUND_TOKENS:
            raise BadRequest(
                f"a sound takes {item.n_tokens} tokens, and each is read at once; send it in parts of at most "
                f"{MAX_SOUND_TOKENS} tokens, one after the other in the same message"
            )


def backlog_of(slots: Sequence[Slot], queue: Iterable[Request], speed: Speed, new_share: float) -> Backlog:
    """How much work is ahead of a new request. ``new_share``: how much of a prompt is usually to be read."""
    running = [(slot.n_fed, request) for slot in slots if (request := slot.request) is not None]
    waiting = list(queue)
    reads = [max(0.0, request.n_prompt - n_fed) for n_fed, request in running]
    writes = [_n_expected(speed, request) for _, request in running]
    soonest = min(zip(reads, writes, strict=True), key=sum, default=(0.0, 0.0))
    return Backlog(
        n_slots=len(slots),
        n_running=len(running),
        n_waiting=len(waiting),
        n_reply=speed.n_reply,
        n_to_read=sum(reads) + sum(new_share * request.n_prompt for request in waiting),
        n_to_write=sum(writes) + sum(_n_expected(speed, request) for request in waiting),
        n_next_read=soonest[0],
        n_next_write=soonest[1],
        read_s=speed.seconds_per_token,
        write_s=speed.write_s,
    )


def _n_expected(speed: Speed, request: Request) -> float:
    """Tokens it will still write: as many as a reply has on average, or as it has already, but no more than it may; all
    that it may where nothing else ends it."""
    if request.ask.ignore_eos:
        return float(request.n_left)
    return min(float(request.n_left), max(speed.n_reply, request.n_reply))
