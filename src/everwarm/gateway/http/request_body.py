"""Request bodies: read within a budget of bytes and time, weighed, and only then parsed.

A small body is parsed on the event loop. A large one is weighed and parsed on one of two dedicated threads, so that large
bodies delay neither the event loop nor small bodies. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from everwarm.errors import HttpError, Overloaded
from everwarm.gateway.http.json_weight import is_surely_light

T = TypeVar("T")

SMALL_BYTES = 64 << 10  # up to this size, parsing is always fast
LARGE_BYTES = 256 << 10  # beyond this size, work is done on a thread
_PIECE_BYTES = 1 << 20
FIRST_S, BYTES_PER_S = (
    30.0,
    128 << 10,
)  # a body's time limit: FIRST_S, plus a second for every BYTES_PER_S bytes received


class BodyReader:
    """Reads and parses up to ``budget_bytes`` of bodies at a time, and up to half of it for one client address."""

    def __init__(self, budget_bytes: int, first_s: float = FIRST_S) -> None:
        self._budget_bytes = budget_bytes
        self._first_s = first_s
        self._n_bytes: Counter[str] = Counter()  # by client
        self._threads = ThreadPoolExecutor(2, "everwarm-bodies")

    @property
    def n_bytes(self) -> int:
        """Bytes that are being read or parsed."""
        return self._n_bytes.total()

    async def read(self, request: Request, parse: Callable[[bytes | bytearray], T]) -> tuple[T, int]:
        """The parsed body and its bytes. ``Overloaded`` if the budget is full before or while it is read, 408 if it is
        too slow."""
        client = request.client.host if request.client else ""
        with self._counted(client) as count:
            pieces = await self._all(request, count)
            n_bytes = request.state.n_body_bytes = sum(map(len, pieces))
            if n_bytes <= SMALL_BYTES or (n_bytes <= LARGE_BYTES and is_surely_light(pieces[0])):
                return parse(pieces[0]), n_bytes
            return await self.beside(partial(_weighed, parse, pieces)), n_bytes

    async def beside(self, work: Callable[[], T]) -> T:
        """Runs the work on one of the threads for large bodies."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def for_request(self, request: Request, work: Callable[[], T]) -> T:
        """Runs work on a request's body on a thread. Large bodies have their own, so they do not delay small ones."""
        return await (self.beside(work) if is_large(request) else asyncio.to_thread(work))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def _counted(self, client: str) -> Iterator[Callable[[int, int], None]]:
        """Yields a function that takes ``n_more`` bytes of the budget if it also has room for the ``n_following`` ones."""
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
        own = self._n_bytes[client] + n_more
        total = self.n_bytes + n_more
        if total > self._budget_bytes:
            raise Overloaded(f"bodies of {self.n_bytes:,} bytes are being read already; try again later")
        if own > self._budget_bytes // 2:
            raise Overloaded(f"bodies of {own - n_more:,} bytes from {client} are being read already; try again later")

    async def _all(self, request: Request, count: Callable[[int, int], None]) -> list[bytearray]:
        """The body in pieces, each but the last of ``_PIECE_BYTES`` or more: a growing buffer is copied many times."""
        length = request.headers.get("content-length", "0")
        n_announced = int(length) if length.isascii() and length.isdigit() else 0
        pieces = [bytearray()]
        n_bytes = 0
        began = asyncio.get_running_loop().time()
        count(0, n_announced)
        try:
            async with asyncio.timeout(self._first_s) as patience:
                async for data in request.stream():
                    n_bytes += len(data)
                    count(len(data), max(0, n_announced - n_bytes))
                    if len(pieces[-1]) >= _PIECE_BYTES:
                        pieces.append(bytearray())
                    pieces[-1] += data
                    patience.reschedule(began + self._first_s + n_bytes / BYTES_PER_S)
        except TimeoutError:
            took_s = asyncio.get_running_loop().time() - began
            message = f"{n_bytes:,} bytes of the body arrived in {took_s:.0f} s; send it faster, or send less"
            raise HttpError(408, "timeout", message) from None
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
    time.sleep(0)  # lets other threads run: the parser holds the interpreter lock
    return parse(data)
