"""Images in requests: from a content part to RGB pixels, decoded in child processes that may crash without harm.

The gateway never runs a decoder. It reads base64, requests the pixels from a child, checks its answer, and caches images by
their encoded bytes: an image that is sent with every turn is decoded once. Each namespace has its own cache: otherwise
timing would reveal which images others have sent. A request holds an ``ImageInfo`` for each image and no pixels; pixels are
lent to it, within a limit for all requests, while an engine needs them. Every problem with an image, also a decoder that
died or took too long, is a ``BadRequest``. Knows no HTTP, no model and no prompt.

One thread at a time talks to a decoder process and blocks; any thread may kill it. Its answers are not trusted: sizes are
checked again, and the gateway computes the digest of the pixels.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import blake3
import msgspec

from everwarm.config import require
from everwarm.errors import BadRequest, EngineStopped, EverwarmError, Overloaded
from everwarm.gateway.images.image_download import ImageDownloader, RemotePolicy
from everwarm.lru import NamespacedLru

__all__ = ["DecodedImage", "ImageInfo", "ImageLimits", "ImageLoader"]

log = logging.getLogger("everwarm.gateway")

_INLINE_BYTES = 64 << 10  # up to this size, work is not moved to a thread
_PIECE_CHARS = 256 << 10  # of base64; other threads may run between two pieces
_MAX_URL_HEAD = 1024  # of a data: URL, before its comma
_N_FETCHES = 4
_N_SIZES = 16_384  # cached sizes and digests
_EXAMPLE = "data:image/png;base64,…"
WORKER = "everwarm.gateway.images.decoder_worker"
SLOW = "it took too long"
_START_S = 30.0
_LATE_S = 5  # beyond the time limit, when a child is killed: its thread returns even if that did not happen
_MAX_HEAD_BYTES = 4096
# A child gets no secrets from the environment, and returns freed memory to the system.
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_OWN_VARIABLES = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """An image without its pixels. ``part``: the client's content part, as in the body."""

    part: Mapping[str, Any]
    width: int
    height: int
    digest: bytes  # of the pixels

    @property
    def n_bytes(self) -> int:
        return 3 * self.width * self.height


