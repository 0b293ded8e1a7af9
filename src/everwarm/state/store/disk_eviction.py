"""Eviction from disk: which state goes next, without looking at every state. Pure: the caller says what time it is.

``VictimQueue`` says which state goes next, of all or of one space, with pins and spared states; ``disk`` asks it and
drops that one. For eviction from RAM see ``state.ram_eviction``.

The rule is that of ``policy.score``, smallest first: seconds saved per byte, times a chance of reuse that falls with
the age; more is not known from the index. ``ranked`` states it plainly, over all states. All scores fall with time,
each at its own pace, so the order changes although nothing happens; but two states change places at most once.
``EvictionOrder`` is a tournament over the states (a kinetic tournament): every match remembers until when its result
holds. Adding, changing or removing a state replays the matches on its way to the top, O(log n). Asking for the first
one replays the matches whose results have expired since; each pair expires at most once, so that is O(log n) for each
change as well, on average over time.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable

from everwarm.state.lineage import Point, point_of
from everwarm.state.policy import HALF_LIFE_S, Entry, assumed_returns, victims
from everwarm.state.store.index import IndexedObject

MAX_MATCHES = 2000  # that are replayed in one call, because the caller holds a lock
_NONE = -1
_NEVER = math.inf
_ROUNDING = 1e-12  # a result expires earlier by this share of what its time was computed from
_TICK_S = 1e-6


def ranked(
    objects: Iterable[IndexedObject], space: str | None, pinned: frozenset[Point], now: float, share: float
) -> list[IndexedObject]:
    """The states to evict first, in order, up to this share of the bytes: those that save least, and those at pinned
    points after all others. ``space``: only of this one."""
    states = [each for each in objects if each.kind == "state" and space in (None, each.space)]
    entries = [_disk_entry(i, each, pinned, now) for i, each in enumerate(states)]
    n_bytes = sum(entry.size_bytes for entry in entries)
    return [states[i] for i in victims(entries, 1 + int(share * n_bytes))]


def _disk_entry(i: int, kept: IndexedObject, pinned: frozenset[Point], now: float) -> Entry:
    """A state saves its whole prompt: what other states would help is not known from the index."""
    is_pinned = point_of(kept.key, kept.n_items) in pinned
    age_s = now - kept.used_at
    return Entry(i, kept.size, float(kept.n_items), assumed_returns(kept.hits, age_s), age_s, pinned=is_pinned)


def score(kept: IndexedObject, now: float) -> float:
    """``policy.score`` of a state on disk, in the same order of operations, so that it has the same bits."""
    chance = math.sqrt(1 + kept.hits) / (1 + max(0.0, now - kept.used_at) / HALF_LIFE_S)
    return float(kept.n_items) * chance / max(1, kept.size)


def holds_until(first: IndexedObject, second: IndexedObject, now: float) -> float:
    """Until when ``first`` stays before ``second``, given that it is now. May be earlier than that, never later."""
    age_first = now - first.used_at
    age_second = now - second.used_at
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


def _worth(kept: IndexedObject) -> float:
    """The score at age 0."""
    return kept.n_items * math.sqrt(1 + kept.hits) / max(1, kept.size)


class EvictionOrder:
    """States as the leaves of a binary tree, whose nodes have the winners of their halves: node 1 is the top, node i has
    the children 2i and 2i + 1, and leaf k is node ``capacity + k``."""

    def __init__(self) -> None:
        self._leaf: dict[str, int] = {}
        self._free: list[int] = [0]
        self._states: list[IndexedObject | None] = [None]
        self._number = array("q", [0])  # of each leaf's state: in the order in which they came
        self._winner = array("q", [_NONE, _NONE])
        self._until = array("d", [_NEVER, _NEVER])
        self._n_put = 0
        self._now = -math.inf

    def __len__(self) -> int:
        return len(self._leaf)

    def put(self, kept: IndexedObject, now: float) -> None:
        """Adds a state, changes it, or shows one again that was hidden."""
        leaf = self._leaf.get(kept.name)
        if leaf is None:
            if not self._free:
                self._grow()
            leaf = self._leaf[kept.name] = self._free.pop()
            self._n_put += 1
            self._number[leaf] = self._n_put
        self._now = max(self._now, now)
        self._set(leaf, kept)

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

    def first(self) -> IndexedObject | None:
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

    def _set(self, leaf: int, kept: IndexedObject | None) -> None:
        self._states[leaf] = kept
        node = leaf + len(self._states)
        self._winner[node] = _NONE if kept is None else leaf
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
        kept = self._states[leaf]
        assert kept is not None
        return score(kept, self._now), kept.used_at, self._number[leaf]


class VictimQueue:
    """``by_space``: whether victims of a single space will be asked for."""

    def __init__(self, *, by_space: bool) -> None:
        self._by_space = by_space
        self._orders: dict[str | None, EvictionOrder] = {None: EvictionOrder()}
        self._pinned: dict[str, IndexedObject] = {}  # hidden, because they came first once and were pinned then

    def put(self, kept: IndexedObject, now: float) -> None:
        """Adds a state, or changes it."""
        if kept.name in self._pinned:
            self._pinned[kept.name] = kept
            return
        for space in self._spaces(kept):
            self._orders.setdefault(space, EvictionOrder()).put(kept, now)

    def remove(self, kept: IndexedObject) -> None:
        self._pinned.pop(kept.name, None)
        for space in self._spaces(kept):
            order = self._orders.get(space)
            if order is not None:
                order.remove(kept.name)
                if space is not None and not len(order):
                    del self._orders[space]

    def note_pins(self, pinned: frozenset[Point], now: float) -> None:
        """States that are not pinned any more take part again."""
        for kept in [kept for kept in self._pinned.values() if point_of(kept.key, kept.n_items) not in pinned]:
            del self._pinned[kept.name]
            self.put(kept, now)

    def advance(self, space: str | None, now: float) -> bool:
        """Call it until it is True, then ``choose``."""
        order = self._orders.get(space)
        return order is None or order.advance(now)

    def choose(
        self, space: str | None, pinned: frozenset[Point], spare: Collection[str], now: float
    ) -> IndexedObject | None:
        """The state to evict: the one that saves least, and one at a pinned point only if there is no other."""
        spared: list[IndexedObject] = []
        while (found := self._first(space, now)) is not None:
            is_pinned = point_of(found.key, found.n_items) in pinned
            if not is_pinned and found.name not in spare:
                break
            for own in self._spaces(found):
                self._orders[own].hide(found.name)
            if is_pinned:
                self._pinned[found.name] = found
            else:
                spared.append(found)
        for kept in spared:
            self.put(kept, now)
        if found is None:
            others = ranked([k for k in self._pinned.values() if k.name not in spare], space, pinned, now, 0.0)
            found = others[0] if others else None
        return found

    def _first(self, space: str | None, now: float) -> IndexedObject | None:
        order = self._orders.get(space)
        if order is None:
            return None
        while not order.advance(now):
            pass
        return order.first()

    def _spaces(self, kept: IndexedObject) -> tuple[str | None, ...]:
        return (None, kept.space) if self._by_space else (None,)
