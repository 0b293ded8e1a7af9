"""Prefixes that were evicted from the tree: enough to report it in diagnostics, nothing to restore.

Items only, no bytes, a bounded number of them; the oldest are forgotten first. Pure: knows no tree.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from everwarm.prompt.prompt import Prompt

MAX_LINEAGES = 64
MAX_EVICTIONS = 1024  # that are remembered with their reasons
MAX_ITEMS = 1 << 20  # four bytes each


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a prompt differs from what is known: after ``at`` items; ``known`` has at least one more, or ends there."""

    at: int
    known: Prompt


@dataclass(frozen=True, slots=True)
class Eviction:
    """Why the state or the KV of a point was evicted. A worth is a ``policy.score``."""

    n_items: int
    at: float
    worth: float
    least_kept: float | None  # the worth of what would have been evicted next
    budget_bytes: int


class Ghosts:
    def __init__(self) -> None:
        self._evictions: OrderedDict[tuple[str, bytes], Eviction] = OrderedDict()
        self._lineages: OrderedDict[tuple[str, bytes], Prompt] = OrderedDict()
        self._n_items = 0

    def __len__(self) -> int:
        return len(self._lineages)

    def note(self, namespace: str, path: Prompt, n_items: int) -> None:
        """Records that the first ``n_items`` of a path were evicted. Copies them: a path may be part of a large
        array."""
        n = min(n_items, MAX_ITEMS)
        items = path.first(n)
        key = _key(namespace, path, n)
        self._drop(key)
        self._lineages[key] = Prompt(np.array(items.codes, np.int32), items.media)
        self._n_items += n
        while len(self._lineages) > MAX_LINEAGES or self._n_items > MAX_ITEMS:
            self._drop(next(iter(self._lineages)))

    def note_eviction(self, namespace: str, path: Prompt, eviction: Eviction) -> None:
        """Records why something at the end of the first items of a path was evicted."""
        key = _key(namespace, path, eviction.n_items)
        self._evictions.pop(key, None)
        self._evictions[key] = eviction
        while len(self._evictions) > MAX_EVICTIONS:
            self._evictions.popitem(last=False)

    def eviction(self, namespace: str, prompt: Prompt, beyond: int) -> Eviction | None:
        """The deepest point of a prompt after ``beyond`` items that was evicted; None: none is remembered."""
        fits = [(key, each) for key, each in self._evictions.items() if beyond < each.n_items <= len(prompt)]
        own = [each for key, each in fits if key == _key(namespace, prompt, each.n_items)]
        return max(own, key=lambda each: each.n_items, default=None)

    def clear(self, namespace: str) -> None:
        """Forgets everything in namespaces with this prefix."""
        for key in [key for key in self._evictions if key[0].startswith(namespace)]:
            del self._evictions[key]
        for key in [key for key in self._lineages if key[0].startswith(namespace)]:
            self._drop(key)

    def parting(self, namespace: str, prompt: Prompt) -> Parting | None:
        """The ghost that shares the longest prefix with a prompt; None: there is none in this namespace."""
        own = (path for (space, _), path in reversed(self._lineages.items()) if space == namespace)
        found = (Parting(int(prompt.common_prefix(path)), path) for path in own)
        return max(found, key=lambda parting: parting.at, default=None)

    def _drop(self, key: tuple[str, bytes]) -> None:
        gone = self._lineages.pop(key, None)
        self._n_items -= 0 if gone is None else len(gone)


def _key(namespace: str, path: Prompt, n_items: int) -> tuple[str, bytes]:
    """Names a point by its last items and their number: enough to tell what is reported from anything like it."""
    return namespace, path.codes[max(0, n_items - 64) : n_items].tobytes() + n_items.to_bytes(8, "little")
