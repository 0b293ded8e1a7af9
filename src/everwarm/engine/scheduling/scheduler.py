"""How many tokens each request decodes in the next step, which one makes room when a step does not fit, and what
happens when nothing moves. Pure: lanes in, grants out; ``core`` acts.

**The rule that keeps the engine moving.** Of the requests that run together the one that was admitted first gets at
least one token in every step (``plan``, ``fit``), and it is never suspended to make room for a younger one
(``next_to_suspend``). A step either decodes more of its items or, where a draft is rejected, adds one to them. So it
ends after at most twice as many steps as it has items, then the next one is the oldest, and every request ends.
Admission and step shares may be ordered in any other way as long as these three functions keep that.

``StepPlanner`` makes lanes of the slots. Requests with other scales of LoRA adapters do not decode in one step: the
scales belong to the whole context. ``StallWatch`` looks for a step without progress although requests wait. The rule
excludes that; it guards against an unknown bug, because an endless loop looks alive from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from everwarm.engine.request import Request
from everwarm.engine.slots import Slot
from everwarm.engine.stats import Speed
from everwarm.errors import PromptTooLong
from everwarm.llama.cells import Cells
from everwarm.state.lineage import chunk_at

T = TypeVar("T")

MIN_BESIDE = 8  # tokens of prompts beside replies, however slow they are read
GPU_STEP_S = 0.25  # how long a step of a GPU may take while replies are being written
MAX_AGAIN = 64  # tokens of a reply that are decoded again in one step, beside others
MAX_ATTEMPTS = 3  # of one request, in which libllama fails
MAX_STEPS = 64  # in a row in which nothing was decoded and no request ended
ADAPTERS_S = 0.2  # how long a group with the same scales of adapters runs on while another waits

LoraScales = tuple[float, ...]


class Lane(NamedTuple):
    """A running request, as far as scheduling cares."""

    slot: int
    n_wanted: int  # tokens up to its next stop: a cut or the end of its items
    is_writing: bool  # its prompt is read: it needs one token per step, and a client watches it
    n_left: int = 0  # tokens of its prompt that are to be read
    admitted: int = 0  # ascending in the order of admission
    priority: int = 0  # the larger, the later
    n_again: int = 0  # tokens of a reply that come before that one: they were taken back with a rejected draft


class Grant(NamedTuple):
    slot: int
    n_tokens: int


class Budget(NamedTuple):
    """``n_step`` tokens in a step; only ``n_beside`` of them for prompts while replies are being written. ``gpu_s``: a GPU
    reads many tokens at once much faster than few, so there are more as long as a step takes no longer; 0: not there."""

    n_step: int
    n_beside: int
    gpu_s: float = 0.0

    def within(self, most_s: float, seconds_per_token: float) -> Budget:
        """With so many tokens of prompts beside replies that a step takes about ``most_s``; 0: as it is, or as a GPU
        reads well."""
        fewest = MIN_BESIDE if most_s else self.n_beside
        n_beside = int((most_s or self.gpu_s) / max(seconds_per_token, 1e-9))
        return self._replace(n_beside=max(fewest, min(n_beside, self.n_step)))


ELDEST_SHARE = 4  # one part in so many of what prompts get is for the one that was admitted first


def plan(lanes: Sequence[Lane], budget: Budget, oldest: int | None = None) -> list[Grant]:
    """Every reply gets its token. What is left goes to the prompt with least to read, then to the next one: read one
    after the other, all but the last are done sooner than side by side, and a short one never waits for long ones. The
    prompt that was admitted first always gets a share. ``oldest`` is the slot of the request that was admitted first: it
    gets a token even if there are fewer of them than requests."""
    reading = sorted([lane for lane in lanes if not lane.is_writing], key=_reading_order)
    n_kept = oldest in [lane.slot for lane in reading]
    writing = sorted([lane for lane in lanes if lane.is_writing], key=lambda lane: lane.slot != oldest)
    grants = _with_tokens_again(writing[: budget.n_step - n_kept], budget.n_step - n_kept)
    if not reading:
        return grants
    room = budget.n_step - sum(grant.n_tokens for grant in grants)
    if grants:
        room = min(room, budget.n_beside)
    if not room:
        return grants
    eldest = min(reading, key=lambda lane: (lane.slot != oldest, lane.admitted))
    given = {eldest.slot: min(eldest.n_wanted, -(-room // ELDEST_SHARE))}
    room -= given[eldest.slot]
    for lane in reading:
        more = min(lane.n_wanted - given.get(lane.slot, 0), room)
        if more > 0:
            given[lane.slot] = given.get(lane.slot, 0) + more
            room -= more
    return [*grants, *(Grant(slot, n) for slot, n in given.items())]


def _reading_order(lane: Lane) -> tuple[int, int, int]:
    return lane.priority, lane.n_left or lane.n_wanted, lane.admitted


def _with_tokens_again(writing: Sequence[Lane], n_step: int) -> list[Grant]:
    """One token for each reply, and before it those that are decoded again, as far as they fit."""
    room, grants = n_step - len(writing), []
    for lane in writing:
        n_again = min(lane.n_again, MAX_AGAIN, room)
        grants.append(Grant(lane.slot, 1 + n_again))
        room -= n_again
    return grants


def fit(grants: Sequence[Grant], running: Sequence[int], n_free: int) -> list[Grant]:
    """What of a plan fits into so many cells: one token each, the oldest first, then the rest in the same order. Empty only
    if not one cell is free. ``running``: the slots of all running requests by admission."""
    wanted = {grant.slot: grant.n_tokens for grant in grants}
    order = [slot for slot in running if slot in wanted]
    given = dict.fromkeys(order[:n_free], 1)
    n_free -= len(given)
    for slot in given:
        more = min(wanted[slot] - 1, n_free)
        given[slot] += more
        n_free -= more
    return [Grant(grant.slot, given[grant.slot]) for grant in grants if grant.slot in given]


def next_to_suspend(oldest_first: Sequence[T]) -> T | None:
    """Which running request makes room when they fill the context: the one that was admitted last. None: only one runs,
    and that one is never suspended for want of room."""
    return oldest_first[-1] if len(oldest_first) > 1 else None


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

    def plan(self, now: float) -> list[Grant]:
        order = oldest_first(self.slots)
        lanes = self._lanes()
        if self.has_adapters:
            scales = {i: request.ask.lora for i in order if (request := self.slots[i].request) is not None}
            chosen = self.adapter_turns.choose(list(scales.values()), now)
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
