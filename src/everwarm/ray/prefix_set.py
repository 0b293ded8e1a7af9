"""The prefixes that a replica has cached, as keys that it publishes to routers: the last used ones. Pure: knows no Ray."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PrefixSet:
    def __init__(self, max_keys: int) -> None:
        self._max = max_keys
        self._keys: OrderedDict[int, None] = OrderedDict()
        self._packed: bytes | None = b""

    def __len__(self) -> int:
        return len(self._keys)

    def use(self, keys: Iterable[int]) -> None:
        """Add the prefixes of a request that goes to this replica; its longest ones are forgotten last."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._max:
            self._keys.popitem(last=False)
        self._packed = None

    def n_new(self, keys: Sequence[int], ends: Sequence[int]) -> int:
        """How many bytes of a request were not read here before."""
        known = (end for key, end in zip(keys, ends, strict=True) if key in self._keys)
        return (ends[-1] if ends else 0) - max(known, default=0)

    def packed(self) -> bytes:
        """Eight bytes per key, the least recently used first."""
        if self._packed is None:
            self._packed = struct.pack(f"<{len(self._keys)}Q", *self._keys)
        return self._packed


def unpacked(data: bytes) -> tuple[int, ...]:
    """The keys in ``packed``; none if the data is no whole number of keys."""
    return struct.unpack(f"<{len(data) // 8}Q", data) if len(data) % 8 == 0 else ()
