"""Keeping what was read: takes checkpoints, copies them and their KV to RAM, makes room, evicts.

The effects between a context and a tree; what to keep is policy's decision. Owns the spare sequences. Knows slots only as
sequences with a lineage.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from everwarm.engine.cache.provenance import is_better, reach_back
from everwarm.engine.inspect.checkpoint_stats import CheckpointStats
from everwarm.engine.slots import Slot
from everwarm.errors import MemoryFault
from everwarm.llama.blobs import is_finite
from everwarm.llama.context import Context
from everwarm.state import policy, segment_merge
from everwarm.state.eviction import Scales, weigh
from everwarm.state.lineage import SEATED, Chunks, history_over, record
from everwarm.state.params import Spacing
from everwarm.state.policy import CutKind
from everwarm.state.tree import Checkpoint, Node, Segment, Tree
from everwarm.types import SeqId

log = logging.getLogger("everwarm.engine")

LOW_WATER = 0.97  # evict a little more than asked, so that not every checkpoint has to evict
_MIB = 1 << 20


@dataclass(slots=True)
class Keeper:
    context: Context
    tree: Tree
    slots: list[Slot]
    spacing: Spacing
    ram_budget: int
    seconds_per_token: float
    namespace_share: float = 1.0  # of the budget, for each at most
    most_joined: int = segment_merge.MOST  # tokens of a segment that is made of several
    may_exceed: bool = False  # the budget, for a moment
    spares: dict[SeqId, Node | None] = field(default_factory=dict)
    counts: CheckpointStats = field(default_factory=CheckpointStats)
    leaving: Callable[[Slot], object] = field(default=lambda _: None)  # hears of a slot that is about to be emptied

    # taking

    def take(self, slot: Slot, kind: CutKind, *, logits: np.ndarray | None = None) -> None:
        """Keep the state at the slot's end: parked if a spare is at hand, else copied to RAM."""
        if not self.context.kind.needs_checkpoints or self.spacing.max_checkpoints == 0:
            return None
        node, now = self.mark_end(slot), time.monotonic()
        clean = self.context.is_clean(slot.seq)
        if node.checkpoint is not None and (node.checkpoint.clean or not clean):
            node.checkpoint.used_at = now
            return self._upgrade(node, node.checkpoint, kind, logits)
        spare = self._spare_at_hand()
        if kind is CutKind.END and spare is None:
            return None
        if node.checkpoint is not None:
            self.drop_checkpoint(node, "read again, and clean")
        state = None if spare is not None else self.context.capture(slot.seq)
        if self.context.kind.has_window:
            record(slot.chunks, SEATED)
        checkpoint = Checkpoint(kind, clean, tuple(slot.chunks), state=state, used_at=now)
        if spare is not None:
            self.context.park(slot.seq, spare)
            self.spares[spare] = node
            checkpoint.parked = spare
            checkpoint.logits = None if logits is None else logits.copy()
        self.tree.set_checkpoint(node, checkpoint)
        self.counts.n_created += 1
        if kind is not CutKind.PREWARM:  # what nobody asked for costs nobody a checkpoint
            self._thin(node)
        self._say("created", node, checkpoint)
        self.enforce_budget()

    def _upgrade(self, node: Node, checkpoint: Checkpoint, kind: CutKind, logits: np.ndarray | None) -> None:
        """Somebody kept this point before, perhaps for a lesser reason."""
        checkpoint.kind = policy.better(checkpoint.kind, kind)
        if checkpoint.logits is None and logits is not None:
            self.tree.add_logits(node, logits.copy())
            self.enforce_budget()

    def mark_end(self, slot: Slot) -> Node:
        """The tree node at the slot's end; without checkpoints this alone lets the KV be found again."""
        slot.has_changed()
        node = self.tree.grow(slot.node, slot.resident(), slot.n_fed)
        self.seat(slot, node)
        return node

    def seat(self, slot: Slot, node: Node) -> None:
        """A slot holds on to the node it stands at, or the node could be pruned under it."""
        self.tree.hold(node)
        self.tree.release(slot.node)
        slot.node = node

    def _thin(self, node: Node) -> None:
        """No path may hold more than its number of checkpoints, neither to this node nor through it to a deeper one."""
        ends = [n for n in node.below() if n.checkpoint is not None and not n.children]
        for end in ends or [node]:
            self._thin_path(end)

    def _thin_path(self, node: Node) -> None:
        kept = [n for n in node.lineage() if n.checkpoint is not None]
        by_end = {n.n_items: n for n in kept}
        path = [
            policy.KeptCheckpoint(n.n_items, n.checkpoint.kind, n.n_pinned > 0)
            for n in kept
            if n.checkpoint is not None
        ]
        for n_items in policy.thin(path, self.spacing.max_checkpoints):
            self.drop_checkpoint(by_end[n_items], "thinning")

    # copying to RAM

    def copy_down(self, node: Node) -> None:
        """Give a parked checkpoint a RAM copy of its state."""
        checkpoint = node.checkpoint
        assert checkpoint is not None and checkpoint.parked is not None
        if checkpoint.state is None:
            self.tree.set_state(node, self.context.capture(checkpoint.parked))

    def save_kv(self, seq: SeqId, node: Node, *, beyond: int = 0) -> None:
        """Copy to RAM the KV of this sequence's lineage that would be lost if the sequence went.

        Only what somebody can come back to: nodes past ``beyond`` with a kept state at or below them, whose KV no other
        sequence and no segment holds.
        """
        self.save_lineage(seq, self.unsaved(seq, node, beyond=beyond))

    def save_lineage(self, seq: SeqId, nodes: Iterable[Node]) -> None:
        """Copy the KV of these nodes to RAM, out of a sequence that passes them."""
        for run in self._unsaved_runs(seq, nodes, self.most_joined):
            self._save_run(seq, run)
        self.enforce_budget()

    def save_piece(self, seq: SeqId, nodes: Iterable[Node], most: int) -> bool:
        """The same for the first ``most`` tokens that are not in RAM. False: there are none, or no room for them."""
        run = next(self._unsaved_runs(seq, nodes, min(most, self.most_joined)), None)
        if run is None:
            return False
        first = run[0]
        if first.parent is not None and first.n_items - first.start > most:
            run = [self.tree.grow(first.parent, first.path, first.start + most)]
        self._save_run(seq, run)
        end = run[-1]
        self.enforce_budget()
        return end.segment is not None

    def _unsaved_runs(self, seq: SeqId, nodes: Iterable[Node], most: int) -> Iterator[list[Node]]:
        n_cells = self.context.cells.count(seq)
        here = (n for n in nodes if n.parent is not None and n.mark.n_tokens <= n_cells)
        unsaved = [n for n in here if self._is_better(seq, n)]
        return segment_merge.runs(unsaved, partial(self._is_exact, seq), most)

    def _is_exact(self, seq: SeqId, node: Node) -> bool:
        return self.context.cells.is_clean(seq) and history_over(self.history(seq), node.n_items) is not None

    def _save_run(self, seq: SeqId, run: list[Node]) -> None:
        """One segment, for a run of nodes."""
        chunks, end = self.history(seq), run[-1]
        clean = self._is_exact(seq, end)
        first = reach_back(run[0], chunks) if clean and self.context.is_clean(seq) else run[0]
        above = first.parent or first
        blob = self.context.capture_segment(seq, above.mark, end.mark)
        history, items = history_over(chunks, end.n_items), (above.n_items, end.n_items)
        self.tree.set_segment(end, Segment(blob, above.mark, end.mark, clean, history, items=items), run[0])

    def _is_better(self, seq: SeqId, node: Node) -> bool:
        """Whether a sequence's KV of a node is worth more than what is kept of it."""
        is_whole = self.context.kind.needs_checkpoints and self.context.is_clean(seq)
        return is_better(node, self.history(seq), is_clean=self.context.cells.is_clean(seq), is_whole=is_whole)

    def history(self, seq: SeqId) -> Chunks:
        """How the cells of a sequence came about."""
        node = self.spares.get(seq)
        if node is not None and node.checkpoint is not None:
            return node.checkpoint.chunks
        return next((tuple(slot.chunks) for slot in self.slots if slot.seq == seq), ())

    def unsaved(self, seq: SeqId, node: Node, *, beyond: int = 0) -> list[Node]:
        """The nodes of a lineage whose KV only this sequence holds and somebody may need."""
        elsewhere = {id(n) for other, end in self._sequences() if other != seq for n in end.lineage()}
        lost = (n for n in self._wanted(node) if n.n_items > beyond and id(n) not in elsewhere)
        return [n for n in lost if self._is_better(seq, n)]

    def _wanted(self, node: Node) -> list[Node]:
        """The part of a lineage that somebody may come back to."""
        lineage = node.lineage() if self.context.kind.has_attention else []
        while lineage and not self._is_wanted(lineage[-1]):
            lineage.pop()
        return lineage

    def _is_wanted(self, node: Node) -> bool:
        """Whether anything at or below the node can only be used with the node's KV."""
        if not self.context.kind.needs_checkpoints:
            return True
        return any(n.checkpoint is not None and n.checkpoint.state is not None for n in node.below())

    def _sequences(self) -> Iterable[tuple[SeqId, Node]]:
        for slot in self.slots:
            yield slot.seq, slot.node
        for spare, node in self.spares.items():
            if node is not None:
                yield spare, node

    def tidy(self) -> bool:
        """One piece of idle work: copy down a parked checkpoint or an idle conversation's KV. False: nothing to do."""
        for node in self.spares.values():
            checkpoint = None if node is None else node.checkpoint
            if node is not None and checkpoint and not checkpoint.tidied:
                checkpoint.tidied = True
                self.copy_down(node)
                self.enforce_budget()
                return True
        for slot in self.slots:
            if slot.is_idle and not slot.is_tidy:
                slot.is_tidy = True
                self.save_lineage(slot.seq, self._wanted(slot.node))
                return True
        return False

    # giving up

    def drop_checkpoint(self, node: Node, reason: str) -> None:
        assert node.checkpoint is not None
        if node.checkpoint.parked is not None and node.parent is not None:
            self.save_kv(node.checkpoint.parked, node.parent)  # states above it may live on this sequence's KV
        checkpoint = self.tree.drop_checkpoint(node)
        self.counts.dropped(reason)
        self._say(f"dropped ({reason})", node, checkpoint)
        if checkpoint.parked is not None:
            self._free_spare(checkpoint.parked)

    def quarantine(self, node: Node, error: MemoryFault) -> None:
        """An entry that libllama refused is never offered again."""
        self.counts.n_quarantined += 1
        log.warning("checkpoint at %d tokens quarantined: %s", node.mark.n_tokens, error)
        if node.checkpoint is not None:
            self.drop_checkpoint(node, "quarantined")

    def scrub(self, end: Node) -> None:
        """Give up the checkpoints of a lineage whose state is not a number, and leave no trace of them on the device."""
        for node in end.lineage():
            checkpoint = node.checkpoint
            if checkpoint is None or self._is_finite(checkpoint):
                continue
            self.tree.drop_checkpoint(node)
            self.counts.n_quarantined += 1
            log.warning("checkpoint at %d tokens quarantined: its state is not a number", node.mark.n_tokens)
            if checkpoint.parked is not None:
                self.context.scrub(checkpoint.parked)
                self.spares[checkpoint.parked] = None

    def _is_finite(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.parked is not None:
            return self.context.is_finite(checkpoint.parked)
        return checkpoint.state is None or is_finite(checkpoint.state)

    def drop_segments(self, nodes: Iterable[Node]) -> None:
        """Forget segments that could not be spliced."""
        for node in list(nodes):
            if node.segment is not None:
                self.tree.drop_segment(node)

    def unpark(self, spare: SeqId) -> None:
        """Take a parked checkpoint off the device. Without a RAM copy it is gone."""
        node = self.spares[spare]
        if node is None:
            return
        checkpoint = node.checkpoint
        assert checkpoint is not None and checkpoint.parked == spare
        if checkpoint.state is None:
            self.drop_checkpoint(node, "capacity")
        else:
            self.save_kv(spare, node)
            checkpoint.parked = None
            self._free_spare(spare)

    def _free_spare(self, spare: SeqId) -> None:
        self.context.drop(spare)
        self.spares[spare] = None
        self.tree.census.changed()

    def _spare_at_hand(self) -> SeqId | None:
        """A free spare, or one whose checkpoint can go without copying anything."""
        if not self.context.kind.can_share_cells:
            return None
        parked: list[tuple[float, SeqId]] = []
        for spare, node in self.spares.items():
            if node is None:
                return spare
            checkpoint = node.checkpoint
            assert checkpoint is not None
            if (checkpoint.kind is CutKind.END and not node.n_pinned) or checkpoint.state is not None:
                parked.append((checkpoint.used_at, spare))
        for _, spare in sorted(parked):
            node = self.spares[spare]
            if node is not None and not self.unsaved(spare, node):
                self.unpark(spare)
                return spare
        return None

    # budgets

    def make_room(self, n_cells: int, keep: Slot | None = None) -> bool:
        """Free cells until ``n_cells`` are free, from what nobody is using. Nothing is lost: it goes to RAM."""
        if not self.context.kind.has_attention or self.context.cells.free >= n_cells:
            return True
        for spare in self._parked_by_age():
            if self.context.cells.free >= n_cells:
                return True
            self.move_out_spare(spare)
        for slot in sorted((s for s in self.slots if s.is_idle and s.n_fed and s is not keep), key=lambda s: s.used_at):
            if self.context.cells.free >= n_cells:
                return True
            self.move_out_slot(slot)
        return self.context.cells.free >= n_cells

    def limit_idle(self, n_cells_each: int) -> None:
        """Let conversations that merely stay keep so many cells per running one: attention runs over theirs as well."""
        if not self.context.kind.has_attention:
            return
        running = [slot for slot in self.slots if not slot.is_idle]
        own = {id(node) for slot in running for node in slot.node.lineage()}
        most = self.context.cells.used_by(slot.seq for slot in running) + n_cells_each * len(running)
        for spare in self._parked_by_age():
            if self.context.cells.used <= most:
                return
            if id(self.spares[spare]) not in own:
                self.move_out_spare(spare)
        for slot in sorted((s for s in self.slots if s.is_idle and s.n_fed), key=lambda s: s.used_at):
            if self.context.cells.used <= most:
                return
            self.move_out_slot(slot)

    def _parked_by_age(self) -> list[SeqId]:
        def age(spare: SeqId) -> tuple[bool, float]:
            node = self.spares[spare]
            checkpoint = None if node is None else node.checkpoint
            return (
                checkpoint is not None and checkpoint.kind is not CutKind.END,
                checkpoint.used_at if checkpoint else 0.0,
            )

        return sorted((spare for spare, node in self.spares.items() if node is not None), key=age)

    def move_out_spare(self, spare: SeqId) -> None:
        node = self.spares[spare]
        if node is not None:
            self.copy_down(node)
        self.unpark(spare)
        self.enforce_budget()

    def move_out_slot(self, slot: Slot) -> None:
        """Empty an idle slot; its conversation comes back from RAM."""
        self.vacate(slot, slot.node.root())

    def vacate(self, slot: Slot, root: Node) -> None:
        """Empty the sequence; what is worth it is in RAM before."""
        self.save_kv(slot.seq, slot.node)
        if not slot.is_archived:
            self.leaving(slot)
        self.context.drop(slot.seq)
        self.seat(slot, root)
        slot.clear()

    @contextlib.contextmanager
    def over_budget(self) -> Iterator[None]:
        """Nothing is evicted meanwhile, so that it can be written elsewhere; afterwards the budget holds again."""
        self.may_exceed = True
        try:
            yield
        finally:
            self.may_exceed = False
            self.enforce_budget()

    @property
    def is_over_budget(self) -> bool:
        most = int(self.ram_budget * self.namespace_share)
        return self.tree.ram_bytes > self.ram_budget or any(root.ram_bytes > most for root in self.tree.roots())

    def enforce_budget(self) -> None:
        """Within the budget, and no namespace over its share of it: one client cannot push out what others keep."""
        if self.may_exceed:
            return
        most = int(self.ram_budget * self.namespace_share)
        for root in self.tree.roots() if most < self.ram_budget else ():
            self._shrink(root.below, lambda root=root: root.ram_bytes, most)  # type: ignore[misc]
        self._shrink(self.tree.nodes, lambda: self.tree.ram_bytes, self.ram_budget)

    def _shrink(self, members: Callable[[], Iterable[Node]], weight: Callable[[], int], budget: int) -> None:
        if weight() <= budget:
            return
        goal = int(budget * LOW_WATER)
        while weight() > goal:
            nodes = list(members())
            chosen = policy.victims(self._weigh(nodes), weight() - goal)
            if not chosen:
                break
            for key in chosen:
                self._evict(nodes[key // 2], is_state=key % 2 == 0)

    def _evict(self, node: Node, *, is_state: bool) -> None:
        checkpoint, node.evicted = node.checkpoint, True
        if not is_state:
            if node.segment is not None:
                self.counts.evicted("ram_budget")
                self.tree.drop_segment(node)
        elif checkpoint is not None and checkpoint.parked is not None:
            self.tree.drop_state(node)
        elif checkpoint is not None:
            self.drop_checkpoint(node, "ram_budget")

    def _weigh(self, nodes: list[Node]) -> list[policy.Entry]:
        kind = self.context.kind
        resident = frozenset(id(n) for _, end in self._sequences() for n in end.lineage())
        scales = Scales(time.monotonic(), self.seconds_per_token, kind.needs_checkpoints, kind.has_attention, resident)
        return weigh(nodes, scales)

    # saying

    def _say(self, what: str, node: Node, checkpoint: Checkpoint) -> None:
        if log.isEnabledFor(logging.DEBUG):
            n = sum(1 for other in node.lineage() if other.checkpoint is not None)
            place = (n, self.spacing.max_checkpoints, node.mark.n_tokens, node.mark.pos)
            about = (checkpoint.size_bytes / _MIB, checkpoint.tiers, checkpoint.kind.value)
            log.debug("checkpoint %s: %d of %d, n_tokens %d, pos %d, %.3f MiB, %s, %s", what, *place, *about)

    def note_restored(self, node: Node, how: str) -> None:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        checkpoint.used_at = time.monotonic()
        checkpoint.hits += 1
        self.counts.n_restored += 1
        self._say(f"restored ({how})", node, checkpoint)
