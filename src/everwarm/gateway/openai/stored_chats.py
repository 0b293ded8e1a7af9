"""Chat completions that were asked with ``store``: looked at, listed, given other metadata, deleted.

They lie beside stored responses, each in its namespace. Nothing continues them: a client sends its conversation itself.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.errors import NotFound
from everwarm.gateway.access.auth import namespace_of
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.openai.encode import ChatEncoder
from everwarm.gateway.openai.schema import ChatBody, StoredMetadata
from everwarm.gateway.response_store import ResponseStore, StoredResponse, page_of
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.types import Json

PREFIX = f"{ChatEncoder.id_prefix}-"
METADATA_QUERY = "metadata["


class UpdateBody(msgspec.Struct, frozen=True):
    metadata: StoredMetadata | None


class StoredChats:
    def __init__(self, gate: RequestGate, store: ResponseStore) -> None:
        self._gate = gate
        self._store = store
        self._listing = asyncio.Semaphore(1)  # one list at a time: it reads much

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.list, methods=["GET"]),
            Route("/v1/chat/completions/{id}", self.get, methods=["GET"]),
            Route("/v1/chat/completions/{id}", self.update, methods=["POST"]),
            Route("/v1/chat/completions/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/chat/completions/{id}/messages", self.messages, methods=["GET"]),
        ]

    async def keep(self, request: Request, body: ChatBody, answer: Json) -> None:
        """Stores an answer with the messages that it answers."""
        messages = [{**message, "id": f"{answer['id']}-{i}"} for i, message in enumerate(body.messages)]
        kept = StoredResponse(messages, {**answer, "metadata": body.metadata or {}})
        await asyncio.to_thread(self._store.keep, namespace_of(request, body.cache_salt), kept)

    async def list(self, request: Request) -> Response:
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

    async def get(self, request: Request) -> Response:
        return json_response((await self._found(request)).response)

    async def update(self, request: Request) -> Response:
        """Only the metadata can be changed."""
        body, _ = await self._gate.read(request, UpdateBody)
        kept = await self._found(request)
        changed = msgspec.structs.replace(kept, response={**kept.response, "metadata": body.metadata or {}})
        if not await asyncio.to_thread(self._store.replace, _namespace(request), changed):
            raise _not_found(kept.id)
        return json_response(changed.response)

    async def delete(self, request: Request) -> Response:
        kept = await self._found(request)
        await asyncio.to_thread(self._store.delete, _namespace(request), kept.id)
        return json_response({"id": kept.id, "object": "chat.completion.deleted", "deleted": True})

    async def messages(self, request: Request) -> Response:
        return json_response(page_of((await self._found(request)).input, dict(request.query_params), order="asc"))

    async def _found(self, request: Request) -> StoredResponse:
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
