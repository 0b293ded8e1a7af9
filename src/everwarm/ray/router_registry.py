"""The routers of this process, by deployment: whoever asks every replica needs their names.

A module of its own, because Serve copies a router's class together with everything in its module.
"""

from __future__ import annotations

from typing import Protocol


class Router(Protocol):
    @property
    def names(self) -> list[str]: ...
    def note(self, name: str, keys: tuple[int, ...]) -> None: ...


ROUTERS: dict[str, Router] = {}


def replicas_of(deployment: str) -> list[str]:
    router = ROUTERS.get(deployment)
    return [] if router is None else router.names


def note(deployment: str, replica: str, key: int) -> None:
    """A replica has something now; sooner than it can publish it."""
    router = ROUTERS.get(deployment)
    if router is not None:
        router.note(replica, (key,))
