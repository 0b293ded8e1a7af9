"""The state on disk that is evicted next is the one that the plain rule chooses among all of them, at any time, and what
each is worth is what a look at all others says."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from everwarm.state.lineage import Point, point_of
from everwarm.state.policy import Entry, assumed_returns
from everwarm.state.policy import score as score_of_policy
from everwarm.state.store import disk_eviction
from everwarm.state.store.disk_eviction import EvictionOrder, VictimQueue, WeighedState, ranked, score
from everwarm.state.store.index import IndexedObject, ObjectTable

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_STEPS = 20_000 if CAMPAIGN else 1500
SPACES = ("a", "b", "c")
N_KV, LONG = 40, 100  # pieces of KV, each of which goes on from the one with half of its number, and their items


def state(rng: random.Random, now: float) -> IndexedObject:
    """Few different values, so that many are worth the same. Half of them have no KV."""
    used_at = now - rng.choice([0.0, 0.0, 1.0, rng.random() * 1e5])
    size, hits = rng.choice([5, 10, rng.randrange(1, 9000)]), rng.choice([0, 0, rng.randrange(4)])
    if rng.random() < 0.5:
        key, n_items = f"{rng.randrange(200):064x}", rng.choice([10, 20, 500, rng.randrange(1, 9000)])
        return IndexedObject(f"state-{key}", "state", key, n_items, size, (), used_at, hits, rng.choice(SPACES))
    numbers = [rng.randrange(1, N_KV)]
    while numbers[0] > 1:
        numbers.insert(0, numbers[0] // 2)
    ends = [LONG * (i + 1) for i in range(len(numbers))]
    reaches = (*ends[:-1], ends[-1] - rng.choice([0, 0, 50]))
    needs = tuple(f"kv-{number}" for number in numbers)
    key = f"{1000 * numbers[-1] + reaches[-1]:064x}"
    return IndexedObject(f"state-{key}", "state", key, reaches[-1], size, needs, used_at, hits, "a", reaches)


def kv(number: int, size: int) -> IndexedObject:
    return IndexedObject(f"kv-{number}", "kv", f"k{number}", 0, size, (), 0.0, space="a")


def above(one: IndexedObject, states: list[IndexedObject]) -> IndexedObject | None:
    uses = dict(zip(one.needs, one.reaches, strict=True))
    found = [
        other
        for other in states
        if other.needs and other.n_items < one.n_items and other.n_items <= uses.get(other.needs[-1], 0)
    ]
    return max(found, key=lambda other: other.n_items, default=None)


def weighed(objects: dict[str, IndexedObject]) -> list[WeighedState]:
    """By a look at all others."""
    states = [each for each in objects.values() if each.kind == "state"]
    found = []
    for one in states:
        n_below = sum(above(other, states) is one for other in states)
        over = above(one, states)
        alone = [need for need in one.needs if sum(need in other.needs for other in states) == 1]
        n_bytes = one.size + sum(objects[need].size for need in alone if need in objects)
        n_saved = one.n_items - (over.n_items if over else 0)
        found.append(WeighedState(one, n_saved, n_bytes, one.hits == 0 and n_below == 1))
    return found


class Life:
    """A queue and the plain list of what is in it, through the same events."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1.8e9
        self.table = ObjectTable()
        self.queue = VictimQueue(self.table, by_space=True)
        self.plain: dict[str, IndexedObject] = {}
        self.pinned: frozenset[Point] = frozenset()

    def step(self) -> None:
        rng = self.rng
        names = [name for name in self.plain if name.startswith("state")]
        match rng.randrange(9):
            case 0 | 1 | 2:
                self.put(state(rng, self.now))
            case 3 if names:
                self.touch(rng.choice(names))
            case 4 if names:
                self.remove(rng.choice(names))
            case 5 if names:
                some = [self.plain[name] for name in rng.sample(names, min(len(names), 5))]
                self.pinned = frozenset(point_of(kept.key, kept.n_items) for kept in some)
                self.queue.note_pins(self.pinned, self.now)
            case 6:
                self.now += rng.choice([1e-3, 1.0, 60.0, 3600.0, 1e6])
            case 7 if rng.random() < 0.02:
                self.now -= 5000.0  # a clock that is set back
            case 8 if rng.random() < 0.3:
                self.put(kv(rng.randrange(1, N_KV), rng.randrange(1, 900)))
                self.remove(f"kv-{rng.randrange(1, N_KV)}")

    def put(self, kept: IndexedObject) -> None:
        self.plain.pop(kept.name, None)
        self.plain[kept.name] = kept
        self.queue.add(kept, self.now)

    def remove(self, name: str) -> None:
        assert self.queue.remove(name, self.now) == self.plain.pop(name, None)

    def touch(self, name: str) -> None:
        old = self.plain[name]
        self.plain[name] = msgspec.structs.replace(old, used_at=self.now, hits=old.hits + 1)
        self.queue.update(self.plain[name], self.now)

    def differs(self) -> bool:
        """Whether the queue chooses another one than the plain rule."""
        space = self.rng.choice([None, None, *SPACES])
        spare = frozenset(self.rng.sample(list(self.plain), min(len(self.plain), self.rng.randrange(3))))
        listed = ranked(weighed(self.plain), space, self.pinned, self.now, 1.0)
        wanted = next((kept.name for kept in listed if kept.name not in spare), None)
        while not self.queue.advance(space, self.now):
            pass
        found = self.queue.choose(space, self.pinned, spare, self.now)
        if found is not None and self.rng.random() < 0.3:
            self.remove(found.name)
        return (None if found is None else found.name) != wanted


