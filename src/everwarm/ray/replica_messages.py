"""What the ingress, its routers, the autoscaler and the replicas tell each other. Knows no Ray.

Between processes they send one HTTP request, the parts of its answer, the keys of the prefixes that a replica has cached,
and how much waits there, which decides how many replicas there should be. All are plain values of built-in types, because
Ray serializes them. Within the process of an ingress, this module passes questions and news to its routers. They register
here and not in their own module, because Serve copies a router's class together with everything in its module.
"""

from __future__ import annotations

import math
import re
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everwarm.gateway.chat.prefix_keys import NOTHING, Prefixes, response_key

RESPONSES = "/v1/responses"
_RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[0-9A-Za-z_-]{1,128})"')
REPLICA_HEADER = b"x-everwarm-replica"
BYTES_PER_TOKEN = 4  # of JSON text, roughly: only for guesses
METRIC = "waiting_tokens"  # what a replica reports of itself


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """A request as a client sent it. ``replica``: only that one may answer; empty: any."""

    request_id: str
    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    prefixes: Prefixes = NOTHING
    replica: str = ""


@dataclass(frozen=True, slots=True)
class ProxiedHead:
    """The first part of an answer; bytes of its body follow."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


def kept_response(request: ProxiedRequest, part: bytes) -> int | None:
    """The key of a stored response, from the first bytes of an answer: only the replica that stored it can continue it."""
    found = _RESPONSE_ID.search(part, 0, 4096) if request.path == RESPONSES else None
    return None if found is None else response_key(found[1].decode())


class PrefixSet:
    """The prefixes that a replica has cached, as keys that it publishes to routers: the last used ones."""

    def __init__(self, max_keys: int) -> None:
        self._max = max_keys
        self._keys: OrderedDict[int, None] = OrderedDict()
        self._packed: bytes | None = b""

    def __len__(self) -> int:
        return len(self._keys)

    def use(self, keys: Iterable[int]) -> None:
        """Add the prefixes of a request that goes to this replica; its longest ones are forgotten last."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._max:
            self._keys.popitem(last=False)
        self._packed = None

    def n_new(self, keys: Sequence[int], ends: Sequence[int]) -> int:
        """How many bytes of a request were not read here before."""
        known = (end for key, end in zip(keys, ends, strict=True) if key in self._keys)
        return (ends[-1] if ends else 0) - max(known, default=0)

    def packed(self) -> bytes:
        """Eight bytes per key, the least recently used first."""
        if self._packed is None:
            self._packed = struct.pack(f"<{len(self._keys)}Q", *self._keys)
        return self._packed


def unpacked(data: bytes) -> tuple[int, ...]:
    """The keys in ``packed``; none if the data is no whole number of keys."""
    return struct.unpack(f"<{len(data) // 8}Q", data) if len(data) % 8 == 0 else ()


ROUTERS: dict[str, Any] = {}  # each is a WarmRouter of ``routing``, which is untyped as Ray is


def replicas_of(deployment: str) -> list[str]:
    router = ROUTERS.get(deployment)
    return [] if router is None else list(router.names)


def note(deployment: str, replica: str, key: int) -> None:
    """Tell the router that a replica has this prefix, sooner than the replica publishes it."""
    router = ROUTERS.get(deployment)
    if router is not None:
        router.note(replica, (key,))


def end(deployment: str, request_id: str) -> None:
    """Tell the router that a request has its answer, so that it no longer counts as waiting time."""
    router = ROUTERS.get(deployment)
    if router is not None:
        router.end(request_id)


def wanted(n_waiting_tokens: float, n_requests: float, tokens_per_replica: int, slots_per_replica: int) -> int:
    """Enough to read what waits, and to have a slot for every request."""
    return max(math.ceil(n_waiting_tokens / tokens_per_replica), math.ceil(n_requests / slots_per_replica))


class ByWaitingTokens:
    def __init__(self, tokens_per_replica: int, slots_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica
        self._slots_per_replica = slots_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        reported = (context.aggregated_metrics or {}).get(METRIC) or {}
        n_waiting = sum(reported.values())
        n_requests = context.total_num_requests
        return wanted(n_waiting, n_requests, self._tokens_per_replica, self._slots_per_replica), {}
