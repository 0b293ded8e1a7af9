"""Turns a point of the tree into objects: the state there, and the KV that leads to it; or into a parcel with a pointer,
as the remote store keeps them. Knows no tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from everwarm.engine.cache.provenance import cover
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import history_over, keys, root_key, short_key
from everwarm.state.remote.pointer import MAC_BYTES, Need, Parcel, Pointer, grid_points, names_at
from everwarm.state.store.object import (
    Damaged,
    KvCut,
    ObjectHeader,
    ObjectPart,
    file_size,
    name_of,
    size_of,
    state_name,
)
from everwarm.state.tier import PartReader
from everwarm.state.tree import Node, Segment, SegmentPiece, Tree
from everwarm.types import Blob, Place, heap

Segments = list[tuple[Segment, int]]  # each with up to which item it is used


@dataclass(frozen=True, slots=True)
class Job:
    """One object to write, with its parts as they are in RAM: they are never changed. It can be read before it is
    written."""

    header: ObjectHeader
    parts: dict[str, ObjectPart]

    @property
    def size(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def read(self, name: str, place: Place = heap) -> Blob:  # noqa: ARG002 - nothing is copied
        part = self.parts.get(name)
        if part is None:
            raise Damaged(f"it has no section {name!r}")
        return part.copy() if isinstance(part, KvCut) else part


def object_size(reader: PartReader) -> int:
    """The size of the file that an object has or will have."""
    return file_size(reader.header, reader.parts) if isinstance(reader, Job) else size_of(reader.header)


class Packing:
    def __init__(
        self, context: Context, tree: Tree, words: Callable[[Prompt], str], fingerprint: Callable[[], str]
    ) -> None:
        """``fingerprint``: asked when something is packed; until then it may be unknown."""
        self._context = context
        self._tree = tree
        self._words = words
        self._fingerprint = fingerprint

    def root(self, node: Node) -> str:
        return root_key(self._fingerprint(), self._tree.namespace(node))

    def state_name(self, node: Node, n_items: int | None = None) -> str:
        """The name of the object that completes this point, or one above it after ``n_items``."""
        n = node.n_items if n_items is None else n_items
        return state_name(keys(self.root(node), node.path, (n,))[n])

    def jobs(self, node: Node, is_kept: Callable[[str], bool]) -> list[Job] | None:
        """The objects of a point that are still to be written; the last one is its state. None: some of it is not in RAM,
        must not leave RAM, or cannot be packed."""
        segments = self._segments(node)
        if segments is None:
            return None
        root = self.root(node)
        used: dict[str, int] = {}  # the names of the KV's objects, each with the item up to which it is used
        jobs: list[Job] = []
        for segment, reach in segments:
            for job in self._missing(root, segment, reach, is_kept):
                if job is None:
                    return None
                jobs.append(job)
            ends = [*(piece.n_start for piece in segment.pieces[1:]), segment.n_stop]
            for piece, end in zip(segment.pieces, ends, strict=True):
                if piece.n_start < reach:
                    used[piece.name] = min(end, reach)
        return [*jobs, self._state_job(root, node, used)]

    def _segments(self, node: Node) -> Segments | None:
        """All KV that the point needs; None: some of it or the state is not in RAM, or must not leave RAM."""
        has_state = node.checkpoint is not None and node.checkpoint.state is not None
        if node.root().is_volatile or (self._context.kind.needs_checkpoints and not has_state):
            return None
        if not self._context.kind.has_attention:
            return []
        parts = cover(node.lineage(), 0, node.n_items)
        return None if parts is None else [(n.segment, stop) for n, stop in parts if n.segment is not None]

    def _missing(
        self, root: str, segment: Segment, n_items: int, is_kept: Callable[[str], bool]
    ) -> Iterator[Job | None]:
        """The objects to write so that the first items of a segment are kept. A joined segment is written as the pieces
        it was joined from, so that nothing is written twice."""
        pieces = list(segment.pieces)
        starts = [segment.n_start, *(piece.n_start for piece in pieces[1:])]
        for i, start in enumerate(starts):
            if start < n_items and (not pieces or not is_kept(pieces[i].name)):
                stop = starts[i + 1] if i + 1 < len(starts) else segment.n_stop
                job = self._kv_job(root, segment, start, stop)
                if job is not None:
                    piece = SegmentPiece(start, stop, name_of(job.header), file_size(job.header, job.parts))
                    pieces[i : i + 1] = [piece]
                yield job
        segment.pieces = tuple(pieces)

    def _kv_job(self, root: str, segment: Segment, n_start: int, n_stop: int) -> Job | None:
        """None: the lineage to the segment's end is not known any more."""
        path = segment.path
        if path is None:
            return None
        named = keys(root, path, (n_start, n_stop))
        header = ObjectHeader(
            kind="kv",
            fingerprint=self._fingerprint(),
            start=named[n_start],
            key=named[n_stop],
            n_start=n_start,
            n_items=n_stop,
            clean=segment.clean,
            chunks=None if segment.chunks is None else history_over(segment.chunks, n_stop),
            media=path.rows(n_start, n_stop),
            space=short_key(root),
        )
        return Job(header, {"items": _bytes(path, n_start, n_stop), "kv": self._part(segment, path, n_start, n_stop)})

    def _part(self, segment: Segment, path: Prompt, n_start: int, n_stop: int) -> ObjectPart:
        if (n_start, n_stop) == (segment.n_start, segment.n_stop):
            return segment.blob
        context = self._context
        whole = segment.blob
        marks = (path.mark(n_start), path.mark(n_stop))
        return KvCut(whole, context.cut_bytes(whole, *marks), lambda: context.cut_segment(whole, *marks))

    def _state_job(self, root: str, node: Node, used: Mapping[str, int]) -> Job:
        n = node.n_items
        checkpoint = node.checkpoint
        key = keys(root, node.path, (n,))[n]
        header = ObjectHeader(
            kind="state",
            fingerprint=self._fingerprint(),
            start=key,
            key=key,
            n_start=n,
            n_items=n,
            cut="" if checkpoint is None else checkpoint.kind.value,
            clean=checkpoint is not None and checkpoint.clean,
            chunks=None if checkpoint is None else checkpoint.chunks,
            needs=tuple(used),
            reaches=tuple(used.values()),
            media=node.path.rows(0, n),
            words=self._words(node.path.first(n)),
            space=short_key(root),
        )
        parts: dict[str, ObjectPart] = {"items": _bytes(node.path, 0, n)}
        if checkpoint is not None and checkpoint.state is not None:
            parts["state"] = checkpoint.state
        return Job(header, parts)

    def parcel(self, node: Node, is_kept: Callable[[str], bool], *, is_hinted: bool) -> Parcel | None:
        """A point for other servers, with the names that they look for. ``is_hinted``: it lies at a boundary that they
        know; else its names are those of a grid. None: it is kept already, or not all of it is here."""
        root = self.root(node)
        n = node.n_items
        cells = {} if is_hinted else grid_points(n)
        named = keys(root, node.path, {n, *cells.values()})
        if is_kept(Pointer(named[n], n, 1).name):
            return None
        jobs = self.jobs(node, is_kept)
        if jobs is None:
            return None
        state = jobs[-1]
        sizes = {piece.name: piece.size for segment, _ in self._segments(node) or () for piece in segment.pieces}
        uses = zip(state.header.needs, state.header.reaches, strict=True)
        needs = [Need(name, sizes[name] + MAC_BYTES, reach) for name, reach in uses]
        pointer = Pointer(named[n], n, file_size(state.header, state.parts) + MAC_BYTES, tuple(needs))
        names = names_at(named[n], {grid: named[at] for grid, at in cells.items()})
        return Parcel(tuple((job.header, job.parts) for job in jobs), pointer, tuple(names))


def _bytes(path: Prompt, start: int, stop: int) -> Blob:
    return np.ascontiguousarray(path.codes[start:stop], "<i4").view(np.uint8)
