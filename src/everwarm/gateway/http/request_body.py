"""Bodies of requests: read within a budget of bytes and of time, weighed, and only then parsed.

A small body is parsed where it was read. What is large is weighed and parsed on one of two threads of their own, so that
many large ones do not crowd out the event loop, nor each other's small neighbours. Knows no dialect.

A parser makes an object of everything it reads and runs nothing else meanwhile, so its input must be bounded: 31 MB
of ``{}`` are ten million objects, 0.9 GB and three seconds. The weight of a text is about what parsing it takes, in
units of two nanoseconds: 1 for a byte of text, a sixth for a byte of base64 (images), 8 for a value, 24 for a key, 32
for an object or array. Where counting all such characters, also those in strings, gives no more than is allowed, that
is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from everwarm.errors import BadRequest, BodyTooSlow, Overloaded

T = TypeVar("T")

SMALL_BYTES = 64 << 10  # can hold nothing that takes long
LARGE_BYTES = 256 << 10  # is worked on beside the event loop
_PIECE_BYTES = 1 << 20
FIRST_S, BYTES_PER_S = 30.0, 128 << 10  # a body has so long, and for every so many bytes that have come a second more


class ReceivedBody(NamedTuple, Generic[T]):
    """A body, and how many bytes it was."""

    body: T
    n_bytes: int


class BodyReader:
    """``budget_bytes`` of bodies may be read and parsed at a time; a client, told by its address, may have half of it."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._n_bytes: Counter[str] = Counter()  # by client
        self._threads = ThreadPoolExecutor(2, "everwarm-bodies")

    @property
    def n_bytes(self) -> int:
        """Being read or parsed just now."""
        return self._n_bytes.total()

    async def read(self, request: Request, parse: Callable[[bytes | bytearray], T]) -> ReceivedBody[T]:
        """``Overloaded`` before or while it is read if there is no room, 408 if it comes too slowly."""
        client = request.client.host if request.client else ""
        with self._counted(client) as count:
            pieces = await self._all(request, count)
            n_bytes = request.state.n_body_bytes = sum(map(len, pieces))
            if n_bytes <= SMALL_BYTES or (n_bytes <= LARGE_BYTES and is_surely_light(pieces[0])):
                return ReceivedBody(parse(pieces[0]), n_bytes)
            return ReceivedBody(await self.beside(partial(_weighed, parse, pieces)), n_bytes)

    async def beside(self, work: Callable[[], T]) -> T:
        """On one of the threads for what is large."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def for_request(self, request: Request, work: Callable[[], T]) -> T:
        """Work on a request's body, on a thread: that on large ones does not keep the others' waiting."""
        return await (self.beside(work) if is_large(request) else asyncio.to_thread(work))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def _counted(self, client: str) -> Iterator[Callable[[int, int], None]]:
        """A function that takes room for so many more bytes, if so many after them can be hoped for, too."""
        n_own = 0

        def count(n_more: int, n_following: int) -> None:
            nonlocal n_own
            self._check(client, n_more + n_following)
            n_own += n_more
            self._n_bytes[client] += n_more

        try:
            yield count
        finally:
            self._n_bytes[client] -= n_own
            if not self._n_bytes[client]:
                del self._n_bytes[client]

    def _check(self, client: str, n_more: int) -> None:
        own, total = self._n_bytes[client] + n_more, self.n_bytes + n_more
        if total > self._budget_bytes:
            raise Overloaded(f"bodies of {self.n_bytes:,} bytes are being read already; try again later")
        if own > self._budget_bytes // 2:
            raise Overloaded(f"bodies of {own - n_more:,} bytes from {client} are being read already; try again later")

    async def _all(self, request: Request, count: Callable[[int, int], None]) -> list[bytearray]:
        """The body in pieces, each but the last of ``_PIECE_BYTES`` or more: a large buffer that grows is copied over and
        over."""
        length = request.headers.get("content-length", "0")
        n_announced = int(length) if length.isascii() and length.isdigit() else 0
        pieces, n_bytes, began = [bytearray()], 0, asyncio.get_running_loop().time()
        count(0, n_announced)
        try:
            async with asyncio.timeout(FIRST_S) as patience:
                async for data in request.stream():
                    n_bytes += len(data)
                    count(len(data), max(0, n_announced - n_bytes))
                    if len(pieces[-1]) >= _PIECE_BYTES:
                        pieces.append(bytearray())
                    pieces[-1] += data
                    patience.reschedule(began + FIRST_S + n_bytes / BYTES_PER_S)
        except TimeoutError:
            took_s = asyncio.get_running_loop().time() - began
            raise BodyTooSlow(
                f"{n_bytes:,} bytes of the body came in {took_s:.0f} s; send it faster, or less"
            ) from None
        return pieces


def is_large(request: Request) -> bool:
    """Whether the request's body was large."""
    return bool(getattr(request.state, "n_body_bytes", 0) > LARGE_BYTES)


def _weighed(parse: Callable[[bytes | bytearray], T], pieces: list[bytearray]) -> T:
    data = b"".join(pieces)
    pieces.clear()
    check_weight(data)
    time.sleep(0)  # others run before the parser, which lets nobody
    return parse(data)


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
