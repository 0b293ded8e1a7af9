"""Ollama's routes: chat and generate, streamed as lines of JSON unless the client sets ``stream`` to false; and models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm import __version__
from everwarm.errors import BadRequest, NotSupported
from everwarm.gateway.access.auth import admin_only, principal_of
from everwarm.gateway.admin.models import SUCCESS, Pulls
from everwarm.gateway.http.sse import EventStream, json_response, unless_gone
from everwarm.gateway.ollama.encode import MEDIA_TYPE, OllamaEncoder, ReplyFields, chat_fields, generate_fields, line
from everwarm.gateway.ollama.models import (
    IN_MEMORY,
    CopyBody,
    CreateBody,
    DerivedModels,
    derived_entries,
    details_of,
    listed,
    presence,
)
from everwarm.gateway.ollama.schema import NamedBody, OllamaChat, OllamaGenerate, PullBody
from everwarm.gateway.openai.schema import CompletionBody
from everwarm.gateway.serving.replies import GenerationBody, Replies
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.router.pool import Pool
from everwarm.types import Json

DIALECT = "0.12.0"  # the version of Ollama that we claim: clients check it before they use new features

OllamaRequest = OllamaChat | OllamaGenerate
FillIn = Callable[[Request, CompletionBody, str], Awaitable[CompletionBody]]  # the prompt with the text that follows it


class Ollama:
    def __init__(
        self, pool: Pool, gate: RequestGate, replies: Replies, pulls: Pulls, fill_in: FillIn, derived: DerivedModels
    ) -> None:
        self._pool = pool
        self._derived = derived
        self._pulls = pulls
        self._gate = gate
        self._replies = replies
        self._fill_in = fill_in

    def routes(self) -> list[Route]:
        refused = {
            "POST": ("push", "blobs/{digest}"),
            "HEAD": ("blobs/{digest}",),
        }
        return [
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/ps", self.ps, methods=["GET"]),
            Route("/api/version", self.version, methods=["GET"]),
            Route("/api/pull", self.pull, methods=["POST"]),
            Route("/api/delete", self.delete, methods=["DELETE"]),
            Route("/api/create", self.create, methods=["POST"]),
            Route("/api/copy", self.copy, methods=["POST"]),
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

    async def version(self, _request: Request) -> Response:
        return json_response({"version": DIALECT, "everwarm": __version__})

    async def tags(self, _request: Request) -> Response:
        models = await asyncio.to_thread(listed, self._pool.all_served())
        return json_response({"models": [*models, *derived_entries(models, self._derived.names())]})

    async def ps(self, _request: Request) -> Response:
        loaded = [s for s in self._pool.all_served() if s.status.phase in IN_MEMORY]
        models = await asyncio.to_thread(listed, loaded)
        more = [presence(served) for served in loaded]
        return json_response({"models": [model | about for model, about in zip(models, more, strict=True)]})

    async def show(self, request: Request) -> Response:
        body, _ = await self._gate.read(request, NamedBody)
        name = _name_of(body)
        derived = self._derived.find(name)
        served = self._pool.find(name if derived is None else derived.base)
        info = served.supervisor.info
        sees = served.spec.mmproj is not None if info is None else info.sees
        details = await asyncio.to_thread(details_of, served.spec, sees)
        return json_response(details if derived is None else derived.shown(details))

    async def pull(self, request: Request) -> Response:
        self._pulls.require_allowed()
        body, _ = await self._gate.read(request, PullBody)
        lines = self._pulls.pull(_name_of(body))
        if body.stream:
            return EventStream(
                lines,
                contextlib.nullcontext(),
                lambda error: line({"error": str(error)}),
                media_type=MEDIA_TYPE,
                keep_alive_frame=line({"status": "pulling manifest"}),
            )

        async def all_of_it() -> None:
            async with contextlib.aclosing(lines):
                async for _ in lines:
                    pass

        await unless_gone(request.receive, all_of_it())
        return json_response(SUCCESS)

    async def delete(self, request: Request) -> Response:
        body, _ = await self._gate.read(request, NamedBody)
        if not await asyncio.to_thread(self._derived.delete, _name_of(body)):
            self._pulls.require_allowed()
            await self._pulls.delete(_name_of(body))
        return Response(status_code=200)

    async def create(self, request: Request) -> Response:
        body, _ = await self._gate.read(request, CreateBody)
        await asyncio.to_thread(self._derived.create, body, _name_of(body))
        return Response(line(SUCCESS), media_type=MEDIA_TYPE) if body.stream else json_response(SUCCESS)

    async def copy(self, request: Request) -> Response:
        body, _ = await self._gate.read(request, CopyBody)
        await asyncio.to_thread(self._derived.copy, body)
        return Response(status_code=200)

    async def refuse(self, request: Request) -> Response:
        raise NotSupported(
            f"{request.url.path} is not offered here: models are files that the server finds, and it uploads none"
        )

    async def _answer(self, request: Request, kind: type[OllamaRequest], reply_fields: ReplyFields) -> Response:
        body, n_bytes = await self._gate.read(request, kind)
        self._gate.note_ignored(request, [f"options.{name}" for name in body.ignored])
        unloads = body.unloads and principal_of(request).is_admin
        if body.unloads and body.only_loads and not unloads:
            raise admin_only("unloading a model (keep_alive 0)")  # in a chat it is ignored: the model stays
        encoder = OllamaEncoder(body.model or self._pool.find(None).id, reply_fields)
        derived = self._derived.find(body.model)
        body = body if derived is None else derived.applied(body)
        model = body.model or self._pool.find(None).id

        async def generation_body() -> GenerationBody:
            if isinstance(body, OllamaGenerate) and body.suffix:
                return await self._filled(request, body.as_completion(), body.suffix)
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

    async def _filled(self, request: Request, body: CompletionBody, suffix: str) -> CompletionBody:
        try:
            return await self._fill_in(request, body, suffix)
        except NotSupported:
            raise BadRequest(
                "suffix cannot be used: this model has no tokens for fill-in-the-middle; put everything into prompt"
            ) from None

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


def _name_of(body: NamedBody) -> str:
    name = body.model or body.name
    if not name:
        raise BadRequest("model is missing; name one from /api/tags")
    return name
