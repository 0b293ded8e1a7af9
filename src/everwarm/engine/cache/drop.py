"""Forgetting what somebody wants forgotten: a node with everything below it, or all of a namespace, in RAM, on the device
and on disk, with everything that could still quote it.

The tree's part runs on the loop's thread; the disk's on the disk's own, after everything that is still on its way there.
What is being read or written just now stays where it is, and is kept anew when it ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from everwarm.engine.core import Core
from everwarm.engine.tiers.disk_writer import DiskWriter
from everwarm.errors import EngineStopped
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, point_of, root_key
from everwarm.state.store.disk import Disk
from everwarm.state.store.index import IndexedObject
from everwarm.state.tree import Node
from everwarm.types import SeqId


@dataclass(frozen=True, slots=True)
class Dropped:
    """How many states and segments, and their bytes."""

    n_objects: int = 0
    n_bytes: int = 0

    def __add__(self, other: Dropped) -> Dropped:
        return Dropped(self.n_objects + other.n_objects, self.n_bytes + other.n_bytes)


@dataclass(frozen=True, slots=True)
class Lineages:
    """What is to be forgotten on disk: everything on the way of these prompts beyond so many items."""

    namespace: str
    prompts: tuple[Prompt, ...]
    beyond: int


def lineages(core: Core, node: Node) -> Lineages:
    ends = [n for n in node.below() if not n.children]
    return Lineages(core.tree.namespace(node), tuple(n.path.first(n.n_items) for n in ends), node.start)


def forget_ahead(core: Core, namespace: str) -> None:
    """Before anything is dropped in namespaces that begin so: nothing of them is on its way into the tree."""
    core.prewarm.drop(core, namespace)
    core.admission.drop_fetches(request for request in core.queue if request.ask.namespace.startswith(namespace))


def forget_words(core: Core, namespace: str) -> None:
    """After everything was dropped: nothing quotes it, neither to a later request nor to one that runs."""
    core.tree.forgotten.clear(namespace)
    for slot in core.slots:
        request = slot.request
        if request is not None and request.why is not None and request.ask.namespace.startswith(namespace):
            request.why = replace(request.why, first_different=None)


def drop(core: Core, node: Node) -> Dropped:
    """Out of the tree, with everything below it."""
    doomed = list(node.below())
    inside = {id(n) for n in doomed}
    n_before = core.tree.ram_bytes
    _leave(core, node, inside)
    n_objects, n_segments = 0, core.tree.census.n_segments
    for n in doomed:
        core.ram.unpin(n)
    for n in reversed(doomed):  # children first: whoever has none and keeps nothing is pruned
        if n.checkpoint is not None:
            core.tree.drop_checkpoint(n)
            core.keeper.counts.dropped("asked for")
            n_objects += 1
        if n.segment is not None:
            core.tree.drop_segment(n)
    n_objects += n_segments - core.tree.census.n_segments
    return Dropped(n_objects, n_before - core.tree.ram_bytes)


def _leave(core: Core, node: Node, inside: set[int]) -> None:
    """No idle sequence stands at or below the node; the KV that those above it need is in RAM before."""
    keeper, namespace = core.keeper, core.tree.namespace(node)
    for spare, end in keeper.spares.items():
        if end is not None and id(end) in inside and end.checkpoint is not None:
            _save_above(core, spare, node)
            end.checkpoint.parked = None
            core.context.drop(spare)
            keeper.spares[spare] = None
    for slot in core.slots:
        if slot.is_idle and id(slot.node) in inside and slot.n_fed:
            _save_above(core, slot.seq, node)
            core.context.drop(slot.seq)
            keeper.seat(slot, slot.node.root())
            slot.clear()
    for slot in core.slots:  # also of conversations that have left the context
        is_on_the_way = int(slot.content.common_prefix(node.path)) > node.start or node.parent is None
        if slot.namespace == namespace and is_on_the_way:
            slot.content = Prompt.of_tokens([])


def _save_above(core: Core, seq: SeqId, node: Node) -> None:
    if node.parent is not None:
        core.keeper.save_kv(seq, node.parent)


# the disk, on its own thread


def drop_on_disk(archive: DiskWriter, doomed: Lineages) -> Dropped:
    disk, remote, root = archive.disk, archive.remote, root_key(archive.fingerprint, doomed.namespace)
    if remote is not None:
        for prompt in doomed.prompts:
            remote.forget(root, prompt, doomed.beyond)
    if disk is None:
        return Dropped()
    named: set[str] = set()
    for prompt in doomed.prompts:
        known = {kept.n_items for kept in disk.objects()} | {pin.n_items for pin in disk.pins.all()}
        lengths = {n_items for n_items in known if doomed.beyond < n_items <= len(prompt)}
        named |= set(keys(root, prompt, lengths).values())
    disk.unpin(named)
    return _remove_states(archive, disk, [k for k in disk.objects() if k.kind == "state" and k.key in named])


def drop_states(archive: DiskWriter, states: Sequence[IndexedObject]) -> Dropped:
    """Those of these that are still there, with the KV that nobody needs then."""
    disk, remote = archive.disk, archive.remote
    if remote is not None:
        remote.forget_states(frozenset(kept.key for kept in states))
    if disk is None:
        return Dropped()
    names, points = disk.names(), {point_of(kept.key, kept.n_items) for kept in states}
    disk.unpin({pin.key for pin in disk.pins.all() if points & set(pin.points)})
    return _remove_states(archive, disk, [kept for kept in states if kept.name in names])


def _remove_states(archive: DiskWriter, disk: Disk, states: Sequence[IndexedObject]) -> Dropped:
    _remove(archive, states)
    kept_still = disk.objects()
    needed = {name for kept in kept_still for name in kept.needs}
    freed = {name for kept in states for name in kept.needs} - needed
    return _weight(states) + _remove(archive, [kept for kept in kept_still if kept.name in freed])


def drop_spaces_on_disk(archive: DiskWriter, spaces: Collection[str] | None) -> Dropped:
    """Everything that is whose, by the names that headers have for namespaces; None: everybody's."""
    if archive.remote is not None:
        archive.remote.forget_spaces(spaces)
    if archive.disk is None:
        return Dropped()
    archive.disk.unpin({pin.key for pin in archive.disk.pins.all() if spaces is None or pin.space in spaces})
    return _remove(archive, [kept for kept in archive.disk.objects() if spaces is None or kept.space in spaces])


def _remove(archive: DiskWriter, objects: Sequence[IndexedObject]) -> Dropped:
    """Or ``EngineStopped``, if the file system will not let go of some of them."""
    disk = archive.disk
    stuck = [] if disk is None else [kept.name for kept in objects if not disk.drop(kept.name)]
    if stuck:
        raise EngineStopped(f"{len(stuck)} files cannot be removed from disk now ({archive.degraded}): try again")
    return _weight(objects)


def _weight(objects: Iterable[IndexedObject]) -> Dropped:
    sizes = [kept.size for kept in objects]
    return Dropped(len(sizes), sum(sizes))
