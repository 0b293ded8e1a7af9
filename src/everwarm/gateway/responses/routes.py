"""OpenAI's other dialect: ``/v1/responses``, whole or streamed, and going on from a response that is kept."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.errors import BadRequest, EverwarmError, PreviousNotFound, ResponseNotFound
from everwarm.gateway.chat.stream import Ended, ModelLoading, stream_chat
from everwarm.gateway.http.sse import EventStream, json_response, sse, sse_loading
from everwarm.gateway.parsing.reasoning import Reasoning, Text
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded
from everwarm.gateway.responses.encode import ResponsesEncoder, skeleton
from everwarm.gateway.responses.response_store import LinkMissing, ResponseStore, StoredResponse
from everwarm.gateway.responses.schema import ResponsesBody, asked, own_items
from everwarm.gateway.service import Service
from everwarm.types import Json

MAX_LISTED = 100
MAX_REFERRED = 32
_REASONS = "it was never stored, was deleted, or had to make room"
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]{4}o?")


class Responses:
    def __init__(self, service: Service, kept: ResponseStore) -> None:
        self._service = service
        self._kept = kept

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/responses", self.create, methods=["POST"]),
            Route("/v1/responses/{id}", self.get, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
        ]

    def close(self) -> None:
        self._kept.close()

    async def create(self, request: Request) -> Response:
        body, n_bytes = await self._service.read(request, ResponsesBody)
        body.check()
        turn = _Turn(self._service, self._kept, request, body)
        if body.stream:
            limit_s = self._service.settings.request_timeout_s or None
            admitted = self._service.admitted(request, n_bytes)
            return EventStream(turn.frames(), admitted, turn.error_frame, limit_s)
        with self._service.admitted(request, n_bytes):
            return json_response(await self._service.within_time(request, turn.whole()))

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") not in ("false", "0"):
            raise BadRequest("a response that is over cannot be streamed again; leave stream out")
        return json_response((await self._found(request)).response)

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        if not await asyncio.to_thread(self._kept.delete, self._namespace(request), id):
            raise _not_found(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """Those of this response itself; those before are in the responses before."""
        items = (await self._found(request)).input
        return json_response(_page(items, dict(request.query_params)))

    async def _found(self, request: Request) -> StoredResponse:
        id = request.path_params["id"]
        kept = await asyncio.to_thread(self._kept.get, self._namespace(request), id)
        if kept is None:
            raise _not_found(id)
        return kept

    def _namespace(self, request: Request) -> str:
        return self._service.namespace(request, request.query_params.get("cache_salt"))


class _Turn:
    """One response from its body to its last event."""

    def __init__(self, service: Service, kept: ResponseStore, request: Request, body: ResponsesBody) -> None:
        self._service, self._kept, self._request, self._body = service, kept, request, body
        self._namespace = service.namespace(request, body.cache_salt)
        self._id = f"resp_{secrets.token_hex(12)}"
        self._teller: ResponsesEncoder | None = None

    async def whole(self) -> Json:
        last: Json = {}
        async with contextlib.aclosing(self._events()) as events:
            async for event in events:
                last = last if isinstance(event, ModelLoading) else event
        response: Json = last["response"]
        return response

    async def frames(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._events()) as events:
            async for event in events:
                yield sse_loading(event.model, event.fraction) if isinstance(event, ModelLoading) else _frame(event)

    def error_frame(self, error: EverwarmError) -> bytes:
        if self._teller is None:
            return _frame({"type": "error", "sequence_number": 0, "code": error.code, "message": str(error)})
        return b"".join(map(_frame, self._teller.fail(error)))

    async def _events(self) -> AsyncGenerator[Json | ModelLoading, None]:
        body = self._body
        before = await self._before()
        aside, request = self._service.bodies.for_request, self._request
        items = await aside(request, partial(own_items, body, self._id.removeprefix("resp_"), self._item_finder()))
        turn = await aside(request, lambda: asked(body, [*before, *items]))
        model = body.model or self._service.pool.find(body.model).id
        self._teller = teller = ResponsesEncoder.of(
            body, skeleton(body, self._id, model, int(time.time()), turn.tools), turn.tools
        )
        async with contextlib.aclosing(stream_chat(self._service, self._request, turn.chat)) as heard:
            async for what in heard:
                match what:
                    case ModelLoading():
                        yield what
                    case Reasoning() | Text() | CallBegun() | CallArguments() | CallEnded():
                        for event in teller.say(what):
                            yield event
                    case Ended(done=done, finish=finish):
                        *rest, last = teller.end(done, finish)
                        for event in rest:
                            yield event
                        await self._keep(StoredResponse(items, last["response"]))
                        yield last
                    case _:
                        for event in teller.begin():
                            yield event

    async def _before(self) -> list[Json]:
        """The items of the conversation that is gone on with."""
        id = self._body.previous_response_id
        if id is None:
            return []
        try:
            chain = await asyncio.to_thread(self._kept.chain, self._namespace, id)
        except LinkMissing as missing:
            words = f"the previous response {id[:80]!r} is not kept here: {_REASONS}"
            if missing.id != id:
                words = f"{missing.id[:80]!r}, which {id[:80]!r} goes on from, is not kept any more"
            raise PreviousNotFound(f"{words}; send the whole conversation as input") from None
        return [item for kept in chain for item in kept.items]

    def _item_finder(self) -> Callable[[str], Json | None]:
        """Finds items that are kept: an item's id says with which response. Each response is read once."""
        known: dict[str, dict[Any, Json]] = {}  # items by id, by response

        def find(id: str) -> Json | None:
            found = _ITEM_ID.fullmatch(id)
            if found is None:
                return None
            response = f"resp_{found[1]}"
            if response not in known:
                if len(known) >= MAX_REFERRED:
                    raise BadRequest(
                        f"the input refers to items of more than {MAX_REFERRED} responses; send them whole"
                    )
                kept = self._kept.get(self._namespace, response)
                known[response] = {item.get("id"): item for item in reversed(kept.items)} if kept else {}
            return known[response].get(id)

        return find

    async def _keep(self, kept: StoredResponse) -> None:
        if self._body.is_stored:
            await asyncio.to_thread(self._kept.keep, self._namespace, kept)


def _frame(event: Json) -> bytes:
    return f"event: {event['type']}\n".encode() + sse(event)


def _not_found(id: str) -> ResponseNotFound:
    return ResponseNotFound(f"there is no response {id[:80]!r} here: {_REASONS}")


def _page(items: list[Json], wish: dict[str, str]) -> Json:
    limit, order, after = wish.get("limit", "20"), wish.get("order", "desc"), wish.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LISTED):
        raise BadRequest(f"limit is {limit[:20]!r}; give 1 to {MAX_LISTED}")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order is {order[:20]!r}; give asc or desc")
    listed = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in listed]
    if after is not None and after not in ids:
        raise BadRequest(f"after is {after[:80]!r}, which is none of the items")
    start = ids.index(after) + 1 if after is not None else 0
    page = listed[start : start + int(limit[:9])]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(listed),
    }
