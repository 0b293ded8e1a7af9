"""Names of namespaces: which of them hold what came from a file of unknown origin, or was read with other scales of LoRA
adapters than the engine's. Pure.

What such a file brought, and everything that is decoded on top of it, lives below a root of its own in the prefix tree.
No other conversation finds it, and all code that stores states checks the root first, so nothing derived from such a
file can leave RAM. The same holds for what is read with other scales: the fingerprint of what is stored has the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

SHORT_NAMESPACE = 12  # characters that are shown of a namespace's name

_UNVERIFIED = "\0unverified\0"  # in no name that a client could have
_ADAPTED = "\0lora\0"


def unverified(namespace: str, digest: str) -> str:
    """The namespace of conversations that continue a file of unknown origin."""
    return f"{owner_of(namespace)}{_UNVERIFIED}{digest}"


def is_unverified(namespace: str) -> bool:
    return _UNVERIFIED in namespace


def adapted(namespace: str, scales: Sequence[float]) -> str:
    """The namespace of requests with these scales of the engine's adapters."""
    return f"{namespace}{_ADAPTED}{','.join(map(repr, scales))}"


def is_adapted(namespace: str) -> bool:
    return _ADAPTED in namespace


def is_volatile(namespace: str) -> bool:
    """Whether nothing of it leaves RAM, or outlives the engine."""
    return is_unverified(namespace) or is_adapted(namespace)


def owner_of(namespace: str) -> str:
    """The namespace of the client's request."""
    return namespace.partition(_UNVERIFIED)[0].partition(_ADAPTED)[0]
