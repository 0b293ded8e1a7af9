"""Making room on the device: parked checkpoints leave the context, oldest first, then idle conversations, the least
likely to be continued first.

What is worth keeping is copied to RAM first: all but the ends of prompts, which only an identical prompt can use.
"""

from __future__ import annotations

import time

from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.cache.ram_writer import RamWriter, is_worth_copying
from everwarm.engine.slots import Residents, Slot
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.engine.tiers.tier_writer import TierWriter
from everwarm.llama.context import Context
from everwarm.state.policy import CutKind
from everwarm.state.returns import Returns
from everwarm.state.tree import Node
from everwarm.types import SeqId


class DeviceRoom:
    def __init__(
        self,
        context: Context,
        residents: Residents,
        checkpointer: Checkpointer,
        writer: RamWriter,
        budget: RamBudget,
        returns: Returns,
        tiers: LowerTiers,
        tier_writer: TierWriter,
    ) -> None:
        """``tier_writer`` is offered every slot that is about to be emptied and was not offered yet."""
        self._context = context
        self._residents = residents
        self._checkpointer = checkpointer
        self._writer = writer
        self._budget = budget
        self._returns = returns
        self._tiers = tiers
        self._tier_writer = tier_writer

    def make_room(self, n_cells: int, keep: Slot | None = None) -> bool:
        """Empty spares and idle slots until ``n_cells`` are free. False: running requests hold too many."""
        cells = self._context.cells
        if not self._context.kind.has_attention or cells.free >= n_cells:
            return True
        for spare in self._parked_by_age():
            if cells.free >= n_cells:
                return True
            self._move_out_spare(spare)
        for slot in self._idle_by_worth():
            if cells.free >= n_cells:
                return True
            if slot is not keep:
                self.vacate(slot)
        return cells.free >= n_cells

    def limit_idle(self, n_cells_each: int) -> None:
        """Limits the cells of idle conversations per running request: attention runs over idle cells, too. Those that
        would be lost stay: RAM has no room for them, and there is no disk tier."""
        if not self._context.kind.has_attention:
            return
        cells = self._context.cells
        running = [slot for slot in self._residents.slots if not slot.is_idle]
        own = {id(node) for slot in running for node in slot.node.lineage()}
        most = cells.used_by(slot.seq for slot in running) + n_cells_each * len(running)
        for spare in self._parked_by_age():
            if cells.used <= most:
                return
            if id(self._residents.spares.node(spare)) not in own:
                self._move_out_spare(spare)
        for slot in self._idle_by_worth():
            if cells.used <= most:
                return
            if not self._would_be_lost(slot):
                self.vacate(slot)

    def _would_be_lost(self, slot: Slot) -> bool:
        return not self._tiers.disk.is_on and self._writer.unsaved_bytes(slot) > self._budget.n_free

    def vacate(self, slot: Slot, root: Node | None = None) -> None:
        """Empty a slot, which then stands at ``root`` or at its own; its conversation comes back from RAM."""
        self.save(slot)
        slot.vacate(root)

    def save(self, slot: Slot, *, beyond: int = 0) -> None:
        """Copies to RAM, and offers to the disk, what would be lost if the slot kept only its first ``beyond`` items."""
        self._writer.save_kv(slot.seq, slot.node, beyond=beyond)
        if not slot.is_archived:
            self._tier_writer.offer(slot)

    def clear(self) -> None:
        """Empty all spares and all slots, which are idle."""
        for spare in self._residents.spares:
            self._move_out_spare(spare)
        for slot in self._residents.slots:
            assert slot.is_idle
            self.vacate(slot)

    def _move_out_spare(self, spare: SeqId) -> None:
        node = self._residents.spares.node(spare)
        with self._budget.lifted():
            if node is not None and is_worth_copying(node):
                self._writer.copy_state(node)
            self._checkpointer.unpark(spare)

    def _parked_by_age(self) -> list[SeqId]:
        """Ends of prompts first: only an identical prompt can use them."""

        def age(parked: tuple[SeqId, Node]) -> tuple[bool, float]:
            checkpoint = parked[1].checkpoint
            assert checkpoint is not None
            return checkpoint.kind is not CutKind.END, checkpoint.used_at

        return [spare for spare, _ in sorted(self._residents.spares.parked(), key=age)]

    def _idle_by_worth(self) -> list[Slot]:
        """Those that are least likely to be continued first, of equals the oldest."""
        idle = [slot for slot in self._residents.slots if slot.is_idle and slot.n_fed]
        now = time.monotonic()

        def worth(slot: Slot) -> tuple[float, float]:
            return self._returns.worth(slot.node, now - slot.used_at) * slot.n_fed, slot.used_at

        return sorted(idle, key=worth)
