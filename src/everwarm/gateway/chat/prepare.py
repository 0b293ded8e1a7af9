"""A chat body as what the engine reads: its text, its pictures, the form of its reply and what its tools' schemas say.

All the work that grows with a conversation, in one function for a thread beside the event loop. Pure but for asking the
template; knows no HTTP and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everwarm.config import Constraint
from everwarm.errors import BadRequest
from everwarm.gateway.chat.canonicalize import Canonical, canonical
from everwarm.gateway.chat.chat_template import ChatTemplate, Rendered
from everwarm.gateway.chat.content import breakpoint_in
from everwarm.gateway.chat.roles import in_known_roles
from everwarm.gateway.constraints.reply_constraint import chat_constraint
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.parsing.model_syntax import ModelSyntax
from everwarm.gateway.parsing.tool_parser import kinds_of
from everwarm.gateway.parsing.tool_reader import Kind
from everwarm.types import Json


@dataclass(frozen=True, slots=True)
class Shown:
    """Messages as the template gets them. ``parts``: the pictures, for each of which a marker stands in a text;
    ``removed``: the rules by which noise was left out."""

    messages: list[Json]
    parts: list[Json]
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedChat:
    shown: Shown
    rendered: Rendered
    form: Constraint | None
    kinds: Mapping[str, Mapping[str, Kind]]  # of the tools that may be called


def prepare_chat(
    body: ChatBody, template: ChatTemplate, notation: ModelSyntax, marker: str, *, canonicalise: bool
) -> PreparedChat:
    """``BadRequest`` where the conversation, or what is said of its reply, cannot be used."""
    shown = show(body, template, marker, canonicalise=canonicalise)
    rendered = template.conversation(shown.messages, **template_options(body))
    form = chat_constraint(body, notation, rendered.text)
    return PreparedChat(shown, rendered, form, kinds_of(body.tools or ()))


def show(body: ChatBody, template: ChatTemplate, marker: str, *, canonicalise: bool) -> Shown:
    """Without the noise that some clients put into system text, unless the server is to leave it there."""
    cleaned = canonical(body.messages) if canonicalise else Canonical(body.messages)
    shown, parts = illustrated(in_known_roles(cleaned.messages, template), marker)
    return Shown(shown, parts, cleaned.removed)


def illustrated(messages: list[Json], marker: str) -> tuple[list[Json], list[Json]]:
    """The messages with a marker as text in the place of every picture, and the pictures' parts. Whatever is neither text
    nor picture is refused: what a model would never see must not pass for seen."""
    parts: list[Json] = []
    shown = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [_as_text(part, marker, parts) for part in content]}
        shown.append(message)
    return shown, parts


def _as_text(part: Any, marker: str, pictures: list[Json]) -> Any:
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    if kind in ("image_url", "input_image"):
        pictures.append(part)
        return {**breakpoint_in(part), "type": "text", "text": marker}
    if kind not in ("text", "input_text", "refusal"):
        raise BadRequest(f"content of type {str(kind)[:40]!r} cannot be used: send text or image_url")
    return part


def template_options(body: ChatBody) -> dict[str, Any]:
    """What a template is given besides the messages."""
    kwargs = body.chat_template_kwargs or {}
    if {"messages", "tools", "add_generation_prompt"} & kwargs.keys() or not all(map(str.isidentifier, kwargs)):
        raise BadRequest("chat_template_kwargs must be names of template variables other than messages and tools")
    return {**kwargs, "tools": body.tools, "add_generation_prompt": body.add_generation_prompt is not False}
