"""The life of checkpoints: takes them, parks them on the device, thins them out, and drops what must go.

The effects between a context and a tree; where a checkpoint is taken and which one goes is policy's decision.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import numpy as np

from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.cache.ram_writer import RamWriter, is_worth_copying
from everwarm.engine.slots import Slot, Spares
from everwarm.engine.stats import EngineStats
from everwarm.errors import MemoryFault
from everwarm.llama.blobs import is_finite, is_packed, trunk, unpack
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state import policy
from everwarm.state.policy import GUARD, PROVISIONAL, CutKind, Spacing
from everwarm.state.tree import Checkpoint, Match, Node, Tree
from everwarm.types import Blob, SeqId

MAX_REPLY_NODES = 16  # of replies that are left aside together: more are conversations of their own
_OF_REPLIES = {CutKind.REPLY, CutKind.END, CutKind.CANCEL}
PARK_S_PER_CELL = 1e-7  # libllama puts each cell of the sequence into an ordered set (docs/benchmarks/scaling.md)
COPY_BYTES_PER_S = 5e9  # of a state, to RAM
PARK_S = 0.002  # parking that takes no longer is never avoided
_OPTIONAL = (CutKind.EVERY, CutKind.LEARNED, CutKind.GUESS, CutKind.BOUNDARY, CutKind.BRANCH, CutKind.NEAR_END)


class Checkpointer:
    def __init__(
        self,
        context: Context,
        tree: Tree,
        spares: Spares,
        spacing: Spacing,
        writer: RamWriter,
        budget: RamBudget,
        journal: EngineStats,
        state_bytes: int,
    ) -> None:
        """``state_bytes``: of one state of this model."""
        self._state_bytes = state_bytes
        self._context = context
        self._tree = tree
        self._spares = spares
        self._writer = writer
        self._budget = budget
        self._journal = journal
        self.spacing = spacing

    # taking

    def take(self, slot: Slot, kind: CutKind, *, logits: np.ndarray | None = None) -> None:
        """Keep the state at the slot's end: parked if a spare is at hand, else copied to RAM."""
        if not self._context.kind.needs_checkpoints or self.spacing.max_checkpoints == 0:
            return
        node = self.mark_end(slot)
        now = time.monotonic()
        clean = self._context.is_clean(slot.seq)
        if node.checkpoint is not None and (node.checkpoint.clean or not clean):
            node.checkpoint.used_at = now
            self._upgrade(node, node.checkpoint, kind, logits)
            return
        may_park = self._context.can_be_parked(slot.seq) and self._is_parked_sooner(slot)
        spare = self._spare_at_hand(kind) if may_park else None
        if kind is CutKind.END and spare is None:
            return
        if node.checkpoint is not None:
            self.drop(node, "read again, and clean")
        state = None if spare is not None else self._captured(slot, kind)
        clean = clean and (state is None or not is_packed(state))
        if self._context.kind.has_window:
            slot.note_window_seated()
        checkpoint = Checkpoint(kind, clean, tuple(slot.chunks), state=state, used_at=now)
        if spare is not None:
            self._spares.take(spare, slot.seq, node, checkpoint)
            checkpoint.logits = None if logits is None else logits.copy()
        with self._budget.lifted():  # what is dropped leaves room, and may not be evicted before it is dropped
            self._tree.set_checkpoint(node, checkpoint)
            if kind not in PROVISIONAL:  # those must not displace another checkpoint
                self._drop_superseded(node)
                self._thin(node)
            self._journal.created(node, checkpoint)
        if node.checkpoint is not checkpoint and kind in _OPTIONAL and not _is_deterministic(slot):
            slot.skip_cuts(kind)  # RAM is full of better ones

    def _is_parked_sooner(self, slot: Slot) -> bool:
        """Whether parking takes no longer than a copy to RAM, or RAM cannot hold one. Parking takes time for each cell of
        a conversation, a copy only for the state: a very long one is copied."""
        park_s = PARK_S_PER_CELL * self._context.cells.count(slot.seq)
        is_quick = park_s <= max(PARK_S, self._state_bytes / COPY_BYTES_PER_S)
        return is_quick or not self._budget.can_hold(self._state_bytes)

    def _captured(self, slot: Slot, kind: CutKind) -> Blob:
        """A suspended request goes on from its state, exactly."""
        is_exact = kind is CutKind.CANCEL or _is_deterministic(slot)
        return self._context.capture(slot.seq) if is_exact else self._context.capture_packed(slot.seq)

    def is_worth_a_cut(self, kind: CutKind) -> bool:
        """False: the checkpoint would be dropped at once. No spare can hold it, and RAM has no room for a single one; but
        the disk may take a stable point."""
        has_spares = len(self._spares) > 0 and self._context.kind.can_share_cells
        return has_spares or kind is CutKind.STABLE or self._budget.can_hold(self._state_bytes)

    def _upgrade(self, node: Node, checkpoint: Checkpoint, kind: CutKind, logits: np.ndarray | None) -> None:
        """This point has a checkpoint already, perhaps of a kind that is thinned sooner."""
        checkpoint.kind = policy.better(checkpoint.kind, kind)
        if checkpoint.logits is None and logits is not None:
            self._tree.add_logits(node, logits.copy())
            self._budget.enforce()

    def mark_end(self, slot: Slot) -> Node:
        """The tree node at the slot's end. For a model without checkpoints this node alone makes the KV findable."""
        slot.has_changed()
        node = self._tree.grow(slot.node, slot.resident(), slot.n_fed)
        slot.stand_at(node)
        return node

    def _spare_at_hand(self, kind: CutKind) -> SeqId | None:
        """A free spare, or one whose checkpoint can be dropped without a copy; a guess drops none. Else the oldest whose
        state is all that would have to be copied: that takes as long as copying the new one, which is the next to be
        continued from. Else one that would be missed less than what RAM would evict for the new one."""
        spare = self._spares.free()
        if spare is not None or kind is CutKind.GUESS:
            return spare
        by_use = sorted(self._spares.parked(), key=_used_at)
        for spare, node in by_use:
            checkpoint = node.checkpoint
            assert checkpoint is not None
            can_go = checkpoint.state is not None or not is_worth_copying(node) or self._has_no_other_place(checkpoint)
            if can_go and not self._writer.unsaved(spare, node):
                self.unpark(spare)
                return spare
        if kind is CutKind.END or kind in PROVISIONAL:
            return None
        oldest = next((spare for spare, node in by_use if not self._writer.is_only_here(spare, node)), None)
        if oldest is None:
            return self._spare_of_least([node for _, node in by_use])
        self.move_out(oldest)
        return oldest

    def _spare_of_least(self, parked: Sequence[Node]) -> SeqId | None:
        least = self._budget.least_parked(parked, self._state_bytes)
        if least is None or least.checkpoint is None:
            return None
        spare = least.checkpoint.parked
        self._budget.tell_of([least])
        self.drop(least, "capacity")
        return spare

    def move_out(self, spare: SeqId) -> None:
        """Empties a spare after copying its state to RAM, if that is worth it; RAM may evict it for that."""
        node = self._spares.node(spare)
        with self._budget.lifted():
            if node is not None and is_worth_copying(node):
                self._writer.copy_state(node)
            self.unpark(spare)

    def _has_no_other_place(self, checkpoint: Checkpoint) -> bool:
        """Whether RAM cannot hold it, and it is of a kind that gives way to others."""
        return checkpoint.kind in _OPTIONAL and not self._budget.can_hold(self._state_bytes)

    def _drop_superseded(self, node: Node) -> None:
        """The end of a reply is of no use once the next turn has a checkpoint a few items behind it, at the end of that
        message."""
        above = node.parent
        while above is not None and node.n_items - above.n_items <= GUARD and len(above.children) == 1:
            is_reply = above.checkpoint is not None and above.checkpoint.kind is CutKind.REPLY
            if is_reply and not above.is_pinned and not above.pins:
                return self.drop(above, "superseded")
            above = above.parent

    def _thin(self, node: Node) -> None:
        """No path may hold more than its number of checkpoints, neither to this node nor through it to a deeper one."""
        ends = [n for n in node.below() if n.checkpoint is not None and not n.children]
        for end in ends or [node]:
            self._thin_path(end)

    def _thin_path(self, node: Node) -> None:
        kept = [(n, n.checkpoint) for n in node.lineage() if n.checkpoint is not None]
        by_end = {n.n_items: n for n, _ in kept}
        path = [policy.Cut(n.n_items, checkpoint.kind) for n, checkpoint in kept]
        pinned = {n.n_items for n, _ in kept if n.n_pinned}
        for n_items in policy.thin(path, self.spacing.max_checkpoints, pinned):
            self.drop(by_end[n_items], "thinning")

    # using

    def note_restored(self, node: Node, how: str) -> None:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        checkpoint.used_at = time.monotonic()
        checkpoint.hits += 1
        self._journal.restored(node, checkpoint, how)

    def note_continued(self, node: Node) -> None:
        """A request continues from here. If the node was prewarmed, the guess was right."""
        if node.checkpoint is not None and node.checkpoint.kind in PROVISIONAL:
            self._journal.n_prewarms_used += node.checkpoint.kind is CutKind.PREWARM
            node.checkpoint.kind = CutKind.STABLE

    # giving up

    def drop_left_aside(self, following: Prompt, match: Match) -> None:
        """``following`` is what the next turn of a conversation will begin with. If that is another text than the reply
        was, because a template renders it anew, no turn will continue from the reply's end: it is dropped with its
        KV. Call it when nothing runs."""
        passed = [node for node in match.path if node.n_items <= match.n_shared and self._tree.has(node)]
        stable = next((node for node in reversed(passed) if _is_stable(node)), None)
        if stable is None or match.n_shared - stable.n_items > GUARD or match.n_shared == len(following):
            return
        after = passed[passed.index(stable) :]
        if any(node.checkpoint is not None and node.checkpoint.kind is CutKind.REPLY for node in after):
            return  # it goes on from a reply, and others may have got another one
        for node in after:
            for child in list(node.children.values()):
                if child not in passed and _is_reply(child):
                    self._drop_reply(child)

    def _drop_reply(self, first: Node) -> None:
        """An end of a prompt stays parked, for a retry, until its spare is needed."""
        for node in reversed(list(first.below())):  # children first: a node that keeps nothing is pruned
            if node.checkpoint is not None and node.checkpoint.kind is not CutKind.END:
                self.drop(node, "left aside")
            if self._tree.has(node) and node.segment is not None and not _has_states(node):
                self._tree.drop_segment(node)

    def drop(self, node: Node, reason: str) -> None:
        assert node.checkpoint is not None
        with self._budget.lifted():
            if node.checkpoint.parked is not None and node.parent is not None:
                self._writer.save_kv(node.checkpoint.parked, node.parent)  # states above may live on this sequence's KV
            checkpoint = self._tree.drop_checkpoint(node)
            self._journal.dropped(node, checkpoint, reason)
            if checkpoint.parked is not None:
                self._spares.release(checkpoint.parked)

    def unpark(self, spare: SeqId) -> None:
        """Removes a parked checkpoint from the device. Without a RAM copy it is lost."""
        node = self._spares.node(spare)
        if node is None:
            return
        checkpoint = node.checkpoint
        assert checkpoint is not None and checkpoint.parked == spare
        if checkpoint.state is None:
            self.drop(node, "capacity")
        else:
            with self._budget.lifted():  # else the copy could be evicted before the original has gone
                self._writer.save_kv(spare, node)
                self._spares.release(spare)

    def quarantine(self, node: Node, error: MemoryFault) -> None:
        """Marks an entry that libllama refused: it is never offered again."""
        self._journal.quarantined(node, error)
        if node.checkpoint is not None:
            self.drop(node, "quarantined")

    def scrub(self, end: Node) -> None:
        """Drops the checkpoints of a lineage whose state contains NaN, and leaves no trace of them on the device."""
        for node in end.lineage():
            checkpoint = node.checkpoint
            if checkpoint is None or self._is_finite(checkpoint):
                continue
            self._tree.drop_checkpoint(node)
            self._journal.quarantined(node, "its state is not a number")
            if checkpoint.parked is not None:
                self._spares.scrub(checkpoint.parked)

    def _is_finite(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.parked is not None:
            return self._context.is_finite(checkpoint.parked)
        if checkpoint.state is None:
            return True
        state = trunk(checkpoint.state)
        return is_finite(unpack(state) if is_packed(state) else state)


def _is_deterministic(slot: Slot) -> bool:
    """Whether its chunks must not depend on what is kept."""
    return slot.request is not None and slot.request.ask.deterministic


def _is_stable(node: Node) -> bool:
    return node.checkpoint is not None and node.checkpoint.kind is CutKind.STABLE


def _is_reply(first: Node) -> bool:
    """Whether the end of a prompt and replies to it follow, and nothing else, and none of them is pinned."""
    below = list(islice(first.below(), MAX_REPLY_NODES + 1))
    kinds = {node.checkpoint.kind for node in below if node.checkpoint is not None}
    is_short = len(below) <= MAX_REPLY_NODES
    return not first.n_pinned and is_short and CutKind.REPLY in kinds and kinds <= _OF_REPLIES


def _has_states(first: Node) -> bool:
    return any(node.checkpoint is not None and node.checkpoint.is_held for node in first.below())


def _used_at(parked: tuple[SeqId, Node]) -> float:
    checkpoint = parked[1].checkpoint
    return 0.0 if checkpoint is None else checkpoint.used_at
