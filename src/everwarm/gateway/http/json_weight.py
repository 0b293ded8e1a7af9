"""The cost of parsing a JSON text, estimated before it is parsed. Pure.

A parser creates an object for every value and blocks all other threads meanwhile, so its input must be bounded: 31 MB
of ``{}`` are ten million objects, 0.9 GB and three seconds. The weight of a text is the approximate time to parse it, in
units of two nanoseconds: 1 for a byte of text, a sixth for a byte of base64 (images), 8 for a value, 24 for a key, 32
for an object or array. An upper bound, which also counts these characters inside strings, is computed first. Only if it
exceeds the limit does ``json_scan`` count exactly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_WEIGHT = 8 << 20
MAX_DIGITS = 64  # of one number; the time to parse a longer one grows with the square of its length

_STRIDE = 16  # the quick check for long numbers looks at every 16th byte
_VERY_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (2 * MAX_DIGITS // _STRIDE))

Data = bytes | bytearray


@dataclass(frozen=True, slots=True)
class Weight:
    """What a JSON text contains, and what parsing it costs."""

    n_text_bytes: int = 0
    n_base64_bytes: int = 0
    n_containers: int = 0  # objects and arrays
    n_keys: int = 0
    n_commas: int = 0

    @property
    def total(self) -> int:
        text = self.n_text_bytes + self.n_base64_bytes // 6
        return text + 32 * self.n_containers + 24 * self.n_keys + 8 * self.n_commas

    def __add__(self, other: Weight) -> Weight:
        return Weight(
            self.n_text_bytes + other.n_text_bytes,
            self.n_base64_bytes + other.n_base64_bytes,
            self.n_containers + other.n_containers,
            self.n_keys + other.n_keys,
            self.n_commas + other.n_commas,
        )


def most_weight(data: Data) -> Weight:
    """An upper bound of the text's weight: every byte counts as text, and every bracket as outside of strings."""
    return Weight(len(data), 0, data.count(b"{") + data.count(b"["), data.count(b":"), data.count(b","))


def is_surely_light(data: Data) -> bool:
    """Whether the upper bound already shows that the text is light enough."""
    if len(data) > MAX_WEIGHT or most_weight(data).total > MAX_WEIGHT:
        return False
    return _VERY_LONG_NUMBER.search(data[::_STRIDE]) is None
