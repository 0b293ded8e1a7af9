"""A tier: a place beyond the tree that keeps objects, on disk or in the remote store.

Callers may use a tier without asking whether there is one. ``DiskTier`` and ``SharedTier`` are what a tier is while it
is switched off, or not open yet: they find nothing, keep nothing, and have nothing to forget; ``store.disk.Disk`` and
``remote.remote_tier.RemoteTier`` are the real ones. Asking ``is_on`` only saves work. One of three values says what is
to be forgotten, so every tier has one way to do it.
"""

# ruff: noqa: ARG002 (a tier that is off takes what a real one takes)

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import Point, keys, point_of
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import Damaged, ObjectHeader, ObjectPart, ObjectReader
from everwarm.types import Blob, Place, heap

if TYPE_CHECKING:  # the disk tier needs nothing of the remote one
    from everwarm.state.remote.pointer import Parcel, Pointer


class PartReader(Protocol):
    """An object whose parts can be read: from a file, from the remote store, or while it waits to be written."""

    @property
    def header(self) -> ObjectHeader: ...

    def read(self, name: str, place: Place = heap) -> Blob: ...


# Opens an object by its name. ``Damaged``: it is gone, or was changed.
OpenObject = Callable[[str], AbstractContextManager[PartReader]]


@dataclass(frozen=True, slots=True)
class Dropped:
    """How many states and segments were dropped, and their bytes."""

    n_objects: int = 0
    n_bytes: int = 0

    def __add__(self, other: Dropped) -> Dropped:
        return Dropped(self.n_objects + other.n_objects, self.n_bytes + other.n_bytes)


@dataclass(frozen=True, slots=True)
class OnPrompts:
    """Every state on the lineages of these prompts after their first ``beyond`` items."""

    root: str
    prompts: tuple[Prompt, ...]
    beyond: int

    def keys(self, lengths: Iterable[int]) -> set[str]:
        """The names of the prompts' prefixes that have one of these lengths, in items."""
        known, found = set(lengths), set[str]()
        for prompt in self.prompts:
            inside = {n_items for n_items in known if self.beyond < n_items <= len(prompt)}
            found.update(keys(self.root, prompt, inside).values())
        return found


@dataclass(frozen=True, slots=True)
class InSpaces:
    """Everything in the namespaces with these names in headers; None: in all of them."""

    spaces: frozenset[str] | None

    def has(self, space: str) -> bool:
        return self.spaces is None or space in self.spaces


Selection = OnPrompts | tuple[IndexedObject, ...] | InSpaces  # a tuple: these states, as far as they are still there


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    n_items: int
    space: str
    above: tuple[Point, ...] = ()

    @property
    def points(self) -> tuple[Point, ...]:
        return (*self.above, point_of(self.key, self.n_items))


@dataclass(slots=True)
class DiskCounts:
    n_written: int = 0
    n_bytes_written: int = 0
    n_read: int = 0
    n_damaged: int = 0
    n_failures: int = 0
    n_evicted: int = 0


class DiskTier:
    """The disk tier: while there is none, as it is switched off, not open yet, or cannot be opened. ``Disk`` is one."""

    is_on = False

    def __init__(self) -> None:
        self.counts = DiskCounts()
        self.degraded: str | None = None  # why, while it is
        self.version = 0  # another one: something came or went

    @property
    def n_bytes(self) -> int:
        return 0

    def has_room(self, n_bytes: int) -> bool:
        """Whether so many bytes more fit without evicting anything."""
        return False

    @property
    def pins(self) -> tuple[Pin, ...]:
        return ()

    @property
    def pinned_points(self) -> frozenset[Point]:
        """Their states are evicted last."""
        return frozenset()

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


class SharedTier:
    """The remote tier: while there is none. ``RemoteTier`` is one."""

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
