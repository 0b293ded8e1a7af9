"""What goes when the disk tier is over its budget: Pure: values in, names out; no clock, no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everwarm.state import policy
from everwarm.state.disk_forest import Point, point_of
from everwarm.state.store.index import IndexedObject


@dataclass(frozen=True, slots=True)
class DiskLimits:
    budget_bytes: int
    space_share: float  # of the budget, for each space at most


@dataclass(frozen=True, slots=True)
class EvictionCandidates:
    """Among whom something must go: the objects of one space, or all."""

    space: str | None


def crowd(space_bytes: Mapping[str, int], n_bytes: int, limits: DiskLimits, most: int) -> EvictionCandidates | None:
    """None: at most ``most`` bytes are taken, and no space has more than its share. One that has gives of its own."""
    if limits.space_share < 1.0:
        space, size = max(space_bytes.items(), key=lambda pair: pair[1], default=("", 0))
        if size > limits.space_share * limits.budget_bytes:
            return EvictionCandidates(space)
    return EvictionCandidates(None) if n_bytes > most else None


def ranked(
    kept: Iterable[IndexedObject], among: EvictionCandidates, marked: frozenset[Point], now: float, share: float
) -> list[IndexedObject]:
    """The states that go first, in their order, with so large a share of the bytes: those that save least, and those at
    marked points after all others."""
    states = [each for each in kept if each.kind == "state" and among.space in (None, each.space)]
    entries = [_entry(i, each, marked, now) for i, each in enumerate(states)]
    n_bytes = sum(entry.size_bytes for entry in entries)
    return [states[i] for i in policy.victims(entries, 1 + int(share * n_bytes))]


def _entry(i: int, kept: IndexedObject, marked: frozenset[Point], now: float) -> policy.Entry:
    is_pinned = point_of(kept.key, kept.n_items) in marked
    return policy.Entry(i, kept.size, float(kept.n_items), now - kept.used_at, kept.hits, pinned=is_pinned)
