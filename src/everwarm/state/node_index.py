"""Who is in a tree: every node by its number, how often anything changed, how much is in RAM; and what must always hold.

Told by the tree; decides nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from everwarm.types import START

if TYPE_CHECKING:
    from everwarm.prompt.prompt import Prompt
    from everwarm.state.segment import Segment
    from everwarm.state.tree import Node

N = TypeVar("N", bound="Node")

_ids = itertools.count(int(time.time()) << 20)  # a later engine's are greater; all of them are exact in JavaScript


def new_id() -> int:
    return next(_ids)


class Census(Generic[N]):
    def __init__(self) -> None:
        self.by_id: dict[int, N] = {}
        self.version = 0  # another one: something is different
        self.n_states = 0  # in RAM
        self.n_segments = 0

    def came(self, node: N) -> None:
        node.n_pinned = sum(child.n_pinned for child in node.children.values())
        self.by_id[node.id] = node
        self.version += 1

    def went(self, node: N) -> None:
        unpin(node)
        self.by_id.pop(node.id, None)
        self.version += 1

    def changed(self, n_states: int = 0, n_segments: int = 0) -> None:
        self.n_states += n_states
        self.n_segments += n_segments
        self.version += 1


def pin(node: Node) -> None:
    """It and the whole way to it are given up last."""
    if not node.is_pinned:
        node.is_pinned = True
        _add_pins(node, 1)


def unpin(node: Node) -> None:
    if node.is_pinned:
        node.is_pinned = False
        _add_pins(node, -1)


def _add_pins(node: Node, n: int) -> None:
    above: Node | None = node
    while above is not None:
        above.n_pinned += n
        above = above.parent


# self-check


def check_tree(
    nodes: Iterable[Node], ram_bytes: int, census: Census[Node], key: Callable[[Prompt, int], int | bytes]
) -> None:
    """``key`` says which child of a node a prompt goes to."""
    users: dict[int, tuple[Segment, int]] = {}
    n_bytes = n_states = 0
    listed = list(nodes)
    for node in listed:
        _check_node(node, key)
        if node.checkpoint is not None:
            n_bytes += node.checkpoint.size_bytes
            n_states += node.checkpoint.state is not None
        if node.segment is not None:
            seen = users.get(id(node.segment), (node.segment, 0))[1]
            users[id(node.segment)] = (node.segment, seen + 1)
    for segment, n_users in users.values():
        assert segment.n_users == n_users
        n_bytes += segment.blob.nbytes
    assert ram_bytes == sum(node.ram_bytes for node in listed if node.parent is None)
    assert n_bytes == ram_bytes, f"the ledger says {ram_bytes} bytes, the parts weigh {n_bytes}"
    assert {node.id: node for node in listed} == census.by_id, "the census knows other nodes than there are"
    assert (n_states, len(users)) == (census.n_states, census.n_segments), "the census counts otherwise"


def _check_node(node: Node, key: Callable[[Prompt, int], int | bytes]) -> None:
    assert node.pins >= 0 and node.holders >= 0
    assert node.n_pinned == node.is_pinned + sum(child.n_pinned for child in node.children.values())
    for first, child in node.children.items():
        assert child.parent is node and child.n_items > node.n_items
        assert first == key(child.path, node.n_items)
        assert int(child.path.common_prefix(node.path)) >= node.n_items, "a child leaves its parent's lineage"
    assert node.mark == node.path.mark(node.n_items)
    if node.parent is None:
        assert node.checkpoint is None and node.segment is None
    if node.segment is not None:
        above = node.parent.mark if node.parent else START
        assert node.segment.start <= above and node.mark <= node.segment.stop