class ImageLoader:
    """Owned by one event loop. Children start on demand and end with ``close``, or with this process."""

    def __init__(
        self,
        limits: ImageLimits | None = None,
        remote: RemotePolicy | None = None,
        *,
        fetcher: ImageDownloader | None = None,
    ) -> None:
        self.limits = limits or ImageLimits()
        self._fetcher = fetcher or (ImageDownloader(remote) if remote else None)
        self.decoding = Gate(self.limits.n_children, self.limits.max_waiting)
        self._fetching = Gate(_N_FETCHES, self.limits.max_waiting)
        self._threads = ThreadPoolExecutor(self.limits.n_children, "everwarm-images")
        self._idle: list[DecoderProcess] = []
        self._busy: set[DecoderProcess] = set()
        self._flights: dict[
            tuple[str, bytes], _Flight
        ] = {}  # by namespace and digest of the encoded bytes, like both caches
        self.cache: NamespacedLru[DecodedImage] = NamespacedLru(self.limits.cache_bytes)
        self._sizes: NamespacedLru[tuple[int, int, bytes]] = NamespacedLru(_N_SIZES)
        self.lending = Lending(self.limits.max_lent_bytes, self.limits.max_waiting)
        self._is_closed = False
        self.n_decoded = self.n_remembered = self.n_deaths = 0

    @property
    def child_pids(self) -> list[int]:
        return [child.pid for child in (*self._idle, *self._busy) if child.pid is not None]

    async def from_parts(self, parts: Sequence[Mapping[str, Any]], namespace: str = "") -> list[ImageInfo]:
        """All images of one request, one after the other, so that a request with many images does not delay the others.
        Each is decoded unless it is cached; only the cache keeps its pixels."""
        limits = self.limits
        if len(parts) > limits.max_images_per_request:
            raise BadRequest(f"there are {len(parts)} pictures; send at most {limits.max_images_per_request}")
        images: list[ImageInfo] = []
        n_pixels = 0
        for part in parts:
            images.append(ImageInfo(part, *await self._size(await self._encoded(part), namespace)))
            n_pixels += images[-1].width * images[-1].height
            if n_pixels > limits.max_pixels_per_request:
                most = limits.max_pixels_per_request
                raise BadRequest(f"the pictures have more than {most:,} pixels together; send fewer or smaller ones")
        return images

    @contextlib.asynccontextmanager
    async def lent(self, images: Sequence[ImageInfo], namespace: str = "") -> AsyncIterator[list[DecodedImage]]:
        """Their pixels, each image once, as soon as there is room for all of them. A request that waits holds no pixels."""
        each = {image.digest: image for image in images}.values()
        async with self.lending.of(namespace, sum(image.n_bytes for image in each)):
            yield [await self._seen_again(image, namespace) for image in each]

    async def from_part(self, part: Mapping[str, Any], namespace: str = "") -> DecodedImage:
        """A content part of OpenAI's chat completions or responses."""
        return await self.decode(await self._encoded(part), namespace)

    async def decode(self, data: bytes, namespace: str = "") -> DecodedImage:
        """Decodes the same bytes once in each namespace, also for concurrent requests."""
        return await self._decoded_once(data, (namespace, await self._key(data)))

    async def _decoded_once(self, data: bytes, key: tuple[str, bytes]) -> DecodedImage:
        known = self.cache.get(*key)
        if known is not None:
            self.n_remembered += 1
            return known
        if self._is_closed:
            raise EngineStopped("the server is stopping")
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            flight.task = asyncio.create_task(self._fly(flight, key, data), name="everwarm-image")
        try:
            return await flight.awaited()
        finally:
            if flight.is_abandoned:
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
            await asyncio.to_thread(child.reap)
        self._idle.clear()
        self._busy.clear()
        if self._fetcher is not None:
            self._fetcher.close()

    # internals

    async def _encoded(self, part: Mapping[str, Any]) -> bytes:
        url = address_of(part)
        if url[:5].lower() == "data:":
            start, most = _data_start(url), self.limits.max_bytes
            if len(url) - start <= _INLINE_BYTES:
                return read_base64(url, start, most)
            return await asyncio.to_thread(read_base64, url, start, most)
        if url[:7].lower() == "http://" or url[:8].lower() == "https://":
            return await self._fetched(url)
        raise BadRequest(f"image_url begins with {url[:12]!r}: send the picture itself, as {_EXAMPLE}")

    async def _key(self, data: bytes) -> bytes:
        if not data:
            raise BadRequest(f"the picture is empty: send it as {_EXAMPLE}")
        if len(data) > self.limits.max_bytes:
            raise _too_large(self.limits.max_bytes)
        return _digest(data) if len(data) <= _INLINE_BYTES else await asyncio.to_thread(_digest, data)

    async def _size(self, data: bytes, namespace: str) -> tuple[int, int, bytes]:
        key = namespace, await self._key(data)
        known = self._sizes.get(*key)
        return _size_of(await self._decoded_once(data, key)) if known is None else known

    async def _seen_again(self, image: ImageInfo, namespace: str) -> DecodedImage:
        decoded = await self.from_part(image.part, namespace)
        if decoded.digest != image.digest:
            raise BadRequest("a picture changed at its address while the request was waiting: send it again")
        return decoded

    async def _fetched(self, url: str) -> bytes:
        if self._fetcher is None:
            raise BadRequest(
                f"this server does not fetch pictures from addresses: send the picture itself, as {_EXAMPLE}"
            )
        async with self._fetching.place():
            return await self._fetcher.fetch(url)

    async def _fly(self, flight: _Flight, key: tuple[str, bytes], data: bytes) -> DecodedImage:
        try:
            async with self.decoding.place():
                flight.has_begun = True
                image = await self._decoded(data)
            self.n_decoded += 1
            self.cache.put(*key, image, len(image.rgb))
            self._sizes.put(*key, _size_of(image), 1)
            return image
        finally:
            self._forget(key, flight)

    def _forget(self, key: tuple[str, bytes], flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _decoded(self, data: bytes) -> DecodedImage:
        loop = asyncio.get_running_loop()
        child = self._take_idle() or DecoderProcess(self.limits)
        self._busy.add(child)
        try:
            await loop.run_in_executor(self._threads, child.start)
            timer = loop.call_later(self.limits.timeout_s, child.kill, SLOW)
            try:
                return await loop.run_in_executor(self._threads, child.decode, data)
            finally:
                timer.cancel()
        except DecoderDied as died:
            self.n_deaths += 1
            log.warning("a picture of %d bytes (%s) ended its decoder: %s", len(data), data[:8].hex(), died)
            raise self._fatal(died) from None
        finally:
            self._give_back(child)

    def _fatal(self, died: DecoderDied) -> BadRequest:
        if died.was_slow:
            limit_s = self.limits.timeout_s
            return BadRequest(
                f"the picture took longer than {limit_s:g} s to decode: send it smaller, or save it again"
            )
        return BadRequest(
            "the picture cannot be decoded, its decoder died: it is damaged; save it again as PNG or JPEG"
        )

    def _take_idle(self) -> DecoderProcess | None:
        while self._idle:
            child = self._idle.pop()
            if child.is_fit:
                return child
            self._threads.submit(child.reap)
        return None

    def _give_back(self, child: DecoderProcess) -> None:
        if self._is_closed:  # ``close`` reaps it
            return
        self._busy.discard(child)
        if child.is_fit and child.n_images < self.limits.n_images_per_child:
            self._idle.append(child)
        else:
            self._threads.submit(child.reap)


class Gate:
    """A semaphore with ``n_places`` and a FIFO queue of at most ``max_waiting``."""

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


@dataclass(slots=True, eq=False)
class _Borrower:
    namespace: str
    n_bytes: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Lending:
    """Limits the bytes of pixels that engines have or are being sent, in total and for each namespace. First come, first
    served, but one namespace gets at most half, and requests that wait for that do not delay other namespaces."""

    def __init__(self, max_bytes: int, max_waiting: int) -> None:
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._lent: dict[str, int] = {}
        self._waiting: deque[_Borrower] = deque()
        self.n_bytes = 0

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def of(self, namespace: str, n_bytes: int) -> AsyncIterator[None]:
        borrower = _Borrower(namespace, min(n_bytes, self._max_bytes))
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests with pictures are waiting already; try again in a moment")
        self._waiting.append(borrower)
        self._serve()
        try:
            await borrower.turn
            yield
        finally:
            self._give_back(borrower)

    def _serve(self) -> None:
        for borrower in list(self._waiting):
            if borrower.turn.done():  # it was cancelled
                continue
            own = self._lent.get(borrower.namespace, 0)
            if self.n_bytes + borrower.n_bytes > self._max_bytes:
                return
            if own and own + borrower.n_bytes > self._max_bytes // 2:
                continue
            self._waiting.remove(borrower)
            self._lent[borrower.namespace] = own + borrower.n_bytes
            self.n_bytes += borrower.n_bytes
            borrower.turn.set_result(None)

    def _give_back(self, borrower: _Borrower) -> None:
        if borrower in self._waiting:
            self._waiting.remove(borrower)
        elif borrower.turn.done():
            self.n_bytes -= borrower.n_bytes
            self._lent[borrower.namespace] -= borrower.n_bytes
            if not self._lent[borrower.namespace]:
                del self._lent[borrower.namespace]
        self._serve()


class _Flight:
    """A pending decode, and the number of requests that wait for it. It is cancelled when none is left, unless decoding has
    begun: then the result goes to the cache."""

    task: asyncio.Task[DecodedImage]

    def __init__(self) -> None:
        self.has_begun = False
        self._n_waiting = 0

    @property
    def is_abandoned(self) -> bool:
        return not self._n_waiting and not self.has_begun

    async def awaited(self) -> DecodedImage:
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


# reading what clients send


def address_of(part: Mapping[str, Any]) -> str:
    """The URL of an image in any of OpenAI's content parts."""
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
    """Where the base64 of a data: URL begins. The declared media type does not matter."""
    comma = url.find(",", 0, _MAX_URL_HEAD)
    if comma < 0 or url[5:comma].rpartition(";")[2].strip().lower() != "base64":
        raise BadRequest(f"{url[:40]!r} is not a data: URL in base64: give one like {_EXAMPLE}")
    return comma + 1


def read_base64(text: str, start: int, max_bytes: int) -> bytes:
    """Decodes base64. Spaces and line ends are allowed anywhere, and padding may be missing; nothing else is tolerated.
    Works in pieces, because one call for all of it would block every other thread."""
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


def _size_of(image: DecodedImage) -> tuple[int, int, bytes]:
    return image.width, image.height, image.digest


def _digest(data: bytes) -> bytes:
    return blake3.blake3(data).digest()


@dataclass(frozen=True, slots=True)
class DecodedImage:
    width: int
    height: int
    rgb: bytes  # rows from the top, three bytes for each pixel
    digest: bytes

    @classmethod
    def of(cls, width: int, height: int, rgb: bytes) -> DecodedImage:
        """The digest covers kind, size, layout and pixels, and nothing else of the file."""
        assert len(rgb) == 3 * width * height, "rows and size disagree"
        about = struct.pack("<8sII8s", b"image", width, height, b"RGB")
        return cls(width, height, rgb, blake3.blake3(about).update(rgb).digest())


@dataclass(frozen=True, slots=True)
class ImageLimits:
    max_bytes: int = 20 << 20  # encoded
    max_pixels: int = 40_000_000
    max_side: int = 16_384
    max_images_per_request: int = 32
    max_pixels_per_request: int = 100_000_000
    timeout_s: float = 10.0  # for decoding one
    child_memory: int = 512 << 20
    n_children: int = 2
    n_images_per_child: int = 256
    max_waiting: int = 64  # for a child; more get 429
    cache_bytes: int = 256 << 20  # of pixels
    max_lent_bytes: int = 512 << 20  # of pixels that engines have or are being sent, for all requests

    def __post_init__(self) -> None:
        least = {"max_bytes": 1024, "child_memory": 128 << 20, "max_waiting": 0, "cache_bytes": 0}
        most = {"max_bytes": (1 << 31) - 1, "max_pixels": 1 << 29, "max_side": (1 << 16) - 1, "n_children": 64}
        for name in self.__slots__:
            value = getattr(self, name)
            low, high = least.get(name, 1 if name != "timeout_s" else 0.001), most.get(name, 1 << 40)
            require(low <= value <= high, f"{name} of pictures is {value}; give {low} to {high}")


class DecoderDied(Exception):
    """A child died while it decoded an image."""

    def __init__(self, why: str, *, was_slow: bool) -> None:
        super().__init__(why)
        self.was_slow = was_slow


class DecodedHead(msgspec.Struct, frozen=True):
    """What a child sends before the rows."""

    ready: bool = False
    width: int = 0
    height: int = 0
    wrong: str = ""


class DecoderProcess:
    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # between starting and killing
        self._process: subprocess.Popen[bytes] | None = None
        self._wire, self._theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            late = struct.pack("ll", math.ceil(limits.timeout_s) + _LATE_S, 0)
            self._wire.setsockopt(socket.SOL_SOCKET, option, late)
        self._their_lifeline, self._lifeline = os.pipe()
        self._why = ""
        self.n_images = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_fit(self) -> bool:
        return not self._why and self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Blocks until it is ready; ``EverwarmError`` if it does not start. Does nothing if it runs already."""
        if self._process is not None:
            return
        with self._lock:
            if not self._why:
                self._process = self._spawn()
        self._theirs.close()
        os.close(self._their_lifeline)
        try:
            self._wire.settimeout(_START_S)
            head = self._head()
            self._wire.settimeout(None)
        except (OSError, EOFError, msgspec.MsgspecError):
            head = DecodedHead()
        if not head.ready:
            self.kill("it did not start")
            log.error("a picture decoder did not start: %s (%s)", self._why, self._end())
            raise EverwarmError("the picture decoder does not start; the server's log says more")

    def _spawn(self) -> subprocess.Popen[bytes]:
        limits = self._limits
        bounds = {
            "max_pixels": limits.max_pixels,
            "max_side": limits.max_side,
            "memory_bytes": limits.child_memory,
            "cpu_s": math.ceil(limits.timeout_s),
        }
        return subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, json.dumps(bounds), str(self._their_lifeline)],
            stdin=self._theirs.fileno(),
            stdout=subprocess.DEVNULL,
            pass_fds=(self._their_lifeline,),
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _OWN_VARIABLES,
        )

    def decode(self, data: bytes) -> DecodedImage:
        """Blocks. ``BadRequest`` if the child rejects the image, ``DecoderDied`` if the child died."""
        self.n_images += 1
        try:
            self._wire.sendall(len(data).to_bytes(4, "big"))
            self._wire.sendall(data)
            head = self._head()
            if not head.wrong:
                self._check(head)
                rgb = self._exactly(3 * head.width * head.height)
        except (OSError, EOFError, msgspec.MsgspecError):
            self.kill("it stopped answering")
            raise self._died() from None
        if head.wrong:
            raise BadRequest(f"the picture cannot be used: {head.wrong}")
        return DecodedImage.of(head.width, head.height, rgb)

    def _head(self) -> DecodedHead:
        n_bytes = int.from_bytes(self._exactly(4), "big")
        if n_bytes > _MAX_HEAD_BYTES:
            raise EOFError
        return msgspec.json.decode(self._exactly(n_bytes), type=DecodedHead)

    def _check(self, head: DecodedHead) -> None:
        n_pixels, longest = head.width * head.height, max(head.width, head.height)
        if min(head.width, head.height) < 1 or n_pixels > self._limits.max_pixels or longest > self._limits.max_side:
            raise EOFError

    def _exactly(self, n_bytes: int) -> bytes:
        """Reads in one call and without a copy, so that other threads run while many megabytes arrive."""
        data = self._wire.recv(n_bytes, socket.MSG_WAITALL)
        if len(data) < n_bytes:
            raise EOFError
        return data

    # its end

    def kill(self, why: str) -> None:
        """May be called from any thread at any time. A thread that waits for an answer gets an error."""
        with self._lock:
            self._why = self._why or why
            if self._process is not None:
                self._process.kill()
            with contextlib.suppress(OSError):  # it was reaped already
                self._wire.shutdown(socket.SHUT_RDWR)

    def reap(self) -> None:
        """Kills it, waits for it, and closes our descriptors. Call once."""
        self.kill("it is not needed any more")
        self._end()
        if self._process is None:
            self._theirs.close()
            os.close(self._their_lifeline)
        self._wire.close()
        os.close(self._lifeline)

    def _end(self) -> str:
        code = 0 if self._process is None else self._process.wait()
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"exit code {code}"

    def _died(self) -> DecoderDied:
        end = self._end()
        was_slow = self._why == SLOW or end == "SIGXCPU"
        return DecoderDied(f"{self._why} ({end})", was_slow=was_slow)
