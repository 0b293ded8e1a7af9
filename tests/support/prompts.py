"""The tokens of the prompt that a request body stands for, in each dialect, by the server's own template."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from everwarm.gateway.anthropic.schema import CountBody, chat_body, read_body
from everwarm.gateway.responses import schema as responses
from everwarm.gateway.responses.schema import ResponsesBody, own_items
from support.server import Server


def chat_tokens(server: Server, body: dict[str, Any]) -> list[int]:
    return _tokens(server, body["messages"], tools=body.get("tools"))


def anthropic_tokens(server: Server, body: dict[str, Any]) -> list[int]:
    chat = chat_body(read_body(json.dumps(body).encode(), CountBody))
    return _tokens(server, chat.messages, tools=chat.tools, chat_template_kwargs=chat.chat_template_kwargs)


def responses_tokens(server: Server, body: dict[str, Any], before: list[Any]) -> list[int]:
    """``before``: the items that earlier responses have left."""
    typed = msgspec.convert(body, ResponsesBody)
    chat = responses.chat_body(typed, responses.offered(typed.tools), [*before, *own_items(typed, "0", lambda _: None)])
    return _tokens(server, chat.messages, tools=chat.tools, chat_template_kwargs=chat.chat_template_kwargs or {})


def _tokens(server: Server, messages: list[Any], **more: Any) -> list[int]:
    text = server.rendered(messages, **more)
    return [int(token) for token in server.ask("/tokenize", {"content": text})["tokens"]]


def n_common(a: list[int], b: list[int]) -> int:
    """How many tokens two prompts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def n_new(server: Server, before: dict[str, Any], body: dict[str, Any]) -> int:
    """Tokens of a chat that the one before did not have."""
    tokens = chat_tokens(server, body)
    return len(tokens) - n_common(tokens, chat_tokens(server, before))
