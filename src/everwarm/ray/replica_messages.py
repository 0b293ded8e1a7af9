"""The messages between the ingress and a replica: one HTTP request, and the parts of its answer.

Plain values of built-in types, because Ray serializes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everwarm.gateway.chat.prefix_keys import NOTHING, Prefixes, response_key

RESPONSES = "/v1/responses"
_RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[0-9A-Za-z_-]{1,128})"')
REPLICA_HEADER = b"x-everwarm-replica"
BYTES_PER_TOKEN = 4  # of JSON text, roughly: only for guesses


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
