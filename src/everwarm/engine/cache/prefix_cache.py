"""Everything that is kept of prompts, as one thing: the tree, and the parts that fill it, empty it and move it between
device, RAM, disk and remote store. Made by ``build``; decides nothing itself, and forgets on request."""

from __future__ import annotations

import time
from dataclasses import dataclass

from msgspec.structs import replace

from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.compaction import Joiner
from everwarm.engine.cache.device_room import DeviceRoom
from everwarm.engine.cache.offload import Offload
from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.cache.restore import Restorer
from everwarm.engine.slots import Residents
from everwarm.engine.tiers.loader import Loader
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.engine.tiers.pins import TimedPins
from everwarm.engine.tiers.ram import Ram
from everwarm.engine.tiers.tier_writer import TierWriter
from everwarm.state.returns import Returns
from everwarm.state.tier import Dropped
from everwarm.state.tree import Node, Tree
from everwarm.types import SeqId


@dataclass(frozen=True, slots=True)
class PrefixCache:
    tree: Tree
    residents: Residents  # what of it is on the device
    # taking, restoring and dropping checkpoints
    checkpointer: Checkpointer
    restorer: Restorer
    returns: Returns
    room: DeviceRoom
    joiner: Joiner
    timed_pins: TimedPins
    # RAM, disk and the remote store
    ram: Ram
    ram_budget: RamBudget
    ram_writer: RamWriter
    offload: Offload | None  # None: nothing outlives this engine but what is on disk
    tiers: LowerTiers
    tier_writer: TierWriter
    loader: Loader

    def save_piece(self) -> bool:
        """One piece of idle work: copies to RAM, or offers to the tiers beyond. False: there is none."""
        return self.ram_writer.tidy() or self.tier_writer.tidy(self.residents.slots)

    def join_piece(self) -> bool:
        """One piece of idle work: joins small segments. False: there is none."""
        return self.joiner.tidy(self.residents.slots)

    def tidy_overdue(self) -> None:
        """Work that cannot wait until nothing runs any more."""
        if self.offload is not None:
            self.offload.copy_piece(self.residents.slots)
        self.tier_writer.tidy_overdue(self.residents.slots, time.monotonic())

    # forgetting: all that a user wants forgotten, in RAM and on the device, with everything that could still quote it.
    # What is on disk is dropped by the disk's own thread. Requests that run now are not touched; what they read is kept
    # again when they end.

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

    def close(self) -> None:
        self.loader.close()
        self.tiers.close()
        self.ram.close()
