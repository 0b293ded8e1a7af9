"""How much work it is to parse a JSON text, told before it is parsed. Pure: bytes in, numbers out.

A parser makes an object of everything it reads and lets nobody else run meanwhile, so what it is given must be bounded:
31 MB of ``{}`` are ten million objects, 0.9 GB and three seconds. A text's weight is about what parsing it takes, in units
of two nanoseconds: 1 for a byte of text, a sixth for a byte of base64 (pictures), 8 for a value, 24 for a key, 32 for an
object or array. Where counting all such characters, also those in strings, gives no more than is allowed, that is enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from everwarm.errors import BadRequest

MAX_WEIGHT = 8 << 20
MAX_DEPTH = 256
MAX_DIGITS = 64  # of one number; a longer one takes time by the square of its length
SLICE_BYTES = 64 << 10  # are looked at at once; between two slices other threads run

_BLOCK_BYTES = 4096  # is base64, or text as a whole
_QUOTE, _BACKSLASH, _SPACE = b'"\\ '
_STRIDE = 16  # a quick look at numbers sees every so many bytes
_VERY_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (2 * MAX_DIGITS // _STRIDE))
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_BASE64 = np.zeros(256, np.bool_)
_BASE64[np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_", np.uint8)] = True
_STEPS = np.zeros(256, np.int8)  # of depth
_STEPS[list(b"{[")] = 1
_STEPS[list(b"}]")] = -1

Data = bytes | bytearray
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Weight:
    """What is in a JSON text."""

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
    """No less than the text's own: all of it counts as text, and as if no bracket stood in a string."""
    return Weight(len(data), 0, data.count(b"{") + data.count(b"["), data.count(b":"), data.count(b","))


def is_surely_light(data: Data) -> bool:
    """Whether a quick look is enough to know it."""
    if len(data) > MAX_WEIGHT or most_weight(data).total > MAX_WEIGHT:
        return False
    return _VERY_LONG_NUMBER.search(data[::_STRIDE]) is None


def check_weight(data: Data) -> None:
    """Or BadRequest, as soon as it is clear. In slices, for a thread beside the event loop. How deep a light text is, its
    parser finds out."""
    if is_surely_light(data):
        return
    weight = Weight()
    for more in weights(data):
        weight += more
        if weight.total > MAX_WEIGHT:
            n_read = weight.n_text_bytes + weight.n_base64_bytes
            raise BadRequest(
                f"the body of {len(data):,} bytes is more than is parsed at once: its first {n_read:,} bytes have "
                f"{weight.n_containers:,} objects and arrays, {weight.n_keys:,} keys, {weight.n_commas:,} commas and "
                f"{weight.n_text_bytes:,} bytes that are no picture, and weigh {weight.total:,}; at most {MAX_WEIGHT:,} may"
            )


def weights(data: Data) -> Iterator[Weight]:
    """What each slice of a text weighs. What stands in strings is only text. BadRequest where something is nested too
    deeply, or a number too long."""
    inside, escaped, depth = False, False, 0
    whole = np.frombuffer(data, np.uint8)
    for at in range(0, len(whole), SLICE_BYTES):
        part = whole[at : at + SLICE_BYTES]
        n_base64 = _n_base64(part)
        if n_base64 == len(part) and inside and not escaped:  # the midst of a picture
            yield Weight(0, n_base64)
            continue
        quotes, escaped = _quotes(part, escaped)
        in_string = np.logical_xor.accumulate(quotes)
        if inside:
            np.logical_not(in_string, out=in_string)
        inside = bool(in_string[-1])
        outside = np.where(in_string, np.uint8(_SPACE), part)
        depth = _depth(outside, depth)
        if _LONG_NUMBER.search(outside.tobytes()):
            raise BadRequest(f"a number in the body has more than {MAX_DIGITS} digits")
        n = np.bincount(outside, minlength=256)
        containers, keys, commas = n[ord("{")] + n[ord("[")], n[ord(":")], n[ord(",")]
        yield Weight(len(part) - n_base64, n_base64, int(containers), int(keys), int(commas))


def _n_base64(part: Bytes) -> int:
    """Bytes of the blocks that have nothing else in them."""
    plain = _BASE64[part]
    n_whole = len(part) // _BLOCK_BYTES * _BLOCK_BYTES
    n = int(plain[:n_whole].reshape(-1, _BLOCK_BYTES).all(axis=1).sum()) * _BLOCK_BYTES
    return n + (len(part) - n_whole if plain[n_whole:].all() else 0)


def _quotes(part: Bytes, escaped: bool) -> tuple[NDArray[np.bool_], bool]:
    """Where strings begin and end, and whether the byte after this part is escaped, as the first of it may be."""
    quotes = part == _QUOTE
    slashes = np.flatnonzero(part == _BACKSLASH)
    if escaped:
        quotes[0] = False
        slashes = slashes[1:] if len(slashes) and slashes[0] == 0 else slashes
    if not len(slashes):
        return quotes, False
    begins = np.diff(slashes, prepend=-2) != 1  # a run of backslashes
    firsts = slashes[begins][np.cumsum(begins) - 1]
    escapes = slashes[(slashes - firsts) % 2 == 0] + 1
    quotes[escapes[escapes < len(part)]] = False
    return quotes, bool(escapes[-1] == len(part))


def _depth(outside: Bytes, depth: int) -> int:
    """How deep the text is after this part."""
    steps = _STEPS[outside]
    brackets = np.flatnonzero(steps)
    if not len(brackets):
        return depth
    depths = depth + np.cumsum(steps[brackets], dtype=np.int64)
    if depths.max() > MAX_DEPTH:
        raise BadRequest(f"the body is nested too deeply; give at most {MAX_DEPTH} levels")
    return int(depths[-1])
