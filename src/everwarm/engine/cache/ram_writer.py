"""From the device to RAM: copies states and the KV that would be lost with its sequence. ``restore`` is the way back.

Nothing is copied twice: nodes whose KV a segment or another sequence holds are left out, unless this reading is worth
more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from everwarm.engine.cache.provenance import is_better, reach_back
from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.slots import Residents, Slot
from everwarm.llama.context import Context
from everwarm.state import segment_merge
from everwarm.state.lineage import history_over
from everwarm.state.policy import CutKind
from everwarm.state.tree import Node, Segment, Tree
from everwarm.types import SeqId

PIECE_BYTES = 64 << 20  # of KV, between two steps; a state is copied whole
MIN_PIECE_TOKENS = 64


class RamWriter:
    def __init__(
        self,
        context: Context,
        tree: Tree,
        residents: Residents,
        budget: RamBudget,
        most_joined: int,
        kv_bytes_per_token: int,
        state_bytes: int,
    ) -> None:
        """``most_joined``: tokens of a segment that is made of several; ``state_bytes``: of one state of this model."""
        self._kv_bytes = kv_bytes_per_token
        self._state_bytes = state_bytes
        self.piece_tokens = max(MIN_PIECE_TOKENS, PIECE_BYTES // max(1, kv_bytes_per_token))
        self._context = context
        self._tree = tree
        self._residents = residents
        self._budget = budget
        self.most_joined = most_joined

    # states

    def copy_state(self, node: Node) -> None:
        """Give a parked checkpoint a RAM copy of its state. The caller enforces the budget."""
        checkpoint = node.checkpoint
        assert checkpoint is not None and checkpoint.parked is not None
        if (
            checkpoint.state is None and checkpoint.kind is CutKind.CANCEL
        ):  # a suspended request goes on from it, exactly
            self._tree.set_state(node, self._context.capture(checkpoint.parked))
        elif checkpoint.state is None:
            checkpoint.clean = checkpoint.clean and not self._context.packs_states
            self._tree.set_state(node, self._context.capture_packed(checkpoint.parked))

    def would_keep(self, points: Sequence[Node]) -> bool:
        """Whether copies of these points of one lineage, the deepest last, would stay in RAM: else it is not worth
        making them as long as the device holds them."""
        if not points:
            return False
        lineage = points[-1].lineage() if self._context.kind.has_attention else []
        states = [node for node in points if node.checkpoint is not None]
        n_new = sum(node.checkpoint.state is None for node in states if node.checkpoint is not None)
        n_bytes = len(states) * self._state_bytes + self._bytes_of(lineage)
        unsaved = self._bytes_of(node for node in lineage if node.segment is None)
        return self._budget.would_keep_copy(points[-1], n_bytes, n_new * self._state_bytes + unsaved)

    @contextlib.contextmanager
    def staged(self, points: Iterable[Node]) -> Iterator[None]:
        """Inside the block these points are in RAM with everything they need, beyond its budget if need be."""
        with self._budget.lifted():
            for node in points:
                self._copy_point(node)
            yield

    def _copy_point(self, node: Node) -> None:
        """Copies all that a restore of this point needs, as far as only the device holds it."""
        checkpoint = node.checkpoint
        parked = None if checkpoint is None else checkpoint.parked
        if parked is not None:
            self.copy_state(node)
        holders = (seq for seq, end in self._residents.ends() if any(n is node for n in end.lineage()))
        seq = next(holders, None) if parked is None else parked
        if seq is not None and self._context.kind.has_attention:
            self.save_lineage(seq, node.lineage())

    # KV

    def leaving(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block something leaves the device: nothing is evicted until it has left, because until then what
        is copied of it would count as a copy of what the device holds."""
        return self._budget.lifted()

    def save_kv(self, seq: SeqId, node: Node, *, beyond: int = 0) -> None:
        """Copy the KV of this sequence's lineage that would be lost if the sequence went.

        Only KV that a restore can use: of nodes past ``beyond`` with a kept state at or below them, whose KV no other
        sequence and no segment holds.
        """
        self.save_lineage(seq, self.unsaved(seq, node, beyond=beyond))

    def save_lineage(self, seq: SeqId, nodes: Iterable[Node]) -> None:
        """Copy the KV of these nodes, out of a sequence that passes them."""
        for run in self._unsaved_runs(seq, nodes, self.most_joined):
            self._save_run(seq, run)
        self._budget.enforce()

    def save_piece(self, seq: SeqId, nodes: Iterable[Node], most: int) -> bool:
        """Copies the first ``most`` tokens that are not in RAM. False: there are none, or no room for them."""
        run = self._next_run(seq, nodes, most)
        return run is not None and self._save_first(seq, run, most)

    def _next_run(self, seq: SeqId, nodes: Iterable[Node], most: int) -> list[Node] | None:
        return next(self._unsaved_runs(seq, nodes, min(most, self.most_joined)), None)

    def _save_first(self, seq: SeqId, run: list[Node], most: int) -> bool:
        """Copies a run, or the first ``most`` tokens of its first node. False: it was evicted at once."""
        first = run[0]
        if first.parent is not None and first.n_items - first.start > most:
            run = [self._tree.grow(first.parent, first.path, first.start + most)]
        self._save_run(seq, run)
        end = run[-1]
        self._budget.enforce()
        return end.segment is not None

    def unsaved(self, seq: SeqId, node: Node, *, beyond: int = 0) -> list[Node]:
        """The nodes of a lineage whose KV only this sequence holds and a request may need."""
        elsewhere = self._held_elsewhere(seq)
        lost = (n for n in self._wanted(node) if n.n_items > beyond and id(n) not in elsewhere)
        return [n for n in lost if self._is_better(seq, n)]

    def is_only_here(self, seq: SeqId, node: Node) -> bool:
        """Whether some KV of a lineage is held by this sequence alone."""
        elsewhere = self._held_elsewhere(seq)
        return any(id(n) not in elsewhere and self._is_better(seq, n) for n in node.lineage())

    def unsaved_bytes(self, slot: Slot) -> int:
        """What emptying a slot would add to RAM."""
        return self._bytes_of(self.unsaved(slot.seq, slot.node))

    def parked_bytes(self, spare: SeqId, node: Node) -> int:
        """What emptying a spare would add to RAM: its state, if it is worth a copy, and the KV that only this spare
        holds. Nothing if RAM can hold no state at all: then spares are for the conversations that run."""
        checkpoint = node.checkpoint
        if not self._budget.can_hold(self._state_bytes):
            return 0
        if checkpoint is None or not is_worth_copying(node):
            return self._bytes_of(self.unsaved(spare, node))
        elsewhere = self._held_elsewhere(spare)
        lost = [n for n in node.lineage() if id(n) not in elsewhere and self._is_better(spare, n)]
        return self._bytes_of(lost) + (self._state_bytes if checkpoint.state is None else 0)

    def whole_bytes(self, seq: SeqId) -> int:
        """What all of a sequence takes: its KV, and a state."""
        return self._context.cells.count(seq) * self._kv_bytes + self._state_bytes

    def _bytes_of(self, nodes: Iterable[Node]) -> int:
        parts = ((n, n.parent) for n in nodes)
        return sum(n.mark.n_tokens - above.mark.n_tokens for n, above in parts if above is not None) * self._kv_bytes

    def _held_elsewhere(self, seq: SeqId) -> set[int]:
        return {id(n) for other, end in self._residents.ends() if other != seq for n in end.lineage()}

    def _unsaved_runs(self, seq: SeqId, nodes: Iterable[Node], most: int) -> Iterator[list[Node]]:
        n_cells = self._context.cells.count(seq)
        here = (n for n in nodes if n.parent is not None and n.mark.n_tokens <= n_cells)
        unsaved = [n for n in here if self._is_better(seq, n)]
        return segment_merge.runs(unsaved, partial(self._is_exact, seq), most)

    def _save_run(self, seq: SeqId, run: list[Node]) -> None:
        """One segment, for a run of nodes."""
        chunks = self._residents.history(seq)
        end = run[-1]
        clean = self._is_exact(seq, end)
        first = reach_back(run[0], chunks) if clean and self._context.is_clean(seq) else run[0]
        above = first.parent or first
        blob = self._context.capture_segment(seq, above.mark, end.mark)
        history = history_over(chunks, end.n_items)
        items = (above.n_items, end.n_items)
        self._tree.set_segment(end, Segment(blob, above.mark, end.mark, clean, history, items=items), run[0])

    def _is_exact(self, seq: SeqId, node: Node) -> bool:
        is_clean = self._context.cells.is_clean(seq)
        return is_clean and history_over(self._residents.history(seq), node.n_items) is not None

    def _is_better(self, seq: SeqId, node: Node) -> bool:
        """Whether a sequence's KV of a node is worth more than what is kept of it."""
        is_whole = self._context.kind.needs_checkpoints and self._context.is_clean(seq)
        history = self._residents.history(seq)
        return is_better(node, history, is_clean=self._context.cells.is_clean(seq), is_whole=is_whole)

    def _wanted(self, node: Node) -> list[Node]:
        """The part of a lineage that a request may come back to."""
        lineage = node.lineage() if self._context.kind.has_attention else []
        while lineage and not self._is_wanted(lineage[-1]):
            lineage.pop()
        return lineage

    def _is_wanted(self, node: Node) -> bool:
        """Whether anything at or below the node can only be used with the node's KV."""
        if not self._context.kind.needs_checkpoints:
            return True
        return any(n.checkpoint is not None and n.checkpoint.state is not None for n in node.below())

    # idle time

    @property
    def has_room_for_state(self) -> bool:
        return self._budget.n_free >= self._state_bytes

    def tidy(self) -> bool:
        """One piece of idle work: copies a parked checkpoint or an idle conversation's KV, if there is room without
        evicting anything. False: there is nothing to do."""
        for _, node in self._residents.spares.parked() if self.has_room_for_state else ():
            checkpoint = node.checkpoint
            if checkpoint is not None and not checkpoint.tidied and is_worth_copying(node):
                checkpoint.tidied = True
                self.copy_state(node)
                self._budget.enforce()
                return True
        for slot in self._residents.slots:
            if slot.is_idle and not slot.is_tidy:
                run = self._next_run(slot.seq, self._wanted(slot.node), self.piece_tokens)
                has_room = run is not None and self._bytes_of(run) <= self._budget.n_free
                if run is None or not has_room or not self._save_first(slot.seq, run, self.piece_tokens):
                    slot.note_tidy()
                return True
        return False


def is_worth_copying(node: Node) -> bool:
    """Whether a parked checkpoint should outlive its spare. The end of a prompt serves only an identical prompt, which
    reads a few items without it; all next turns continue from other points."""
    checkpoint = node.checkpoint
    return checkpoint is not None and (checkpoint.kind is not CutKind.END or node.n_pinned > 0)
