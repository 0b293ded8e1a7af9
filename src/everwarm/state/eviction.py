"""Weighing everything in RAM for eviction: one pass down the tree, one pass up. Pure: asks the tree, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everwarm.state.policy import PROTECTED_S, CutKind, Entry
from everwarm.state.tree import Node, Segment


@dataclass(frozen=True, slots=True)
class Scales:
    """What weighing depends on besides the tree."""

    now: float
    seconds_per_token: float
    needs_checkpoints: bool
    needs_kv: bool
    resident: frozenset[int]  # ids of nodes whose KV is on the device


def weigh(nodes: Sequence[Node], scales: Scales) -> list[Entry]:
    """Entries for all states and segments that may go. Keys are 2·index for a state, 2·index + 1 for a segment.

    ``nodes`` come parents first.
    """
    index = {id(node): i for i, node in enumerate(nodes)}
    above, has_kv = _from_above(nodes, index, scales)
    leans = _leans(nodes, index)
    wanted, followed, covered = _from_below(nodes, index)
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


def _leans(nodes: Sequence[Node], index: dict[int, int]) -> list[tuple[int | None, int]]:
    """For each node: the entry of the nearest checkpoint above it, and the KV that is kept for it alone."""
    found: list[tuple[int | None, int]] = [(None, 0)] * len(nodes)
    for i, node in enumerate(nodes):
        if node.parent is None:
            continue
        p = index[id(node.parent)]
        key, n_bytes = found[p]
        if node.parent.checkpoint is not None:
            key, n_bytes = 2 * p, 0
        elif len(node.parent.children) > 1:
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
    """Whether no other node before it uses its segment: what the segment weighs counts there."""
    return node.parent is None or node.parent.segment is not node.segment


def _segment_entry(i: int, node: Node, segment: Segment, scales: Scales) -> Entry:
    """A segment goes from a node on, with all that use it below."""
    size = segment.blob.nbytes if _is_first(node) else 0
    seconds = (segment.n_stop - node.start) * scales.seconds_per_token
    return Entry(2 * i + 1, size, seconds, 0.0, 0, stranded=scales.needs_checkpoints, pinned=node.n_pinned > 0)


def _state_entry(
    i: int, node: Node, scales: Scales, above: int, has_kv: bool, is_newest: bool, leans: tuple[int | None, int]
) -> Entry:
    checkpoint = node.checkpoint
    assert checkpoint is not None
    age_s = scales.now - checkpoint.used_at
    is_end = is_newest and checkpoint.kind is not CutKind.END
    return Entry(
        2 * i,
        checkpoint.size_bytes,
        (node.n_items - above) * scales.seconds_per_token,
        age_s,
        checkpoint.hits,
        stranded=not has_kv,
        protected=age_s < PROTECTED_S and (is_end or len(node.children) > 1),
        is_ahead=checkpoint.kind is CutKind.PREWARM and not node.children,
        pinned=node.n_pinned > 0,
        above=leans[0],
        kv_bytes=leans[1],
    )
