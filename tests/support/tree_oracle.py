"""A prefix tree as a plain dictionary, for comparing: from (namespace, items) to what is kept there.

Slow and obvious. Nodes are tuples of items; an edge is whatever lies between a node and its longest shorter prefix.
"""

from dataclasses import dataclass

from everwarm.prompt.prompt import MediaItem, Prompt
from everwarm.state.tree import Node, Tree

Item = int | MediaItem
Items = tuple[Item, ...]
Key = tuple[str, Items]


@dataclass
class Kept:
    """What one node has. Checkpoints and segments are compared by identity."""

    checkpoint: object | None = None
    segment: object | None = None
    holders: int = 0
    pins: int = 0

    @property
    def is_bare(self) -> bool:
        return self.checkpoint is None and self.segment is None and not self.holders and not self.pins


class Oracle:
    def __init__(self) -> None:
        self.nodes: dict[Key, Kept] = {}

    def grow(self, key: Key) -> None:
        namespace, items = key
        if not items or key in self.nodes:
            return
        known = [other for ns, other in self.nodes if ns == namespace]
        fork = max((common(items, other) for other in known), default=0)
        if fork > 0 and (namespace, items[:fork]) not in self.nodes:
            self._split(namespace, items[:fork])
        self.nodes.setdefault(key, Kept())

    def _split(self, namespace: str, items: Items) -> None:
        below = min((o for ns, o in self.nodes if ns == namespace and o[: len(items)] == items), key=len)
        self.nodes[namespace, items] = Kept(segment=self.nodes[namespace, below].segment)

    def prune(self, key: Key) -> None:
        while key in self.nodes and self.nodes[key].is_bare and not self.children(key):
            lineage = self.lineage(key)
            del self.nodes[key]
            if len(lineage) < 2:
                return
            key = lineage[-2]
        for near in reversed(self.lineage(key)[-2:]):
            self.merge(near)

    def merge(self, key: Key) -> None:
        """A node that has nothing and leads to one other, that begins without KV, is no node."""
        if self.nodes[key].is_bare and [self.nodes[k].segment for k in self.edges(key)] == [None]:
            del self.nodes[key]

    def drop_segment(self, key: Key) -> None:
        """From a node, and from those right below it that use the same."""
        segment, users = self.nodes[key].segment, [key]
        while below := [k for k in self.edges(users[-1]) if self.nodes[k].segment is segment]:
            users.append(below[0])
        for user in reversed(users):
            self.nodes[user].segment = None
            self.prune(user)

    def edges(self, key: Key) -> list[Key]:
        """Children, but no grandchildren."""
        below = self.children(key)
        return [k for k in below if not any(k != o and k[1][: len(o[1])] == o[1] for o in below)]

    def children(self, key: Key) -> list[Key]:
        return [o for o in self.nodes if o[0] == key[0] and o != key and o[1][: len(key[1])] == key[1]]

    def lineage(self, key: Key) -> list[Key]:
        """All nodes on the way, this one last."""
        return sorted(
            (k for k in self.nodes if k[0] == key[0] and key[1][: len(k[1])] == k[1]), key=lambda k: len(k[1])
        )

    def n_shared(self, namespace: str, items: Items) -> int:
        return max((common(items, other) for ns, other in self.nodes if ns == namespace), default=0)

    def has_kv(self, namespace: str, items: Items, n_resident: int) -> list[bool]:
        """For each item that is known: is its KV resident or in the segment of its edge?"""
        covered = []
        for i in range(self.n_shared(namespace, items)):
            edge = min((o for ns, o in self.nodes if ns == namespace and o[: i + 1] == items[: i + 1]), key=len)
            covered.append(i < n_resident or self.nodes[namespace, edge].segment is not None)
        return covered


def common(a: Items, b: Items) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def items_of(prompt: Prompt, n_items: int) -> Items:
    return tuple(prompt.media[i] if i in prompt.media else int(prompt.codes[i]) for i in range(n_items))


def snapshot(tree: Tree) -> dict[Key, tuple]:
    """Everything a tree holds, as plain values."""
    return {
        (namespace, items_of(node.path, node.n_items)): look(node)
        for namespace, root in tree._roots.items()
        for node in root.below()
        if node.parent is not None
    }


def look(node: Node) -> tuple:
    return node.checkpoint, node.segment, node.holders, node.pins
