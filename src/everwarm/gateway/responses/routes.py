"""Routes of ``/v1/responses``: create, whole, streamed or in the background, also as the continuation of a stored response;
get, cancel, delete."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest, EverwarmError, NotFound
from everwarm.gateway.access.auth import namespace_of
from everwarm.gateway.http.sse import json_response, sse_named, within
from everwarm.gateway.openai.encode import figures, live_timings, progress
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.parsing.output_parser import message_of
from everwarm.gateway.responses.background_responses import BackgroundResponses
from everwarm.gateway.responses.encode import ResponsesEncoder, skeleton, usage
from everwarm.gateway.responses.schema import ResponsesBody, chat_body, compacting, offered, own_items, sealed
from everwarm.gateway.serving.generate import ReplyEvent
from everwarm.gateway.serving.replies import Dialect, Replies
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.gateway.serving.request_preparer import RequestPreparer
from everwarm.gateway.stores import WHY_MISSING, ResponseStore, StoredResponse, missing_link, page_of
from everwarm.router.pool import Pool
from everwarm.types import Json

log = logging.getLogger("everwarm.gateway")

PREFIX = "resp_"  # of ids
MAX_REFERRED = 32
MAX_SUMMARY_TOKENS = 2048
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]{4}o?")


class Responses:
    def __init__(
        self,
        pool: Pool,
        gate: RequestGate,
        replies: Replies,
        preparer: RequestPreparer,
        store: ResponseStore,
        background: BackgroundResponses,
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._replies = replies
        self._preparer = preparer
        self._store = store
        self._background = background

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.input_tokens, methods=["POST"]),
            Route("/v1/responses/compact", self.compact, methods=["POST"]),
            Route("/v1/responses/{id}", self.get, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, ResponsesBody)
        turn = self._turn(request, body)
        if body.background:
            return await self._begin(request, n_bytes, turn)
        if body.stream:
            return self._replies.stream(request, n_bytes, turn.chat_body, turn)
        with self._gate.admitted(request, n_bytes):
            return json_response(await self._gate.within_time(request, self._whole(request, turn)))

    async def _begin(self, request: Request, n_bytes: int, turn: ResponsesTurn) -> Response:
        """A bad request fails at once; a later failure is stored in the response."""
        with contextlib.ExitStack() as place:
            place.enter_context(self._gate.admitted(request, n_bytes))
            chat = await self._gate.within_time(request, turn.chat_body())
            self._pool.find(chat.model)
            self._background.require_room(turn.namespace)
            work, when_over = self._outcome(request, turn, chat), place.pop_all().close
            self._background.start(turn.namespace, turn.id, turn.shown, work, turn.keep, when_over)
        return json_response(turn.shown("queued"))

    async def _outcome(self, request: Request, turn: ResponsesTurn, chat: ChatBody) -> Json:
        """The response when it is over, also when it failed."""
        try:
            async with within(self._gate.timeout_s):
                await self._collected(request, turn, chat)
            return turn.last_response
        except EverwarmError as error:
            return turn.failed(error)
        except Exception:
            log.exception("a response in the background failed")
            return turn.failed(EverwarmError("internal error"))

    async def _whole(self, request: Request, turn: ResponsesTurn) -> Json:
        await self._collected(request, turn, await turn.chat_body())
        return await turn.response()

    async def _collected(self, request: Request, turn: ResponsesTurn, chat: ChatBody) -> None:
        (choice,) = await self._replies.collect(request, chat)
        for piece in choice.pieces:
            turn.encoder.encode(piece)
        turn.end(choice.done, choice.finish)

    async def input_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of such a request has."""
        body, n_bytes = await self._gate.read(request, ResponsesBody)
        turn = self._turn(request, body)

        async def counted() -> int:
            chat = await turn.chat_body()
            with self._pool.lease(chat.model) as lease:
                return await self._preparer.count(request, chat, await lease.ready())

        with self._gate.admitted(request, n_bytes):
            n_tokens = await self._gate.within_time(request, counted())
        return json_response({"object": "response.input_tokens", "input_tokens": n_tokens})

    async def compact(self, request: Request) -> Response:
        """The conversation in short: the user's messages and a summary that the model writes. Nothing is stored."""
        body, n_bytes = await self._gate.read(request, ResponsesBody)
        turn = self._turn(request, body)

        async def compacted() -> Json:
            (choice,) = await self._replies.collect(request, compacting(await turn.chat_body(), MAX_SUMMARY_TOKENS))
            return turn.compaction(message_of(choice.pieces)["content"] or "", choice.done)

        with self._gate.admitted(request, n_bytes):
            return json_response(await self._gate.within_time(request, compacted()))

    def _turn(self, request: Request, body: ResponsesBody) -> ResponsesTurn:
        body.check()
        return ResponsesTurn(self._pool, self._gate, self._store, request, body)

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") not in ("false", "0"):
            raise BadRequest("a stored response cannot be streamed again; leave stream out")
        return json_response(await self._response(request))

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        namespace = self._namespace(request)
        await self._background.cancel(namespace, id)
        was_unstored = self._background.forget(namespace, id)
        was_stored = id.startswith(PREFIX) and await asyncio.to_thread(self._store.delete, namespace, id)
        if not (was_stored or was_unstored):
            raise _not_found(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancelling twice is the same as once."""
        await self._background.cancel(self._namespace(request), request.path_params["id"])
        response = await self._response(request)
        if response.get("status") != "cancelled":
            id = request.path_params["id"]
            raise BadRequest(f"the response {id} is over: only one that runs in the background can be cancelled")
        return json_response(response)

    async def input_items(self, request: Request) -> Response:
        """The input items of this response only; earlier items belong to the responses before it."""
        items = (await self._found(request)).input
        return json_response(page_of(items, request.query_params))

    async def _response(self, request: Request) -> Json:
        """As it is now: it may still run."""
        running = self._background.find(self._namespace(request), request.path_params["id"])
        return (await self._found(request)).response if running is None else running

    async def _found(self, request: Request) -> StoredResponse:
        id = request.path_params["id"]
        kept = await asyncio.to_thread(self._store.get, self._namespace(request), id) if id.startswith(PREFIX) else None
        if kept is None:
            raise _not_found(id)
        return kept

    def _namespace(self, request: Request) -> str:
        return namespace_of(request, request.query_params.get("cache_salt"))


class ResponsesTurn(Dialect):
    """One response from its body to its last event, which carries the response and is sent once that is stored."""

    def __init__(
        self, pool: Pool, gate: RequestGate, store: ResponseStore, request: Request, body: ResponsesBody
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._store = store
        self._request = request
        self._body = body
        self.namespace = namespace_of(request, body.cache_salt)
        self.id = f"{PREFIX}{secrets.token_hex(12)}"
        self._items: list[Json] = []  # of this request's input
        self._all_items: list[Json] = []  # of the conversation
        self._encoder: ResponsesEncoder | None = None
        self._last: Json = {}
        self._live = live_timings(body, time.monotonic)

    def compaction(self, summary: str, done: m.Done) -> Json:
        """The answer to a request to compact this conversation."""
        tail = self.id.removeprefix(PREFIX)
        kept = [item for item in self._all_items if item["type"] == "message" and item.get("role") == "user"]
        item = {"type": "compaction", "id": f"cmp_{tail}", "encrypted_content": sealed(summary)}
        about = {"id": self.id, "object": "response.compaction", "created_at": int(time.time())}
        return {**about, "output": [*kept, item], "usage": usage(done)}

    @property
    def encoder(self) -> ResponsesEncoder:
        assert self._encoder is not None, "the chat body comes first"
        return self._encoder

    async def chat_body(self) -> ChatBody:
        """The whole conversation as a chat. What it continues is read from the store."""
        body, tail = self._body, self.id.removeprefix(PREFIX)
        before = await self._before()
        aside = self._gate.bodies.for_request
        self._items = items = await aside(self._request, partial(own_items, body, tail, self._item_finder()))
        self._all_items = [*before, *items]
        tools = await aside(self._request, partial(offered, body.tools))
        chat = await aside(self._request, lambda: chat_body(body, tools, self._all_items))
        model = body.model or self._pool.find(body.model).id
        response = skeleton(body, self.id, model, int(time.time()), tools)
        self._encoder = ResponsesEncoder.of(body, response, tools)
        return chat

    def encode(self, event: ReplyEvent) -> list[bytes]:
        events = [each for piece in event.pieces for each in self.encoder.encode(piece)]
        match event.message:
            case m.Begun():
                events += self.encoder.begin()
            case m.PromptRead() as read:
                events += self.encoder.progress(progress(read))
            case m.Done() as done:
                events += self.end(done, event.finish)
        now = self._live(event)
        return [_frame({**each, **now}) for each in events]

    def end(self, done: m.Done, finish: str) -> list[Json]:
        """All final events but the last, which is sent by ``finish``."""
        *events, last = self.encoder.end(done, finish)
        self._last = {**last, "timings": figures(done)} if self._body.timings_per_token else last
        return events

    async def finish(self) -> list[bytes]:
        await self.response()
        return [_frame(self._last)]

    async def response(self) -> Json:
        """The complete response, stored unless the client sent ``store: false``."""
        if self._body.is_stored:
            await self.keep(self.last_response)
        return self.last_response

    @property
    def last_response(self) -> Json:
        """The response in the last event."""
        response: Json = self._last["response"]
        return response

    async def keep(self, response: Json) -> bool:
        """Whether it is stored."""
        return await asyncio.to_thread(self._store.keep, self.namespace, StoredResponse(self._items, response))

    def shown(self, status: str) -> Json:
        """The response before it is over."""
        return {**self.encoder.response, "status": status}

    def failed(self, error: EverwarmError) -> Json:
        response: Json = self.encoder.fail(error)[-1]["response"]
        return response

    def error(self, error: EverwarmError, body: Json) -> bytes:  # noqa: ARG002 - this dialect has its own errors
        if self._encoder is None:
            return _frame({"type": "error", "sequence_number": 0, "code": error.code, "message": str(error)})
        return b"".join(map(_frame, self._encoder.fail(error)))

    async def _before(self) -> list[Json]:
        """The items of the conversation that this request continues."""
        id = self._body.previous_response_id
        if id is None:
            return []
        if not id.startswith(PREFIX):
            raise missing_link(id, id)
        chain = await asyncio.to_thread(self._store.chain, self.namespace, id)
        return [item for kept in chain for item in kept.items]

    def _item_finder(self) -> Callable[[str], Json | None]:
        """Finds stored items: an item's id contains the id of its response. Each response is read once."""
        known: dict[str, dict[Any, Json]] = {}  # items by id, by response

        def find(id: str) -> Json | None:
            found = _ITEM_ID.fullmatch(id)
            if found is None:
                return None
            response = f"{PREFIX}{found[1]}"
            if response not in known:
                if len(known) >= MAX_REFERRED:
                    raise BadRequest(
                        f"the input refers to items of more than {MAX_REFERRED} responses; send them whole"
                    )
                kept = self._store.get(self.namespace, response)
                known[response] = {item.get("id"): item for item in reversed(kept.items)} if kept else {}
            return known[response].get(id)

        return find


def _frame(event: Json) -> bytes:
    return sse_named(event["type"], event)


def _not_found(id: str) -> NotFound:
    return NotFound(f"there is no response {id[:80]!r} here: {WHY_MISSING}", "response_not_found")
