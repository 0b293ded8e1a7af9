"""What may be evicted, and what it is worth: in RAM one pass down the tree and one pass up; on disk one over the index.
``policy`` then chooses what is evicted. Pure: reads the tree and the index, changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from everwarm.state.lineage import Point, point_of
from everwarm.state.policy import CutKind, Entry, assumed_returns, victims
from everwarm.state.store.index import IndexedObject
from everwarm.state.tree import Node, Segment


@dataclass(frozen=True, slots=True)
class Scales:
    """What weighing depends on besides the tree."""

    now: float
    seconds_per_token: float
    needs_checkpoints: bool
    needs_kv: bool
    resident: frozenset[int]  # nodes whose KV is on the device, by their Python ids
    expected: Mapping[int, float]  # returns to nodes, by their ids: see ``Returns.expected``
    unvisited: Callable[[int, float], float]  # returns to what no request is known to have ended at: hits, age
    awaited: frozenset[int] = frozenset()  # ids of nodes that suspended requests will continue from


def weigh(nodes: Sequence[Node], scales: Scales) -> list[Entry]:
    """Entries for all states and segments that may be evicted. Keys are 2·index for a state, 2·index + 1 for a segment.

    ``nodes`` come parents first.
    """
    index = {id(node): i for i, node in enumerate(nodes)}
    above, has_kv = _from_above(nodes, index, scales)
    wanted, followed, covered = _from_below(nodes, index)
    leans = _leans(nodes, index, wanted)
    entries = []
    for i, node in enumerate(nodes):
        if node.pins:
            continue
        if node.checkpoint is not None and node.checkpoint.size_bytes:
            entries.append(_state_entry(i, node, scales, above[i], has_kv[i], not followed[i], leans[i]))
        may_go = wanted if scales.needs_checkpoints else covered  # where this says False
        if node.segment is not None and not may_go[i] and (_is_first(node) or may_go[index[id(node.parent)]]):
            entries.append(_segment_entry(i, node, node.segment, scales))
    return entries


def _from_above(nodes: Sequence[Node], index: dict[int, int], scales: Scales) -> tuple[list[int], list[bool]]:
    """For each node: where the nearest checkpoint above it ends, and whether its KV lineage is whole."""
    above, has_kv = [0] * len(nodes), [True] * len(nodes)
    for i, node in enumerate(nodes):
        if node.parent is None:
            continue
        p = index[id(node.parent)]
        above[i] = node.parent.n_items if node.parent.checkpoint is not None else above[p]
        own = node.segment is not None or id(node) in scales.resident
        has_kv[i] = not scales.needs_kv or (has_kv[p] and own)
    return above, has_kv


def _leans(nodes: Sequence[Node], index: dict[int, int], wanted: Sequence[bool]) -> list[tuple[int | None, int]]:
    """For each node: the entry of the nearest checkpoint above it, and the KV that is kept for it alone."""
    found: list[tuple[int | None, int]] = [(None, 0)] * len(nodes)
    n_wanted = Counter(index[id(node.parent)] for node in nodes if node.parent is not None and wanted[index[id(node)]])
    for i, node in enumerate(nodes):
        if node.parent is None:
            continue
        p = index[id(node.parent)]
        key, n_bytes = found[p]
        if node.parent.checkpoint is not None:
            key, n_bytes = 2 * p, 0
        elif n_wanted[p] > 1:
            n_bytes = 0
        found[i] = key, n_bytes + (node.segment.blob.nbytes if node.segment is not None and _is_first(node) else 0)
    return found


def _from_below(nodes: Sequence[Node], index: dict[int, int]) -> tuple[list[bool], list[bool], list[bool]]:
    """For each node: a RAM state at or below it; any checkpoint below it; any segment that begins below it."""
    wanted, followed, covered = ([False] * len(nodes) for _ in range(3))
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        checkpoint = node.checkpoint
        wanted[i] |= checkpoint is not None and checkpoint.state is not None
        if node.parent is not None:
            p = index[id(node.parent)]
            wanted[p] |= wanted[i]
            followed[p] |= followed[i] or checkpoint is not None
            covered[p] |= covered[i] or (node.segment is not None and _is_first(node))
    return wanted, followed, covered


def _is_first(node: Node) -> bool:
    """Whether no earlier node uses its segment: the segment's bytes count at the first one."""
    return node.parent is None or node.parent.segment is not node.segment


def _segment_entry(i: int, node: Node, segment: Segment, scales: Scales) -> Entry:
    """The entry of a segment from this node on, with all nodes below that use it."""
    size = segment.blob.nbytes if _is_first(node) else 0
    seconds = (segment.n_stop - node.start) * scales.seconds_per_token
    returns = scales.expected.get(node.id, 0.0)
    return Entry(2 * i + 1, size, seconds, returns, stranded=scales.needs_checkpoints, pinned=node.n_pinned > 0)


def _state_entry(
    i: int, node: Node, scales: Scales, above: int, has_kv: bool, is_newest: bool, leans: tuple[int | None, int]
) -> Entry:
    checkpoint = node.checkpoint
    assert checkpoint is not None
    age_s = scales.now - checkpoint.used_at
    returns = scales.expected.get(node.id, 0.0)
    if not returns and (is_newest or node.is_junction or checkpoint.hits):
        returns = scales.unvisited(checkpoint.hits, age_s)
    return Entry(
        2 * i,
        checkpoint.size_bytes,
        (node.n_items - above) * scales.seconds_per_token,
        returns,
        age_s,
        stranded=not has_kv,
        is_ahead=checkpoint.kind is CutKind.PREWARM and not node.children,
        pinned=node.n_pinned > 0 or node.id in scales.awaited,
        above=leans[0],
        kv_bytes=leans[1],
    )


# on disk


@dataclass(frozen=True, slots=True)
class DiskLimits:
    budget_bytes: int
    space_share: float  # of the budget, for each space at most


@dataclass(frozen=True, slots=True)
class EvictionCandidates:
    """The objects to choose victims from: those of one space, or all."""

    space: str | None


def candidates(
    space_bytes: Mapping[str, int], n_bytes: int, limits: DiskLimits, most: int
) -> EvictionCandidates | None:
    """None: at most ``most`` bytes are taken, and no space has more than its share. A space that has more evicts its
    own objects."""
    if limits.space_share < 1.0:
        space, size = max(space_bytes.items(), key=lambda pair: pair[1], default=("", 0))
        if size > limits.space_share * limits.budget_bytes:
            return EvictionCandidates(space)
    return EvictionCandidates(None) if n_bytes > most else None


def ranked(
    objects: Iterable[IndexedObject], among: EvictionCandidates, pinned: frozenset[Point], now: float, share: float
) -> list[IndexedObject]:
    """The states to evict first, in order, up to this share of the bytes: those that save least, and those at pinned
    points after all others."""
    states = [each for each in objects if each.kind == "state" and among.space in (None, each.space)]
    entries = [_disk_entry(i, each, pinned, now) for i, each in enumerate(states)]
    n_bytes = sum(entry.size_bytes for entry in entries)
    return [states[i] for i in victims(entries, 1 + int(share * n_bytes))]


def _disk_entry(i: int, kept: IndexedObject, pinned: frozenset[Point], now: float) -> Entry:
    """A state saves its whole prompt: what other states would help is not known from the index."""
    is_pinned = point_of(kept.key, kept.n_items) in pinned
    age_s = now - kept.used_at
    return Entry(i, kept.size, float(kept.n_items), assumed_returns(kept.hits, age_s), age_s, pinned=is_pinned)
