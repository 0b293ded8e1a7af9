"""One chat reply as it comes, or whole: what every dialect says in words of its own. Knows no wire shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from everwarm.engine.process import messages as m
from everwarm.gateway.chat.generate import collect
from everwarm.gateway.http.sse import LOADING_S
from everwarm.gateway.openai.encode import chat_finish_reason
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.parsing import output_parser
from everwarm.gateway.service import Service


@dataclass(frozen=True, slots=True)
class ModelLoading:
    """The model is not in memory yet."""

    model: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The last thing heard. ``finish``: stop, length or tool_calls."""

    done: m.Done
    finish: str


Heard = ModelLoading | m.Begun | m.PromptRead | output_parser.Event | Ended


@dataclass(frozen=True, slots=True)
class Whole:
    """A reply that is all there. ``message`` is the assistant's, in OpenAI's words."""

    message: dict[str, Any]
    done: m.Done
    finish: str


async def stream_chat(service: Service, request: Request, body: ChatBody) -> AsyncGenerator[Heard, None]:
    """The first choice's reply, while it is written."""
    with service.pool.lease(body.model) as lease:
        async for fraction in lease.waiting(LOADING_S):
            yield ModelLoading(lease.served.id, fraction)
        asked = await service.chat_submits(request, body, lease.served)
        reader = asked.reader()
        async for event in service.run(lease.served, asked.first):
            match event.message:
                case m.TextPiece() as piece:
                    for said in reader.read(piece.text):
                        yield said
                case m.Done() as done:
                    for said in (*reader.read(done.text), *reader.rest()):
                        yield said
                    yield Ended(done, chat_finish_reason(done, reader))
                case other:
                    yield other


async def collect_chat(service: Service, request: Request, body: ChatBody) -> Whole:
    """The first choice's reply, when it is written."""
    async with service.borrowed(body.model) as served:
        asked = await service.chat_submits(request, body, served)
        (choice,) = await collect(service.run(served, asked.first), 1)
    reader = asked.reader()
    message = reader.message(choice.text)
    return Whole(message, choice.done, chat_finish_reason(choice.done, reader))
