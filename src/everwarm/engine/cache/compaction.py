"""Idle work: joins small segments of a conversation, so that the cost of restoring it does not grow with its turns.

``state.segment_merge`` decides which ones. Bytes are joined as they are in RAM: nothing is read from the device, and
nothing on disk is written again, because a segment remembers the objects that it consists of.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.slots import Slot
from everwarm.engine.tiers.ram import Ram
from everwarm.errors import StateRejected
from everwarm.llama.context import Context
from everwarm.state.lineage import history_over
from everwarm.state.segment_merge import SegmentRun, to_join
from everwarm.state.tree import Segment, Tree

log = logging.getLogger("everwarm.engine")


def join(context: Context, segments: Sequence[Segment]) -> Segment:
    """Joins consecutive segments into one. Safe on any thread."""
    first, last = segments[0], segments[-1]
    return Segment(
        context.join_segments([segment.blob for segment in segments]),
        start=first.start,
        stop=last.stop,
        clean=last.clean,
        chunks=last.chunks,
        items=(first.n_start, last.n_stop),
        path=last.path,
        pieces=tuple(piece for segment in segments for piece in segment.pieces),
    )


class Joiner:
    def __init__(self, context: Context, tree: Tree, ram: Ram, budget: RamBudget, most_joined: int) -> None:
        """``most_joined``: tokens of a segment that is made of several."""
        self._context = context
        self._tree = tree
        self._ram = ram
        self._budget = budget
        self.most_joined = most_joined

    def tidy(self, slots: Sequence[Slot]) -> bool:
        """One piece of idle work, on conversations that are saved already. False: there is none."""
        for slot in slots:
            is_saved = slot.is_idle and slot.is_tidy and slot.is_archived
            if is_saved and not slot.is_joined:
                groups = to_join(slot.node, slot.n_settled, self.most_joined)
                if not groups or not self._can_join(groups[-1]):
                    slot.note_joined()
                if groups:
                    return True
        return False

    def _can_join(self, group: Sequence[SegmentRun]) -> bool:
        try:
            return self._join(group)
        except StateRejected as error:
            log.warning("segments could not be joined: %s", error)
            return False

    def _join(self, group: Sequence[SegmentRun]) -> bool:
        """False: the arena has no room for the joined segment, so it would not outlive the engine."""
        old = [stretch.segment.blob for stretch in group]
        whole = join(self._context, [self._used(stretch) for stretch in group])
        if not self._ram.arena.has(whole.blob):
            return False
        for stretch in group:
            self._cut_rest(stretch)
        self._tree.set_segment(group[-1].users[-1], whole)
        self._ram.keep_meanwhile(old)
        self._budget.enforce()  # where a segment was parted there are two heads now
        return True

    def _used(self, stretch: SegmentRun) -> Segment:
        """What the lineage uses of a segment."""
        segment, end = stretch.segment, stretch.users[-1]
        self._ram.require_sound(segment.blob)
        if end.mark == segment.stop:
            return segment
        return Segment(
            self._context.cut_segment(segment.blob, segment.start, end.mark),
            start=segment.start,
            stop=end.mark,
            clean=segment.clean,
            chunks=None if segment.chunks is None else history_over(segment.chunks, end.n_items),
            items=(segment.n_start, end.n_items),
            path=end.path,
            pieces=tuple(piece for piece in segment.pieces if piece.n_start < end.n_items),
        )

    def _cut_rest(self, stretch: SegmentRun) -> None:
        """Lineages that use a segment beyond where this one left it keep only that part."""
        segment, left_at = stretch.segment, stretch.users[-1]
        end = left_at
        while (child := next((c for c in end.children.values() if c.segment is segment), None)) is not None:
            end = child
        if end is left_at:
            return
        rest = Segment(
            self._context.cut_segment(segment.blob, left_at.mark, segment.stop, self._ram.place),
            start=left_at.mark,
            stop=segment.stop,
            clean=segment.clean,
            chunks=segment.chunks,
            items=(left_at.n_items, segment.n_stop),
            path=segment.path,
            pieces=tuple(piece for piece in segment.pieces if piece.n_stop > left_at.n_items),
        )
        self._tree.set_segment(end, rest)
