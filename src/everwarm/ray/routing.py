"""A request router for Ray Serve that chooses replicas by their cached prefixes, with ``router.replica_score``.

Replicas publish their keys every second or so, and how much they have not read yet; what this router has sent, and what of
that has ended, is known at once. Waiting times come from both and from Serve's own count of running requests. Several
ingresses each have a router; they learn of each other through what replicas publish.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from everwarm.ray import replica_messages
from everwarm.ray.ray_api import RequestRouter
from everwarm.ray.replica_messages import ProxiedRequest, unpacked
from everwarm.router.replica_score import Holdings, ReadingQueue, ReplicaLoad, choose

TRUSTED_S = 30.0  # what was sent somewhere counts as held there for so long, published or not
MAX_PLACED = 4096
UNMEASURED = {"seconds_per_byte": 1e-4, "reply_s": 1.0}  # until any replica has served a request


@dataclass(slots=True)
class ReplicaPrefixes:
    """What a router knows of a replica: what it published last, and what was sent there since."""

    stats: dict[str, Any] = field(default_factory=dict)
    reading: ReadingQueue = field(default_factory=ReadingQueue)
    placed: deque[tuple[float, tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=MAX_PLACED))

    def recent(self, now: float) -> set[int]:
        while self.placed and self.placed[0][0] < now - TRUSTED_S:
            self.placed.popleft()
        return {key for _, keys in self.placed for key in keys}


class WarmRouter(RequestRouter):  # type: ignore[misc]
    # Serve asks a replica that it has not used for a while how long its queue is, and takes another one if the answer is
    # late. Its own 0.1 s would send a conversation away from its cache for a moment's load; a dead replica answers at once.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, stats_every_s: float = 1.0, **_kwargs: Any) -> None:
        self._stats_every_s = stats_every_s
        self._holdings = Holdings()
        self._seen: dict[str, ReplicaPrefixes] = {}
        replica_messages.ROUTERS[self._deployment_id.name] = self

    @property
    def names(self) -> list[str]:
        return [name_of(replica.replica_id) for replica in self.curr_replicas.values()]

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        now = time.monotonic()
        names = set()
        for replica in replicas:
            name = name_of(replica.replica_id)
            names.add(name)
            seen = self._seen.setdefault(name, ReplicaPrefixes())
            stats = replica.routing_stats or {}
            if stats != seen.stats:
                seen.stats = stats
                read_s = stats.get("unread_bytes", 0) * self._measured(stats, "seconds_per_byte")
                seen.reading.publish(now, read_s, self._stats_every_s)
                self._holdings.replace(name, {*unpacked(stats.get("keys", b"")), *seen.recent(now)})
        for name in self._seen.keys() - names:
            del self._seen[name]
            self._holdings.drop(name)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        request = None if pending_request is None or not pending_request.args else pending_request.args[0]
        if not candidate_replicas or not isinstance(request, ProxiedRequest):
            return [candidate_replicas]
        names = [name_of(replica.replica_id) for replica in candidate_replicas]
        if request.replica in names:
            return [[candidate_replicas[names.index(request.replica)]]]
        prefixes = request.prefixes
        if prefixes.bound is not None:
            holders = self._holdings.holders(prefixes.bound)
            bound = [r for r, name in zip(candidate_replicas, names, strict=True) if name in holders]
            if bound:
                return [bound]
        reusable = self._holdings.reach(prefixes.keys, prefixes.ends, names)
        loads = [self._load(replica, name) for replica, name in zip(candidate_replicas, names, strict=True)]
        best = candidate_replicas[choose(reusable, prefixes.n_bytes, loads, (random.random(), random.random()))]
        return [[best], [replica for replica in candidate_replicas if replica is not best]]

    def on_request_routed(self, pending_request: Any, replica_id: Any, _result: Any) -> None:
        """Note the prefixes of the request: the replica will have them cached for the next requests."""
        request = pending_request.args[0] if pending_request.args else None
        name = name_of(replica_id)
        seen = self._seen.get(name)
        if seen is None or not isinstance(request, ProxiedRequest) or not request.prefixes.keys:
            return
        now = time.monotonic()
        prefixes = request.prefixes
        (n_reusable,) = self._holdings.reach(prefixes.keys, prefixes.ends, [name])
        read_s = (prefixes.n_bytes - n_reusable) * self._measured(seen.stats, "seconds_per_byte")
        seen.reading.send(now, request.request_id, read_s)
        self.note(name, prefixes.keys)

    def end(self, request_id: str) -> None:
        """A request of this router has its answer, or never will."""
        for seen in self._seen.values():
            seen.reading.end(request_id)

    def note(self, name: str, keys: tuple[int, ...]) -> None:
        seen = self._seen.get(name)
        if seen is not None:
            seen.placed.append((time.monotonic(), keys))
            self._holdings.add(name, keys)

    def _load(self, replica: Any, name: str) -> ReplicaLoad:
        seen = self._seen.get(name) or ReplicaPrefixes()
        stats = seen.stats
        n_running = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return ReplicaLoad(
            busy_s=seen.reading.busy_s(time.monotonic()),
            n_running=n_running,
            n_slots=max(1, int(stats.get("n_slots", 1))),
            seconds_per_byte=self._measured(stats, "seconds_per_byte"),
            reply_s=self._measured(stats, "reply_s"),
        )

    def _measured(self, stats: dict[str, Any], what: str) -> float:
        """By the replica itself; one that has just started is taken to be as fast as the others."""
        if what in stats:
            return float(stats[what])
        others = [float(seen.stats[what]) for seen in self._seen.values() if what in seen.stats]
        return median(others) if others else UNMEASURED[what]


def name_of(replica_id: Any) -> str:
    return str(replica_id.unique_id)
