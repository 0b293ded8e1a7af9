"""What goes when the disk tier is over its budget: values in, a name out. No clock, no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from everwarm.state import policy
from everwarm.state.forest import Point, point_of
from everwarm.state.index import Kept


@dataclass(frozen=True, slots=True)
class Limits:
    budget_bytes: int
    space_share: float  # of the budget, for each space at most


def victim(
    kept: Mapping[str, Kept], n_bytes: int, limits: Limits, spare: frozenset[str], marked: frozenset[Point], now: float
) -> str | None:
    """What goes next; None: there is room, or nothing that may go. KV that no state needs goes first, then the states that
    save least, those at marked points last. A space that has more than its share gives of its own."""
    crowd = _too_much(kept, n_bytes, limits)
    if crowd is None:
        return None
    return _stranded(kept, spare, crowd) or _least(spare, crowd, marked, now)


def _too_much(kept: Mapping[str, Kept], n_bytes: int, limits: Limits) -> list[Kept] | None:
    """Those among which something must go; None: there is room for all."""
    if limits.space_share < 1.0:
        sizes: Counter[str] = Counter()
        for each in kept.values():
            sizes[each.space] += each.size
        space, size = max(sizes.items(), key=lambda pair: pair[1], default=("", 0))
        if size > limits.space_share * limits.budget_bytes:
            return [each for each in kept.values() if each.space == space]
    return list(kept.values()) if n_bytes > limits.budget_bytes else None


def _stranded(kept: Mapping[str, Kept], spare: frozenset[str], crowd: list[Kept]) -> str | None:
    needed = {need for each in kept.values() for need in each.needs}
    lost = (
        each.name
        for each in crowd
        if each.name not in spare and (each.name not in needed if each.kind == "kv" else not is_whole(each, kept))
    )
    return next(lost, None)


def is_whole(each: Kept, kept: Mapping[str, Kept]) -> bool:
    return all(need in kept for need in each.needs)


def _least(spare: frozenset[str], crowd: list[Kept], marked: frozenset[Point], now: float) -> str | None:
    states = [each for each in crowd if each.kind == "state" and each.name not in spare]
    entries = (_entry(i, each, marked, now) for i, each in enumerate(states))
    return next((states[i].name for i in policy.victims(entries, 1)), None)


def _entry(i: int, kept: Kept, marked: frozenset[Point], now: float) -> policy.Entry:
    is_pinned = point_of(kept.key, kept.n_items) in marked
    return policy.Entry(i, kept.size, float(kept.n_items), now - kept.used_at, kept.hits, pinned=is_pinned)
