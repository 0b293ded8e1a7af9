"""Policies to compare: where each stops to take a checkpoint, and what it gives up when memory is full. Pure.

``ours`` uses the very functions of the engine. The others stand for what other servers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everwarm.simulate.simulated_machine import Curves
from everwarm.simulate.trace import TraceTurn
from everwarm.state import policy
from everwarm.state.policy import GUARD, NEAR_END, CheckpointParams, Cut, CutKind, Entry, EvictionChoice, Spacing
from everwarm.state.ram_eviction import N_LEAST

N_UBATCH = 512
EVERY_N = 1024
FLOP_WEIGHT = 1.0  # of what a byte saves, beside how lately it was used
_ANY_NUMBER = 1 << 20


@dataclass(frozen=True, slots=True)
class TurnReading:
    """A turn whose prompt is about to be read."""

    turn: TraceTurn
    n_restored: int
    n_shared: int  # items that were read before
    places: Sequence[int]  # learned: where it is likely to be left


Cuts = Callable[[TurnReading, Spacing], Sequence[Cut]]
Victims = Callable[[Sequence[Entry], int, Curves], EvictionChoice]


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    cuts: Cuts
    victims: Victims
    params: CheckpointParams = field(default_factory=CheckpointParams)
    keeps_ends: bool = True  # of replies
    learns: bool = False  # what comes back, and where

    def spacing(self, curves: Curves) -> Spacing:
        return self.params.fitted(
            state_bytes=curves.state_bytes, kv_bytes_per_token=curves.kv_bytes_per_token, window=False
        )


# where


def our_cuts(reading: TurnReading, spacing: Spacing) -> Sequence[Cut]:
    turn, is_far = reading.turn, reading.n_shared - reading.n_restored > GUARD
    return policy.cuts(
        len(turn.prompt),
        spacing,
        n_ubatch=N_UBATCH,
        boundaries=turn.boundaries,
        stable=turn.stable,
        branch=reading.n_shared if is_far else None,
        media=turn.prompt.media,
        learned=reading.places,
    )


def even_cuts(reading: TurnReading, spacing: Spacing) -> Sequence[Cut]:
    """Every n tokens, and near the end."""
    n = len(reading.turn.prompt)
    found = {at: Cut(at, CutKind.EVERY) for at in range(spacing.every_n_tokens, n, spacing.every_n_tokens)}
    near = n - min(NEAR_END, n - 1)
    return [*(cut for at, cut in found.items() if at < near), Cut(near, CutKind.NEAR_END)]


def branch_cuts(reading: TurnReading, spacing: Spacing) -> Sequence[Cut]:  # noqa: ARG001
    """Where a prompt leaves the known prefixes, and its end: nothing is kept before a prefix was used twice."""
    n = len(reading.turn.prompt)
    near = n - min(NEAR_END, n - 1)
    is_known = reading.n_restored < reading.n_shared < near
    return [*([Cut(reading.n_shared, CutKind.BRANCH)] if is_known else []), Cut(near, CutKind.NEAR_END)]


def no_cuts(reading: TurnReading, spacing: Spacing) -> Sequence[Cut]:  # noqa: ARG001
    return ()


# what goes


def our_victims(entries: Sequence[Entry], bytes_to_free: int, curves: Curves) -> EvictionChoice:  # noqa: ARG001
    return policy.choose(entries, bytes_to_free, N_LEAST)


def oldest(entries: Sequence[Entry], bytes_to_free: int, curves: Curves) -> EvictionChoice:  # noqa: ARG001
    """Least recently used first."""
    return _first(sorted(entries, key=lambda e: (not e.stranded, -e.age_s, e.key)), bytes_to_free)


def smallest_hole(entries: Sequence[Entry], bytes_to_free: int, curves: Curves) -> EvictionChoice:  # noqa: ARG001
    """Evicts what leaves the smallest gap, so that the rest stays evenly spread."""
    return _first(sorted(entries, key=lambda e: (not e.stranded, e.seconds_saved, -e.age_s, e.key)), bytes_to_free)


def least_work_per_byte(entries: Sequence[Entry], bytes_to_free: int, curves: Curves) -> EvictionChoice:
    """How lately used plus work saved per byte of state and KV, both scaled to 1."""
    oldest_s = max((e.age_s for e in entries), default=0.0) or 1.0
    worth = {e.key: e.seconds_saved / (e.size_bytes + _kv_bytes(e, curves)) for e in entries if e.size_bytes}
    most = max(worth.values(), default=0.0) or 1.0

    def value(e: Entry) -> tuple[bool, float, int]:
        return not e.stranded, 1 - e.age_s / oldest_s + FLOP_WEIGHT * worth.get(e.key, 0.0) / most, e.key

    return _first(sorted(entries, key=value), bytes_to_free)


def _kv_bytes(entry: Entry, curves: Curves) -> float:
    return entry.seconds_saved / curves.seconds_per_token * curves.kv_bytes_per_token


def _first(entries: Sequence[Entry], bytes_to_free: int) -> EvictionChoice:
    chosen = []
    freed = 0
    for entry in entries:
        if freed >= bytes_to_free:
            break
        chosen.append(entry.key)
        freed += entry.size_bytes
    return EvictionChoice(tuple(chosen))


OURS = Policy("ours", our_cuts, our_victims, learns=True)
LRU = Policy("lru", even_cuts, oldest, CheckpointParams(_ANY_NUMBER, EVERY_N))
FLOPS = Policy("flop-per-byte", branch_cuts, least_work_per_byte, CheckpointParams(_ANY_NUMBER))
SPREAD = Policy("spread", our_cuts, smallest_hole, CheckpointParams(_ANY_NUMBER))
COLD = Policy("cold", no_cuts, oldest, CheckpointParams(0), keeps_ends=False)
POLICIES = {each.name: each for each in (OURS, LRU, FLOPS, SPREAD, COLD)}
