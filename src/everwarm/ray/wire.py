"""What goes between the ingress and a replica: one HTTP request, and the parts of its answer.

Plain values of Python's own types, because Ray carries them.
"""

from __future__ import annotations

from dataclasses import dataclass

from everwarm.gateway.prefixes import NOTHING, Prefixes

Headers = list[tuple[bytes, bytes]]

REPLICA_HEADER = b"x-everwarm-replica"
BYTES_PER_TOKEN = 4  # of JSON text, roughly: only for guesses


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a client sent it. ``replica``: only that one may answer; empty: whoever is best."""

    request_id: str
    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    prefixes: Prefixes = NOTHING
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """The first part of an answer; bytes of its body follow."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
