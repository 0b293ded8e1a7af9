"""Answers on the wire: JSON, server-sent events, and noticing that nobody is listening any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everwarm.errors import EverwarmError

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")

PATIENCE_S = 1.0  # an error within this time still gets its own status; then the stream begins
KEEP_ALIVE_S = 10.0


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(body), status, headers, "application/json")


def sse(body: Any) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
SSE_KEEP_ALIVE = b": waiting\n\n"


class EventStream(Response):
    """Server-sent events while ``admitted`` lasts. A refusal before the first event keeps its own status code; closing the
    connection closes ``frames`` at once, also while it waits."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        admitted: AbstractContextManager[None],
        error_frame: Callable[[EverwarmError], bytes],
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-store", "x-accel-buffering": "no"}, "text/event-stream")
        del self.headers["content-length"]
        self._frames = frames
        self._admitted = admitted
        self._error_frame = error_frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with self._admitted:
            await unless_gone(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        pump = _Pump(self._frames)
        try:
            frame = await pump.next(PATIENCE_S)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while frame is not _END:
                await send({"type": "http.response.body", "body": frame or SSE_KEEP_ALIVE, "more_body": True})
                try:
                    frame = await pump.next(KEEP_ALIVE_S)
                except EverwarmError as error:
                    await send({"type": "http.response.body", "body": self._error_frame(error), "more_body": True})
                    break
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await pump.close()


_END = b"\0"


class _Pump:
    """The next frame within a time, without losing it when the time is up."""

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        self._frames = frames
        self._pending: asyncio.Future[bytes] | None = None

    async def next(self, patience_s: float) -> bytes | None:
        """A frame, ``_END``, or None when none came in time."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(anext(self._frames, _END))
        ready, _ = await asyncio.wait({self._pending}, timeout=patience_s)
        if not ready:
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    async def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, EverwarmError):
                await self._pending
        await self._frames.aclose()


class Hangup(Exception):
    """The client has gone; nothing needs to be said any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but drop it with ``Hangup`` as soon as the client hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Hangup
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
