"""Making room on the device: parked checkpoints leave the context, oldest first, then idle conversations, the least
likely to be continued first.

What is worth keeping is copied to RAM first: all but the ends of prompts, which only an identical prompt can use.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.slots import Residents, Slot
from everwarm.engine.stats import Speed
from everwarm.engine.tiers.tier_writer import TierWriter
from everwarm.llama.context import Context
from everwarm.state.policy import CutKind, has_other_place
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
        speed: Speed,
        disk_s: Callable[[int], float],
        tier_writer: TierWriter,
        idle_cells: int,
    ) -> None:
        """``disk_s``: how long it takes to load so many bytes from the disk. ``tier_writer`` is offered every slot that is
        about to be emptied and was not offered yet. ``idle_cells``: of idle conversations, for each running request."""
        self._context = context
        self._residents = residents
        self._checkpointer = checkpointer
        self._writer = writer
        self._budget = budget
        self._returns = returns
        self._speed = speed
        self._disk_s = disk_s
        self._tier_writer = tier_writer
        self._idle_cells = idle_cells

    def make_room(self, n_cells: int, keep: Slot | None = None) -> bool:
        """Empty spares and idle slots until ``n_cells`` are free. False: running requests hold too many."""
        cells = self._context.cells
        if not self._context.kind.has_attention or cells.free >= n_cells:
            return True
        for spare, _ in self._parked_by_age():
            if cells.free >= n_cells:
                return True
            self._checkpointer.move_out(spare)
        for slot in self._idle_by_worth():
            if cells.free >= n_cells:
                return True
            if slot is not keep:
                self.vacate(slot)
        return cells.free >= n_cells

    def limit_idle(self, started: Slot) -> None:
        """Limits the cells of idle conversations for each running request: attention runs over idle cells, too. What has
        no other place stays: RAM has no room for it, and there is no disk with room, or loading would take too long.

        libllama takes milliseconds to empty a long sequence. It does so at once where this decides whether the cells of
        ``started`` are clean, else one by one after the next steps, so that a short prompt does not wait for it.
        """
        if not self._context.kind.has_attention:
            return
        if self._context.is_clean(started.seq):
            self._context.finish_drops()
            self._move_idle_out()
        else:
            with self._context.dropping_later():
                self._move_idle_out()

    def _move_idle_out(self) -> None:
        cells = self._context.cells
        running = [slot for slot in self._residents.slots if not slot.is_idle]
        own = {id(node) for slot in running for node in slot.node.lineage()}
        most = cells.used_by(slot.seq for slot in running) + self._idle_cells * len(running)
        for spare, node in self._parked_by_age():
            if cells.used <= most:
                return
            if id(node) not in own and self._has_other_place(spare, self._writer.parked_bytes(spare, node)):
                self._checkpointer.move_out(spare)
        for slot in self._idle_by_worth():
            if cells.used <= most:
                return
            if self._has_other_place(slot.seq, self._writer.unsaved_bytes(slot)):
                self.vacate(slot)

    def _has_other_place(self, seq: SeqId, unsaved_bytes: int) -> bool:
        """Whether a sequence may leave the device; ``unsaved_bytes``: what RAM would have to take of it."""
        read_s = self._context.cells.count(seq) * self._speed.seconds_per_token
        load_s = self._disk_s(self._writer.whole_bytes(seq))
        return has_other_place(unsaved_bytes, self._budget.n_free, load_s, read_s)

    def vacate(self, slot: Slot, root: Node | None = None) -> None:
        """Empty a slot, which then stands at ``root`` or at its own; its conversation comes back from RAM."""
        with self._budget.lifted():  # until it has left, its KV would count as a copy of what the device holds
            self.save(slot)
            slot.vacate(root)

    def save(self, slot: Slot, *, beyond: int = 0) -> None:
        """Copies to RAM, and offers to the disk, what would be lost if the slot kept only its first ``beyond`` items."""
        self._writer.save_kv(slot.seq, slot.node, beyond=beyond)
        if not slot.is_archived:
            self._tier_writer.offer(slot)

    def clear(self) -> None:
        """Empty all spares and all slots, which are idle."""
        self._context.finish_drops()
        for spare in self._residents.spares:
            self._checkpointer.move_out(spare)
        for slot in self._residents.slots:
            assert slot.is_idle
            self.vacate(slot)

    def _parked_by_age(self) -> list[tuple[SeqId, Node]]:
        """Ends of prompts first: only an identical prompt can use them."""

        def age(parked: tuple[SeqId, Node]) -> tuple[bool, float]:
            checkpoint = parked[1].checkpoint
            assert checkpoint is not None
            return checkpoint.kind is not CutKind.END, checkpoint.used_at

        return sorted(self._residents.spares.parked(), key=age)

    def _idle_by_worth(self) -> list[Slot]:
        """Those that are least likely to be continued first, of equals the oldest."""
        idle = [slot for slot in self._residents.slots if slot.is_idle and slot.n_fed]
        now = time.monotonic()

        def worth(slot: Slot) -> tuple[float, float]:
            return self._returns.worth(slot.node, now - slot.used_at) * slot.n_fed, slot.used_at

        return sorted(idle, key=worth)
