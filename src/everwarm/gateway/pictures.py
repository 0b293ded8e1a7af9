"""Pictures in requests: from a content part to RGB pixels, decoded in processes that may die without anybody noticing.

The gateway never runs a decoder. It reads base64, asks a child for the pixels, checks what the child says, and remembers
pictures by their encoded bytes: one that comes with every turn is decoded once. Whatever is wrong with a picture, also that
its decoder died or took too long, is the sender's ``BadRequest``. Knows no HTTP, no model and no prompt.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import blake3

from everwarm.errors import BadRequest, EngineStopped, Overloaded
from everwarm.gateway.picture_child import SLOW, Child, Died, Picture, PictureLimits
from everwarm.gateway.remote import Fetcher, RemotePolicy

__all__ = ["Picture", "PictureLimits", "Pictures"]

log = logging.getLogger("everwarm.gateway")

_INLINE_BYTES = 64 << 10  # less is not worth a thread
_PIECE_CHARS = 256 << 10  # of base64; between two pieces other threads may run
_MAX_URL_HEAD = 1024  # of a data: URL, before its comma
_N_FETCHES = 4
_EXAMPLE = "data:image/png;base64,…"


class Pictures:
    """Owned by one event loop. Children start when they are needed and end with ``close``, or with this process."""

    def __init__(
        self,
        limits: PictureLimits | None = None,
        remote: RemotePolicy | None = None,
        *,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.limits = limits or PictureLimits()
        self._fetcher = fetcher or (Fetcher(remote) if remote else None)
        self._decoding = Gate(self.limits.n_children, self.limits.max_waiting)
        self._fetching = Gate(_N_FETCHES, self.limits.max_waiting)
        self._threads = ThreadPoolExecutor(self.limits.n_children, "everwarm-pictures")
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._flights: dict[bytes, _Flight] = {}
        self._cache = _Cache(self.limits.cache_bytes)
        self._is_closed = False
        self.n_decoded = self.n_remembered = self.n_deaths = 0

    @property
    def child_pids(self) -> list[int]:
        return [child.pid for child in (*self._idle, *self._busy) if child.pid is not None]

    async def from_parts(self, parts: Sequence[Mapping[str, Any]]) -> list[Picture]:
        """All pictures of one request, one after the other: so requests take turns, however many pictures they bring."""
        limits = self.limits
        if len(parts) > limits.max_pictures_per_request:
            raise BadRequest(f"there are {len(parts)} pictures; send at most {limits.max_pictures_per_request}")
        pictures: list[Picture] = []
        n_pixels = 0
        for part in parts:
            pictures.append(await self.from_part(part))
            n_pixels += pictures[-1].width * pictures[-1].height
            if n_pixels > limits.max_pixels_per_request:
                most = limits.max_pixels_per_request
                raise BadRequest(f"the pictures have more than {most:,} pixels together; send fewer or smaller ones")
        return pictures

    async def from_part(self, part: Mapping[str, Any]) -> Picture:
        """A content part of OpenAI's chat completions or responses."""
        url = address_of(part)
        if url[:5].lower() == "data:":
            return await self.from_base64(url, _data_start(url))
        if url[:7].lower() == "http://" or url[:8].lower() == "https://":
            return await self.decode(await self._fetched(url))
        raise BadRequest(f"image_url begins with {url[:12]!r}: send the picture itself, as {_EXAMPLE}")

    async def from_base64(self, text: str, start: int = 0) -> Picture:
        """A picture as text, from that character on."""
        if len(text) - start <= _INLINE_BYTES:
            return await self.decode(read_base64(text, start, self.limits.max_bytes))
        return await self.decode(await asyncio.to_thread(read_base64, text, start, self.limits.max_bytes))

    async def decode(self, data: bytes) -> Picture:
        """The same bytes are decoded once, also when several ask at the same time."""
        if not data:
            raise BadRequest(f"the picture is empty: send it as {_EXAMPLE}")
        if len(data) > self.limits.max_bytes:
            raise _too_large(self.limits.max_bytes)
        key = _digest(data) if len(data) <= _INLINE_BYTES else await asyncio.to_thread(_digest, data)
        known = self._cache.get(key)
        if known is not None:
            self.n_remembered += 1
            return known
        if self._is_closed:
            raise EngineStopped("the server is stopping")
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            flight.task = asyncio.create_task(self._fly(flight, key, data), name="everwarm-picture")
        try:
            return await flight.awaited()
        finally:
            if flight.is_deserted:
                flight.task.cancel()
                self._forget(key, flight)

    async def close(self) -> None:
        self._is_closed = True
        flights = [flight.task for flight in self._flights.values()]
        for child in (*self._idle, *self._busy):
            child.kill("the server is stopping")
        for task in flights:
            task.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)
        for child in (*self._idle, *self._busy):
            await asyncio.to_thread(child.bury)
        self._idle.clear()
        self._busy.clear()
        if self._fetcher is not None:
            self._fetcher.close()

    # inside

    async def _fetched(self, url: str) -> bytes:
        if self._fetcher is None:
            raise BadRequest(
                f"this server does not fetch pictures from addresses: send the picture itself, as {_EXAMPLE}"
            )
        async with self._fetching.place():
            return await self._fetcher.fetch(url)

    async def _fly(self, flight: _Flight, key: bytes, data: bytes) -> Picture:
        try:
            async with self._decoding.place():
                flight.has_begun = True
                picture = await self._decoded(data)
            self.n_decoded += 1
            self._cache.put(key, picture)
            return picture
        finally:
            self._forget(key, flight)

    def _forget(self, key: bytes, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _decoded(self, data: bytes) -> Picture:
        loop = asyncio.get_running_loop()
        child = self._rested() or Child(self.limits)
        self._busy.add(child)
        try:
            await loop.run_in_executor(self._threads, child.start)
            timer = loop.call_later(self.limits.timeout_s, child.kill, SLOW)
            try:
                return await loop.run_in_executor(self._threads, child.decode, data)
            finally:
                timer.cancel()
        except Died as died:
            self.n_deaths += 1
            log.warning("a picture of %d bytes (%s) ended its decoder: %s", len(data), data[:8].hex(), died)
            raise self._fatal(died) from None
        finally:
            self._give_back(child)

    def _fatal(self, died: Died) -> BadRequest:
        if died.was_slow:
            limit_s = self.limits.timeout_s
            return BadRequest(
                f"the picture took longer than {limit_s:g} s to decode: send it smaller, or save it again"
            )
        return BadRequest(
            "the picture cannot be decoded, its decoder died: it is damaged; save it again as PNG or JPEG"
        )

    def _rested(self) -> Child | None:
        while self._idle:
            child = self._idle.pop()
            if child.is_fit:
                return child
            self._threads.submit(child.bury)
        return None

    def _give_back(self, child: Child) -> None:
        if self._is_closed:  # ``close`` buries it
            return
        self._busy.discard(child)
        if child.is_fit and child.n_pictures < self.limits.n_pictures_per_child:
            self._idle.append(child)
        else:
            self._threads.submit(child.bury)


class Gate:
    """So many at once. The others wait in order of arrival, and not too many of them."""

    def __init__(self, n_places: int, max_waiting: int) -> None:
        self._places = asyncio.Semaphore(n_places)
        self._max_waiting = max_waiting
        self.n_waiting = 0

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        if self._places.locked() and self.n_waiting >= self._max_waiting:
            raise Overloaded(f"{self.n_waiting} pictures are waiting already; try again in a moment")
        self.n_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.n_waiting -= 1
        try:
            yield
        finally:
            self._places.release()


class _Flight:
    """A picture on its way, and how many wait for it. When nobody does any more it is dropped, unless it is being decoded
    already: then it lands in the cache."""

    task: asyncio.Task[Picture]

    def __init__(self) -> None:
        self.has_begun = False
        self._n_waiting = 0

    @property
    def is_deserted(self) -> bool:
        return not self._n_waiting and not self.has_begun

    async def awaited(self) -> Picture:
        self._n_waiting += 1
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            us = asyncio.current_task()
            if self.task.cancelled() and not (us and us.cancelling()):
                raise EngineStopped("the server is stopping") from None
            raise
        finally:
            self._n_waiting -= 1


class _Cache:
    """Decoded pictures by the digest of their encoded bytes; the one unused for longest goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()
        self.n_bytes = 0

    def get(self, key: bytes) -> Picture | None:
        picture = self._pictures.get(key)
        if picture is not None:
            self._pictures.move_to_end(key)
        return picture

    def put(self, key: bytes, picture: Picture) -> None:
        if len(picture.rgb) > self._max_bytes or key in self._pictures:
            return
        self._pictures[key] = picture
        self.n_bytes += len(picture.rgb)
        while self.n_bytes > self._max_bytes:
            _, oldest = self._pictures.popitem(last=False)
            self.n_bytes -= len(oldest.rgb)


# reading what clients send


def address_of(part: Mapping[str, Any]) -> str:
    """The URL of a picture in any of OpenAI's spellings."""
    kind = part.get("type")
    if kind not in ("image_url", "input_image"):
        raise BadRequest(f"content of type {str(kind)[:40]!r} is no picture: give image_url or input_image")
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str) or not url:
        raise BadRequest(f'a content part of type {kind} needs a picture: give "image_url": {{"url": "{_EXAMPLE}"}}')
    return url


