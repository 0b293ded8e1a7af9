"""Copies running requests to RAM beside the steps, so that a turn outlives the engine before its last frame leaves.

While a reply is written, the KV of its prompt and the states that a next turn or a retry continues from are copied, one
bounded piece between two steps. When it ends, the rest follows: the reply's KV and the state at its end. A receipt then
says what must be safe; another thread completes it while the loop continues, and the last frame waits for that. What
has no room in the arena goes to the disk instead, and what has none there either is reported as kept nowhere. Knows no
frames.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from everwarm.engine.cache.provenance import cover
from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.slots import Slot
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.engine.tiers.ram import Note, Ram, Receipt
from everwarm.engine.tiers.tier_writer import TierWriter
from everwarm.llama.model import MemoryKind
from everwarm.state.policy import PROVISIONAL, CutKind
from everwarm.state.tree import Node, Tree

SHARE = 0.1  # of the time while replies are written: so much goes into copies at most
DISK_WAIT_S = 5.0  # a last frame waits no longer for a disk that does not answer


# Where a finished turn is when its last frame leaves: safe from the engine's death, from the machine's as well, or nowhere,
# so that a death now costs reading it again.
Where = Literal["ram", "disk", "none"]


@dataclass(slots=True)
class Offload:
    kind: MemoryKind
    tree: Tree
    writer: RamWriter
    budget: RamBudget
    ram: Ram
    tiers: LowerTiers
    tier_writer: TierWriter
    not_before: float = 0.0  # the next piece

    # beside the steps

    def copy_piece(self, slots: Sequence[Slot]) -> bool:
        """One piece of a request whose reply is being written. False: nothing is left, or the last piece was just now."""
        waiting = [s for s in slots if not s.is_offloaded and _is_writing(s)]
        began = time.monotonic()
        if not waiting or began < self.not_before:
            return False
        slot = min(waiting, key=lambda s: s.request.id if s.request is not None else 0)
        has_copied = self._copy_next(slot)
        if not has_copied:
            slot.note_offloaded()
        now = time.monotonic()
        self.not_before = now + (now - began) * (1 / SHARE - 1)
        return has_copied

    def _copy_next(self, slot: Slot) -> bool:
        """The states first: a spare that holds one without a copy cannot be given to another."""
        request = slot.request
        assert request is not None
        if not self.kind.needs_checkpoints:
            return self._copy_kv(slot, request.n_prompt)
        points = needed_points(slot, request.n_prompt)
        if not self.writer.would_keep(points):
            return False
        for node in points:
            if self._copy_state(node):
                return True
        if self.kind.has_attention and points and self._copy_piece(slot, points[-1]):
            return True
        others = (node for node in slot.node.lineage() if not _is_end(node))
        return self.writer.has_room_for_state and any(self._copy_state(node) for node in others)

    def _copy_state(self, node: Node) -> bool:
        """Copies each state once: one that was evicted since is not copied again."""
        checkpoint = node.checkpoint
        if checkpoint is None or checkpoint.parked is None or checkpoint.state is not None or checkpoint.tidied:
            return False
        checkpoint.tidied = True
        self.writer.copy_state(node)
        self.budget.enforce()
        return True

    def _copy_kv(self, slot: Slot, n_prompt: int) -> bool:
        """Plain attention: a prompt has no cuts, so its pieces get nodes here."""
        if slot.node.n_items < n_prompt:
            n_items = min(slot.node.n_items + self.writer.piece_tokens, n_prompt)
            slot.stand_at(self.tree.grow(slot.node, slot.resident(), n_items))
        return self._copy_piece(slot, slot.node)

    def _copy_piece(self, slot: Slot, end: Node) -> bool:
        return self.writer.save_piece(slot.seq, end.lineage(), self.writer.piece_tokens)

    # at the end of a turn

    def finish(self, slot: Slot, n_prompt: int, ended_at: float) -> Receipt:
        """Copies the rest of the turn that ended in this slot, if what would be evicted for that is worth less. What has
        no place in RAM is offered to the disk."""
        on_disk = None
        with self.budget.lifted():
            points = self._points(slot, n_prompt)
            if self.writer.would_keep(points):
                self._copy_rest(slot, points)
            if points:
                self.tier_writer.note_end(slot, ended_at)
                if self.tiers.is_on and (self.budget.is_exceeded or not self._has_room(points)):
                    on_disk = self.tier_writer.offer_ended(slot)
        notes = self._notes(points)
        blobs = tuple(blob for note in notes or () if (blob := note.blob()) is not None)
        return Receipt(ended_at, notes, blobs, on_disk)

    def _copy_rest(self, slot: Slot, points: Sequence[Node]) -> None:
        for node in points:
            if node.checkpoint is not None and node.checkpoint.parked is not None:
                self.writer.copy_state(node)
        if self.kind.has_attention:
            self.writer.save_lineage(slot.seq, points[-1].lineage())

    def _points(self, slot: Slot, n_prompt: int) -> list[Node]:
        """The points that a request may continue from."""
        if self.kind.needs_checkpoints:
            return needed_points(slot, n_prompt)
        return [slot.node] if slot.n_fed else []

    def _has_room(self, points: Sequence[Node]) -> bool:
        notes = self._notes(points)
        if notes is None or self.ram.arena.n_rows_left < len(notes):
            return False
        return all(blob is not None and self.ram.arena.has(blob) for blob in (note.blob() for note in notes))

    def _notes(self, points: Sequence[Node]) -> tuple[Note, ...] | None:
        """What the next engine must find to continue from these points; None: some of it is not in RAM."""
        kind = self.kind
        states = [node for node in points if node.checkpoint is not None and node.checkpoint.state is not None]
        if not points or (kind.needs_checkpoints and len(states) < len(points)):
            return None
        notes = [self.ram.note_of_state(node) for node in states] if kind.needs_checkpoints else []
        if kind.has_attention:
            parts = cover(points[-1].lineage(), 0, points[-1].n_items)
            if parts is None:
                return None
            notes = [self.ram.note_of_segment(_last_user(node)) for node, _ in parts] + notes
        return tuple(notes)

    def when_safe(self, receipt: Receipt, done: Callable[[Where], None]) -> None:
        """Calls ``done`` once, from another thread, as soon as it is known where the turn is."""

        def is_in_ram(is_kept: bool) -> None:
            done("ram") if is_kept else self._when_on_disk(receipt, done)

        if receipt.notes is None:
            return self._when_on_disk(receipt, done)
        self.ram.keep_now(receipt.notes, receipt.blobs, is_in_ram)

    def _when_on_disk(self, receipt: Receipt, done: Callable[[Where], None]) -> None:
        tiers = self.tiers
        name = receipt.on_disk
        if name is None:
            return done("none")
        once = _once(done)
        timer = threading.Timer(DISK_WAIT_S, once, ("none",))
        timer.daemon = True
        timer.start()

        def is_written() -> None:
            timer.cancel()
            once("disk" if tiers.disk.has(name) else "none")

        tiers.after_all(is_written)


def _once(function: Callable[[Where], None]) -> Callable[[Where], None]:
    """Calls the function the first time only."""
    is_called = threading.Lock()

    def call(where: Where) -> None:
        if is_called.acquire(blocking=False):
            function(where)

    return call


def needed_points(slot: Slot, n_prompt: int) -> list[Node]:
    """The nodes whose states a next turn, a retry or another reply to the same prompt continues from, the deepest last:
    the stable points of this prompt, the last one before its end, and the end of the reply."""
    kept = [(n, n.checkpoint.kind) for n in slot.node.lineage() if n.checkpoint is not None]
    before_end = [n for n, kind in kept if n.n_items < n_prompt and kind not in PROVISIONAL][-1:]
    stable = [n for n, kind in kept if kind is CutKind.STABLE]
    stable = [n for n in stable if n is stable[-1] or n.n_items >= slot.n_settled]
    reply = [n for n, _ in kept if n is slot.node and n.n_items > n_prompt]
    chosen = {n.n_items: n for n in (*before_end, *stable, *reply)}
    return [chosen[n_items] for n_items in sorted(chosen)]


def _is_writing(slot: Slot) -> bool:
    request = slot.request
    return request is not None and not request.ask.ahead and slot.n_fed >= request.n_prompt


def _is_end(node: Node) -> bool:
    """A checkpoint at the end of a prompt is useful only with its logits, and those do not outlive the engine."""
    return node.checkpoint is not None and node.checkpoint.kind is CutKind.END


def _last_user(node: Node) -> Node:
    """The deepest node of a branch that uses the same segment."""
    while (child := next((c for c in node.children.values() if c.segment is node.segment), None)) is not None:
        node = child
    return node
