"""A point of the tree as objects: the state there, and the KV that leads to it. Where they go others know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from everwarm.engine.keeper import Keeper
from everwarm.engine.reading import cover
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key
from everwarm.state.object import Header, name_of
from everwarm.state.tree import Node, Segment
from everwarm.types import Blob

Segments = list[tuple[Segment, Node]]  # each with the last node of the lineage that uses it


@dataclass(frozen=True, slots=True)
class Job:
    """One object to write, with its parts as they are in RAM: nobody changes them."""

    header: Header
    parts: dict[str, Blob]

    @property
    def size(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


class Packing:
    def __init__(self, keeper: Keeper, words: Callable[[Prompt], str]) -> None:
        self._keeper = keeper
        self._words = words
        self.fingerprint = ""

    def root(self, node: Node) -> str:
        return root_key(self.fingerprint, self._keeper.tree.namespace(node))

    def segments(self, node: Node) -> Segments | None:
        """All KV that the point needs; None: some of it is not in RAM."""
        if not self._keeper.context.kind.has_attention:
            return []
        parts = cover(node.lineage(), 0, node.n_items)
        return None if parts is None else [(n.segment, n) for n, _ in parts if n.segment is not None]

    def kv_job(self, root: str, segment: Segment, path: Prompt) -> Job | None:
        """None: the way to the segment's end is not known any more."""
        n_start, n_stop = segment.n_start, segment.n_stop
        if n_stop > len(path):
            return None
        named = keys(root, path, (n_start, n_stop))
        header = Header(
            kind="kv",
            fingerprint=self.fingerprint,
            start=named[n_start],
            key=named[n_stop],
            n_start=n_start,
            n_items=n_stop,
            clean=segment.clean,
            chunks=segment.chunks,
            media=path.rows(n_start, n_stop),
            space=root[:16],
        )
        segment.name = name_of(header)
        return Job(header, {"items": _bytes(path, n_start, n_stop), "kv": segment.blob})

    def state_job(self, root: str, node: Node, segments: Segments) -> Job:
        """The segments have their names by now."""
        n, checkpoint = node.n_items, node.checkpoint
        key = keys(root, node.path, (n,))[n]
        needs = {segment.name or "": last.n_items for segment, last in segments}
        header = Header(
            kind="state",
            fingerprint=self.fingerprint,
            start=key,
            key=key,
            n_start=n,
            n_items=n,
            cut="" if checkpoint is None else checkpoint.kind.value,
            clean=checkpoint is not None and checkpoint.clean,
            chunks=None if checkpoint is None else checkpoint.chunks,
            needs=tuple(needs),
            reaches=tuple(needs.values()),
            media=node.path.rows(0, n),
            words=self._words(node.path.first(n)),
            space=root[:16],
        )
        parts = {"items": _bytes(node.path, 0, n)}
        if checkpoint is not None and checkpoint.state is not None:
            parts["state"] = checkpoint.state
        return Job(header, parts)


def _bytes(path: Prompt, start: int, stop: int) -> Blob:
    return np.ascontiguousarray(path.codes[start:stop], "<i4").view(np.uint8)
