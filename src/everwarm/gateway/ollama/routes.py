"""Ollama's dialect: chat and generate, streamed as lines of JSON unless told otherwise."""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.errors import EverwarmError, Forbidden
from everwarm.gateway.access.auth import admin_only, principal_of
from everwarm.gateway.access.middleware import ollama_error
from everwarm.gateway.chat.generate import collect
from everwarm.gateway.chat.stream import Ended, Heard, ModelLoading, Whole, collect_chat, stream_chat
from everwarm.gateway.http.sse import LOADING_S, EventStream, json_response
from everwarm.gateway.ollama import encode as shapes
from everwarm.gateway.ollama.model_list import OllamaModels
from everwarm.gateway.ollama.schema import OllamaChat, OllamaGenerate
from everwarm.gateway.openai.encode import finish_reason
from everwarm.gateway.openai.schema import CompletionBody
from everwarm.gateway.parsing.reasoning import Text
from everwarm.gateway.service import Service
from everwarm.types import Json

log = logging.getLogger("everwarm.gateway")


MEDIA_TYPE = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class OllamaTurn:
    """One request: its body, how its reply is said, and when it came."""

    body: OllamaChat | OllamaGenerate
    speech: shapes.Speech
    model: str
    unloads: bool
    began_at: float

    def line(self, said: Json) -> Json:
        now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        return {"model": self.model, "created_at": now, **said}

    def end(self, said: Json, ended: Ended) -> Json:
        return self.line({**said, **shapes.end(ended, time.monotonic() - self.began_at)})


class Ollama:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, OllamaChat, shapes.chat_speech)

    async def generate(self, request: Request) -> Response:
        return await self._answer(request, OllamaGenerate, shapes.generate_speech)

    async def refuse(self, request: Request) -> Response:
        path = request.url.path
        raise Forbidden(
            501, "not_supported_error", f"{path} is not offered here; models are files that the server finds"
        )

    async def refuse_embedding(self, _request: Request) -> Response:
        raise Forbidden(501, "not_supported_error", "embeddings are not offered here; this server writes text")

    async def _answer(
        self, request: Request, kind: type[OllamaChat | OllamaGenerate], speech: shapes.Speech
    ) -> Response:
        body, n_bytes = await self._service.read(request, kind)
        if body.ignored:
            log.debug("options that change nothing here: %s", ", ".join(body.ignored)[:500])
        unloads = body.unloads and principal_of(request).is_admin
        if body.unloads and body.only_loads and not unloads:
            raise admin_only("unloading a model (keep_alive 0)")  # in a chat it is only a wish: the model stays
        turn = OllamaTurn(body, speech, body.model or self._service.pool.find(None).id, unloads, time.monotonic())
        if body.streams and not body.only_loads:
            return self._stream(request, turn, n_bytes)
        with self._service.admitted(request, n_bytes):
            work = self._loaded(turn) if body.only_loads else self._whole(request, turn)
            said = await self._service.within_time(request, work)
        return Response(shapes.line(said), media_type=MEDIA_TYPE) if body.streams else json_response(said)

    async def _loaded(self, turn: OllamaTurn) -> Json:
        """Nothing was asked: the model comes, or goes."""
        with self._keeping(turn):
            if not turn.unloads:
                async with self._service.borrowed(turn.body.model):
                    pass
        reason = "unload" if turn.unloads else "load"
        return turn.line({**turn.speech(""), "done": True, "done_reason": reason})

    async def _whole(self, request: Request, turn: OllamaTurn) -> Json:
        with self._keeping(turn):
            if isinstance(turn.body, OllamaGenerate) and turn.body.raw:
                reply = await self._hear_out_raw(request, turn.body.as_completion())
            else:
                chat = await self._service.bodies.for_request(request, turn.body.as_chat)
                reply = await collect_chat(self._service, request, chat)
        return turn.end(shapes.whole(turn.speech, reply.message), Ended(reply.done, reply.finish))

    def _stream(self, request: Request, turn: OllamaTurn, n_body_bytes: int) -> EventStream:
        def error_frame(error: EverwarmError) -> bytes:
            return shapes.line(ollama_error(error))

        admitted, limit_s = self._service.admitted(request, n_body_bytes), self._service.settings.request_timeout_s
        waiting = shapes.line(turn.line({**turn.speech(""), "done": False}))
        frames = self._frames(request, turn)
        return EventStream(
            frames, admitted, error_frame, limit_s or None, media_type=MEDIA_TYPE, keep_alive_frame=waiting
        )

    async def _frames(self, request: Request, turn: OllamaTurn) -> AsyncGenerator[bytes, None]:
        lines = shapes.OllamaEncoder(turn.speech)
        with self._keeping(turn):
            async with contextlib.aclosing(self._heard(request, turn)) as heard:
                async for one in heard:
                    said = lines.of(one)
                    if said is not None:
                        yield shapes.line(turn.line({**said, "done": False}))
                    if isinstance(one, Ended):
                        yield shapes.line(turn.end(turn.speech(""), one))

    async def _heard(self, request: Request, turn: OllamaTurn) -> AsyncGenerator[Heard, None]:
        if isinstance(turn.body, OllamaGenerate) and turn.body.raw:
            heard = self._hear_raw(request, turn.body.as_completion())
        else:
            heard = stream_chat(
                self._service, request, await self._service.bodies.for_request(request, turn.body.as_chat)
            )
        async with contextlib.aclosing(heard):
            async for one in heard:
                yield one

    async def _hear_raw(self, request: Request, body: CompletionBody) -> AsyncGenerator[Heard, None]:
        """A reply to a prompt as it is: all of it is text."""
        with self._service.pool.lease(body.model) as lease:
            async for fraction in lease.waiting(LOADING_S):
                yield ModelLoading(lease.served.id, fraction)
            asked = await self._service.completion_submits(request, body, lease.served)
            async for event in self._service.run(lease.served, asked.first):
                if isinstance(event.message, m.TextPiece | m.Done):
                    yield Text(event.message.text)
                if isinstance(event.message, m.Done):
                    yield Ended(event.message, finish_reason(event.message))

    async def _hear_out_raw(self, request: Request, body: CompletionBody) -> Whole:
        async with self._service.borrowed(body.model) as served:
            asked = await self._service.completion_submits(request, body, served)
            (choice,) = await collect(self._service.run(served, asked.first), 1)
        return Whole({"content": choice.text}, choice.done, finish_reason(choice.done))

    @contextlib.contextmanager
    def _keeping(self, turn: OllamaTurn) -> Iterator[None]:
        """Afterwards the model leaves, if that was asked for."""
        try:
            yield
        finally:
            if turn.unloads:
                self._service.pool.unload(turn.model)


def ollama_routes(service: Service) -> list[Route]:
    ollama, models = Ollama(service), OllamaModels(service)
    refused = {
        "POST": ("pull", "push", "create", "copy", "blobs/{digest}"),
        "HEAD": ("blobs/{digest}",),
        "DELETE": ("delete",),
    }
    return [
        Route("/api/chat", ollama.chat, methods=["POST"]),
        Route("/api/generate", ollama.generate, methods=["POST"]),
        Route("/api/tags", models.tags, methods=["GET"]),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/ps", models.ps, methods=["GET"]),
        Route("/api/version", models.version, methods=["GET"]),
        *(Route(f"/api/{name}", ollama.refuse_embedding, methods=["POST"]) for name in ("embed", "embeddings")),
        *(
            Route(f"/api/{name}", ollama.refuse, methods=[method])
            for method, names in refused.items()
            for name in names
        ),
    ]
