"""OpenAI's dialect: chat completions and completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.gateway.chat.generate import Event, collect
from everwarm.gateway.explain import cache_reason
from everwarm.gateway.http.sse import LOADING_S, SSE_DONE, json_response, sse, sse_loading
from everwarm.gateway.openai import encode
from everwarm.gateway.openai.schema import Body, ChatBody, CompletionBody
from everwarm.gateway.parsing.output_parser import OutputParser
from everwarm.gateway.service import Asked, Service
from everwarm.router.pool import Served
from everwarm.types import Json

Submits = Callable[[Served], Coroutine[Any, Any, Asked]]


def openai_routes(service: Service) -> list[Route]:
    openai = OpenAI(service)
    return [
        Route("/v1/chat/completions", openai.chat, methods=["POST"]),
        Route("/chat/completions", openai.chat, methods=["POST"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
    ]


class OpenAI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        body, n_bytes = await self._service.read(request, ChatBody)
        submits = partial(self._service.chat_submits, request, body)
        return await self._answer(request, body, submits, n_bytes, _CHAT, with_probs=body.n_probs is not None)

    async def completions(self, request: Request) -> Response:
        body, n_bytes = await self._service.read(request, CompletionBody)
        submits = partial(self._service.completion_submits, request, body)
        return await self._answer(request, body, submits, n_bytes, _TEXT, with_probs=body.wanted_probs is not None)

    async def _answer(
        self,
        request: Request,
        body: Body,
        submits: Submits,
        n_body_bytes: int,
        shape: ReplyEncoder,
        *,
        with_probs: bool,
    ) -> Response:
        """As a stream or whole, whichever was asked for."""
        frame = self._service.frame(shape.prefix, body)
        if body.stream:
            frames = self._frames(body, submits, {**frame, "object": shape.chunk_name}, shape, with_probs=with_probs)
            return self._service.stream(request, frames, n_body_bytes)
        with self._service.admitted(request, n_body_bytes):
            whole = self._whole(body, submits, frame, shape, with_probs=with_probs)
            return await self._service.within_time(request, whole)

    async def _whole(
        self, body: Body, submits: Submits, frame: Json, shape: ReplyEncoder, *, with_probs: bool
    ) -> Response:
        async with self._service.borrowed(body.model) as served:
            asked = await submits(served)
            choices = await collect(self._service.run(served, asked), len(asked.submits))
        echo = (asked.submits[0]["text"] or "") if isinstance(body, CompletionBody) and body.echo else ""
        readers = [asked.reader() for _ in choices]
        answer = shape.whole(frame, choices, readers, with_probs=with_probs, prefix=echo)
        return json_response({**answer, **_diagnostics(body, choices[0].done)})

    async def _frames(
        self, body: Body, submits: Submits, frame: Json, shape: ReplyEncoder, *, with_probs: bool
    ) -> AsyncGenerator[bytes, None]:
        dones: dict[int, m.Done] = {}
        with self._service.pool.lease(body.model) as lease:
            async for loaded in lease.waiting(LOADING_S):
                yield sse_loading(lease.served.id, loaded)
            asked = await submits(lease.served)
            readers = [asked.reader() for _ in asked.submits]
            async for event in self._service.run(lease.served, asked):
                for choice, more in shape.chunks(event, readers[event.index], with_probs=with_probs):
                    yield sse({**frame, "choices": [choice] if choice else [], **more})
                if isinstance(event.message, m.Done):
                    dones[event.index] = event.message
        ends = [dones[i] for i in sorted(dones)]
        last = _diagnostics(body, ends[0])
        if body.includes_usage:
            last |= {"usage": encode.usage(ends), "timings": encode.timings(ends[0])}
        if last:
            yield sse({**frame, "choices": [], **last})
        yield SSE_DONE


def _diagnostics(body: Body, done: m.Done) -> Json:
    return {"prompt_cache_diagnostics": cache_reason.diagnostics(done)} if body.prompt_cache_diagnostics else {}


def _chat_chunks(event: Event, reader: OutputParser, *, with_probs: bool) -> list[tuple[Json | None, Json]]:
    """A choice (or none) and what stands beside it, for each chunk an event is worth."""
    match event.message:
        case m.Begun():
            return [(_chat_choice(event.index, {"role": "assistant", "content": ""}), {})]
        case m.PromptRead() as read_so_far:
            return [(None, {"prompt_progress": encode.progress(read_so_far)})]
        case m.TextPiece() as piece:
            probs = encode.logprobs(piece.probs) if with_probs and piece.probs else None
            deltas = reader.feed(piece.text) or ([{"content": ""}] if probs else [])
            return [(_chat_choice(event.index, delta, None if i else probs), {}) for i, delta in enumerate(deltas)]
        case m.Done() as done:
            deltas = [*reader.feed(done.text), *reader.finish()]
            end = {**_chat_choice(event.index, {}), "finish_reason": encode.chat_finish_reason(done, reader)}
            said: list[tuple[Json | None, Json]] = [(_chat_choice(event.index, delta), {}) for delta in deltas]
            return [*said, (end, {"timings": encode.timings(done)})]


def _chat_choice(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _text_chunks(event: Event, _reader: OutputParser, *, with_probs: bool) -> list[tuple[Json | None, Json]]:
    match event.message:
        case m.Begun():
            return []
        case m.PromptRead() as read_so_far:
            return [(None, {"prompt_progress": encode.progress(read_so_far)})]
        case m.TextPiece() as piece:
            if not piece.text and not (with_probs and piece.probs):
                return []
            probs = encode.legacy_logprobs(piece.probs or []) if with_probs else None
            return [({"index": event.index, "text": piece.text, "logprobs": probs, "finish_reason": None}, {})]
        case m.Done() as done:
            reason = encode.finish_reason(done)
            end = {"index": event.index, "text": done.text, "logprobs": None, "finish_reason": reason}
            return [(end, {"timings": encode.timings(done)})]


@dataclass(frozen=True, slots=True)
class ReplyEncoder:
    """What tells chat completions and completions apart on the wire."""

    prefix: str
    chunk_name: str
    whole: Callable[..., Json]
    chunks: Callable[..., list[tuple[Json | None, Json]]]


_CHAT = ReplyEncoder("chatcmpl", "chat.completion.chunk", encode.chat_completion, _chat_chunks)
_TEXT = ReplyEncoder("cmpl", "text_completion", encode.text_completion, _text_chunks)
