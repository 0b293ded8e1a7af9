"""Names of namespaces: which of them hold what came from a file of unknown origin. Pure.

What such a file brought, and everything that is decoded on top of it, lives below a root of its own in the prefix tree.
No other conversation finds it, and all code that stores states checks the root first, so nothing derived from such a
file can leave RAM.
"""

from __future__ import annotations

SHORT_NAMESPACE = 12  # characters that are shown of a namespace's name

_UNVERIFIED = "\0unverified\0"  # in no name that a client could have


def unverified(namespace: str, digest: str) -> str:
    """The namespace of conversations that continue a file of unknown origin."""
    return f"{owner_of(namespace)}{_UNVERIFIED}{digest}"


def is_unverified(namespace: str) -> bool:
    return _UNVERIFIED in namespace


def owner_of(namespace: str) -> str:
    """The namespace of the client's request."""
    return namespace.partition(_UNVERIFIED)[0]
