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
from everwarm.gateway.chat.chat_template import ChatTemplate, Continues, in_known_roles
from everwarm.gateway.chat.content import MARKER_PART, breakpoint_in
from everwarm.gateway.chat.reply_memory import Remembered, restored
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.rewrite.rules import Rewritten, Rules, canonical, rewritten
from everwarm.types import Json

ImageMarker = Callable[[Json], str]  # the text that stands for an image or a sound, given its content part


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A prompt, and what it was rendered from."""

    text: str  # with a marker in the place of every image and sound
    hints: CutHints  # in characters of the text
    add_special: bool  # whether the tokenizer adds BOS
    messages: list[Json]  # as the template got them
    options: Json  # the other arguments of the template
    images: list[Json]  # content parts, one for each marker
    bos: str = ""  # what of the text the tokenizer would add itself
    removed: tuple[str, ...] = ()  # the rule by which each line of noise was left out
    n_recalled: int = 0  # replies of the model that the client had written otherwise
    rewritten: tuple[str, ...] = ()  # rules that changed system text

    @property
    def continues(self) -> Continues:
        return self.options["continues"]  # type: ignore[no-any-return]


def prepare_chat(
    body: ChatBody,
    template: ChatTemplate,
    marker: ImageMarker,
    *,
    adds_bos: bool,
    canonicalise: bool = True,
    remembered: Remembered = MappingProxyType({}),
    rules: Rules = (),
) -> PreparedChat:
    """Renders the prompt of a chat; ``BadRequest`` if the template or the content is not usable. ``adds_bos``: the model's
    tokenizer does; ``canonicalise``: known noise at the head of system text is left out; ``remembered``: what the model
    wrote in earlier turns takes the place of what the client made of it; ``rules`` change lines of system text."""
    _require_sound(body.messages)
    changed = rewritten(body.messages, rules)
    written = restored(changed.messages, remembered)
    options: Json = {"adds_bos": adds_bos, "canonicalise": canonicalise, "rewritten_by": changed.rules}
    n_recalled = sum(one is not other and one != other for one, other in zip(written, changed.messages, strict=True))
    if n_recalled:
        try:
            return replace(_prepared(body, written, template, marker, **options), n_recalled=n_recalled)
        except BadRequest:
            pass  # if the template refuses only what is remembered, the client's own messages stand
    return _prepared(body, changed.messages, template, marker, **options)


def _prepared(
    body: ChatBody,
    sent: list[Json],
    template: ChatTemplate,
    marker: ImageMarker,
    *,
    adds_bos: bool,
    canonicalise: bool,
    rewritten_by: tuple[str, ...],
) -> PreparedChat:
    cleaned = canonical(sent) if canonicalise else Rewritten(sent)
    messages, images = _with_markers(in_known_roles(cleaned.messages, template), marker)
    options = {**_template_options(body), "continues": continued_part(body)}
    rendered = template.conversation(messages, **options)
    bos = template.bos if adds_bos and rendered.text.startswith(template.bos) else ""
    add_special = adds_bos and not bos
    made = PreparedChat(rendered.text, rendered.hints, add_special, messages, options, images, bos, cleaned.rules)
    return replace(made, rewritten=rewritten_by)


def _require_sound(messages: list[Json]) -> None:
    """Refuses messages that no template could show."""
    for i, message in enumerate(messages):
        role = message.get("role")
        content = message.get("content")
        if not isinstance(role, str):
            raise BadRequest(f"message {i} has no role: give system, user, assistant or tool")
        if not isinstance(content, str | list | None):
            raise BadRequest(f"the content of message {i} is a {type(content).__name__}: give text or a list of parts")
        is_reply = role == "assistant" and ("tool_calls" in message or "reasoning_content" in message)
        if "content" not in message and not is_reply:
            raise BadRequest(f"message {i} has no content")


def continued_part(body: ChatBody) -> Continues:
    """Which part of the last message the reply goes on with; None: the reply is a message of its own."""
    asked = body.continue_final_message
    last = body.messages[-1]
    if asked and body.add_generation_prompt is not False:
        raise BadRequest("add_generation_prompt and continue_final_message cannot both be true")
    if last.get("role") != "assistant":
        return None
    if not asked and len(body.messages) > 1 and body.messages[-2].get("role") == "assistant":
        raise BadRequest("the last two messages are the assistant's: only one reply can be continued; join them")
    if last.get("tool_calls"):
        raise BadRequest("the last message has tool calls and cannot be continued: send their results")
    if asked == "reasoning_content" or (
        last.get("reasoning_content") and not last.get("content") and asked != "content"
    ):
        return "reasoning"
    return "content" if last.get("content") else None


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
    if kind in ("image_url", "input_image", "input_audio"):
        images.append(part)
        return {**breakpoint_in(part), "type": MARKER_PART, "text": marker(part)}
    if kind not in ("text", "input_text", "refusal"):
        raise BadRequest(f"content of type {str(kind)[:40]!r} cannot be used: send text, image_url or input_audio")
    return part


def _template_options(body: ChatBody) -> Json:
    """The arguments of a template besides the messages."""
    kwargs = body.chat_template_kwargs or {}
    if {"messages", "tools", "add_generation_prompt"} & kwargs.keys() or not all(map(str.isidentifier, kwargs)):
        raise BadRequest("chat_template_kwargs must be names of template variables other than messages and tools")
    kwargs = {**_kept_thinking(kwargs), **kwargs, **_effort(body.reasoning_effort)}
    return {**kwargs, "tools": body.tools, "add_generation_prompt": body.add_generation_prompt is not False}


def _kept_thinking(kwargs: Json) -> Json:
    """One name for what templates call by four: whether the thinking of earlier turns stays in the prompt."""
    keeps = kwargs.get("preserve_reasoning")
    if not isinstance(keeps, bool):
        return {}
    drops = dict.fromkeys(("clear_thinking", "truncate_history_thinking", "drop_thinking"), not keeps)
    return {"preserve_thinking": keeps, **drops}


def _effort(level: str | None) -> Json:
    if level == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": level, "reasoning_strength": level} if level else {}
