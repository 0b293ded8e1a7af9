"""The routers of this process, by deployment: whoever asks every replica needs their names.

A module of its own, because Serve copies a router's class together with everything in its module.
"""

from __future__ import annotations

from typing import Protocol


class Names(Protocol):
    @property
    def names(self) -> list[str]: ...


ROUTERS: dict[str, Names] = {}


def replicas_of(deployment: str) -> list[str]:
    router = ROUTERS.get(deployment)
    return [] if router is None else router.names
