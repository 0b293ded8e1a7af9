"""OpenAI's routes: chat completions and completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm import __version__
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.openai.encode import ChatEncoder, CompletionEncoder, TextEncoder
from everwarm.gateway.openai.schema import ChatBody, CompletionBody
from everwarm.gateway.openai.stored_chats import StoredChats
from everwarm.gateway.serving.live_timings import live_timings
from everwarm.gateway.serving.replies import GenerationBody, Replies
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.router.pool import Pool
from everwarm.types import Json


class OpenAI:
    def __init__(self, pool: Pool, gate: RequestGate, replies: Replies, chats: StoredChats) -> None:
        self._pool = pool
        self._gate = gate
        self._replies = replies
        self._chats = chats

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    async def chat(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, ChatBody)
        header = self._header(ChatEncoder.id_prefix, body)
        with_probs = body.n_probs is not None
        keep = partial(self._chats.keep, request, body) if body.store else None
        more = (self._fingerprint(body), body, live_timings(body))
        encoder = ChatEncoder(header, *more, with_probs=with_probs, keep=keep)
        return await self._answer(request, body, n_bytes, encoder, keep)

    async def completions(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, CompletionBody)
        header = self._header(TextEncoder.id_prefix, body)
        encoder = TextEncoder(
            header, self._fingerprint(body), body, live_timings(body), with_probs=body.wanted_probs is not None
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
