"""Two request bodies, explained: rendered, tokenized and compared as a server would have read them one after the other.

Knows a model through its vocabulary and template only; where these come from is the caller's business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from everwarm.errors import BadRequest
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.prepare import template_options
from everwarm.gateway.explain.causes import hints
from everwarm.gateway.explain.prompt_diff import Difference, ModelFacts, Side, compare, surroundings
from everwarm.gateway.openai.schema import ChatBody, CompletionBody, read
from everwarm.prompt.prompt import Prompt
from everwarm.prompt.tokenizer import Tokenizer
from everwarm.types import Json

MAX_FILE_BYTES = 32 << 20
_PICTURES = ("image_url", "input_image")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What turns a body into tokens."""

    name: str
    tokenizer: Tokenizer
    detokenize: Callable[[list[int]], bytes]
    template: ChatTemplate | None
    bos: str
    adds_bos: bool
    model: ModelFacts


@dataclass(frozen=True, slots=True)
class ExplainedRequest:
    """A body as it was in a file."""

    body: ChatBody | CompletionBody
    raw: Json


@dataclass(frozen=True, slots=True)
class Explained:
    difference: Difference
    before: str
    known: str
    given: str
    hints: list[str]


def read_file(path: Path) -> ExplainedRequest:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror or error}; give a file with a request body") from None
    if len(data) > MAX_FILE_BYTES:
        raise BadRequest(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB; a request body has less")
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict) or not {"messages", "prompt"} & raw.keys():
        raise BadRequest(f"{path} is no request body: it has neither messages (chat) nor prompt (completion)")
    try:
        return ExplainedRequest(read(data, ChatBody) if "messages" in raw else read(data, CompletionBody), raw)
    except BadRequest as error:
        raise BadRequest(f"{path}: {error}") from None


def explained(first: ExplainedRequest, second: ExplainedRequest, source: PromptSource) -> Explained:
    """What a server that has read the first does with the second."""
    sides = _side(first.body, source), _side(second.body, source)
    same = (first.body.cache_salt or "") == (second.body.cache_salt or "")
    found = compare(*sides, source.model, same_namespace=same, use_cache=second.body.uses_cache)
    n_common = int(sides[0].prompt.common_prefix(sides[1].prompt))
    around = surroundings(sides[0].prompt, sides[1].prompt, n_common)
    parts = (around.before, around.first, around.second)
    before, known, given = (source.detokenize(tokens).decode("utf-8", "replace") for tokens in parts)
    causes = hints(first.raw, second.raw, before=before, known=known, given=given)
    return Explained(found, before, known, given, causes)


def _side(body: ChatBody | CompletionBody, source: PromptSource) -> Side:
    side = _chat_side(body, source) if isinstance(body, ChatBody) else _completion_side(body, source)
    if not len(side.prompt):
        raise BadRequest("a prompt is empty: there is nothing to compare")
    return side


def _chat_side(body: ChatBody, source: PromptSource) -> Side:
    if source.template is None:
        raise BadRequest(f"{source.name} has no chat template; compare completions, or give another model")
    rendered = source.template.conversation([_told(message) for message in body.messages], **template_options(body))
    text, tokenizer = rendered.text, source.tokenizer
    special = source.adds_bos and not (source.bos and text.startswith(source.bos))
    prompt = tokenizer.tokenize(text, add_special=special)
    counts = tokenizer.count_at(text, rendered.boundaries, add_special=special)
    stable = None
    if rendered.stable is not None:
        known = dict(zip(rendered.boundaries, counts, strict=True)).get(rendered.stable)
        stable = tokenizer.safe_count_at(text, rendered.stable, add_special=special) if known is None else known
    return Side(prompt, tuple(counts), stable)


def _completion_side(body: CompletionBody, source: PromptSource) -> Side:
    text, tokens = body.text_or_tokens()
    if text is None:
        return Side(Prompt.of_tokens(tokens or []))
    return Side(source.tokenizer.tokenize(text, add_special=True))


def _told(message: Json) -> Json:
    """The message with a name in the place of every picture: the same picture, the same name."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_named(part) for part in content]}


def _named(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") not in _PICTURES:
        return part
    digest = hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:12]
    return {"type": "text", "text": f"[picture {digest}]"}
