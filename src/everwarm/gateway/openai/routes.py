"""OpenAI's routes: chat completions and completions; and chats that were asked with ``store``: looked at, listed, given
other metadata, deleted. These lie beside stored responses, each in its namespace. Nothing continues them: a client sends
its conversation itself."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm import __version__
from everwarm.errors import NotFound
from everwarm.gateway.access.auth import namespace_of
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.openai.encode import ChatEncoder, CompletionEncoder, TextEncoder, live_timings
from everwarm.gateway.openai.schema import ChatBody, CompletionBody, StoredMetadata
from everwarm.gateway.serving.replies import GenerationBody, Replies
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.gateway.stores import ResponseStore, StoredResponse, page_of
from everwarm.router.pool import Pool
from everwarm.types import Json

PREFIX = f"{ChatEncoder.id_prefix}-"
METADATA_QUERY = "metadata["


class UpdateBody(msgspec.Struct, frozen=True):
    metadata: StoredMetadata | None


class OpenAI:
    def __init__(self, pool: Pool, gate: RequestGate, replies: Replies, store: ResponseStore) -> None:
        self._pool = pool
        self._gate = gate
        self._replies = replies
        self._store = store
        self._listing = asyncio.Semaphore(1)  # one list at a time: it reads much

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    def stored_routes(self) -> list[Route]:
        """The routes of stored chats. Their ``{id}`` matches every name, so they must come behind all other routes."""
        return [
            Route("/v1/chat/completions", self.list_stored, methods=["GET"]),
            Route("/v1/chat/completions/{id}", self.get_stored, methods=["GET"]),
            Route("/v1/chat/completions/{id}", self.update_stored, methods=["POST"]),
            Route("/v1/chat/completions/{id}", self.delete_stored, methods=["DELETE"]),
            Route("/v1/chat/completions/{id}/messages", self.messages_of_stored, methods=["GET"]),
        ]

    async def chat(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, ChatBody)
        header = self._header(ChatEncoder.id_prefix, body)
        with_probs = body.n_probs is not None
        keep = partial(self._keep, request, body) if body.store else None
        more = (self._fingerprint(body), body, live_timings(body, time.monotonic))
        encoder = ChatEncoder(header, *more, with_probs=with_probs, keep=keep)
        return await self._answer(request, body, n_bytes, encoder, keep)

    async def completions(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, CompletionBody)
        header = self._header(TextEncoder.id_prefix, body)
        encoder = TextEncoder(
            header,
            self._fingerprint(body),
            body,
            live_timings(body, time.monotonic),
            with_probs=body.wanted_probs is not None,
        )
        return await self._answer(request, body, n_bytes, encoder)

    async def _answer(
        self,
        request: Request,
        body: GenerationBody,
        n_bytes: int,
        encoder: CompletionEncoder,
        keep: Callable[[Json], Awaitable[None]] | None = None,
    ) -> Response:
        """Streams the reply if the body asks for it, else sends it whole; ``keep`` stores it first."""
        if body.stream:
            return self._replies.stream(request, n_bytes, body, encoder)
        with self._gate.admitted(request, n_bytes):
            choices = await self._gate.within_time(request, self._replies.collect(request, body))
        answer = encoder.whole(choices)
        if keep is not None:
            await keep(answer)
        if (prompt := getattr(request.state, "prompt", None)) is not None:  # of a chat that is verbose
            answer["__verbose"] = {"prompt": prompt, "content": choices[0].text, "tokens": choices[0].tokens}
        return json_response(answer)

    def _header(self, id_prefix: str, body: GenerationBody) -> Json:
        """What every chunk and answer of one request repeats."""
        return {
            "id": f"{id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model or self._pool.find(body.model).id,
        }

    def _fingerprint(self, body: GenerationBody) -> Callable[[], str]:
        supervisor = self._pool.find(body.model).supervisor
        return lambda: f"{supervisor.info.build if supervisor.info else ''}-everwarm-{__version__}"

    # chats that were stored

    async def _keep(self, request: Request, body: ChatBody, answer: Json) -> None:
        """Stores an answer with the messages that it answers."""
        messages = [{**message, "id": f"{answer['id']}-{i}"} for i, message in enumerate(body.messages)]
        kept = StoredResponse(messages, {**answer, "metadata": body.metadata or {}})
        await asyncio.to_thread(self._store.keep, namespace_of(request, body.cache_salt), kept)

    async def list_stored(self, request: Request) -> Response:
        query = request.query_params
        wanted = {
            name[len(METADATA_QUERY) : -1]: value for name, value in query.items() if name.startswith(METADATA_QUERY)
        }

        def is_wanted(answer: Json) -> bool:
            is_of_model = query.get("model") in (None, answer["model"])
            return is_of_model and wanted.items() <= answer["metadata"].items()

        async with self._listing:
            found = await asyncio.to_thread(self._store.listed, _namespace(request), PREFIX, is_wanted)
        return json_response(page_of(found, dict(query), order="asc"))

    async def get_stored(self, request: Request) -> Response:
        return json_response((await self._stored(request)).response)

    async def update_stored(self, request: Request) -> Response:
        """Only the metadata can be changed."""
        body, _ = await self._gate.read(request, UpdateBody)
        kept = await self._stored(request)
        changed = msgspec.structs.replace(kept, response={**kept.response, "metadata": body.metadata or {}})
        if not await asyncio.to_thread(self._store.replace, _namespace(request), changed):
            raise _not_found(kept.id)
        return json_response(changed.response)

    async def delete_stored(self, request: Request) -> Response:
        kept = await self._stored(request)
        await asyncio.to_thread(self._store.delete, _namespace(request), kept.id)
        return json_response({"id": kept.id, "object": "chat.completion.deleted", "deleted": True})

    async def messages_of_stored(self, request: Request) -> Response:
        return json_response(page_of((await self._stored(request)).input, dict(request.query_params), order="asc"))

    async def _stored(self, request: Request) -> StoredResponse:
        id = request.path_params["id"]
        kept = await asyncio.to_thread(self._store.get, _namespace(request), id) if id.startswith(PREFIX) else None
        if kept is None:
            raise _not_found(id)
        return kept


def _namespace(request: Request) -> str:
    return namespace_of(request, request.query_params.get("cache_salt"))


def _not_found(id: str) -> NotFound:
    reasons = "it was asked without store, was deleted, or was evicted"
    return NotFound(f"there is no chat completion {id[:80]!r} here: {reasons}", "not_found")
