"""Restores a slot to the deepest kept point of a prompt, cheapest way first.

In place (the KV stays, the state comes from RAM, or a window is cut back), unparked (no copy), or KV and state reloaded. An
entry that libllama refuses is quarantined and the next best is tried, down to an empty slot: a bad cache entry never fails
a request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.device_room import DeviceRoom
from everwarm.engine.cache.provenance import cover, entry, is_exact, is_part_of
from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.process.messages import CheckpointUse
from everwarm.engine.slots import Residents, Slot
from everwarm.engine.stats import EngineStats
from everwarm.engine.tiers.ram import Ram
from everwarm.errors import ContextFull, KvMissing, MemoryFault, StateRejected, TrimRefused
from everwarm.llama.context import Context
from everwarm.llama.model import MemoryKind
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import Chunks, history_over, n_items_of
from everwarm.state.policy import GUARD, CutKind
from everwarm.state.tree import Match, Node, Segment, Tree
from everwarm.types import SeqId

log = logging.getLogger("everwarm.engine")

Sources = Mapping[SeqId, int]  # sequences on the device, each with how many items of a prompt it begins with


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a slot stands now. ``logits`` are there if nothing at all has to be decoded."""

    n_items: int
    use: CheckpointUse | None = None
    logits: np.ndarray | None = None
    n_refused: int = 0  # ways there that were tried and could not be used


@dataclass(frozen=True, slots=True)
class Goal:
    """The prompt that a slot is restored for."""

    prompt: Prompt
    namespace: str
    clean_only: bool = False
    n_brought: int = 0  # what was brought from another tier for it
    tier: str = "disk"  # which


