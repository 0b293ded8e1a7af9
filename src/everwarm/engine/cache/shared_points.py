"""Points of a lineage that more than its own next turn may go on from: worth keeping beyond the engine, too.

Where conversations part, and the end of the first message, usually the system prompt: others will begin with it.
"""

from __future__ import annotations

from itertools import pairwise

from everwarm.llama.model import MemoryKind
from everwarm.state.policy import GUARD, CutKind
from everwarm.state.tree import Node, first_message_end

WORTH_S = 0.05  # of reading: what is read sooner is not worth its bytes

_REPLIES = (CutKind.REPLY, CutKind.END, CutKind.CANCEL, CutKind.PREWARM)


def shared_points(kind: MemoryKind, node: Node) -> list[Node]:
    """Those above the node, whose states are in RAM."""
    above = [(n, child) for n, child in pairwise(node.lineage()) if _can_be_kept(kind, n)]
    first = first_message_end(n for n, _ in above)
    return [n for n, child in above if n is first or _leads_to_other_prompts(kind, n, child)]


def _leads_to_other_prompts(kind: MemoryKind, node: Node, ours: Node) -> bool:
    """Whether another prompt goes on from here, and not only a reply that was left aside. One is enough, be it a retry:
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
    return checkpoint is not None and checkpoint.state is not None and checkpoint.kind is not CutKind.PREWARM
