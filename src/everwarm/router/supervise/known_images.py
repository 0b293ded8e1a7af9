"""Which pictures an engine probably knows, so that their pixels need not travel with every turn."""

from __future__ import annotations

from collections.abc import Sequence

from everwarm.engine.process import messages as m
from everwarm.lru import NamespacedLru

MAX_SEEN = 4096


class Seen:
    def __init__(self) -> None:
        self._digests: NamespacedLru[bool] = NamespacedLru(MAX_SEEN)

    def knows(self, namespace: str, pictures: Sequence[m.Picture]) -> bool:
        """Whether it has seen all of them, in this namespace: what it knows of others it will not use."""
        return all(self._digests.get(namespace, picture.digest) for picture in pictures)

    def add(self, namespace: str, pictures: Sequence[m.Picture]) -> None:
        for picture in pictures:
            self._digests.put(namespace, picture.digest, True, 1)
