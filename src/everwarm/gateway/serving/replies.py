"""Replies to requests, streamed in a dialect or whole. The one place that joins a body, a model and the engine.

From the engine to the socket a token passes three generators: the supervisor's ``stream``, ``generate`` and ``_frames``.

A ``Dialect`` is what an API adds to a streamed reply: how it writes events, errors and keep-alives.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from starlette.requests import Request

from everwarm.engine.process import messages as m
from everwarm.errors import EverwarmError
from everwarm.gateway.access.auth import namespace_of
from everwarm.gateway.access.limits import AdmittedRequest
from everwarm.gateway.admin.metrics import Metrics
from everwarm.gateway.admin.request_log import Caller, RequestLog
from everwarm.gateway.http.error_body import error_body
from everwarm.gateway.http.sse import LOADING_S, SSE_KEEP_ALIVE, EventStream, sse, sse_loading
from everwarm.gateway.openai.schema import ChatBody, CompletionBody
from everwarm.gateway.parsing.output_parser import message_of
from everwarm.gateway.serving.generate import Choice, EngineMessage, ReplyEvent, collect, generate
from everwarm.gateway.serving.prewarm import NextTurnPrewarmer
from everwarm.gateway.serving.request_gate import RequestGate, place_of
from everwarm.gateway.serving.request_preparer import PreparedRequest, RequestPreparer
from everwarm.router.pool import Pool, Served
from everwarm.types import Json


class Dialect(abc.ABC):
    """The encoder of one reply. Frames are sent one by one, in order. What most dialects share is here."""

    media_type = "text/event-stream"
    keep_alive: bytes = SSE_KEEP_ALIVE  # sent after a long time without other frames

    @abc.abstractmethod
    def encode(self, event: ReplyEvent) -> Sequence[bytes]:
        """The frames of an event."""

    def loading(self, model: str, fraction: float) -> Sequence[bytes]:
        """Frames to send while the model is loading."""
        return [sse_loading(model, fraction)]

    async def finish(self) -> Sequence[bytes]:
        """Frames to send after all choices have ended."""
        return ()

    def error(self, error: EverwarmError, body: Json) -> bytes:  # noqa: ARG002 - for dialects with their own errors
        """``body``: the error in the form of the request's path."""
        return sse(body)


GenerationBody = ChatBody | CompletionBody
BodySource = Callable[[], Awaitable[GenerationBody]]  # makes one of these from a dialect's own body


class Replies:
    def __init__(
        self,
        pool: Pool,
        gate: RequestGate,
        preparer: RequestPreparer,
        request_log: RequestLog,
        metrics: Metrics,
        prewarmer: NextTurnPrewarmer,
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._preparer = preparer
        self._request_log = request_log
        self._metrics = metrics
        self._prewarmer = prewarmer

    def stream(
        self,
        request: Request,
        n_body_bytes: int,
        body: GenerationBody | BodySource,
        dialect: Dialect,
        scope: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> EventStream:
        """``scope`` is entered once the request is admitted, and left after its model was released."""

        @contextlib.contextmanager
        def admitted() -> Iterator[AdmittedRequest]:
            with self._gate.admitted(request, n_body_bytes) as place, scope():
                yield place

        def error_frame(error: EverwarmError) -> bytes:
            return dialect.error(error, error_body(error, request.state.request_id, request.url.path))

        return EventStream(
            self._frames(request, body, dialect),
            admitted(),
            error_frame,
            self._gate.timeout_s,
            media_type=dialect.media_type,
            keep_alive_frame=dialect.keep_alive,
        )

    async def collect(self, request: Request, body: GenerationBody) -> list[Choice]:
        """All choices, complete."""
        with self._pool.lease(body.model) as lease:
            served = await lease.ready()
            prepared = await self._preparer.prepare(request, body, served)
            return await collect(self._run(request, body, served, prepared), len(prepared.submits))

    async def _frames(
        self, request: Request, source: GenerationBody | BodySource, dialect: Dialect
    ) -> AsyncGenerator[bytes, None]:
        body = source if isinstance(source, ChatBody | CompletionBody) else await source()
        with self._pool.lease(body.model) as lease:
            async for fraction in lease.waiting(LOADING_S):
                for frame in dialect.loading(lease.served.id, fraction):
                    yield frame
            prepared = await self._preparer.prepare(request, body, lease.served)
            async with contextlib.aclosing(self._run(request, body, lease.served, prepared)) as events:
                async for event in events:
                    if frames := dialect.encode(event):
                        yield b"".join(frames)  # one write for all of them
        if last := await dialect.finish():
            yield b"".join(last)

    def _run(
        self, request: Request, body: GenerationBody, served: Served, prepared: PreparedRequest
    ) -> AsyncGenerator[ReplyEvent, None]:
        caller = Caller(
            id=request.state.request_id,
            model=served.id,
            path=request.url.path,
            stream=bool(body.stream),
            traceparent=request.headers.get("traceparent"),
            namespace=namespace_of(request, body.cache_salt),
        )
        follow = partial(self._request_log.follow, caller)
        choices = [Choice() for _ in prepared.submits]
        place = place_of(request)

        def observe(event: ReplyEvent) -> Awaitable[None] | None:
            choice = choices[event.index]
            choice.add(event)
            self._account(event.message, place, choices)
            if choice.ended is None:
                return None
            if prepared.next_text is not None and len(prepared.submits) == 1:
                next_text = partial(prepared.next_text, choice.text)
                self._prewarmer.offer(served.supervisor, prepared.submits[0], next_text)
            if event.index == 0 and prepared.charge is not None:
                prepared.charge(choice.ended.n_prompt - choice.ended.n_cached)
            if prepared.keep_reply is None:
                return None
            return asyncio.to_thread(prepared.keep_reply, message_of(choice.pieces), choice.text)

        more = prepared.lend, observe, prepared.notes
        return generate(served.supervisor, prepared.submits, prepared.parser, follow, *more)

    def _account(self, message: EngineMessage, place: AdmittedRequest | None, choices: Sequence[Choice]) -> None:
        """The effects of a message outside of its reply."""
        if place is not None and isinstance(message, m.Begun):
            place.recount(message.n_prompt)
        if isinstance(message, m.Done):
            self._metrics.finished(message)
            if place is not None and all(choice.ended is not None for choice in choices):
                place.release()  # before its last words are taken
