"""Ollama's routes: chat and generate, streamed as lines of JSON unless the client sets ``stream`` to false."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.errors import NotSupported
from everwarm.gateway.access.auth import admin_only, principal_of
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.ollama.encode import MEDIA_TYPE, OllamaEncoder, ReplyFields, chat_fields, generate_fields, line
from everwarm.gateway.ollama.model_list import OllamaModels
from everwarm.gateway.ollama.schema import OllamaChat, OllamaGenerate
from everwarm.gateway.serving.replies import GenerationBody, Replies
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.router.pool import Pool
from everwarm.types import Json

log = logging.getLogger("everwarm.gateway")

OllamaRequest = OllamaChat | OllamaGenerate


class Ollama:
    def __init__(self, pool: Pool, gate: RequestGate, replies: Replies) -> None:
        self._pool = pool
        self._gate = gate
        self._replies = replies
        self._models = OllamaModels(pool, gate)

    def routes(self) -> list[Route]:
        models = self._models
        refused = {
            "POST": ("pull", "push", "create", "copy", "blobs/{digest}"),
            "HEAD": ("blobs/{digest}",),
            "DELETE": ("delete",),
        }
        return [
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/tags", models.tags, methods=["GET"]),
            Route("/api/show", models.show, methods=["POST"]),
            Route("/api/ps", models.ps, methods=["GET"]),
            Route("/api/version", models.version, methods=["GET"]),
            *(Route(f"/api/{name}", self.refuse_embedding, methods=["POST"]) for name in ("embed", "embeddings")),
            *(
                Route(f"/api/{name}", self.refuse, methods=[method])
                for method, names in refused.items()
                for name in names
            ),
        ]

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, OllamaChat, chat_fields)

    async def generate(self, request: Request) -> Response:
        return await self._answer(request, OllamaGenerate, generate_fields)

    async def refuse(self, request: Request) -> Response:
        raise NotSupported(f"{request.url.path} is not offered here; models are files that the server finds")

    async def refuse_embedding(self, _request: Request) -> Response:
        raise NotSupported("embeddings are not offered here; this server writes text")

    async def _answer(self, request: Request, kind: type[OllamaRequest], reply_fields: ReplyFields) -> Response:
        body, n_bytes = await self._gate.read(request, kind)
        if body.ignored:
            log.debug("options that change nothing here: %s", ", ".join(body.ignored)[:500])
        unloads = body.unloads and principal_of(request).is_admin
        if body.unloads and body.only_loads and not unloads:
            raise admin_only("unloading a model (keep_alive 0)")  # in a chat it is ignored: the model stays
        model = body.model or self._pool.find(None).id
        encoder = OllamaEncoder(model, reply_fields)

        async def generation_body() -> GenerationBody:
            if isinstance(body, OllamaGenerate) and body.raw:
                return body.as_completion()
            return await self._gate.bodies.for_request(request, body.as_chat)

        async def whole() -> Json:
            with self._unloading(model, unloads):
                (choice,) = await self._replies.collect(request, await generation_body())
            return encoder.whole(choice)

        if body.streams and not body.only_loads:
            scope = lambda: self._unloading(model, unloads)  # noqa: E731
            return self._replies.stream(request, n_bytes, generation_body, encoder, scope)
        with self._gate.admitted(request, n_bytes):
            work = self._load(body, model, unloads) if body.only_loads else whole()
            fields = await self._gate.within_time(request, work)
        answer = encoder.dated({**reply_fields(""), **fields}) if body.only_loads else fields
        return Response(line(answer), media_type=MEDIA_TYPE) if body.streams else json_response(answer)

    async def _load(self, body: OllamaRequest, model: str, unloads: bool) -> Json:
        """For a request without a prompt: loads the model, or unloads it."""
        with self._unloading(model, unloads):
            if not unloads:
                with self._pool.lease(body.model) as lease:
                    await lease.ready()
        return {"done": True, "done_reason": "unload" if unloads else "load"}

    @contextlib.contextmanager
    def _unloading(self, model: str, unloads: bool) -> Iterator[None]:
        """Unloads the model afterwards, if the request asks for that."""
        try:
            yield
        finally:
            if unloads:
                self._pool.unload(model)
