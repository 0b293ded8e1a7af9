"""What to keep: where to cut a prompt, which checkpoints to thin, and the rule of eviction.

``score`` is what an entry is worth, and ``choose`` picks the least valuable. What an entry in RAM saves and how soon it is
used again, ``ram_eviction`` finds out. The disk has the same rule in a form that needs no look at every entry:
``store.disk_eviction``.

Pure: values in, values out; no clock, no disk, no logging. Counts are items of the prompt.

``CheckpointParams`` says how densely checkpoints are taken and how many are kept; the defaults need no tuning.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from everwarm.config import require

MIN_SPACING, MAX_SPACING = 256, 8192
WINDOW_FLOOR = 64
GUARD = 16  # an identical prompt reads at most this many items again
NEAR_END = 4  # items before the end of a prompt: where the guard checkpoint is taken if no stable point is near
SHORT = 64  # the same on a GPU, for a prompt that goes on from a checkpoint: a stop would take as long as reading them
HALF_LIFE_S = (
    30.0  # of the chance of reuse at first, where nothing was learned; each further halving takes twice as long
)
LOADED_SHARE = 0.25  # of the time to read it: what the disk gives back no sooner has no place there
MAX_BREAKPOINTS = 16  # of one prompt; of more the last ones count


@dataclass(frozen=True, slots=True)
class CheckpointParams:
    """``None`` means: fit to the model (see ``fitted``). A value that is set is honoured for every kind of model.

    max_checkpoints  kept on one path from the beginning to the end of a conversation; 0 switches the mechanism off
    every_n_tokens   spacing inside long messages; 0 or less: only near the end of a prompt
    min_tokens       no checkpoint before this many tokens
    min_gap          no checkpoint closer than this to the one before it

    The checkpoints at the end of a prompt are always taken, unless ``max_checkpoints`` is 0.
    """

    max_checkpoints: int = 32
    every_n_tokens: int | None = None
    min_tokens: int | None = None
    min_gap: int | None = None

    def __post_init__(self) -> None:
        _bounded("max_checkpoints", self.max_checkpoints, 0, 1 << 20)
        _bounded("every_n_tokens", self.every_n_tokens, -1, 1 << 26)
        _bounded("min_tokens", self.min_tokens, 0, 1 << 26)
        _bounded("min_gap", self.min_gap, 0, 1 << 26)

    def with_max_checkpoints(self, max_checkpoints: int) -> CheckpointParams:
        return replace(self, max_checkpoints=max_checkpoints)

    def with_every_n_tokens(self, every_n_tokens: int) -> CheckpointParams:
        return replace(self, every_n_tokens=every_n_tokens)

    def with_min_tokens(self, min_tokens: int) -> CheckpointParams:
        return replace(self, min_tokens=min_tokens)

    def with_min_gap(self, min_gap: int) -> CheckpointParams:
        return replace(self, min_gap=min_gap)

    def fitted(self, *, state_bytes: int, kv_bytes_per_token: int, window: bool, on_gpu: bool = False) -> Spacing:
        """The numbers for one model: a state then costs about what the KV it stands for costs."""
        natural = state_bytes // kv_bytes_per_token if kv_bytes_per_token else MAX_SPACING
        every = min(max(natural, MIN_SPACING), MAX_SPACING) if self.every_n_tokens is None else self.every_n_tokens
        floor = WINDOW_FLOOR if window else 0
        return Spacing(
            max_checkpoints=self.max_checkpoints,
            every_n_tokens=every,
            min_tokens=floor if self.min_tokens is None else self.min_tokens,
            min_gap=floor if self.min_gap is None else self.min_gap,
            n_unguarded=SHORT if on_gpu else 0,
        )


@dataclass(frozen=True, slots=True)
class Spacing:
    """``CheckpointParams`` with every number decided."""

    max_checkpoints: int
    every_n_tokens: int
    min_tokens: int
    min_gap: int
    n_unguarded: int = 0  # a prompt that goes on from a checkpoint no farther from its end has no guard


def _bounded(name: str, value: int | None, low: int, high: int) -> None:
    require(value is None or low <= value <= high, f"{name} is {value}; give {low} to {high}")


class CutKind(enum.Enum):
    """Why a checkpoint is where it is. ``_RANK`` says which kinds are thinned first."""

    PREWARM = "prewarm"
    BACKGROUND = "background"
    EVERY = "every-n"
    LEARNED = "learned"
    GUESS = "guess"
    BRANCH = "branch"
    BOUNDARY = "boundary"
    BREAKPOINT = "breakpoint"
    NEAR_END = "near-end"
    CANCEL = "cancelled"
    REPLY = "reply-end"
    END = "prompt-end"
    STABLE = "stable"

    @classmethod
    def named(cls, value: str) -> CutKind:
        """The kind that a file names; an unknown one counts as a boundary."""
        return next((cut for cut in cls if cut.value == value), cls.BOUNDARY)


def first_message(opening: int | None, boundaries: Iterable[int]) -> range | None:
    """The items of the first message after the system text; None: it is not known."""
    if opening is None:
        return None
    end = min((at for at in boundaries if at > opening), default=None)
    return None if end is None else range(opening, end)


def is_new_conversation(n_known: int, n_prompt: int, first: range | None, *, parts: bool) -> bool:
    """Whether only the template's tokens, or they and all of the system text, were known: that is no conversation.
    ``parts``: what is known goes on otherwise. A difference inside of the system text is an edit, and so is one after the
    first message."""
    if not parts:
        return n_known == 0 or n_known <= GUARD < n_prompt - n_known
    if first is None:
        return n_known <= GUARD
    return n_known < first.stop and (n_known <= GUARD or first.start <= n_known <= first.start + GUARD)


MESSAGE_ENDS = (CutKind.BOUNDARY, CutKind.BREAKPOINT)
PROVISIONAL = (CutKind.PREWARM, CutKind.BACKGROUND)  # evicted first, until a request continues from them

_LESSER = (*PROVISIONAL, CutKind.EVERY, CutKind.LEARNED, CutKind.GUESS, CutKind.NEAR_END, CutKind.END)


def better(known: CutKind, new: CutKind) -> CutKind:
    """The kind of a checkpoint that is taken a second time, for another reason."""
    return new if known in _LESSER and new is not CutKind.END else known


@dataclass(frozen=True, slots=True)
class Cut:
    """A checkpoint that is to be taken, or was."""

    at: int
    kind: CutKind


def cuts(
    n_items: int,
    spacing: Spacing,
    *,
    n_ubatch: int,
    boundaries: Iterable[int] = (),
    stable: int | None = None,
    branch: int | None = None,
    media: Iterable[int] = (),
    stables: Iterable[int] = (),
    breakpoints: Iterable[int] = (),
    learned: Iterable[int] = (),
    volatile: Iterable[int] = (),
    joints: Iterable[int] = (),
    kept: int = 0,
) -> tuple[Cut, ...]:
    """Where prefill stops to take a checkpoint, ascending, all inside the prompt.

    ``stable`` is where all likely next turns differ from this prompt, ``stables`` where some of them do,
    ``breakpoints`` are what the caller demands, ``learned`` where earlier prompts were left, ``volatile`` where the text is
    likely to change, and ``joints`` where it may. ``kept`` is where reading begins, with a checkpoint; 0: there is none.
    All other cuts, but the end cuts and the branch, depend only on what lies before them, so extending a prompt never
    moves an earlier cut.
    """
    if spacing.max_checkpoints == 0:
        return ()
    found = {cut.at: cut for cut in _steady_cuts(n_items, spacing, boundaries)}
    if branch is not None and 0 < branch < n_items:
        before = max((at for at in found if at <= branch), default=0)
        if _far_enough(branch, before, spacing):
            found[branch] = Cut(branch, CutKind.BRANCH)
    for at in learned:
        if 0 < at < n_items:
            found.setdefault(at, Cut(at, CutKind.LEARNED))
    for at in sorted({at for at in breakpoints if 0 < at < n_items})[-MAX_BREAKPOINTS:]:
        found[at] = Cut(at, CutKind.BREAKPOINT)
    is_guarded = kept <= 0 or n_items - kept > spacing.n_unguarded
    for cut in _end_cuts(n_items, is_guarded, {at for at in (stable, *stables) if at is not None and 0 < at < n_items}):
        found[cut.at] = cut
    for at in {at for index in media for at in (index, index + 1) if 0 < at < n_items} - found.keys():
        found[at] = Cut(at, CutKind.BOUNDARY)  # right before and right after an image, which is read as a whole
    found |= {at: Cut(at, CutKind.GUESS) for at in _guesses(found, spacing, volatile, joints) if at < n_items}
    if spacing.every_n_tokens <= 0:
        near = n_items - NEAR_END - n_ubatch
        found = {at: cut for at, cut in found.items() if at >= near or cut.kind in _INSISTED}
    return tuple(found[at] for at in sorted(found))


_INSISTED = (CutKind.STABLE, CutKind.BRANCH, CutKind.BREAKPOINT)


def _steady_cuts(n_items: int, spacing: Spacing, boundaries: Iterable[int]) -> Iterable[Cut]:
    """Message boundaries, and evenly spaced points inside long messages."""
    inside = sorted({b for b in boundaries if 0 < b < n_items})
    last, message_start = 0, 0
    for stop, kind in [*((b, CutKind.BOUNDARY) for b in inside), (n_items, None)]:
        if spacing.every_n_tokens > 0:
            for at in range(message_start + spacing.every_n_tokens, stop, spacing.every_n_tokens):
                if _far_enough(at, last, spacing):
                    yield Cut(at, CutKind.EVERY)
                    last = at
        if kind is not None and _far_enough(stop, last, spacing):
            yield Cut(stop, kind)
            last = stop
        message_start = stop


def _guesses(taken: Collection[int], spacing: Spacing, volatile: Iterable[int], joints: Iterable[int]) -> Iterable[int]:
    """Of the points where the text may change, those that are far enough behind the cut before them. Joints only make
    the spacing of cuts closer, as long as thinning would leave them."""
    closer = max(2 * GUARD, spacing.every_n_tokens // 3)
    gaps = dict.fromkeys(joints, closer) | dict.fromkeys(volatile, 2 * GUARD)
    last, n_left = 0, spacing.max_checkpoints - len(taken)
    for at in sorted({*taken, *gaps}):
        if at in taken:
            last = at
        elif at - last >= gaps[at] and _far_enough(at, last, spacing) and (gaps[at] < closer or n_left > 0):
            yield at
            last, n_left = at, n_left - 1


def _far_enough(at: int, last: int, spacing: Spacing) -> bool:
    return at >= spacing.min_tokens and at - last >= max(1, spacing.min_gap)


def _end_cuts(n_items: int, is_guarded: bool, stables: set[int]) -> Iterable[Cut]:
    if is_guarded and n_items > 1 and n_items - max(stables, default=-GUARD) > GUARD:
        yield Cut(n_items - min(NEAR_END, n_items - 1), CutKind.NEAR_END)
    for stable in stables:
        yield Cut(stable, CutKind.STABLE)


def thin(path: Sequence[Cut], max_checkpoints: int, pinned: Collection[int] = ()) -> list[int]:
    """Which checkpoints of a path (ascending) to give up so that ``max_checkpoints`` remain, by where they are.
    ``pinned``: where the pinned ones are.

    Kinds of rank 0 go before those of rank 1, and pinned ones last of all; the newest two stay. Within a rank the one that
    leaves the smallest hole for its distance from the end goes first, so what remains is spaced geometrically with the
    distance from the end.
    """
    kept, given_up = list(path), []
    while len(kept) > max(1, max_checkpoints):
        candidates = range(len(kept) - min(2, len(kept) - 1))
        worst = min(candidates, key=lambda i: (kept[i].at in pinned, _RANK[kept[i].kind], _hurt(kept, i)))
        given_up.append(kept.pop(worst).at)
    return given_up


# A kind that serves only its own prompt is thinned before one that a next turn, a retry or another conversation uses.
_RANK = {
    CutKind.PREWARM: 0,
    CutKind.BACKGROUND: 0,
    CutKind.EVERY: 0,
    CutKind.LEARNED: 0,
    CutKind.GUESS: 0,
    CutKind.NEAR_END: 0,
    CutKind.CANCEL: 0,
    CutKind.END: 0,
    CutKind.REPLY: 1,
    CutKind.BRANCH: 1,
    CutKind.BOUNDARY: 1,
    CutKind.BREAKPOINT: 1,
    CutKind.STABLE: 1,
}


def _hurt(kept: Sequence[Cut], i: int) -> float:
    before = kept[i - 1].at if i else 0
    hole = kept[i + 1].at - before
    return hole / (kept[-1].at - before + 1)


def worth_saving(path: Sequence[Cut], max_checkpoints: int, pinned: Collection[int]) -> list[int]:
    """Which checkpoints of a conversation (ascending) go into a file, by where they are: at most so many, as ``thin``
    chooses. Left out are guesses that no request continued from, states of requests that were suspended or cancelled, and
    the ends of prompts before the last one: a later turn has superseded them."""
    last_end = max((cut.at for cut in path if cut.kind is CutKind.END), default=0)
    kept = [
        cut
        for i, cut in enumerate(path)
        if cut.at in pinned
        or i == len(path) - 1
        or not (cut.kind in (*PROVISIONAL, CutKind.CANCEL) or (cut.kind is CutKind.END and cut.at < last_end))
    ]
    given_up = set(thin(kept, max_checkpoints, pinned))
    return [cut.at for cut in kept if cut.at not in given_up]


class Entry(NamedTuple):
    """Something that can be evicted, as far as eviction cares."""

    key: int
    size_bytes: int
    seconds_saved: float  # what reading again from the nearest surviving ancestor would cost
    returns: float  # expected, per unit of time, that would resume from here: see ``state.returns``
    age_s: float = 0.0
    stranded: bool = False  # its lineage is broken: it cannot be used
    is_ahead: bool = False  # prewarmed or of a background call, and not used yet
    above: int | None = None  # the entry from whose end it would be read again
    kv_bytes: int = 0  # of KV that goes with it if no entry below it needs that
    pinned: bool = False  # evicted only when nothing else can be
    load_s: float = math.inf  # what bringing it back from the disk takes; infinite: it is not there


def score(entry: Entry | _Kept) -> float:
    """Seconds of reading, or of loading from the disk, that a byte saves per unit of time."""
    return min(entry.seconds_saved, entry.load_s) * entry.returns / max(1, entry.size_bytes)


def assumed_returns(hits: int, age_s: float) -> float:
    """The chance of reuse where nothing was learned. It falls with the inverse of the age: an hour after its last use
    an entry is about half as likely to be used in the next minute as after half an hour."""
    return math.sqrt(1 + hits) / (1 + max(0.0, age_s) / HALF_LIFE_S)


@dataclass(frozen=True, slots=True)
class EvictionChoice:
    """What to evict, in that order, and what would follow. A worth is a ``score`` at the time of the choice."""

    keys: tuple[int, ...]
    worths: tuple[float, ...] = ()
    next_keys: tuple[int, ...] = ()
    least_kept: float | None = None  # the worth of what would follow; None: nothing is left
    freed_bytes: int = 0
    missed_s: float = 0.0  # seconds of reading, or of loading, per unit of time that the evicted ones would have saved


def choose(entries: Iterable[Entry], bytes_to_free: int, n_next: int = 1) -> EvictionChoice:
    """Picks the least valuable entries until ``bytes_to_free`` are free or none is left.

    Evicting an entry makes those below it more valuable, because they would be read again from farther up; its returns
    then resume from the entry above, which may also lose the last one that needed its KV. So the values are updated
    after each eviction.
    """
    order = _least_first(entries)
    chosen: list[_Kept] = []
    freed = 0
    while freed < bytes_to_free and (least := next(order, None)) is not None:
        chosen.append(least)
        freed += least.size_bytes
    following = list(islice(order, n_next))
    return EvictionChoice(
        tuple(each.entry.key for each in chosen),
        tuple(score(each) for each in chosen),
        tuple(each.entry.key for each in following),
        score(following[0]) if following else None,
        freed,
        sum(each.missed_s for each in chosen),
    )


def victims(entries: Iterable[Entry], bytes_to_free: int) -> list[int]:
    """The keys of what ``choose`` picks, in that order."""
    return list(choose(entries, bytes_to_free, 0).keys)


_Rank = tuple[tuple[bool, bool, bool], float, float, int]


class _Kept:
    """An entry that was not evicted yet, as those that were have left it."""

    __slots__ = ("above", "below", "entry", "kv_bytes", "load_s", "order", "returns", "seconds_saved")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.seconds_saved, self.returns, self.kv_bytes = entry.seconds_saved, entry.returns, entry.kv_bytes
        self.load_s = entry.load_s
        self.above: _Kept | None = None
        self.below: set[_Kept] = set()
        self.order = (not entry.stranded, entry.pinned, not entry.is_ahead)  # a stranded one is useless, pinned or not

    @property
    def size_bytes(self) -> int:
        """What evicting it frees now."""
        return self.entry.size_bytes + (0 if self.below else self.kv_bytes)

    @property
    def missed_s(self) -> float:
        """Seconds per unit of time that it would have saved."""
        return 0.0 if self.entry.stranded else score(self) * self.size_bytes

    @property
    def rank(self) -> _Rank:
        """The smallest is evicted first."""
        return self.order, score(self), -self.entry.age_s, self.entry.key


def _least_first(entries: Iterable[Entry]) -> Iterator[_Kept]:
    """Entries in the order of eviction: each was evicted when the next one is asked for."""
    left = {entry.key: _Kept(entry) for entry in entries}
    for kept in left.values():
        if kept.entry.above is not None and (above := left.get(kept.entry.above)) is not None:
            kept.above = above
            above.below.add(kept)
    heap = [kept.rank for kept in left.values()]
    heapq.heapify(heap)
    while heap:
        rank = heapq.heappop(heap)
        least = left.get(rank[-1])
        if least is not None and rank == least.rank:
            del left[rank[-1]]
            yield least
            for kept in _take_out(least):
                heapq.heappush(heap, kept.rank)


def _take_out(gone: _Kept) -> list[_Kept]:
    """Gives what an entry has to those above and below it; returns those."""
    above = gone.above
    for kept in gone.below:
        kept.seconds_saved += gone.seconds_saved
        kept.kv_bytes += gone.kv_bytes
        kept.above = above
    if above is None:
        return list(gone.below)
    above.below.remove(gone)
    above.below |= gone.below
    above.returns += gone.returns if gone.load_s > gone.seconds_saved else 0.0  # others resume from the disk
    return [*gone.below, above]


@dataclass(frozen=True, slots=True)
class Seat:
    """An idle slot, as far as seating a request cares."""

    slot: int
    n_resident: int
    n_common: int
    last_used: float


def seat(seats: Sequence[Seat], worth: Callable[[int], float]) -> int:
    """Which idle slot a request gets: the one that holds its own conversation, else an empty one, else the one that is
    least likely to be continued, by what it would have to read again; of equals the least recently used. ``worth``:
    expected returns to what a slot holds."""
    own = [s for s in seats if s.n_common > 0 and 2 * s.n_common >= s.n_resident]
    if own:
        return max(own, key=lambda s: (s.n_common, -s.n_resident, -s.slot)).slot
    empty = [s for s in seats if s.n_resident == 0]
    if empty or len(seats) == 1:
        return min(empty or seats, key=lambda s: (s.last_used, s.slot)).slot
    return min(seats, key=lambda s: (worth(s.slot) * s.n_resident, s.last_used, s.slot)).slot


def has_other_place(unsaved_bytes: int, free_bytes: int, load_s: float, read_s: float) -> bool:
    """Whether an idle conversation may leave the device, only so that others are faster without it: RAM has room for
    what only the device holds of it, or the disk gives all of it back much sooner than it would be read again.
    ``load_s``: infinite without a disk that has room for it."""
    return unsaved_bytes <= free_bytes or load_s <= LOADED_SHARE * read_s
