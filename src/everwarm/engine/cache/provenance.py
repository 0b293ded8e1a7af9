"""Whether the kept parts come from the same clean reading: only then does continuing from them give the same bits.

Prompts that begin alike share nodes, and a node has one segment. So a reading whose first tokens another one has kept
keeps its own copy of those few with the next segment, which then reaches back before its node. Pure.

Shared points are those of a lineage that others than its own next turn may continue from: where conversations part, and
the end of the first message (usually the system prompt). They are worth keeping beyond the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from everwarm.llama.model import MemoryKind
from everwarm.state.lineage import Chunks, history_over
from everwarm.state.policy import GUARD, PROVISIONAL, CutKind
from everwarm.state.tree import Node, Segment, first_message_end

WORTH_S = 0.05  # of reading: what is read sooner is not worth its bytes

_REPLIES = (CutKind.REPLY, CutKind.END, CutKind.CANCEL, *PROVISIONAL)


def shared_points(kind: MemoryKind, node: Node) -> list[Node]:
    """Those above the node, whose states are on the device or in RAM."""
    above = [(n, child) for n, child in pairwise(node.lineage()) if _can_be_kept(kind, n)]
    first = first_message_end(n for n, _ in above)
    return [n for n, child in above if n is first or _leads_to_other_prompts(kind, n, child)]


def _leads_to_other_prompts(kind: MemoryKind, node: Node, ours: Node) -> bool:
    """Whether another prompt continues from here, and not only an abandoned reply. One prompt is enough, even a retry:
    a state costs less than reading its prompt again."""
    others = [child for child in node.children.values() if child is not ours]
    if not kind.needs_checkpoints:
        return bool(others)
    kept = (n.checkpoint for child in others for n in child.below())
    return any(checkpoint is not None and checkpoint.kind not in _REPLIES for checkpoint in kept)


def is_worth_it(node: Node, seconds_per_token: float, *, is_always: bool) -> bool:
    return node.n_items > GUARD and (is_always or node.n_items * seconds_per_token >= WORTH_S)


def _can_be_kept(kind: MemoryKind, node: Node) -> bool:
    if not kind.needs_checkpoints:
        return True
    checkpoint = node.checkpoint
    return checkpoint is not None and checkpoint.is_held and checkpoint.kind not in PROVISIONAL


@dataclass(frozen=True, slots=True)
class CoveredRange:
    """A node as it was, for other threads."""

    start: int
    n_items: int
    segment: Segment | None


S = TypeVar("S", Node, CoveredRange)


def cover(path: Sequence[S], n_from: int, n_items: int) -> list[tuple[S, int]] | None:
    """The nodes whose segments hold the KV between two points, each with the end of its part. A segment that reaches
    back is used as far as it goes. None: some of the KV is missing."""
    found = []
    at = n_items
    for node in reversed(path):
        if at <= n_from:
            break
        if node.start < at:
            if node.segment is None:
                return None
            found.append((node, at))
            at = node.segment.n_start
    return found[::-1] if at <= n_from else None


def entry(path: Sequence[S], n_have: int, n_items: int, chunks: Chunks) -> int:
    """Where loading KV starts, after KV with these chunks that is there already. It starts before the end of that KV if
    the next segment brings its own reading of the last few items."""
    parts = cover(path, n_have, n_items) if n_have < n_items else None
    first = parts[0][0].segment if parts else None
    if first is None or not 0 < n_have - first.n_start <= GUARD or is_part_of(first, chunks, n_have):
        return n_have
    return first.n_start


def is_exact(node: Node) -> bool:
    """Whether a checkpoint and all the KV kept for it come from one clean reading. KV that is only on the device is the
    checkpoint's own."""
    checkpoint = node.checkpoint
    lineage = node.lineage()
    if checkpoint is None or not checkpoint.clean:
        return False
    parts = cover(lineage, 0, node.n_items) or [(n, n.n_items) for n in lineage]
    kept = ((n.segment, stop) for n, stop in parts if n.segment is not None)
    return all(is_part_of(segment, checkpoint.chunks, stop) for segment, stop in kept)


def is_part_of(segment: Segment, chunks: Chunks, n_items: int) -> bool:
    """Whether a segment, up to ``n_items``, comes from the clean reading with these chunks."""
    if not segment.clean or segment.chunks is None:
        return False
    history = history_over(chunks, n_items)
    return history is not None and history_over(segment.chunks, n_items) == history


def n_of(path: Sequence[S], chunks: Chunks) -> int:
    """How many items have KV of that reading, from the first one on."""
    for i in range(len(path), 0, -1):
        parts = cover(path[:i], 0, path[i - 1].n_items)
        if parts and all(n.segment is not None and is_part_of(n.segment, chunks, stop) for n, stop in parts):
            return path[i - 1].n_items
    return 0


def is_better(node: Node, chunks: Chunks, *, is_clean: bool, is_whole: bool) -> bool:
    """Whether KV with this history is worth more than the node's own. A clean reading replaces any other, even a clean
    one: a state is exact only with KV of its own reading, and requests continue from the latest reading. ``is_whole``:
    its state is clean, too."""
    segment = node.segment
    if segment is None:
        return True
    if not is_clean or history_over(chunks, node.n_items) is None:
        return False
    is_another = is_whole and not _is_passage(node) and not is_part_of(segment, chunks, node.n_items)
    return not segment.clean or is_another


def _is_passage(node: Node) -> bool:
    """A few items that several prompts share and none continues from: not worth replacing one reading by another."""
    return node.checkpoint is None and node.n_items - node.start <= GUARD


def reach_back(node: Node, chunks: Chunks) -> Node:
    """The first node whose KV a segment of this reading must include: the node itself, and passages of other readings
    before it."""
    first = node
    above = node.parent
    while above is not None and above.parent is not None and _is_passage(above):
        if above.segment is not None and is_part_of(above.segment, chunks, above.n_items):
            break
        first = above
        above = above.parent
    return first