def n_differences(seed: int) -> int:
    life, n = Life(seed), 0
    for _ in range(N_STEPS):
        life.step()
        n += life.differs()
    return n


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_that_of_the_plain_rule(seed, monkeypatch):
    monkeypatch.setattr(disk_eviction, "MAX_MATCHES", 3)
    assert n_differences(seed) == 0


@pytest.mark.parametrize("broken", ["never", "an hour late", "no clock that goes back", "the last of equals"])
def test_results_that_hold_too_long_would_be_noticed(monkeypatch, broken):
    real, advance, rank = disk_eviction.holds_until, EvictionOrder.advance, EvictionOrder._rank
    match broken:
        case "never":
            monkeypatch.setattr(disk_eviction, "holds_until", lambda *_: float("inf"))
        case "an hour late":
            monkeypatch.setattr(disk_eviction, "holds_until", lambda *each: real(*each) + 3600.0)
        case "no clock that goes back":
            monkeypatch.setattr(EvictionOrder, "advance", lambda self, now: advance(self, max(now, self._now)))
        case "the last of equals":
            monkeypatch.setattr(EvictionOrder, "_rank", lambda *each: (*rank(*each)[:2], -rank(*each)[2]))
    assert sum(map(n_differences, range(2))) > 0


def test_the_score_has_the_same_bits_as_the_policys():
    rng = random.Random(3)
    for _ in range(2000):
        kept, now = state(rng, 1.8e9), 1.8e9 + rng.random() * 1e6
        one = WeighedState(kept, rng.randrange(1, 9000), kept.size + rng.randrange(9000), rng.random() < 0.5)
        returns = assumed_returns(kept.hits, now - kept.used_at) * one.share
        assert score(one, now) == score_of_policy(Entry(0, one.n_bytes, float(one.n_saved), returns))


@pytest.mark.parametrize("n", [100, 10_000])
def test_a_change_replays_one_match_per_level_however_many_states_there_are(n, monkeypatch):
    rng, order, now = random.Random(5), EvictionOrder(), 1.8e9
    for i in range(n):
        key = f"{i:064x}"
        kept = IndexedObject(f"state-{key}", "state", key, rng.randrange(1, 9000), 10, (), now)
        order.put(WeighedState(kept, kept.n_items, kept.size), now)
    while not order.advance(now):
        pass
    n_played, real = [0], EvictionOrder._play

    def play(self, node):
        n_played[0] += 1
        real(self, node)

    monkeypatch.setattr(EvictionOrder, "_play", play)
    for _ in range(20):
        first = order.first()
        order.remove(first.name)
        assert order.advance(now)
    assert n_played[0] <= 20 * (len(order._states).bit_length() - 1)


def turns(n: int, kv_bytes: int = 50) -> list[IndexedObject]:
    """A conversation of so many turns: KV, and a state after each."""
    found: list[IndexedObject] = []
    for i in range(1, n + 1):
        needs, reaches = tuple(f"kv-{k}" for k in range(1, i + 1)), tuple(LONG * k for k in range(1, i + 1))
        found += [
            kv(i, kv_bytes),
            IndexedObject(f"state-{i}", "state", f"{i:064x}", LONG * i, 100, needs, 0.0, 0, "a", reaches),
        ]
    return found


def evicted(objects: list[IndexedObject], now: float) -> list[str]:
    """The order in which all of it goes."""
    table = ObjectTable()
    queue, order = VictimQueue(table, by_space=False), []
    for each in objects:
        queue.add(each, now)
    while (name := table.stranded((), None)) or (found := queue.choose(None, frozenset(), (), now)):
        order.append(name or found.name)
        queue.remove(order[-1], now)
    assert not table._kept
    return order


def test_what_a_conversation_left_behind_goes_before_its_end_and_the_end_of_one_that_was_long_not_used():
    old = IndexedObject("state-old", "state", f"{99:064x}", 4 * LONG, 100, ("kv-9",), -60.0, 0, "a", (4 * LONG,))
    order = [name for name in evicted([kv(9, 50), old, *turns(4)], 0.0) if name.startswith("state")]
    assert order[0] == "state-1" and order[-2:] == ["state-old", "state-4"]


def test_a_state_that_was_loaded_or_that_two_others_continue_was_not_left_behind():
    first, second, *rest = turns(3)
    loaded = [first, msgspec.structs.replace(second, hits=1), *rest]
    branch = IndexedObject("state-b", "state", f"{98:064x}", 200, 100, ("kv-1", "kv-7"), 0.0, 0, "a", (100, 200))
    for objects, is_left in ((turns(3), True), (loaded, False), ([*turns(3), kv(7, 50), branch], False)):
        table = ObjectTable()
        for each in objects:
            table.add(each)
        assert disk_eviction.weigh(table, table["state-1"]).is_left is is_left


def test_a_long_conversation_goes_from_its_end_where_kv_is_what_takes_the_room():
    """A state between takes little then, and all that is before it stays."""
    order = [name for name in evicted(turns(3, kv_bytes=100_000), 0.0) if name.startswith("state")]
    assert order == ["state-3", "state-2", "state-1"]
    assert [name for name in evicted(turns(3), 0.0) if name.startswith("state")][-1] == "state-3", "the control"
