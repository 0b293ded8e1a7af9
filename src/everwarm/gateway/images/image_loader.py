"""Images and sounds in requests: from a content part to RGB pixels or samples, decoded in child processes that may crash
without harm.

The gateway never runs a decoder. It reads base64, requests the pixels from a child, checks its answer, and caches images by
their encoded bytes: an image that is sent with every turn is decoded once. Each namespace has its own cache: otherwise
timing would reveal which images others have sent. A request holds each image without its pixels; pixels are
lent to it, within a limit for all requests, while an engine needs them. Every problem with an image, also a decoder that
died or took too long, is a ``BadRequest``. Sounds go the same way: whatever is written here of images holds for sounds.
Knows no HTTP, no model and no prompt.

One thread at a time talks to a decoder process and blocks; any thread may kill it. Its answers are not trusted: sizes are
checked again, and the gateway computes the digest of the pixels.
"""

from __future__ import annotations

import abc
import asyncio
import binascii
import contextlib
import dataclasses
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
from typing import Any, ClassVar

import blake3
import msgspec

from everwarm.config import require
from everwarm.errors import BadRequest, EngineStopped, EverwarmError, Overloaded
from everwarm.gateway.images.image_download import ImageDownloader
from everwarm.lru import NamespacedLru
from everwarm.sound_files import SAMPLE_RATE, is_sound

__all__ = ["DecodedImage", "DecodedMedia", "DecodedSound", "ImageLimits", "ImageLoader"]

log = logging.getLogger("everwarm.gateway")

_INLINE_BYTES = 64 << 10  # up to this size, work is not moved to a thread
_PIECE_CHARS = 256 << 10  # of base64; other threads may run between two pieces
_MAX_URL_HEAD = 1024  # of a data: URL, before its comma
_N_FETCHES = 4
_N_SIZES = 16_384  # cached sizes and digests
_EXAMPLE = "data:image/png;base64,…"
_SOUND_EXAMPLE = '"input_audio": {"data": "BASE64", "format": "wav"}'
SOUND_PART = "input_audio"  # the type of a content part with a sound
SLOW = "it took too long"
_START_S = 30.0
_LATE_S = 5  # beyond the time limit, when a child is killed: its thread returns even if that did not happen
_MAX_HEAD_BYTES = 4096
# A child gets no secrets from the environment, and returns freed memory to the system.
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_OWN_VARIABLES = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """``rgb``: rows from the top, three bytes for each pixel; empty in an image without its pixels. ``part``: the client's
    content part, as in the body."""

    width: int
    height: int
    rgb: bytes
    digest: bytes  # of the pixels
    part: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, width: int, height: int, rgb: bytes) -> DecodedImage:
        """The digest covers kind, size, layout and pixels, and nothing else of the file."""
        assert len(rgb) == 3 * width * height, "rows and size disagree"
        about = struct.pack("<8sII8s", b"image", width, height, b"RGB")
        return cls(width, height, rgb, blake3.blake3(about).update(rgb).digest())

    @property
    def data(self) -> bytes:
        return self.rgb

    @property
    def n_bytes(self) -> int:
        """The size of the pixels, whether they are here or not."""
        return 3 * self.width * self.height

    def without_data(self) -> DecodedImage:
        return dataclasses.replace(self, rgb=b"")


