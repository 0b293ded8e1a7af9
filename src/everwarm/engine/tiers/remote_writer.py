"""From the tree to the remote store: decides what is worth uploading for other servers.

Those are the point that the next turn of a conversation continues from, and the shared points above it. Other servers
can prefill everything else from there.
"""

from __future__ import annotations

from everwarm.engine.cache.provenance import is_worth_it, shared_points
from everwarm.engine.speed import Speed
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.engine.tiers.packing import Job, Packing
from everwarm.llama.model import MemoryKind
from everwarm.state.lineage import keys
from everwarm.state.remote.pointer import MAC_BYTES, Need, Parcel, Pointer, grid_points, names_at
from everwarm.state.store.object import ObjectHeader, ObjectPart, file_size
from everwarm.state.tree import Node


class RemoteWriter:
    def __init__(self, tiers: LowerTiers, packing: Packing, kind: MemoryKind, speed: Speed, *, is_always: bool) -> None:
        """``is_always``: also points that others prefill as fast as they fetch them."""
        self._tiers = tiers
        self._packing = packing
        self._kind = kind
        self._speed = speed
        self._is_always = is_always

    def offer(self, node: Node, *, is_hinted: bool) -> None:
        """Offers the point that the next turn will continue from, after a turn has ended. ``is_hinted``: at one of its
        own boundaries."""
        if not self._tiers.remote.is_on:
            return
        for point in self._points(node):
            parcel = self._parcel(point, is_hinted=is_hinted or point is not node)
            if parcel is not None:
                self._tiers.remote.offer(parcel)

    def _points(self, node: Node) -> list[Node]:
        found = (*shared_points(self._kind, node), node)
        seconds = self._speed.seconds_per_token
        return [n for n in found if is_worth_it(n, seconds, is_always=self._is_always)]

    def _parcel(self, node: Node, *, is_hinted: bool) -> Parcel | None:
        """None: it is in the store already, or not all of it is here."""
        root = self._packing.root(node)
        n = node.n_items
        cells = {} if is_hinted else grid_points(n)
        named = keys(root, node.path, {n, *cells.values()})
        if self._tiers.remote.has(Pointer(named[n], n, 1).name):
            return None
        segments = self._packing.segments(node)
        if segments is None:
            return None
        kv = self._packing.kv(root, segments, self._tiers.remote.has)
        if kv is None:
            return None
        state = self._packing.state_job(root, node, kv)
        needs = [Need(use.piece.name, use.piece.size + MAC_BYTES, use.reach) for use in kv.uses]
        pointer = Pointer(named[n], n, file_size(state.header, state.parts) + MAC_BYTES, tuple(needs))
        names = names_at(named[n], {grid: named[at] for grid, at in cells.items()})
        return Parcel(tuple(_object(job) for job in (*kv.jobs, state)), pointer, tuple(names))


def _object(job: Job) -> tuple[ObjectHeader, dict[str, ObjectPart]]:
    return job.header, job.parts
