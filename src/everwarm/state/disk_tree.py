"""Which of the states that are only on disk share prefixes, and where they attach to the tree in RAM. Pure: from the
index alone.

A state names the KV that makes it whole, in order, and how far each part of it is used. Names of KV hold the names of
the lineages where it starts and ends (``object.name_of``), so they say which points a state's lineage passes. States
that use the same KV lie on one lineage as far as both use it. States without KV are attached to their root.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import blake3

from everwarm.state.lineage import N_SHORT, Point, point_of
from everwarm.state.store.index import IndexedObject

N_ID = 13  # hexadecimal digits of an id: exact in JavaScript
_START = slice(3, 3 + N_SHORT)  # of the name of KV: see ``object.name_of``
_END = slice(4 + N_SHORT, 4 + 2 * N_SHORT)


@dataclass(frozen=True, slots=True)
class TreePoint:
    """A node that others attach to: of the tree in RAM, or a state on disk."""

    id: int
    n_items: int
    space: str


@dataclass(frozen=True, slots=True)
class DiskNode:
    """A node that is only on disk: a state, or the root of a space of which nothing is in RAM."""

    id: int
    parent: int | None
    n_above: int  # items of the parent
    space: str
    kept: IndexedObject | None = None  # None: a root
    kv_bytes: int = 0  # of the KV that no node before it in the list needs

    @property
    def has_kv(self) -> bool:
        return self.kept is not None and bool(self.kept.needs)


@dataclass(frozen=True, slots=True)
class DiskTree:
    """Parents before children."""

    nodes: list[DiskNode] = field(default_factory=list)
    place: dict[int, int] = field(default_factory=dict)  # of a node in the list, by id
    n_children: Counter[int] = field(default_factory=Counter)  # that are only on disk; also of nodes in RAM

    def below(self, ids: Iterable[int]) -> list[IndexedObject]:
        """The states at or below these nodes."""
        inside = set(ids)
        found = []
        for node in self.nodes:
            if node.id in inside or node.parent in inside:
                inside.add(node.id)
                if node.kept is not None:
                    found.append(node.kept)
        return found


def id_of(name: str) -> int:
    """The id of a state's lineage or of a space: negative, and the same in every process."""
    return -1 - int(blake3.blake3(name.encode()).hexdigest()[:N_ID], 16)


def build_disk_tree(
    states: Iterable[IndexedObject],
    sizes: Mapping[str, int],
    in_ram: Mapping[Point, TreePoint],
    roots: Mapping[str, int],
    pace: Callable[[Iterable[IndexedObject]], Iterable[IndexedObject]] = iter,
) -> DiskTree:
    """All states whose point has no node in RAM (``in_ram`` are the points that have). ``sizes``: of all KV; ``roots``:
    the nodes of spaces that RAM knows; ``pace``: how to walk over many."""
    known = {point_of(kept.key, kept.n_items): kept for kept in states}
    own = {point: kept for point, kept in known.items() if point not in in_ram}
    ends: dict[str, list[IndexedObject]] = defaultdict(list)
    for kept in sorted(own.values(), key=lambda kept: -kept.n_items):
        if kept.needs:
            ends[kept.needs[-1]].append(kept)
    children: dict[int, list[DiskNode]] = defaultdict(list)
    tops: dict[int, DiskNode] = {}
    for kept in pace(sorted(own.values(), key=lambda kept: (kept.n_items, kept.name))):
        above = _above(kept, own, in_ram, ends) or _root(kept.space, roots, tops)
        node = DiskNode(id_of(kept.key), above.id, above.n_items, kept.space, kept)
        children[above.id].append(node)
    return _listed(tops, children, sizes)


def kv_on_path(kept: IndexedObject) -> Iterator[tuple[str, int, Point | None, Point | None]]:
    """The KV of a state's lineage, the last first: its name, how far it is used, and the points at that end and at its
    start."""
    if len(kept.needs) != len(kept.reaches):
        return
    for i in range(len(kept.needs) - 1, -1, -1):
        need = kept.needs[i]
        reach = kept.reaches[i]
        before = kept.reaches[i - 1] if i else 0
        yield need, reach, (need[_END], reach), (need[_START], before) if before else None


def _above(
    kept: IndexedObject,
    own: Mapping[Point, IndexedObject],
    in_ram: Mapping[Point, TreePoint],
    ends: Mapping[str, list[IndexedObject]],
) -> TreePoint | None:
    """The deepest known node of a state's lineage."""

    def at(point: Point | None) -> TreePoint | None:
        if point is None or point[1] >= kept.n_items:
            return None
        other = own.get(point)
        found = in_ram.get(point) if other is None else _point(other)
        return found if found is not None and found.space == kept.space else None

    for need, reach, end, start in kv_on_path(kept):
        most = min(reach, kept.n_items - 1)
        inside = next((o for o in ends.get(need, ()) if o.n_items <= most and o.space == kept.space), None)
        found = at(end) or (None if inside is None else _point(inside)) or at(start)
        if found is not None:
            return found
    return None


def _point(kept: IndexedObject) -> TreePoint:
    return TreePoint(id_of(kept.key), kept.n_items, kept.space)


def _root(space: str, roots: Mapping[str, int], tops: dict[int, DiskNode]) -> TreePoint:
    if space in roots:
        return TreePoint(roots[space], 0, space)
    id = id_of(f"root of {space}")
    tops[id] = DiskNode(id, None, 0, space)
    return TreePoint(id, 0, space)


def _listed(tops: dict[int, DiskNode], children: dict[int, list[DiskNode]], sizes: Mapping[str, int]) -> DiskTree:
    own = {node.id for nodes in children.values() for node in nodes} | tops.keys()
    hanging = [node for id, nodes in children.items() if id not in own for node in nodes]
    todo = [*reversed([*tops.values(), *hanging])]
    tree = DiskTree()
    counted = set[str]()
    while todo:
        node = todo.pop()
        if node.id in tree.place:  # two names that begin alike
            continue
        tree.place[node.id] = len(tree.nodes)
        tree.nodes.append(_weighed(node, sizes, counted))
        if node.parent is not None:
            tree.n_children[node.parent] += 1
        todo.extend(reversed(children.get(node.id, ())))
    return tree


def _weighed(node: DiskNode, sizes: Mapping[str, int], counted: set[str]) -> DiskNode:
    """Adds the bytes of the KV that no earlier node has counted, so that the sum is right."""
    if node.kept is None:
        return node
    n_bytes = 0
    for need, reach, _, _ in kv_on_path(node.kept):
        if reach <= node.n_above:
            break
        if need not in counted:
            counted.add(need)
            n_bytes += sizes.get(need, 0)
    return replace(node, kv_bytes=n_bytes)
