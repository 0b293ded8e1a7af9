"""Whether what is kept comes from one and the same clean reading: only then does going on from it give the same bits.

Pure."""

from __future__ import annotations

from collections.abc import Iterable

from everwarm.state.history import Chunks, history_over
from everwarm.state.tree import Node, Segment

Stretch = tuple[int, Segment | None]  # up to which item a node reaches, and the KV that is kept of it


def is_exact(node: Node) -> bool:
    """Of a checkpoint and all the KV that is kept for it."""
    checkpoint = node.checkpoint
    if checkpoint is None or not checkpoint.clean:
        return False
    kept = ((n.n_items, n.segment) for n in node.lineage() if n.segment is not None)
    return all(is_part_of(segment, checkpoint.chunks, n_items) for n_items, segment in kept)


def is_part_of(segment: Segment, chunks: Chunks, n_items: int) -> bool:
    """Whether a segment, as far as ``n_items``, is of the clean reading that had these chunks."""
    if not segment.clean or segment.chunks is None:
        return False
    history = history_over(chunks, n_items)
    return history is not None and history_over(segment.chunks, n_items) == history


def n_of(kept: Iterable[Stretch], chunks: Chunks) -> int:
    """How many items have KV of that reading, from the first one on."""
    n = 0
    for n_items, segment in kept:
        if segment is None or not is_part_of(segment, chunks, n_items):
            break
        n = n_items
    return n
