"""A bounded cache whose entries belong to namespaces. No namespace finds entries of another, nor evicts all of them."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class NamespacedLru(Generic[V]):
    """Least recently used, in fair shares: evicts the oldest entry of the namespace that takes most. So a namespace keeps
    at least an equal share of what it has, however much others put in. Not thread-safe."""

    def __init__(self, max_bytes: int, max_entries: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: dict[str, OrderedDict[Hashable, tuple[V, int]]] = {}
        self._sizes: dict[str, int] = {}
        self._largest: list[tuple[int, int, str]] = []  # a heap of sizes, negative; some are out of date
        self._turn = itertools.count()
        self._n_entries = 0
        self.n_bytes = 0

    def __len__(self) -> int:
        return self._n_entries

    def get(self, namespace: str, key: Hashable) -> V | None:
        """Marks the entry as used."""
        entries = self._entries.get(namespace)
        if entries is None or key not in entries:
            return None
        entries.move_to_end(key)
        return entries[key][0]

    def namespaces(self) -> list[str]:
        return list(self._entries)

    def values(self, namespace: str) -> Iterator[V]:
        """Newest first. Marks none as used."""
        return (value for value, _ in reversed(self._entries.get(namespace, OrderedDict()).values()))

    def put(self, namespace: str, key: Hashable, value: V, n_bytes: int) -> None:
        """An entry larger than the whole cache is not kept and evicts nothing."""
        self.remove(namespace, key)
        if n_bytes > self._max_bytes:
            return
        self._entries.setdefault(namespace, OrderedDict())[key] = (value, n_bytes)
        self._n_entries += 1
        self._resize(namespace, n_bytes)
        while self.n_bytes > self._max_bytes or (self._max_entries or self._n_entries) < self._n_entries:
            largest = self._find_largest()
            self.remove(largest, next(iter(self._entries[largest])))

    def remove(self, namespace: str, key: Hashable) -> None:
        entries = self._entries.get(namespace)
        if entries is None or key not in entries:
            return
        _, n_bytes = entries.pop(key)
        self._n_entries -= 1
        if not entries:
            del self._entries[namespace]
        self._resize(namespace, -n_bytes)

    def remove_all(self, namespace: str) -> None:
        for key in list(self._entries.get(namespace, ())):
            self.remove(namespace, key)

    def clear(self) -> None:
        self._entries.clear()
        self._sizes.clear()
        self._largest.clear()
        self._n_entries = self.n_bytes = 0

    def _resize(self, namespace: str, n_more: int) -> None:
        self.n_bytes += n_more
        size = self._sizes.get(namespace, 0) + n_more
        if namespace not in self._entries:
            self._sizes.pop(namespace, None)
            return
        self._sizes[namespace] = size
        heapq.heappush(self._largest, (-size, next(self._turn), namespace))
        if len(self._largest) > 64 + 4 * len(self._sizes):
            self._largest = [(-size, next(self._turn), name) for name, size in self._sizes.items()]
            heapq.heapify(self._largest)

    def _find_largest(self) -> str:
        while True:
            size, _, namespace = self._largest[0]
            if self._sizes.get(namespace) == -size:
                return namespace
            heapq.heappop(self._largest)

    def check(self) -> None:
        """For tests: the sums are right and the bounds hold."""
        sizes = {name: sum(n for _, n in entries.values()) for name, entries in self._entries.items()}
        assert sizes == self._sizes and sum(sizes.values()) == self.n_bytes <= self._max_bytes
        assert sum(map(len, self._entries.values())) == self._n_entries <= (self._max_entries or self._n_entries)
        assert all(self._entries.values()), "a namespace without entries is remembered"
        assert not sizes or self._sizes[self._find_largest()] == max(sizes.values())
