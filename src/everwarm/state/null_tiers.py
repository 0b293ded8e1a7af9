"""Tiers that are switched off or not open: they find nothing and keep nothing, so that callers need not ask."""

# ruff: noqa: ARG002 (they take what a real tier takes)

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import Point
from everwarm.state.store.disk import Disk, DiskCounts, Pin
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import Damaged, ObjectHeader, ObjectPart, ObjectReader
from everwarm.state.tier import Dropped, OpenObject, Selection

if TYPE_CHECKING:  # without a remote store none of its modules is loaded
    from everwarm.state.remote.pointer import Parcel, Pointer
    from everwarm.state.remote.remote_tier import RemoteTier


class NullPins:
    """Nothing is pinned, and nothing can be."""

    marked: frozenset[Point] = frozenset()

    def all(self) -> tuple[Pin, ...]:
        return ()


class NullDisk:
    """The disk tier while there is none: it is switched off, not open yet, or cannot be opened."""

    is_on = False
    degraded: str | None = None
    version = n_bytes = 0

    def __init__(self) -> None:
        self.counts = DiskCounts()
        self.pins = NullPins()

    def names(self) -> frozenset[str]:
        return frozenset()

    def objects(self) -> list[IndexedObject]:
        return []

    def has(self, name: str) -> bool:
        return False

    def size_of(self, names: Sequence[str]) -> int:
        return 0

    def n_lengths(self) -> int:
        return 0

    def find(self, root: str, prompt: Prompt, most: int) -> IndexedObject | None:
        return None

    def newest_texts(self, space: str, n_most: int) -> list[NDArray[np.int32]]:
        return []

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[ObjectReader]:
        raise Damaged("there is no disk tier")
        yield

    def put(self, header: ObjectHeader, parts: Mapping[str, ObjectPart]) -> bool:
        return False

    def touch(self, names: Sequence[str]) -> None:
        pass

    def pin(self, pin: Pin) -> None:
        pass

    def unpin(self, keys: Collection[str]) -> None:
        pass

    def forget(self, what: Selection) -> Dropped:
        return Dropped()

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class NullRemote:
    """The remote tier while there is none."""

    is_on = False
    wait_s = 0.0

    def find(self, root: str, prompt: Prompt, ends: Iterable[int], *, least: int, most: int) -> Pointer | None:
        return None

    def note_declined(self) -> None:
        pass

    def answers_within(self, seconds: float) -> bool:
        return False

    @contextlib.contextmanager
    def fetching(
        self, pointer: Pointer, n_kv: int, patience_s: float, nearer: OpenObject, names: frozenset[str]
    ) -> Iterator[OpenObject]:
        raise Damaged("there is no remote store")
        yield

    def has(self, name: str) -> bool:
        return False

    def offer(self, parcel: Parcel) -> bool:
        return False

    def forget(self, what: Selection) -> Dropped:
        return Dropped()

    def stats(self) -> dict[str, float]:
        return {}

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        pass


DiskTier: TypeAlias = Disk | NullDisk
SharedTier: TypeAlias = "RemoteTier | NullRemote"
