"""Eviction from disk: which state goes next, without looking at every state. Pure: the caller says what time it is.

``VictimQueue`` says which state goes next, of all or of one space, with pins and spared states; ``disk`` asks it and
drops that one, and so does the simulated disk. For eviction from RAM see ``state.ram_eviction``.

The rule is that of ``policy.score``, smallest first: seconds saved per byte, times a chance of reuse that falls with
the age. ``weigh`` says what a state saves and frees beside the others on its lineage. One that a single other state
continues, and that nothing was loaded from, was left behind by its conversation: returns continue from the other one,
but for those that step back to an earlier turn. ``ranked`` states the rule plainly, over all states. All scores fall with
time, each at its own pace, so the order changes although nothing happens; but two states change places at most once.
``EvictionOrder`` is a tournament over the states (a kinetic tournament): every match remembers until when its result
holds. Adding, changing or removing a state replays the matches on its way to the top, O(log n). Asking for the first
one replays the matches whose results have expired since; each pair expires at most once, so that is O(log n) for each
change as well, on average over time.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable
from itertools import islice

import msgspec

from everwarm.state.lineage import Point, point_of
from everwarm.state.policy import HALF_LIFE_S, Entry, assumed_returns, victims
from everwarm.state.returns import ASSUMED_STEPS
from everwarm.state.store.index import IndexedObject, ObjectTable

MAX_MATCHES = 2000  # that are replayed in one call, because the caller holds a lock
_NONE = -1
_NEVER = math.inf
_ROUNDING = 1e-12  # a result expires earlier by this share of what its time was computed from
_TICK_S = 1e-6


class WeighedState(msgspec.Struct, frozen=True, gc=False):
    """A state on disk, and what it is worth beside the others that are there."""

    kept: IndexedObject
    n_saved: int  # items that are not in the state above it
    n_bytes: int  # of its file, and of the KV that only it needs
    is_left: bool = False  # its conversation went on, and nothing was loaded from it

    @property
    def name(self) -> str:
        return self.kept.name

    @property
    def share(self) -> float:
        """Of the returns that are assumed."""
        return ASSUMED_STEPS if self.is_left else 1.0


def weigh(table: ObjectTable, kept: IndexedObject) -> WeighedState:
    above = table.above(kept)
    is_left = kept.hits == 0 and len(list(islice(table.directly_below(kept), 2))) == 1
    return WeighedState(kept, kept.n_items - (above.n_items if above else 0), table.own_bytes(kept), is_left)


def ranked(
    states: Iterable[WeighedState], space: str | None, pinned: frozenset[Point], now: float, share: float
) -> list[WeighedState]:
    """The states to evict first, in order, up to this share of the bytes, as they are worth now: those that save least,
    and those at pinned points after all others. ``space``: only of this one."""
    among = [each for each in states if space in (None, each.kept.space)]
    entries = [_disk_entry(i, each, pinned, now) for i, each in enumerate(among)]
    n_bytes = sum(entry.size_bytes for entry in entries)
    return [among[i] for i in victims(entries, 1 + int(share * n_bytes))]


def _disk_entry(i: int, state: WeighedState, pinned: frozenset[Point], now: float) -> Entry:
    kept = state.kept
    is_pinned = point_of(kept.key, kept.n_items) in pinned
    age_s = now - kept.used_at
    returns = assumed_returns(kept.hits, age_s) * state.share
    return Entry(i, state.n_bytes, float(state.n_saved), returns, age_s, pinned=is_pinned)


def score(state: WeighedState, now: float) -> float:
    """``policy.score`` of a state on disk, in the same order of operations, so that it has the same bits."""
    chance = math.sqrt(1 + state.kept.hits) / (1 + max(0.0, now - state.kept.used_at) / HALF_LIFE_S)
    return float(state.n_saved) * (chance * state.share) / max(1, state.n_bytes)


def holds_until(first: WeighedState, second: WeighedState, now: float) -> float:
    """Until when ``first`` stays before ``second``, given that it is now. May be earlier than that, never later."""
    age_first = now - first.kept.used_at
    age_second = now - second.kept.used_at
    if age_first < 0 or age_second < 0:
        return now  # the clock went back: a state does not age until the clock has caught up
    worth_first = _worth(first)
    worth_second = _worth(second)
    if worth_second >= worth_first:
        return _NEVER
    gap = worth_first - worth_second
    of_first = worth_first * (HALF_LIFE_S + age_second)
    of_second = worth_second * (HALF_LIFE_S + age_first)
    return now + (of_second - of_first) / gap - _ROUNDING * (of_first + of_second) / gap - _TICK_S


def _worth(state: WeighedState) -> float:
    """The score at age 0."""
    return state.n_saved * math.sqrt(1 + state.kept.hits) * state.share / max(1, state.n_bytes)


class EvictionOrder:
    """States as the leaves of a binary tree, whose nodes have the winners of their halves: node 1 is the top, node i has
    the children 2i and 2i + 1, and leaf k is node ``capacity + k``."""

    def __init__(self) -> None:
        self._leaf: dict[str, int] = {}
        self._free: list[int] = [0]
        self._states: list[WeighedState | None] = [None]
        self._number = array("q", [0])  # of each leaf's state: in the order in which they came
        self._winner = array("q", [_NONE, _NONE])
        self._until = array("d", [_NEVER, _NEVER])
        self._n_put = 0
        self._now = -math.inf

    def __len__(self) -> int:
        return len(self._leaf)

    def put(self, state: WeighedState, now: float) -> None:
        """Adds a state, changes it, or shows one again that was hidden."""
        leaf = self._leaf.get(state.name)
        if leaf is None:
            if not self._free:
                self._grow()
            leaf = self._leaf[state.name] = self._free.pop()
            self._n_put += 1
            self._number[leaf] = self._n_put
        self._now = max(self._now, now)
        self._set(leaf, state)

    def hide(self, name: str) -> None:
        """A state that keeps its place but is not evicted for now."""
        self._set(self._leaf[name], None)

    def remove(self, name: str) -> None:
        leaf = self._leaf.pop(name, None)
        if leaf is not None:
            self._free.append(leaf)
            self._set(leaf, None)

    def advance(self, now: float) -> bool:
        """Replays what has expired. False: there is more, and the caller should let others have the lock first."""
        if now < self._now:
            capacity = len(self._states)
            self._until[:capacity] = array("d", [-math.inf]) * capacity
        self._now = now
        return self._advance(1, MAX_MATCHES) > 0

    def first(self) -> WeighedState | None:
        """The state to evict first, at the time of the last ``advance``, if that was True."""
        winner = self._winner[1]
        return None if winner == _NONE else self._states[winner]

    def _grow(self) -> None:
        """Doubles the number of leaves: the tree becomes the left half of a new one."""
        capacity = len(self._states)
        winner = array("q", [_NONE]) * (4 * capacity)
        until = array("d", [_NEVER]) * (4 * capacity)
        at = 1
        while at <= capacity:
            winner[2 * at : 3 * at] = self._winner[at : 2 * at]
            until[2 * at : 3 * at] = self._until[at : 2 * at]
            at *= 2
        winner[1], until[1] = self._winner[1], self._until[1]
        self._winner = winner
        self._until = until
        self._states += [None] * capacity
        self._number.extend([0] * capacity)
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))

    def _set(self, leaf: int, state: WeighedState | None) -> None:
        self._states[leaf] = state
        node = leaf + len(self._states)
        self._winner[node] = _NONE if state is None else leaf
        node //= 2
        while node:
            self._play(node)
            node //= 2

    def _advance(self, node: int, n_left: int) -> int:
        """How many matches may still be replayed; 0: no more, and some of this half is left."""
        if self._until[node] > self._now or n_left <= 0:
            return n_left
        n_left = self._advance(2 * node, n_left)
        n_left = self._advance(2 * node + 1, n_left)
        if n_left > 0:
            self._play(node)
        return n_left - 1 if n_left > 0 else 0

    def _play(self, node: int) -> None:
        left = self._winner[2 * node]
        right = self._winner[2 * node + 1]
        until = min(self._until[2 * node], self._until[2 * node + 1])
        if left == _NONE or right == _NONE:
            self._winner[node], self._until[node] = max(left, right), until
            return
        winner, loser = (left, right) if self._rank(left) < self._rank(right) else (right, left)
        first = self._states[winner]
        second = self._states[loser]
        assert first is not None and second is not None
        self._winner[node] = winner
        still = math.nextafter(self._now, math.inf)  # it holds now, however close the end of it is
        self._until[node] = min(until, max(still, holds_until(first, second, self._now)))

    def _rank(self, leaf: int) -> tuple[float, float, int]:
        state = self._states[leaf]
        assert state is not None
        return score(state, self._now), state.kept.used_at, self._number[leaf]


class VictimQueue:
    """The order of eviction of the states of a table. Through it objects come into the table and leave it, because that
    changes what those around them are worth."""

    def __init__(self, table: ObjectTable, *, by_space: bool) -> None:
        """``by_space``: whether victims of a single space will be asked for."""
        self._table = table
        self._by_space = by_space
        self._orders: dict[str | None, EvictionOrder] = {None: EvictionOrder()}
        self._pinned: dict[str, WeighedState] = {}  # hidden, because they came first once and were pinned then

    # what comes and goes

    def add(self, kept: IndexedObject, now: float) -> None:
        """In place of an object of the same name."""
        self.remove(kept.name, now)
        self._table.add(kept)
        for name in (kept.name, *sorted(self._table.around(kept))):
            self._weigh(name, now)

    def remove(self, name: str, now: float) -> IndexedObject | None:
        """Returns what was removed. None: nothing was known of it but its name."""
        known = self._table.get(name)
        around = [] if known is None else sorted(self._table.around(known))
        self._table.remove(name)
        if known is not None:
            self._take_out(known)
        for each in around:
            self._weigh(each, now)
        return known

    def update(self, kept: IndexedObject, now: float) -> None:
        """The same object, used once more."""
        self._table.update(kept)
        self._weigh(kept.name, now)

    def _weigh(self, name: str, now: float) -> None:
        kept = self._table[name]
        if kept.kind != "kv":
            self._put(weigh(self._table, kept), now)

    def _put(self, state: WeighedState, now: float) -> None:
        if state.name in self._pinned:
            self._pinned[state.name] = state
            return
        for space in self._spaces(state.kept):
            self._orders.setdefault(space, EvictionOrder()).put(state, now)

    def _take_out(self, kept: IndexedObject) -> None:
        self._pinned.pop(kept.name, None)
        for space in self._spaces(kept):
            order = self._orders.get(space)
            if order is not None:
                order.remove(kept.name)
                if space is not None and not len(order):
                    del self._orders[space]

    def note_pins(self, pinned: frozenset[Point], now: float) -> None:
        """States that are not pinned any more take part again."""
        for state in [each for each in self._pinned.values() if _point(each) not in pinned]:
            del self._pinned[state.name]
            self._put(state, now)

    # which goes next

    def advance(self, space: str | None, now: float) -> bool:
        """Call it until it is True, then ``choose``."""
        order = self._orders.get(space)
        return order is None or order.advance(now)

    def choose(
        self, space: str | None, pinned: frozenset[Point], spare: Collection[str], now: float
    ) -> IndexedObject | None:
        """The state to evict: the one that saves least, and one at a pinned point only if there is no other."""
        spared: list[WeighedState] = []
        while (found := self._first(space, now)) is not None:
            is_pinned = _point(found) in pinned
            if not is_pinned and found.name not in spare:
                break
            for own in self._spaces(found.kept):
                self._orders[own].hide(found.name)
            if is_pinned:
                self._pinned[found.name] = found
            else:
                spared.append(found)
        for state in spared:
            self._put(state, now)
        if found is None:
            others = ranked([k for k in self._pinned.values() if k.name not in spare], space, pinned, now, 0.0)
            found = others[0] if others else None
        return None if found is None else found.kept

    def _first(self, space: str | None, now: float) -> WeighedState | None:
        order = self._orders.get(space)
        if order is None:
            return None
        while not order.advance(now):
            pass
        return order.first()

    def _spaces(self, kept: IndexedObject) -> tuple[str | None, ...]:
        return (None, kept.space) if self._by_space else (None,)


def _point(state: WeighedState) -> Point:
    return point_of(state.kept.key, state.kept.n_items)
