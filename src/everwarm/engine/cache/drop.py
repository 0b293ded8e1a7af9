"""Drops what a user wants forgotten: a node with everything below it, or all of a namespace, in RAM, on the device and
on disk, with everything that could still quote it.

The tree's part runs on the loop's thread; the disk's on the disk's own, after everything that is still on its way
there. Requests that run now are not touched; what they read is kept again when they end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from everwarm.engine.core import Core
from everwarm.prompt.prompt import Prompt
from everwarm.state.tier import Dropped
from everwarm.state.tree import Node
from everwarm.types import SeqId


@dataclass(frozen=True, slots=True)
class Lineages:
    """What is to be forgotten on disk: every state of these prompts after the given number of items."""

    namespace: str
    prompts: tuple[Prompt, ...]
    beyond: int


def lineages(core: Core, node: Node) -> Lineages:
    ends = [n for n in node.below() if not n.children]
    return Lineages(core.tree.namespace(node), tuple(n.path.first(n.n_items) for n in ends), node.start)


def forget_ahead(core: Core, namespace: str) -> None:
    """Cancels prewarming and loading for namespaces with this prefix, so that nothing of them enters the tree later."""
    ahead = core.prewarm.drop(namespace)
    if ahead is not None:
        core.cancel(ahead.id)
        core.stop(ahead.id)
    core.admission.drop_fetches(request for request in core.queue if request.ask.namespace.startswith(namespace))


def forget_words(core: Core, namespace: str) -> None:
    """Forgets the texts, after everything was dropped, so that no running or later request can quote them."""
    core.tree.forgotten.clear(namespace)
    for slot in core.slots:
        request = slot.request
        if request is not None and request.why is not None and request.ask.namespace.startswith(namespace):
            request.why = replace(request.why, first_different=None)


def drop(core: Core, node: Node) -> Dropped:
    """Removes the node from the tree, with everything below it."""
    doomed = list(node.below())
    inside = {id(n) for n in doomed}
    n_before = core.tree.ram_bytes
    _leave(core, node, inside)
    n_objects = 0
    n_segments = core.tree.census.n_segments
    for n in doomed:
        core.ram.unpin(n)
    for n in reversed(doomed):  # children first: a node that has none and keeps nothing is pruned
        if n.checkpoint is not None:
            core.checkpointer.drop(n, "asked for")
            n_objects += 1
        if n.segment is not None:
            core.tree.drop_segment(n)
    n_objects += n_segments - core.tree.census.n_segments
    return Dropped(n_objects, n_before - core.tree.ram_bytes)


def _leave(core: Core, node: Node, inside: set[int]) -> None:
    """Empties idle sequences that end at or below the node, after copying to RAM the KV that nodes above it need."""
    namespace = core.tree.namespace(node)
    for spare, end in core.spares.parked():
        if id(end) in inside:
            _save_above(core, spare, node)
            core.spares.release(spare)
    for slot in core.slots:
        if slot.is_idle and id(slot.node) in inside and slot.n_fed:
            _save_above(core, slot.seq, node)
            slot.vacate()
    for slot in core.slots:  # also of conversations that have left the context
        is_on_the_way = int(slot.content.common_prefix(node.path)) > node.start or node.parent is None
        if slot.namespace == namespace and is_on_the_way:
            slot.forget_content()


def _save_above(core: Core, seq: SeqId, node: Node) -> None:
    if node.parent is not None:
        core.ram_writer.save_kv(seq, node.parent)