@dataclass(frozen=True, slots=True)
class DecodedSound:
    """``data``: 32-bit samples of one channel; empty in a sound without its samples."""

    n_samples: int
    data: bytes
    digest: bytes  # of the samples
    part: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: bytes) -> DecodedSound:
        about = struct.pack("<8sII8s", b"sound", len(data) // 4, SAMPLE_RATE, b"F32")
        return cls(len(data) // 4, data, blake3.blake3(about).update(data).digest())

    @property
    def n_bytes(self) -> int:
        return 4 * self.n_samples

    def without_data(self) -> DecodedSound:
        return dataclasses.replace(self, data=b"")


DecodedMedia = DecodedImage | DecodedSound


class ImageLoader:
    """Owned by one event loop. Children start on demand and end with ``close``, or with this process."""

    def __init__(self, limits: ImageLimits | None = None, fetcher: ImageDownloader | None = None) -> None:
        """``fetcher``: None: images come with their requests."""
        self.limits = limits or ImageLimits()
        self._fetcher = fetcher
        self.decoding = Gate(self.limits.n_children, self.limits.max_waiting)
        self._fetching = Gate(_N_FETCHES, self.limits.max_waiting)
        self._threads = ThreadPoolExecutor(self.limits.n_children, "everwarm-images")
        self._idle: list[DecoderProcess] = []
        self._busy: set[DecoderProcess] = set()
        self._flights: dict[
            tuple[str, bytes], _Flight
        ] = {}  # by namespace and digest of the encoded bytes, like both caches
        self.cache: NamespacedLru[DecodedMedia] = NamespacedLru(self.limits.cache_bytes)
        self._sizes: NamespacedLru[DecodedMedia] = NamespacedLru(_N_SIZES)
        self.lending = Lending(self.limits.max_lent_bytes, self.limits.max_waiting)
        self._is_closed = False
        self.n_decoded = self.n_remembered = self.n_deaths = 0

    @property
    def child_pids(self) -> list[int]:
        return [child.pid for child in (*self._idle, *self._busy) if child.pid is not None]

    async def from_parts(self, parts: Sequence[Mapping[str, Any]], namespace: str = "") -> list[DecodedMedia]:
        """All images of one request, one after the other, so that a request with many images does not delay the others.
        Each is decoded unless it is cached; only the cache keeps its pixels."""
        limits = self.limits
        if len(parts) > limits.max_images_per_request:
            raise BadRequest(f"there are {len(parts)} images and sounds; send at most {limits.max_images_per_request}")
        images: list[DecodedMedia] = []
        for part in parts:
            known = await self._size(await self._encoded(part), kind_of(part), namespace)
            images.append(dataclasses.replace(known, part=part))
            self._require_room(images)
        return images

    def _require_room(self, images: Sequence[DecodedMedia]) -> None:
        most, most_samples = self.limits.max_pixels_per_request, self.limits.max_samples_per_request
        if sum(image.width * image.height for image in images if isinstance(image, DecodedImage)) > most:
            raise BadRequest(f"the images have more than {most:,} pixels together; send fewer or smaller ones")
        if sum(sound.n_samples for sound in images if isinstance(sound, DecodedSound)) > most_samples:
            raise BadRequest(
                f"the sounds are longer than {most_samples / SAMPLE_RATE:g} s together; send fewer or shorter ones"
            )

    @contextlib.asynccontextmanager
    async def lent(self, images: Sequence[DecodedMedia], namespace: str = "") -> AsyncIterator[list[DecodedMedia]]:
        """The images with their pixels, each once, as soon as there is room for all of them. A request that waits holds no
        pixels."""
        each = {image.digest: image for image in images}.values()
        async with self.lending.of(namespace, sum(image.n_bytes for image in each)):
            yield [await self._seen_again(image, namespace) for image in each]

    async def from_part(self, part: Mapping[str, Any], namespace: str = "") -> DecodedMedia:
        """A content part of OpenAI's chat completions or responses."""
        data, kind = await self._encoded(part), kind_of(part)
        return await self._decoded_once(data, (namespace, await self._key(data, kind)), kind)

    async def decode(self, data: bytes, namespace: str = "") -> DecodedImage:
        """Decodes the same bytes once in each namespace, also for concurrent requests."""
        found = await self._decoded_once(data, (namespace, await self._key(data, ImageProcess)), ImageProcess)
        assert isinstance(found, DecodedImage)
        return found

    async def _decoded_once(self, data: bytes, key: tuple[str, bytes], kind: type[DecoderProcess]) -> DecodedMedia:
        known = self.cache.get(*key)
        if known is not None:
            self.n_remembered += 1
            return known
        if self._is_closed:
            raise EngineStopped("the server is stopping")
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            flight.task = asyncio.create_task(self._fly(flight, key, data, kind), name="everwarm-image")
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
        url = base64_of(part) if part.get("type") == SOUND_PART else address_of(part)
        if url[:5].lower() == "data:":
            start, most = _data_start(url), self.limits.max_bytes
            if len(url) - start <= _INLINE_BYTES:
                return read_base64(url, start, most)
            return await asyncio.to_thread(read_base64, url, start, most)
        if url[:7].lower() == "http://" or url[:8].lower() == "https://":
            return await self._fetched(url)
        raise BadRequest(f"image_url begins with {url[:12]!r}: send the image itself, as {_EXAMPLE}")

    async def _key(self, data: bytes, kind: type[DecoderProcess]) -> bytes:
        if not data:
            raise BadRequest(f"the {kind.noun} is empty: send its file in base64")
        if len(data) > self.limits.max_bytes:
            raise _too_large(self.limits.max_bytes)
        digest = _digest(data) if len(data) <= _INLINE_BYTES else await asyncio.to_thread(_digest, data)
        return digest + kind.noun.encode()

    async def _size(self, data: bytes, kind: type[DecoderProcess], namespace: str) -> DecodedMedia:
        """Without its part."""
        key = namespace, await self._key(data, kind)
        known = self._sizes.get(*key)
        return (await self._decoded_once(data, key, kind)).without_data() if known is None else known

    async def _seen_again(self, image: DecodedMedia, namespace: str) -> DecodedMedia:
        decoded = await self.from_part(image.part, namespace)
        if decoded.digest != image.digest:
            raise BadRequest("an image changed at its address while the request was waiting: send it again")
        return decoded

    async def _fetched(self, url: str) -> bytes:
        if self._fetcher is None:
            raise BadRequest(f"this server does not fetch images from addresses: send the image itself, as {_EXAMPLE}")
        async with self._fetching.place():
            return await self._fetcher.fetch(url)

    async def _fly(
        self, flight: _Flight, key: tuple[str, bytes], data: bytes, kind: type[DecoderProcess]
    ) -> DecodedMedia:
        try:
            async with self.decoding.place():
                flight.has_begun = True
                image = await self._decoded(data, kind)
            self.n_decoded += 1
            self.cache.put(*key, image, len(image.data))
            self._sizes.put(*key, image.without_data(), 1)
            return image
        finally:
            self._forget(key, flight)

    def _forget(self, key: tuple[str, bytes], flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _decoded(self, data: bytes, kind: type[DecoderProcess]) -> DecodedMedia:
        loop = asyncio.get_running_loop()
        child = self._take_idle(kind) or kind(self.limits)
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
            log.warning("a %s of %d bytes (%s) ended its decoder: %s", kind.noun, len(data), data[:8].hex(), died)
            raise self._fatal(died, kind) from None
        finally:
            self._give_back(child)

    def _fatal(self, died: DecoderDied, kind: type[DecoderProcess]) -> BadRequest:
        if died.was_slow:
            limit_s = self.limits.timeout_s
            return BadRequest(
                f"the {kind.noun} took longer than {limit_s:g} s to decode: send it smaller, or save it again"
            )
        return BadRequest(f"the {kind.noun} cannot be decoded, its decoder died: {kind.advice}")

    def _take_idle(self, kind: type[DecoderProcess]) -> DecoderProcess | None:
        for child in [child for child in reversed(self._idle) if isinstance(child, kind)]:
            self._idle.remove(child)
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
            raise Overloaded(f"{self.n_waiting} images and sounds are waiting already; try again in a moment")
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
            raise Overloaded(f"{len(self._waiting)} requests with images are waiting already; try again in a moment")
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
            own = self._lent.get(borrower.namespace, 0) - borrower.n_bytes
            self._lent[borrower.namespace] = own
            if own <= 0:
                del self._lent[borrower.namespace]
        self._serve()


class _Flight:
    """A pending decode, and the number of requests that wait for it. It is cancelled when none is left, unless decoding has
    begun: then the result goes to the cache."""

    task: asyncio.Task[DecodedMedia]

    def __init__(self) -> None:
        self.has_begun = False
        self._n_waiting = 0

    @property
    def is_abandoned(self) -> bool:
        return not self._n_waiting and not self.has_begun

    async def awaited(self) -> DecodedMedia:
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
        raise BadRequest(f"content of type {str(kind)[:40]!r} is no image: give image_url or input_image")
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str) or not url:
        raise BadRequest(f'a content part of type {kind} needs an image: give "image_url": {{"url": "{_EXAMPLE}"}}')
    return url


def kind_of(part: Mapping[str, Any]) -> type[DecoderProcess]:
    return SoundProcess if part.get("type") == SOUND_PART else ImageProcess


def base64_of(part: Mapping[str, Any]) -> str:
    """A sound in OpenAI's content part, as a data: URL. Its ``format`` does not matter: a file says what it is."""
    given = part.get(SOUND_PART)
    data = given.get("data") or given.get("url") if isinstance(given, dict) else None
    if not isinstance(data, str) or not data:
        raise BadRequest(f"a content part of type {SOUND_PART} needs a sound: give {_SOUND_EXAMPLE}")
    if data[:7].lower() == "http://" or data[:8].lower() == "https://":
        raise BadRequest(f"this server does not fetch sounds from addresses: give {_SOUND_EXAMPLE}")
    return data if data[:5].lower() == "data:" else f"data:audio/wav;base64,{data}"


def part_of(data: str) -> dict[str, Any]:
    """A content part with a file in base64, or in a data: URL, that may be an image or a sound."""
    start = data.find(",", 0, _MAX_URL_HEAD) + 1 if data[:5].lower() == "data:" else 0
    with contextlib.suppress(ValueError):
        if is_sound(binascii.a2b_base64(data[start : start + 16])):
            return {"type": SOUND_PART, SOUND_PART: {"data": data}}
    return {"type": "image_url", "image_url": {"url": data if start else f"data:image/png;base64,{data}"}}


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
            raise BadRequest(f"the image or sound is not base64 ({why}): send its file in base64") from None
        left = piece[n_whole:]
        n_bytes += len(parts[-1])
        if n_bytes > max_bytes:
            raise _too_large(max_bytes)
    return b"".join(parts)


def _too_large(max_bytes: int) -> BadRequest:
    return BadRequest(f"the image or sound is larger than {max_bytes:,} bytes: send it smaller or more compressed")


def _digest(data: bytes) -> bytes:
    return blake3.blake3(data).digest()


@dataclass(frozen=True, slots=True)
class ImageLimits:
    max_bytes: int = 20 << 20  # encoded
    max_pixels: int = 40_000_000
    max_side: int = 16_384
    max_images_per_request: int = 32
    max_pixels_per_request: int = 100_000_000
    max_samples: int = 600 * SAMPLE_RATE  # of one sound
    max_samples_per_request: int = 1800 * SAMPLE_RATE
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
            require(low <= value <= high, f"{name} of images is {value}; give {low} to {high}")


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
    n_samples: int = 0
    wrong: str = ""


class DecoderProcess(abc.ABC):
    """A child that decodes one kind of files, named by ``noun``."""

    worker: ClassVar[str]
    noun: ClassVar[str]
    advice: ClassVar[str]  # for a file that ends the child

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
            log.error("a %s decoder did not start: %s (%s)", self.noun, self._why, self._end())
            raise EverwarmError(f"the {self.noun} decoder does not start; the server's log says more")

    def _spawn(self) -> subprocess.Popen[bytes]:
        shared = {"memory_bytes": self._limits.child_memory, "cpu_s": math.ceil(self._limits.timeout_s)}
        bounds = json.dumps(shared | self._bounds())
        return subprocess.Popen(
            [sys.executable, "-P", "-m", self.worker, bounds, str(self._their_lifeline)],
            stdin=self._theirs.fileno(),
            stdout=subprocess.DEVNULL,
            pass_fds=(self._their_lifeline,),
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _OWN_VARIABLES,
        )

    def decode(self, data: bytes) -> DecodedMedia:
        """Blocks. ``BadRequest`` if the child rejects the image, ``DecoderDied`` if the child died."""
        self.n_images += 1
        try:
            self._wire.sendall(len(data).to_bytes(4, "big"))
            self._wire.sendall(data)
            head = self._head()
            if not head.wrong:
                self._check(head)
                decoded = self._exactly(self._n_bytes(head))
        except (OSError, EOFError, msgspec.MsgspecError):
            self.kill("it stopped answering")
            raise self._died() from None
        if head.wrong:
            raise BadRequest(f"the {self.noun} cannot be used: {head.wrong}")
        return self._made(head, decoded)

    @abc.abstractmethod
    def _bounds(self) -> dict[str, int]: ...

    @abc.abstractmethod
    def _check(self, head: DecodedHead) -> None:
        """``EOFError`` for a size that a child of ours would not give."""

    @abc.abstractmethod
    def _n_bytes(self, head: DecodedHead) -> int: ...

    @abc.abstractmethod
    def _made(self, head: DecodedHead, data: bytes) -> DecodedMedia: ...

    def _head(self) -> DecodedHead:
        n_bytes = int.from_bytes(self._exactly(4), "big")
        if n_bytes > _MAX_HEAD_BYTES:
            raise EOFError
        return msgspec.json.decode(self._exactly(n_bytes), type=DecodedHead)

    def _exactly(self, n_bytes: int) -> bytes:
        """Reads in one call and without a copy, so that other threads run while many megabytes arrive."""
        data = self._wire.recv(n_bytes, socket.MSG_WAITALL) if n_bytes else b""
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


class ImageProcess(DecoderProcess):
    worker = "everwarm.gateway.images.decoder_worker"
    noun = "image"
    advice = "it is damaged; save it again as PNG or JPEG"

    def _bounds(self) -> dict[str, int]:
        return {"max_pixels": self._limits.max_pixels, "max_side": self._limits.max_side}

    def _check(self, head: DecodedHead) -> None:
        n_pixels, longest = head.width * head.height, max(head.width, head.height)
        if min(head.width, head.height) < 1 or n_pixels > self._limits.max_pixels or longest > self._limits.max_side:
            raise EOFError

    def _n_bytes(self, head: DecodedHead) -> int:
        return 3 * head.width * head.height

    def _made(self, head: DecodedHead, data: bytes) -> DecodedImage:
        return DecodedImage.of(head.width, head.height, data)


class SoundProcess(DecoderProcess):
    worker = "everwarm.llama.media.sound_worker"
    noun = "sound"
    advice = "it is damaged, or far too long; save it again, or send a shorter one"

    def _bounds(self) -> dict[str, int]:
        return {"max_samples": self._limits.max_samples}

    def _check(self, head: DecodedHead) -> None:
        if not 0 <= head.n_samples <= self._limits.max_samples:
            raise EOFError

    def _n_bytes(self, head: DecodedHead) -> int:
        return 4 * head.n_samples

    def _made(self, head: DecodedHead, data: bytes) -> DecodedSound:
        assert len(data) == self._n_bytes(head)
        return DecodedSound.of(data)
