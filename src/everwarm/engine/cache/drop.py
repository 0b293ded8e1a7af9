"""Drops what a user wants forgotten: a node with everything below it, or all of a namespace, in RAM and on the device, with
everything that could still quote it. What is on disk is dropped by the disk's own thread (``inspect.cache_commands``).

Runs on the loop's thread. Requests that run now are not touched; what they read is kept again when they end.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.slots import Residents
from everwarm.engine.tiers.ram import Ram
from everwarm.state.returns import Returns
from everwarm.state.tier import Dropped
from everwarm.state.tree import Node, Tree
from everwarm.types import SeqId


@dataclass(frozen=True, slots=True)
class Dropper:
    tree: Tree
    residents: Residents
    ram: Ram
    ram_writer: RamWriter
    checkpointer: Checkpointer
    returns: Returns

    def drop(self, node: Node) -> Dropped:
        """Removes the node from the tree, with everything below it."""
        doomed = list(node.below())
        inside = {id(n) for n in doomed}
        n_before = self.tree.ram_bytes
        self._leave(node, inside)
        self.returns.forget(doomed)
        n_objects = 0
        n_segments = self.tree.n_segments
        for n in doomed:
            self.ram.unpin(n)
        for n in reversed(doomed):  # children first: a node that has none and keeps nothing is pruned
            if n.checkpoint is not None:
                self.checkpointer.drop(n, "asked for")
                n_objects += 1
            if n.segment is not None:
                self.tree.drop_segment(n)
        self.returns.forget_pruned()
        n_objects += n_segments - self.tree.n_segments
        return Dropped(n_objects, n_before - self.tree.ram_bytes)

    def forget_words(self, namespace: str) -> None:
        """Forgets the texts of namespaces with this prefix, after everything was dropped, so that no running or later
        request can quote them."""
        self.tree.forgotten.clear(namespace)
        for slot in self.residents.slots:
            request = slot.request
            if request is not None and request.why is not None and request.ask.namespace.startswith(namespace):
                request.why = replace(request.why, diverged=None)

    def _leave(self, node: Node, inside: set[int]) -> None:
        """Empties idle sequences that end at or below the node, after copying to RAM the KV that nodes above it need."""
        namespace = self.tree.namespace(node)
        slots = self.residents.slots
        spares = self.residents.spares
        for spare, end in spares.parked():
            if id(end) in inside:
                self._save_above(spare, node)
                spares.release(spare)
        for slot in slots:
            if slot.is_idle and id(slot.node) in inside and slot.n_fed:
                self._save_above(slot.seq, node)
                slot.vacate()
        for slot in slots:  # also of conversations that have left the context
            is_on_the_way = int(slot.content.common_prefix(node.path)) > node.start or node.parent is None
            if slot.namespace == namespace and is_on_the_way:
                slot.forget_content()

    def _save_above(self, seq: SeqId, node: Node) -> None:
        if node.parent is not None:
            self.ram_writer.save_kv(seq, node.parent)
