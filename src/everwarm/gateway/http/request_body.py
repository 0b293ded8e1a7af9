"""Bodies of requests: read within a budget of bytes and of time, weighed, and only then parsed.

A small body is parsed where it was read. What is large is weighed and parsed on one of two threads of their own, so that
many large ones do not crowd out the event loop, nor each other's small neighbours. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from starlette.requests import Request

from everwarm.errors import BodyTooSlow, Overloaded
from everwarm.gateway.http.json_weight import is_surely_light

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
    if not is_surely_light(data):
        from everwarm.gateway.http.json_scan import check_weight  # loads numpy, which few servers ever need

        check_weight(data)
    time.sleep(0)  # others run before the parser, which lets nobody
    return parse(data)
