"""Pins that outlive the engine: written down beside the objects on disk, and set again on nodes that come back to RAM.

The loop's thread says what is to be written and marks nodes; hashing and writing are jobs for the disk's own. Nothing here
is about memory that a device copies from: that is ``pinning``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from everwarm.engine.tiers.ram import Ram
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, point_of, root_key, short_key
from everwarm.state.null_tiers import DiskTier
from everwarm.state.store.pin_file import Pin
from everwarm.state.tree import Node, Tree

MOST_PINS = 256  # of one namespace, unless an admin pins

Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class PinnedDisk:
    """Where pins are written down."""

    disk: DiskTier
    fingerprint: str


@dataclass(frozen=True, slots=True)
class HeldPin:
    """What somebody's pins keep."""

    n_pins: int
    n_bytes: int


def pinned_on_disk(disk: DiskTier, space: str, *also: Pin) -> HeldPin:
    """The pins of a space, with the states at their points and the KV that those need."""
    pins = {pin.key: pin for pin in (*disk.pins.all(), *also) if pin.space == space}
    points = {point for pin in pins.values() for point in pin.points}
    kept = {each.name: each for each in disk.objects() if each.space == space}
    states = [each for each in kept.values() if each.kind == "state" and point_of(each.key, each.n_items) in points]
    names = {name for state in states for name in (state.name, *state.needs)}
    return HeldPin(len(pins), sum(kept[name].size for name in names if name in kept))


class PinBoard:
    def __init__(self, tree: Tree, ram: Ram, where: Callable[[], PinnedDisk]) -> None:
        self._tree = tree
        self._ram = ram
        self._where = where

    def renew(self, namespace: str, prompt: Prompt, n_items: int) -> None:
        """Pin again what of these items was pinned. They are in the tree."""
        where = self._where()
        if not where.disk.pins.marked:
            return
        root = root_key(where.fingerprint, namespace)
        wanted = {pin.key: pin.n_items for pin in where.disk.pins.all() if pin.space == short_key(root)}
        ends = {n for n in wanted.values() if 0 < n <= n_items}
        for n, key in keys(root, prompt, ends).items() if ends else ():
            if wanted.get(key) == n:
                self._ram.pin(self._tree.grow(self._tree.root(namespace), prompt, n))

    def note(self, node: Node) -> Job:
        """A job: write down that the node is pinned."""
        namespace, path, at = self._tree.namespace(node), node.path, node.n_items
        ends = sorted(n.n_items for n in node.lineage())

        def write() -> None:
            where = self._where()
            root = root_key(where.fingerprint, namespace)
            named = keys(root, path, ends)
            above = tuple(point_of(named[n], n) for n in ends if n != at)
            where.disk.pin(Pin(named[at], at, short_key(root), above))

        return write

    def strike(self, node: Node) -> Job:
        """A job: write down that the node is pinned no longer."""
        namespace, path, at = self._tree.namespace(node), node.path, node.n_items

        def write() -> None:
            where = self._where()
            where.disk.unpin(keys(root_key(where.fingerprint, namespace), path, (at,)).values())

        return write


def pinned_below(node: Node) -> Iterator[Node]:
    """The pinned ones at or below a node."""
    todo = [node] if node.n_pinned else []
    while todo:
        at = todo.pop()
        if at.is_pinned:
            yield at
        todo += [child for child in at.children.values() if child.n_pinned]
