"""Pins beyond the tree: those that outlive the engine, and those that end by themselves.

A pin is stored beside the objects on disk, and set again on nodes that come back to RAM (``ram`` keeps it for the next
engine). The loop's thread makes the jobs and pins nodes; hashing and writing happen when the disk's thread does the jobs:
the disk tier may come and go until then. A pin for a time is held in this engine's memory alone, so it ends with it at the
latest. Pinning memory for a device is something else: see ``ram``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from everwarm.engine.tiers.ram import Ram
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, point_of, root_key, short_key
from everwarm.state.tier import DiskTier, Pin
from everwarm.state.tree import Node, Tree, pin, unpin

MOST_PINS = 256  # of one namespace, unless an admin pins

PinJob = Callable[[DiskTier, str], None]  # done on the disk's thread, with the fingerprint
MOST_TIMED = 4096  # of all namespaces; beyond it the one that would end first is ended


def pinned_on_disk(disk: DiskTier, space: str, *also: Pin) -> tuple[int, int]:
    """How many pins a space has, and the bytes of the states at their points with the KV that those need."""
    pins = {pin.key: pin for pin in (*disk.pins, *also) if pin.space == space}
    points = {point for pin in pins.values() for point in pin.points}
    kept = {each.name: each for each in disk.objects() if each.space == space}
    states = [each for each in kept.values() if each.kind == "state" and point_of(each.key, each.n_items) in points]
    names = {name for state in states for name in (state.name, *state.needs)}
    return len(pins), sum(kept[name].size for name in names if name in kept)


def pin_again(
    tree: Tree, ram: Ram, disk: DiskTier, fingerprint: str, namespace: str, prompt: Prompt, n_items: int
) -> None:
    """Pins those nodes of a prompt's first items again that were pinned before. The items are in the tree."""
    if not disk.pinned_points:
        return
    root = root_key(fingerprint, namespace)
    wanted = {pin.key: pin.n_items for pin in disk.pins if pin.space == short_key(root)}
    ends = {n for n in wanted.values() if 0 < n <= n_items}
    for n, key in keys(root, prompt, ends).items() if ends else ():
        if wanted.get(key) == n:
            ram.pin(tree.grow(tree.root(namespace), prompt, n))


def pin_job(tree: Tree, node: Node) -> PinJob:
    """Stores the pin of this node."""
    namespace = tree.namespace(node)
    path = node.path
    at = node.n_items
    ends = sorted(n.n_items for n in node.lineage())

    def write(disk: DiskTier, fingerprint: str) -> None:
        root = root_key(fingerprint, namespace)
        named = keys(root, path, ends)
        above = tuple(point_of(named[n], n) for n in ends if n != at)
        disk.pin(Pin(named[at], at, short_key(root), above))

    return write


def unpin_job(tree: Tree, node: Node) -> PinJob:
    """Removes the stored pin of this node."""
    namespace = tree.namespace(node)
    path = node.path
    at = node.n_items

    def write(disk: DiskTier, fingerprint: str) -> None:
        disk.unpin(keys(root_key(fingerprint, namespace), path, (at,)).values())

    return write


def pinned_below(node: Node) -> Iterator[Node]:
    """The pinned nodes at or below a node."""
    todo = [node] if node.n_pinned else []
    while todo:
        at = todo.pop()
        if at.is_pinned:
            yield at
        todo += [child for child in at.children.values() if child.n_pinned]


@dataclass(slots=True)
class TimedPins:
    tree: Tree
    _until: dict[int, tuple[Node, float]] = field(default_factory=dict)  # by node id, on the monotonic clock

    def hold(self, node: Node, until: float) -> None:
        """A pin without an end stays one, and a later end replaces an earlier one."""
        if node.is_pinned and node.id not in self._until:
            return
        pin(node)
        self.tree.changed()
        _, before = self._until.get(node.id, (node, until))
        self._until[node.id] = node, max(before, until)
        if len(self._until) > MOST_TIMED:
            self.release(min(self._until.values(), key=lambda held: held[1])[0])

    def expire(self, now: float) -> None:
        for node, until in list(self._until.values()):
            if until <= now:
                self.release(node)

    def release(self, node: Node) -> None:
        """Ends the pin if it is one of these."""
        held = self._until.pop(node.id, None)
        if held is not None and self.tree.has(node):
            unpin(node)
            self.tree.unpinned(node)
