"""Prefixes that were evicted from the tree: enough to report it in diagnostics, nothing to restore.

Items only, no bytes, a bounded number of them; the oldest are forgotten first. Pure: knows no tree.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from everwarm.prompt.prompt import Prompt

MAX_LINEAGES = 64
MAX_ITEMS = 1 << 20  # four bytes each


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a prompt differs from what is known: after ``at`` items; ``known`` has at least one more, or ends there."""

    at: int
    known: Prompt


class Ghosts:
    def __init__(self) -> None:
        self._lineages: OrderedDict[tuple[str, bytes], Prompt] = OrderedDict()
        self._n_items = 0

    def __len__(self) -> int:
        return len(self._lineages)

    def note(self, namespace: str, path: Prompt, n_items: int) -> None:
        """Records that the first ``n_items`` of a path were evicted. Copies them: a path may be part of a large
        array."""
        n = min(n_items, MAX_ITEMS)
        items = path.first(n)
        key = (namespace, items.codes[-64:].tobytes() + n.to_bytes(8, "little"))
        self._drop(key)
        self._lineages[key] = Prompt(np.array(items.codes, np.int32), items.media)
        self._n_items += n
        while len(self._lineages) > MAX_LINEAGES or self._n_items > MAX_ITEMS:
            self._drop(next(iter(self._lineages)))

    def clear(self, namespace: str) -> None:
        """Forgets everything in namespaces with this prefix."""
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
