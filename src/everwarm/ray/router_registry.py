"""The routers of this process, by deployment: asking every replica takes their names.

A module of its own, because Serve copies a router's class together with everything in its module.
"""

from __future__ import annotations

from typing import Protocol


class Router(Protocol):
    @property
    def names(self) -> list[str]: ...
    def note(self, name: str, keys: tuple[int, ...]) -> None: ...
    def end(self, request_id: str) -> None: ...


ROUTERS: dict[str, Router] = {}


def replicas_of(deployment: str) -> list[str]:
    router = ROUTERS.get(deployment)
    return [] if router is None else router.names


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