def _data_start(url: str) -> int:
    """Where the base64 of a data: URL begins. What kind of picture it claims to be does not matter."""
    comma = url.find(",", 0, _MAX_URL_HEAD)
    if comma < 0 or url[5:comma].rpartition(";")[2].strip().lower() != "base64":
        raise BadRequest(f"{url[:40]!r} is not a data: URL in base64: give one like {_EXAMPLE}")
    return comma + 1


def read_base64(text: str, start: int, max_bytes: int) -> bytes:
    """Spaces and line ends may stand anywhere, and the padding may be missing; nothing else may. In pieces, because one
    call for all of it would stop every other thread."""
    if (len(text) - start) * 2 > max_bytes * 3:  # even if some of it is spaces
        raise _too_large(max_bytes)
    parts, left, n_bytes = [], b"", 0
    for begin in range(start, len(text), _PIECE_CHARS):
        is_last = begin + _PIECE_CHARS >= len(text)
        try:
            piece = left + text[begin : begin + _PIECE_CHARS].encode("ascii").translate(None, b" \t\r\n\f")
            if piece and n_bytes % 3:
                raise ValueError("there is more after the padding")
            n_whole = len(piece) if is_last else len(piece) // 4 * 4
            padding = b"=" * (-n_whole % 4)
            parts.append(binascii.a2b_base64(piece[:n_whole] + padding, strict_mode=True))
        except ValueError as error:  # also binascii.Error and UnicodeError
            why = "a character is not of its alphabet" if isinstance(error, UnicodeError) else str(error).lower()
            raise BadRequest(f"the picture is not base64 ({why}): give {_EXAMPLE}") from None
        left = piece[n_whole:]
        n_bytes += len(parts[-1])
        if n_bytes > max_bytes:
            raise _too_large(max_bytes)
    return b"".join(parts)


def _too_large(max_bytes: int) -> BadRequest:
    return BadRequest(f"the picture is larger than {max_bytes:,} bytes: send it smaller or more compressed")


def _digest(data: bytes) -> bytes:
    return blake3.blake3(data).digest()
