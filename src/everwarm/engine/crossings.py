"""Points of a lineage that more than its own next turn may go on from: worth keeping beyond the engine, too.

Where conversations part, and the end of the first message, usually the system prompt: others will begin with it.
"""

from __future__ import annotations

from everwarm.engine.keeper import Keeper
from everwarm.state.policy import GUARD, CutKind
from everwarm.state.tree import Node

WORTH_S = 0.05  # of reading: what is read sooner is not worth its bytes

_MESSAGE_ENDS = (CutKind.BOUNDARY, CutKind.BREAKPOINT)


def crossings(keeper: Keeper, node: Node) -> list[Node]:
    """Those above the node, whose states are in RAM."""
    above = [n for n in node.lineage()[:-1] if _can_be_kept(keeper, n)]
    first = next((n for n in above if n.checkpoint is not None and n.checkpoint.kind in _MESSAGE_ENDS), None)
    return [n for n in above if len(n.children) > 1 or n is first]


def is_worth_it(keeper: Keeper, node: Node, *, is_always: bool) -> bool:
    return node.n_items > GUARD and (is_always or node.n_items * keeper.seconds_per_token >= WORTH_S)


def _can_be_kept(keeper: Keeper, node: Node) -> bool:
    if not keeper.context.kind.needs_checkpoints:
        return True
    checkpoint = node.checkpoint
    return checkpoint is not None and checkpoint.state is not None and checkpoint.kind is not CutKind.PREWARM