class Restorer:
    def __init__(
        self,
        context: Context,
        tree: Tree,
        residents: Residents,
        checkpointer: Checkpointer,
        writer: RamWriter,
        room: DeviceRoom,
        ram: Ram,
        stats: EngineStats,
    ) -> None:
        self._context = context
        self._tree = tree
        self._residents = residents
        self._checkpointer = checkpointer
        self._writer = writer
        self._room = room
        self._ram = ram
        self._stats = stats

    def sources(self, prompt: Prompt, namespace: str) -> Sources:
        """Every sequence of this namespace on the device, with the length of the prefix it shares with the prompt."""
        root = self._tree.root(namespace)
        found = {
            slot.seq: int(prompt.common_prefix(slot.resident()))
            for slot in self._residents.slots
            if slot.n_fed and slot.node.root() is root
        }
        for spare, node in self._residents.spares.parked():
            if node.root() is root:
                found[spare] = min(int(prompt.common_prefix(node.path)), node.n_items)
        return found

    def match(self, prompt: Prompt, namespace: str, sources: Sources) -> Match:
        n_resident = max(sources.values(), default=0)
        return self._tree.match(namespace, prompt, n_resident, needs_kv=self._context.kind.has_attention)

    def n_known(self, match: Match) -> int:
        """The items up to the deepest point of a match that can be restored."""
        if not self._context.kind.needs_checkpoints:
            return match.n_kv
        return match.usable[0].n_items if match.usable else 0

    def known(self, prompt: Prompt, namespace: str) -> int:
        """The items of a prompt up to the deepest point in RAM or on the device that can be restored."""
        return self.n_known(self.match(prompt, namespace, self.sources(prompt, namespace)))

    def knows(self, namespace: str) -> bool:
        """Whether anything of a namespace is kept, on the device or in RAM."""
        root = self._tree.namespaces().get(namespace)
        return root is not None and bool(root.children)

    def reach(self, prompt: Prompt, namespace: str) -> int:
        """The items of a prompt that need not be read again in this namespace; what is only on disk does not count."""
        sources = self.sources(prompt, namespace)
        match = self.match(prompt, namespace, sources)
        most = len(prompt) - 1
        if not self._context.kind.needs_checkpoints:
            return min(match.n_kv, most)
        ends = [node.n_items for node in match.usable]
        ends += [slot.n_fed for slot in self._residents.slots if slot.is_idle and sources.get(slot.seq) == slot.n_fed]
        return max((n for n in ends if n <= most), default=0)

    def bring(self, slot: Slot, goal: Goal, match: Match, sources: Sources) -> Restored:
        """Restore the deepest usable point into ``slot``. Unless its logits were kept, an item is left to decode."""
        here = self._stay(slot, goal, match, sources)
        if here is not None:
            return here
        if not self._context.kind.needs_checkpoints:
            deepest = match.path[-1] if match.path else self._tree.root(goal.namespace)
            with self._tree.pinned(deepest):
                return self._bring_attention(slot, goal, match, sources)
        cut = self._cut_window(slot, goal, match, sources)
        if cut is not None:
            return cut
        sources = self.sources(goal.prompt, goal.namespace)  # the attempt may have emptied the slot
        n_before = self._stats.n_quarantined
        for node in match.usable:
            restored = self._try(slot, goal, node, match, sources)
            if restored is not None:
                break
            sources = self.sources(goal.prompt, goal.namespace)  # the attempt may have moved others out
        else:
            restored = self.start_cold(slot, goal)
        return replace(restored, n_refused=self._stats.n_quarantined - n_before)

    def start_cold(self, slot: Slot, goal: Goal) -> Restored:
        self._room.vacate(slot, self._tree.root(goal.namespace))
        self._stand(slot, goal, [], 0, ())
        return Restored(0)

    # how much room that takes

    def n_cells_beside(self, slot: Slot, goal: Goal, running: Sequence[SeqId]) -> int:
        """Cells that these sequences and ``slot`` will hold once the prompt is restored and the rest is read. Only
        cells that the restore really shares with a running sequence count once; an equal prefix in other cells does
        not."""
        sources = self.sources(goal.prompt, goal.namespace)
        seq, n_common = self._found(slot, goal.prompt, self.match(goal.prompt, goal.namespace, sources), sources)
        n_found = goal.prompt.n_tokens(n_common)
        n_read = goal.prompt.n_tokens(len(goal.prompt)) - n_found
        return self._context.cells.used_with(running, seq, n_found) + n_read

    def _found(self, slot: Slot, prompt: Prompt, match: Match, sources: Sources) -> tuple[SeqId, int]:
        """The sequence whose cells a restore starts with, and how many of its items it takes, chosen as in ``bring``; KV
        from RAM takes new cells."""
        own = sources.get(slot.seq, 0)
        n_items = self._n_restorable(prompt, match)
        if 0 < own == slot.n_fed and n_items <= own:
            return slot.seq, own
        node = next((node for node in match.usable if node.n_items == n_items), None)
        if node is not None and node.checkpoint is not None and node.checkpoint.parked is not None:
            return node.checkpoint.parked, n_items
        best, n_best = _longest(sources, slot)
        if own >= n_items or n_best <= own or not self._context.kind.can_share_cells:
            return slot.seq, min(own, n_items)
        chunks = self._residents.history(best)
        return best, entry(match.path, min(n_best, n_items), n_items, chunks)

    def _n_restorable(self, prompt: Prompt, match: Match) -> int:
        """The deepest point that can be restored and leaves something to decode, or its logits."""
        if not self._context.kind.needs_checkpoints:
            return min(match.n_kv, len(prompt) - 1)
        return max((node.n_items for node in match.usable if _leaves_work(node, prompt)), default=0)

    # ways to a point, cheapest first

    def _stay(self, slot: Slot, goal: Goal, match: Match, sources: Sources) -> Restored | None:
        """Keeps the slot as it is: it ends inside the prompt and nothing deeper is known, or it ends with the prompt
        and the logits were kept."""
        own = sources.get(slot.seq, 0)
        if not 0 < own == slot.n_fed or (goal.clean_only and not self._context.is_clean(slot.seq)):
            return None
        if own == len(goal.prompt):
            return self._stay_at_end(slot, goal)
        if self._n_restorable(goal.prompt, match) > own:
            return None
        slot.hold_as(goal.prompt.first(own))
        self._checkpointer.note_continued(slot.node)
        return Restored(own, CheckpointUse(slot.n_fed, "end", "in place"))

    def _stay_at_end(self, slot: Slot, goal: Goal) -> Restored | None:
        node = slot.node
        checkpoint = node.checkpoint
        if node.n_items != slot.n_fed or checkpoint is None or checkpoint.logits is None:
            return None
        if checkpoint.chunks != tuple(slot.chunks):  # the same items, read another way
            return None
        slot.hold_as(goal.prompt)
        self._checkpointer.note_restored(node, "in place")
        self._checkpointer.note_continued(node)
        return Restored(
            node.n_items, CheckpointUse(node.mark.n_tokens, checkpoint.kind.value, "in place"), checkpoint.logits
        )

    def _try(self, slot: Slot, goal: Goal, node: Node, match: Match, sources: Sources) -> Restored | None:
        checkpoint = node.checkpoint
        if checkpoint is None or not _leaves_work(node, goal.prompt) or (goal.clean_only and not is_exact(node)):
            return None
        with self._tree.pinned(node), self._writer.leaving():
            try:
                how = self._restore(slot, goal, node, match, sources)
            except MemoryFault as error:
                self._give_up(slot)
                if not isinstance(error, ContextFull | KvMissing):
                    self._checkpointer.quarantine(node, error)
                return None
            how = f"from {goal.tier}" if node.n_items == goal.n_brought else how
            self._stand(slot, goal, match.path, node.n_items, checkpoint.chunks)
            self._checkpointer.note_restored(node, how)
            self._checkpointer.note_continued(node)
        logits = checkpoint.logits if node.n_items == len(goal.prompt) else None
        return Restored(node.n_items, CheckpointUse(node.mark.n_tokens, checkpoint.kind.value, how), logits)

    def _restore(self, slot: Slot, goal: Goal, node: Node, match: Match, sources: Sources) -> str:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        root = self._tree.root(goal.namespace)
        if checkpoint.parked is not None:
            self._room.vacate(slot, root)
            self._context.unpark(checkpoint.parked, slot.seq)
            return "unparked"
        assert checkpoint.state is not None
        self._ram.require_sound(checkpoint.state)
        how = "from ram"
        if self._context.kind.has_attention:
            how = self._bring_kv(slot, goal, node.n_items, match.path, sources)
        else:
            self._room.vacate(slot, root)
        history = history_over(slot.chunks, node.n_items) if self._context.kind.has_attention else checkpoint.chunks
        clean = checkpoint.clean and history is not None and history == checkpoint.chunks
        self._context.restore(slot.seq, checkpoint.state, node.mark, clean=clean)
        return how

    def _bring_attention(self, slot: Slot, goal: Goal, match: Match, sources: Sources) -> Restored:
        """Plain attention: a restore can end at any item, so the deepest KV wins."""
        n = min(self._clean_kv(match) if goal.clean_only else match.n_kv, len(goal.prompt) - 1)
        try:
            how = self._bring_kv(slot, goal, n, match.path, sources)
            self._context.trim(slot.seq, goal.prompt.mark(n))
        except MemoryFault as error:
            log.warning("the KV of %d tokens could not be brought back: %s", n, error)
            self._give_up(slot)
            return replace(self.start_cold(slot, goal), n_refused=1)
        history = history_over(slot.chunks, n)
        is_known = history is not None and n_items_of(history) == n  # not if it was cut inside a chunk
        self._stand(slot, goal, match.path, n, history if is_known and history else ())
        how = f"from {goal.tier}" if n and n == goal.n_brought else how
        return Restored(n, CheckpointUse(n, "end", how) if n else None)

    def _cut_window(self, slot: Slot, goal: Goal, match: Match, sources: Sources) -> Restored | None:
        """Cuts the slot back to what it shares with the prompt, while its sliding window still reaches back that far, and
        keeps a checkpoint there. What was cut is not clean, so a clean checkpoint a few items before is better."""
        if self._context.kind is not MemoryKind.WINDOW or goal.clean_only:
            return None
        n = min(sources.get(slot.seq, 0), len(goal.prompt) - 1)
        best = next((node for node in match.usable if _leaves_work(node, goal.prompt)), None)
        n_kept = 0 if best is None else best.n_items
        is_clean = best is not None and best.checkpoint is not None and best.checkpoint.clean
        mark = goal.prompt.mark(n)
        if n - n_kept <= (GUARD if is_clean else 0) or not self._context.window_reaches(slot.seq, mark):
            return None  # nothing was changed: saving evicts, perhaps what was just loaded for this prompt
        with self._writer.leaving():
            self._room.save(slot, beyond=n)
            try:
                self._context.trim(slot.seq, mark)
            except TrimRefused:
                return None
            self._stand(slot, goal, match.path, n, ())
        spacing = self._checkpointer.spacing
        if n >= spacing.min_tokens and n - n_kept >= max(1, spacing.min_gap):
            try:
                self._checkpointer.take(slot, CutKind.BRANCH)
            except StateRejected:
                self._give_up(slot)
                return None
        return Restored(n, CheckpointUse(n, "end", "in place"))

    @staticmethod
    def _clean_kv(match: Match) -> int:
        """How far the KV in RAM comes from clean readings."""
        n = 0
        for node in match.path:
            if node.n_items > match.n_shared or node.segment is None or not node.segment.clean:
                break
            n = node.n_items
        return n

    # KV

    def _bring_kv(self, slot: Slot, goal: Goal, n_items: int, path: Sequence[Node], sources: Sources) -> str:
        """Make the slot hold the KV of the first ``n_items``: its own, another sequence's, the rest from segments.

        Meanwhile the slot's record always matches what its sequence holds: making room depends on it.
        """
        own = min(sources.get(slot.seq, 0), n_items)
        best, n_best = _longest(sources, slot)
        chunks = tuple(slot.chunks)
        have = entry(path, own, n_items, chunks)
        how = "from ram"
        self._writer.save_kv(slot.seq, slot.node, beyond=have)
        if own == n_items:
            return "in place"
        if n_best > own and self._context.kind.can_share_cells:
            chunks = self._residents.history(best)
            have = entry(path, min(n_best, n_items), n_items, chunks)
            how = "shared"
            self._room.vacate(slot, self._tree.root(goal.namespace))
            self._context.share_kv(best, slot.seq, goal.prompt.mark(have))
        else:
            if n_best > own:  # beyond ``n_items`` a path may agree only in part
                self._writer.save_lineage(best, [n for n in path if own < n.n_items <= min(n_best, n_items)])
            self._context.keep_kv(slot.seq, goal.prompt.mark(have))
        self._stand(slot, goal, path, have, chunks)
        self._splice(slot, goal, n_items, path)
        return how if have == n_items else "from ram"

    def _splice(self, slot: Slot, goal: Goal, n_items: int, path: Sequence[Node]) -> None:
        """Load the segments from the slot's end on, each object once."""
        prompt = goal.prompt
        parts = cover(path, slot.n_fed, n_items)
        if parts is None:
            raise KvMissing(f"the KV from {slot.n_fed} tokens on is not there any more")
        for segment, stop in [(node.segment, stop) for node, stop in parts if node.segment is not None]:
            try:
                self._ram.require_sound(segment.blob)
                self._splice_part(slot, segment, prompt, stop, n_items)
            except ContextFull:
                raise
            except MemoryFault:
                self._drop_segment(segment, path)
                raise
            self._stand(slot, goal, path, stop, segment.chunks or ())

    def _drop_segment(self, segment: Segment, path: Sequence[Node]) -> None:
        """Forget a segment that could not be spliced."""
        for node in [node for node in path if node.segment is segment]:
            if node.segment is not None:  # else it went with one above
                self._tree.drop_segment(node)

    def _splice_part(self, slot: Slot, segment: Segment, prompt: Prompt, stop: int, n_items: int) -> None:
        """A segment that is longer than needed is loaded whole if there is room, else cut. Of one that begins before
        the slot's end only the rest is loaded. Others follow up to ``n_items``."""
        start = prompt.mark(slot.n_fed)
        end = prompt.mark(stop)
        n_needed = end.n_tokens - start.n_tokens
        blob = segment.blob
        n_cells = segment.n_cells
        if start != segment.start or n_cells > max(n_needed, self._context.cells.free):
            blob = self._context.cut_segment(blob, start, end)
            n_cells = n_needed
        if not self._room.make_room(n_cells, keep=slot):
            raise ContextFull(f"{n_cells} cells are needed to bring back a segment")
        is_whole = stop < n_items or _is_cut_between_chunks(segment, stop)  # the next one shows whether it continues
        clean = _goes_on(slot, segment) and is_whole
        self._context.splice_segment(slot.seq, blob, start, end, n_cells=n_cells, clean=clean)

    # the slot's own record

    def _give_up(self, slot: Slot) -> None:
        """A restore failed half-way: keep the KV that is still good for the next best checkpoint, then start empty."""
        if self._context.cells.count(slot.seq) < slot.node.mark.n_tokens:
            slot.stand_at(slot.node.root())  # the fault took the KV as well
        self._room.vacate(slot)

    def _stand(self, slot: Slot, goal: Goal, path: Sequence[Node], n_items: int, chunks: Chunks) -> None:
        """Records that the slot holds the prompt's first ``n_items`` in these chunks; its node is the last one inside
        them. The last of a path may agree only in part, while a running sequence shares more with the prompt."""
        root = self._tree.root(goal.namespace)
        inside = (node for node in reversed(path) if node.n_items <= n_items and self._tree.has(node))
        inside = (node for node in inside if goal.prompt.common_prefix(node.path, node.start) >= node.n_items)
        slot.hold(goal.prompt.first(n_items), next(inside, root), chunks)


def _longest(sources: Sources, slot: Slot) -> tuple[SeqId, int]:
    """The sequence that holds most of a prompt, and how much."""
    return max(sources.items(), key=lambda source: source[1], default=(slot.seq, 0))


def _goes_on(slot: Slot, segment: Segment) -> bool:
    """Whether a segment comes from the clean reading that the slot's cells come from."""
    return segment.clean if slot.n_fed == 0 else is_part_of(segment, tuple(slot.chunks), slot.n_fed)


def _leaves_work(node: Node, prompt: Prompt) -> bool:
    """Whether an item is left to decode, or the logits after the last item were kept: a request must never have
    neither."""
    return node.n_items < len(prompt) or (node.checkpoint is not None and node.checkpoint.logits is not None)


def _is_cut_between_chunks(segment: Segment, n_items: int) -> bool:
    """Whether a chunk ended there, so that the items before were decoded without those after. Always true at a
    segment's end."""
    history = None if segment.chunks is None else history_over(segment.chunks, n_items)
    return n_items == segment.n_stop or (history is not None and n_items_of(history) == n_items)
