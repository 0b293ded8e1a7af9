"""Anthropic's dialect: messages, and how many tokens they would be."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.errors import EverwarmError
from everwarm.gateway.anthropic import encode as shapes
from everwarm.gateway.anthropic.schema import CountBody, MessagesBody, read_body
from everwarm.gateway.anthropic.to_chat import chat_body
from everwarm.gateway.chat.stream import Ended, ModelLoading, stream_chat
from everwarm.gateway.http.sse import json_response, sse_named
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.parsing.output_parser import Event
from everwarm.gateway.service import Service

SESSION_HEADER = "x-claude-code-session-id"


def anthropic_routes(service: Service) -> list[Route]:
    anthropic = Anthropic(service)
    return [
        Route("/v1/messages", anthropic.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", anthropic.count_tokens, methods=["POST"]),
    ]


class Anthropic:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def messages(self, request: Request) -> Response:
        def parse(data: bytes | bytearray) -> tuple[MessagesBody, ChatBody, bool]:
            body = read_body(data, MessagesBody)
            return body, chat_body(body, _session(request, body)), body.marks_cache

        (body, chat, marks_cache), n_bytes = await self._service.bodies.read(request, parse)
        model = body.model or self._service.pool.find(None).id
        frame = shapes.NamedEvent(f"msg_{secrets.token_hex(12)}", model, marks_cache)
        if body.stream:
            frames = self._frames(request, chat, shapes.AnthropicEncoder(frame))
            return self._service.stream(
                request, frames, n_bytes, error_frame=_error_frame(request), keep_alive_frame=_PING
            )
        with self._service.admitted(request, n_bytes):
            return await self._service.within_time(request, self._whole(request, chat, frame))

    async def _whole(self, request: Request, chat: ChatBody, frame: shapes.NamedEvent) -> Response:
        """Heard like a stream, so that both have the same blocks in the same order."""
        begun, said = None, list[Event]()
        async with contextlib.aclosing(stream_chat(self._service, request, chat)) as heard:
            async for event in heard:
                match event:
                    case m.Begun():
                        begun = event
                    case Ended(done=done, finish=finish):
                        assert begun is not None, "a reply ends that never began"
                        return json_response(shapes.whole(frame, begun, said, done, finish))
                    case ModelLoading() | m.PromptRead():
                        pass
                    case _:
                        said.append(event)
        raise EverwarmError("the reply has no end")

    async def _frames(
        self, request: Request, chat: ChatBody, stream: shapes.AnthropicEncoder
    ) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(stream_chat(self._service, request, chat)) as heard:
            async for event in heard:
                match event:
                    case m.Begun():
                        told = stream.begun(event)
                    case Ended(done=done, finish=finish):
                        told = stream.ended(done, finish)
                    case ModelLoading() | m.PromptRead():
                        told = [shapes.PING]
                    case _:
                        told = stream.said(event)
                if told:
                    yield b"".join(map(sse_named, told))

    async def count_tokens(self, request: Request) -> Response:
        parse: Callable[[bytes | bytearray], ChatBody] = lambda data: chat_body(read_body(data, CountBody))  # noqa: E731
        chat, n_bytes = await self._service.bodies.read(request, parse)
        with self._service.admitted(request, n_bytes):
            return await self._service.within_time(request, self._counted(request, chat))

    async def _counted(self, request: Request, chat: ChatBody) -> Response:
        async with self._service.borrowed(chat.model) as served:
            (submit,) = (await self._service.chat_submits(request, chat, served)).submits
            pictures = tuple(msgspec.structs.replace(each, rgb=None) for each in submit.get("pictures", ()))
            fields = {"text": submit["text"], "add_special": submit["add_special"], "pictures": pictures}
            fields["namespace"] = submit["namespace"]
            n_tokens = await served.supervisor.ask(m.Count, marker=submit.get("marker", ""), **fields)
        return json_response({"input_tokens": n_tokens})


_PING = sse_named(shapes.PING)


def _session(request: Request, body: MessagesBody) -> str | None:
    return request.headers.get(SESSION_HEADER) or (body.metadata.user_id if body.metadata else None)


def _error_frame(request: Request) -> Callable[[EverwarmError], bytes]:
    return lambda error: sse_named(shapes.error_body(error, request.state.request_id))
