"""HTTP responses: JSON, server-sent events, and detection of clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from everwarm.errors import EverwarmError, HttpError
from everwarm.gateway.access.limits import AdmittedRequest

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")

PATIENCE_S = 1.0  # an error within this time still gets its own status; then the stream begins
KEEP_ALIVE_S = 10.0
LOADING_S = 1.0  # between comments that report the progress of loading a model


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(body), status, headers, "application/json")


def sse(body: Any) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def sse_named(name: str, body: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + sse(body)


SSE_DONE = b"data: [DONE]\n\n"
SSE_KEEP_ALIVE = b": waiting\n\n"


def sse_loading(model: str, loaded: float) -> bytes:
    """A comment with the progress of loading. Clients ignore it; it keeps proxies from timing out."""
    name = "".join(c for c in model if c.isprintable())
    return f": loading {name} {loaded:.0%}\n\n".encode()


class EventStream(Response):
    """Streams server-sent events, or lines, inside ``admitted``. The response starts with its first frame or after
    ``PATIENCE_S``: an error before that keeps its own status code. A keep-alive frame is sent after every ``KEEP_ALIVE_S``
    without a frame. When the client disconnects, ``frames`` is closed at once, even while it waits."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        admitted: AbstractContextManager[AdmittedRequest | None],
        error_frame: Callable[[EverwarmError], bytes],
        limit_s: float | None = None,
        *,
        media_type: str = "text/event-stream",
        keep_alive_frame: bytes = SSE_KEEP_ALIVE,
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-store", "x-accel-buffering": "no"}, media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._admitted = admitted
        self._error_frame = error_frame
        self._limit_s = limit_s
        self._keep_alive_frame = keep_alive_frame
        self._sent_at = time.monotonic()
        self._is_open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with self._admitted as place, contextlib.suppress(ClientGone):
            await unless_gone(receive, self._stream(send if place is None else _recording(place, send)))

    async def _stream(self, send: Send) -> None:
        idle = asyncio.create_task(self._keep_alive(send))
        try:
            async with within(self._limit_s), contextlib.aclosing(self._frames):
                async for frame in self._frames:
                    await self._send(send, frame)
        except EverwarmError as error:
            if not self._is_open:
                raise
            await self._send(send, self._error_frame(error))
        finally:
            idle.cancel()
        if not self._is_open:
            await self._send(send, b"")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, frame: bytes) -> None:
        self._sent_at = time.monotonic()
        if not self._is_open:
            self._is_open = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        await asyncio.sleep(PATIENCE_S)
        while True:
            if not self._is_open or time.monotonic() - self._sent_at > KEEP_ALIVE_S:
                await self._send(send, self._keep_alive_frame)
            await asyncio.sleep(KEEP_ALIVE_S / 4)


def _recording(place: AdmittedRequest, send: Send) -> Send:
    """A ``send`` that records in the place for how long the client has not read."""

    async def recorded(message: Message) -> None:
        place.note_sending()
        try:
            await send(message)
        finally:
            place.note_sent()

    return recorded


@contextlib.asynccontextmanager
async def within(limit_s: float | None) -> AsyncGenerator[None, None]:
    """Raises ``HttpError`` (504) if the block takes longer than ``limit_s``."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise HttpError(504, "timeout", f"the request took longer than {limit_s:g} s") from None


class ClientGone(Exception):
    """The client has disconnected; no answer is needed."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits the work, but cancels it and raises ``ClientGone`` as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
