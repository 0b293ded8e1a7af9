"""Idle work: joins small segments of a conversation, so that the cost of restoring it does not grow with its turns.

``state.segment_merge`` decides which ones. Bytes are joined as they are in RAM: nothing is read from the device, and
nothing on disk is written again, because a segment remembers the objects that it consists of. A join takes as many
pieces of idle work as its bytes need, so that a request never waits for more than one of them; the tree changes with the
last one.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence

from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.slots import Slot
from everwarm.engine.tiers.ram import Ram
from everwarm.errors import StateRejected
from everwarm.llama.context import Context
from everwarm.state.lineage import history_over
from everwarm.state.segment_merge import SegmentRun, to_join
from everwarm.state.tree import Node, Segment, Tree
from everwarm.types import Blob, heap

log = logging.getLogger("everwarm.engine")


STEP_BYTES = 16 << 20  # copied in one piece of idle work: a few milliseconds
FEWER = 4  # where there is no room for a long segment, one of this part of its length is tried


def join(context: Context, segments: Sequence[Segment]) -> Segment:
    """Joins consecutive segments into one. Safe on any thread."""
    return _whole(segments, context.join_segments([segment.blob for segment in segments]))


def _whole(segments: Sequence[Segment], blob: Blob) -> Segment:
    first = segments[0]
    last = segments[-1]
    return Segment(
        blob,
        start=first.start,
        stop=last.stop,
        clean=last.clean,
        chunks=last.chunks,
        items=(first.n_start, last.n_stop),
        path=last.path,
        pieces=tuple(piece for segment in segments for piece in segment.pieces),
    )


Joining = Generator[int, None, None]  # yields the bytes of each piece that was copied


class Joiner:
    def __init__(self, context: Context, tree: Tree, ram: Ram, budget: RamBudget, most_joined: int) -> None:
        """``most_joined``: tokens of a segment that is made of several."""
        self._context = context
        self._tree = tree
        self._ram = ram
        self._budget = budget
        self._joining: Joining | None = None
        self.most_joined = most_joined

    def tidy(self, slots: Sequence[Slot]) -> bool:
        """One piece of idle work, on conversations that are saved already. False: there is none."""
        if self._joining is None:
            self._joining = self._next(slots)
        if self._joining is None:
            return False
        n_bytes = 0
        for n_copied in self._joining:
            n_bytes += n_copied
            if n_bytes >= STEP_BYTES:
                return True
        self._joining = None
        return True

    def _next(self, slots: Sequence[Slot]) -> Joining | None:
        for slot in slots:
            is_saved = slot.is_idle and slot.is_tidy and slot.is_archived
            if is_saved and not slot.is_joined:
                group = self._group(slot)
                if group:
                    return self._try_to_join(slot, group)
                slot.note_joined()
        return None

    def _group(self, slot: Slot) -> Sequence[SegmentRun]:
        """What to join next: as much as there is room for."""
        for most in (self.most_joined, self.most_joined // FEWER):
            groups = to_join(slot.node, slot.n_settled, most)
            if groups and self._ram.arena.has_room(sum(stretch.segment.blob.nbytes for stretch in groups[-1])):
                return groups[-1]
        return ()

    def _try_to_join(self, slot: Slot, group: Sequence[SegmentRun]) -> Joining:
        try:
            has_joined = yield from self._join(group)
        except StateRejected as error:
            log.warning("segments could not be joined: %s", error)
            has_joined = False
        if not has_joined:
            slot.note_joined()

    def _join(self, group: Sequence[SegmentRun]) -> Generator[int, None, bool]:
        """False: the arena has no room for the joined segment, so it would not outlive the engine. Nothing is joined if
        the tree has changed meanwhile: what is left to join is looked for again."""
        ends = [_last_user(stretch) for stretch in group]
        parts: list[Segment] = []
        for stretch in group:
            part = yield from self._used(stretch)
            parts.append(part)
        blob = yield from self._context.joining_segments([part.blob for part in parts])
        if not self._ram.arena.has(blob):
            return False
        rests = []
        for stretch, end in zip(group, ends, strict=True):
            rest = yield from self._rest(stretch, end)
            rests.append(rest)
        if not all(self._is_as_before(stretch, end) for stretch, end in zip(group, ends, strict=True)):
            return True
        old = [stretch.segment.blob for stretch in group]
        for end, rest in zip(ends, rests, strict=True):
            if rest is not None:
                self._tree.set_segment(end, rest)
        self._tree.set_segment(group[-1].users[-1], _whole(parts, blob))
        self._ram.keep_meanwhile(old)
        self._budget.enforce()  # where a segment was parted there are two heads now
        return True

    def _is_as_before(self, stretch: SegmentRun, end: Node) -> bool:
        """``end``: the last node that used the segment."""
        is_used = all(self._tree.has(node) and node.segment is stretch.segment for node in stretch.users)
        return is_used and _last_user(stretch) is end

    def _used(self, stretch: SegmentRun) -> Generator[int, None, Segment]:
        """What the lineage uses of a segment."""
        segment = stretch.segment
        end = stretch.users[-1]
        self._ram.require_sound(segment.blob)
        if end.mark == segment.stop:
            return segment
        blob = yield from self._context.cutting_segment(segment.blob, segment.start, end.mark, heap)
        return Segment(
            blob,
            start=segment.start,
            stop=end.mark,
            clean=segment.clean,
            chunks=None if segment.chunks is None else history_over(segment.chunks, end.n_items),
            items=(segment.n_start, end.n_items),
            path=end.path,
            pieces=tuple(piece for piece in segment.pieces if piece.n_start < end.n_items),
        )

    def _rest(self, stretch: SegmentRun, end: Node) -> Generator[int, None, Segment | None]:
        """What other lineages use of a segment, up to ``end``, beyond where this one left it; None: nothing."""
        segment = stretch.segment
        left_at = stretch.users[-1]
        if end is left_at:
            return None
        blob = yield from self._context.cutting_segment(segment.blob, left_at.mark, segment.stop, self._ram.place)
        return Segment(
            blob,
            start=left_at.mark,
            stop=segment.stop,
            clean=segment.clean,
            chunks=segment.chunks,
            items=(left_at.n_items, segment.n_stop),
            path=segment.path,
            pieces=tuple(piece for piece in segment.pieces if piece.n_stop > left_at.n_items),
        )


def _last_user(stretch: SegmentRun) -> Node:
    """The deepest node that uses its segment."""
    node = stretch.users[-1]
    while (child := next((c for c in node.children.values() if c.segment is stretch.segment), None)) is not None:
        node = child
    return node
