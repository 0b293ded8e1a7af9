"""A tier: a place beyond the tree that keeps objects, on disk or in the remote store.

Callers may use a tier without asking whether there is one. A tier that is switched off, or that is not open yet, is a
null tier, with ``is_on`` False: it finds nothing, keeps nothing, and has nothing to forget. Asking ``is_on`` only saves
work. One of three values says what is to be forgotten, so every tier has one way to do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import ObjectHeader
from everwarm.types import Blob, Place, heap


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
