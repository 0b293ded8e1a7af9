"""From a chat body to the prompt that an engine reads.

``prepare_chat`` is the only way to do that: the server, ``/apply-template``, token counts, prewarming of next turns and
``everwarm explain`` all call it, so all of them see the same prompt. Pure but for the template; knows no HTTP and no
engine. All work that grows with a conversation is here, so that it can run in a thread beside the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from everwarm.engine.process.messages import CutHints
from everwarm.errors import BadRequest
from everwarm.gateway.chat.canonicalize import Canonical, canonical
from everwarm.gateway.chat.chat_template import ChatTemplate, in_known_roles
from everwarm.gateway.chat.content import breakpoint_in
from everwarm.gateway.chat.reply_memory import Remembered, restored
from everwarm.gateway.openai.schema import ChatBody
from everwarm.types import Json

ImageMarker = Callable[[Json], str]  # the text that stands for an image, given its content part


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A prompt, and what it was rendered from."""

    text: str  # with a marker in the place of every image
    hints: CutHints  # in characters of the text
    add_special: bool  # whether the tokenizer adds BOS
    messages: list[Json]  # as the template got them
    options: Json  # the other arguments of the template
    images: list[Json]  # content parts, one for each marker
    removed: tuple[str, ...] = ()  # the rule by which each line of noise was left out
    n_restored: int = 0  # replies of the model that the client had written otherwise


def prepare_chat(
    body: ChatBody,
    template: ChatTemplate,
    marker: ImageMarker,
    *,
    adds_bos: bool,
    canonicalise: bool = True,
    remembered: Remembered = MappingProxyType({}),
) -> PreparedChat:
    """Renders the prompt of a chat; ``BadRequest`` if the template or the content is not usable. ``adds_bos``: the model's
    tokenizer does; ``canonicalise``: known noise at the head of system text is left out; ``remembered``: what the model
    wrote in earlier turns takes the place of what the client made of it."""
    written = restored(body.messages, remembered)
    if written.n_replies:
        try:
            found = _prepared(body, written.messages, template, marker, adds_bos=adds_bos, canonicalise=canonicalise)
            return replace(found, n_restored=written.n_replies)
        except BadRequest:
            pass  # if the template refuses only what is remembered, the client's own messages stand
    return _prepared(body, body.messages, template, marker, adds_bos=adds_bos, canonicalise=canonicalise)


def _prepared(
    body: ChatBody,
    sent: list[Json],
    template: ChatTemplate,
    marker: ImageMarker,
    *,
    adds_bos: bool,
    canonicalise: bool,
) -> PreparedChat:
    cleaned = canonical(sent) if canonicalise else Canonical(sent)
    messages, images = _with_markers(in_known_roles(cleaned.messages, template), marker)
    options = _template_options(body)
    rendered = template.conversation(messages, **options)
    add_special = adds_bos and not (template.bos and rendered.text.startswith(template.bos))
    return PreparedChat(rendered.text, rendered.hints, add_special, messages, options, images, cleaned.removed)


def _with_markers(messages: list[Json], marker: ImageMarker) -> tuple[list[Json], list[Json]]:
    """The messages with a marker as text in the place of every image, and the images' parts. Other content is refused:
    content that the model never sees must not be accepted silently."""
    images: list[Json] = []
    marked = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [_as_text(part, marker, images) for part in content]}
        marked.append(message)
    return marked, images


def _as_text(part: Any, marker: ImageMarker, images: list[Json]) -> Any:
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    if kind in ("image_url", "input_image"):
        images.append(part)
        return {**breakpoint_in(part), "type": "text", "text": marker(part)}
    if kind not in ("text", "input_text", "refusal"):
        raise BadRequest(f"content of type {str(kind)[:40]!r} cannot be used: send text or image_url")
    return part


def _template_options(body: ChatBody) -> Json:
    """The arguments of a template besides the messages."""
    kwargs = body.chat_template_kwargs or {}
    if {"messages", "tools", "add_generation_prompt"} & kwargs.keys() or not all(map(str.isidentifier, kwargs)):
        raise BadRequest("chat_template_kwargs must be names of template variables other than messages and tools")
    return {**kwargs, "tools": body.tools, "add_generation_prompt": body.add_generation_prompt is not False}
