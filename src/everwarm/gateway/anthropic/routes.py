"""Anthropic's routes: messages, and counting their tokens."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.gateway.anthropic.encode import AnthropicEncoder
from everwarm.gateway.anthropic.schema import CountBody, MessagesBody, chat_body, read_body
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.serving.replies import Replies
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.gateway.serving.request_preparer import RequestPreparer
from everwarm.router.pool import Pool

SESSION_HEADER = "x-claude-code-session-id"


class Anthropic:
    def __init__(self, pool: Pool, gate: RequestGate, replies: Replies, preparer: RequestPreparer) -> None:
        self._pool = pool
        self._gate = gate
        self._replies = replies
        self._preparer = preparer

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        def parse(data: bytes | bytearray) -> tuple[MessagesBody, ChatBody, bool]:
            body = read_body(data, MessagesBody)
            return body, chat_body(body, _session(request, body)), body.marks_cache

        (body, chat, marks_cache), n_bytes = await self._gate.bodies.read(
            request, self._gate.noting(request, MessagesBody, parse)
        )
        model = body.model or self._pool.find(None).id
        encoder = AnthropicEncoder(f"msg_{secrets.token_hex(12)}", model, marks_cache=marks_cache)
        if body.stream:
            return self._replies.stream(request, n_bytes, chat, encoder)
        with self._gate.admitted(request, n_bytes):
            (choice,) = await self._gate.within_time(request, self._replies.collect(request, chat))
        return json_response(encoder.whole(choice))

    async def count_tokens(self, request: Request) -> Response:
        parse: Callable[[bytes | bytearray], ChatBody] = lambda data: chat_body(read_body(data, CountBody))  # noqa: E731
        chat, n_bytes = await self._gate.bodies.read(request, self._gate.noting(request, CountBody, parse))
        with self._gate.admitted(request, n_bytes):
            return await self._gate.within_time(request, self._counted(request, chat))

    async def _counted(self, request: Request, chat: ChatBody) -> Response:
        with self._pool.lease(chat.model) as lease:
            served = await lease.ready()
            n_tokens = await self._preparer.count(request, chat, served)
        return json_response({"input_tokens": n_tokens})


def _session(request: Request, body: MessagesBody) -> str | None:
    return request.headers.get(SESSION_HEADER) or (body.metadata.user_id if body.metadata else None)
