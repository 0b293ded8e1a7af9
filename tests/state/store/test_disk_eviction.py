"""The state on disk that is evicted next is the one that the plain rule chooses among all of them, at any time."""

from __future__ import annotations

import os
import random

import pytest

from everwarm.state.lineage import Point, point_of
from everwarm.state.policy import Entry, assumed_returns
from everwarm.state.policy import score as score_of_policy
from everwarm.state.store import disk_eviction
from everwarm.state.store.disk_eviction import EvictionOrder, VictimQueue, ranked, score
from everwarm.state.store.index import IndexedObject

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_STEPS = 20_000 if CAMPAIGN else 1500
SPACES = ("a", "b", "c")


def state(rng: random.Random, now: float) -> IndexedObject:
    """Few different values, so that many are worth the same."""
    key = f"{rng.randrange(200):064x}"
    n_items, size = rng.choice([10, 20, 500, rng.randrange(1, 9000)]), rng.choice([5, 10, rng.randrange(1, 9000)])
    used_at = now - rng.choice([0.0, 0.0, 1.0, rng.random() * 1e5])
    return IndexedObject(f"state-{key}", "state", key, n_items, size, (), used_at, rng.randrange(4), rng.choice(SPACES))


class Life:
    """A queue and the plain list of what is in it, through the same events."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1.8e9
        self.queue = VictimQueue(by_space=True)
        self.plain: dict[str, IndexedObject] = {}
        self.pinned: frozenset[Point] = frozenset()

    def step(self) -> None:
        rng = self.rng
        names = list(self.plain)
        match rng.randrange(8):
            case 0 | 1 | 2:
                self.put(state(rng, self.now))
            case 3 if names:
                self.touch(rng.choice(names))
            case 4 if names:
                self.queue.remove(self.plain.pop(rng.choice(names)))
            case 5 if names:
                some = [self.plain[name] for name in rng.sample(names, min(len(names), 5))]
                self.pinned = frozenset(point_of(kept.key, kept.n_items) for kept in some)
                self.queue.note_pins(self.pinned, self.now)
            case 6:
                self.now += rng.choice([1e-3, 1.0, 60.0, 3600.0, 1e6])
            case 7 if rng.random() < 0.02:
                self.now -= 5000.0  # a clock that is set back

    def put(self, kept: IndexedObject) -> None:
        before = self.plain.pop(kept.name, None)
        if before is not None:
            self.queue.remove(before)
        self.plain[kept.name] = kept
        self.queue.put(kept, self.now)

    def touch(self, name: str) -> None:
        old = self.plain[name]
        used = IndexedObject(*(getattr(old, f) for f in old.__struct_fields__[:6]), self.now, old.hits + 1, old.space)
        self.plain[name] = used
        self.queue.put(used, self.now)

    def differs(self) -> bool:
        """Whether the queue chooses another one than the plain rule."""
        space = self.rng.choice([None, None, *SPACES])
        spare = frozenset(self.rng.sample(list(self.plain), min(len(self.plain), self.rng.randrange(3))))
        listed = ranked(self.plain.values(), space, self.pinned, self.now, 1.0)
        wanted = next((kept.name for kept in listed if kept.name not in spare), None)
        while not self.queue.advance(space, self.now):
            pass
        found = self.queue.choose(space, self.pinned, spare, self.now)
        if found is not None and self.rng.random() < 0.3:
            self.queue.remove(self.plain.pop(found.name))
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
        entry = Entry(0, kept.size, float(kept.n_items), assumed_returns(kept.hits, now - kept.used_at))
        assert score(kept, now) == score_of_policy(entry)


@pytest.mark.parametrize("n", [100, 10_000])
def test_a_change_replays_one_match_per_level_however_many_states_there_are(n, monkeypatch):
    rng, order, now = random.Random(5), EvictionOrder(), 1.8e9
    for i in range(n):
        key = f"{i:064x}"
        order.put(IndexedObject(f"state-{key}", "state", key, rng.randrange(1, 9000), 10, (), now), now)
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
