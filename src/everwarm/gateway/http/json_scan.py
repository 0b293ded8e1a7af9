"""Exact weights of JSON texts, counted slice by slice with numpy. Pure.

For texts that the estimate of ``json_weight`` cannot accept. Other threads run between two slices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from everwarm.errors import BadRequest
from everwarm.gateway.http.json_weight import MAX_DIGITS, MAX_WEIGHT, Data, Weight, is_surely_light

MAX_DEPTH = 256
SLICE_BYTES = 64 << 10  # counted at once

_BLOCK_BYTES = 4096  # classified as a whole, as base64 or text
_QUOTE, _BACKSLASH, _SPACE = b'"\\ '
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_BASE64 = np.zeros(256, np.bool_)
_BASE64[np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_", np.uint8)] = True
_STEPS = np.zeros(256, np.int8)  # of depth
_STEPS[list(b"{[")] = 1
_STEPS[list(b"}]")] = -1

Bytes = NDArray[np.uint8]


def check_weight(data: Data) -> None:
    """Raises ``BadRequest`` as soon as the text exceeds ``MAX_WEIGHT``. Works in slices; call it on a thread, not on the
    event loop. The nesting depth of a light text is left to its parser."""
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
                f"{weight.n_text_bytes:,} bytes that are no image, and weigh {weight.total:,}; at most {MAX_WEIGHT:,} may"
            )


def weights(data: Data) -> Iterator[Weight]:
    """The weight of each slice of a text. Inside strings, everything counts as text. ``BadRequest`` if something is nested
    too deeply, or a number is too long."""
    inside, escaped, depth = False, False, 0
    whole = np.frombuffer(data, np.uint8)
    for at in range(0, len(whole), SLICE_BYTES):
        part = whole[at : at + SLICE_BYTES]
        n_base64 = _n_base64(part)
        if n_base64 == len(part) and inside and not escaped:  # the midst of an image
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
        containers = n[ord("{")] + n[ord("[")]
        keys = n[ord(":")]
        commas = n[ord(",")]
        yield Weight(len(part) - n_base64, n_base64, int(containers), int(keys), int(commas))


def _n_base64(part: Bytes) -> int:
    """Bytes in blocks that are entirely base64."""
    plain = _BASE64[part]
    n_whole = len(part) // _BLOCK_BYTES * _BLOCK_BYTES
    n = int(plain[:n_whole].reshape(-1, _BLOCK_BYTES).all(axis=1).sum()) * _BLOCK_BYTES
    return n + (len(part) - n_whole if plain[n_whole:].all() else 0)


def _quotes(part: Bytes, escaped: bool) -> tuple[NDArray[np.bool_], bool]:
    """Where strings begin and end, and whether the next part begins escaped; ``escaped``: whether this one does."""
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
    """The nesting depth after this part."""
    steps = _STEPS[outside]
    brackets = np.flatnonzero(steps)
    if not len(brackets):
        return depth
    depths = depth + np.cumsum(steps[brackets], dtype=np.int64)
    if depths.max() > MAX_DEPTH:
        raise BadRequest(f"the body is nested too deeply; give at most {MAX_DEPTH} levels")
    return int(depths[-1])
