"""Ollama's bodies, and their translation to ``ChatBody`` and ``CompletionBody``. Pure; knows no HTTP.

Ollama's clients send no ids of calls: calls are numbered in order, so that a growing history is rendered the same way every
time.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from everwarm.errors import BadRequest
from everwarm.gateway.images.image_loader import part_of
from everwarm.gateway.openai.schema import MAX_MESSAGES, MAX_TOKENIZED_CHARS, ChatBody, CompletionBody, Name
from everwarm.types import Json

Think = bool | Literal["low", "medium", "high", "max"] | None

MAX_IMAGES = 1024
# The options that are used; others are settings of the server. Types and bounds are those of our own bodies.
OPTIONS = (
    "num_predict",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "typical_p",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)
_NUMBER = r"\d{1,18}(?:\.\d{0,9})?"
_DURATION = re.compile(rf"[+-]?(?:{_NUMBER}|(?:{_NUMBER}(?:ns|us|ms|s|m|h)){{1,8}})")

T = TypeVar("T")


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] = {}


class Call(msgspec.Struct, frozen=True):
    function: Function
    id: Name | None = None


class OllamaMessage(msgspec.Struct, frozen=True):
    """A message. ``images`` are base64; a sound may be among them."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Meta(max_length=MAX_IMAGES)] | None = None
    tool_calls: Annotated[list[Call], Meta(max_length=1024)] | None = None
    tool_name: str | None = None
    tool_call_id: Name | None = None


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and generate have in common."""

    model: Name | None = None
    stream: bool | None = None  # None: yes
    think: Think = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def ignored(self) -> list[str]:
        """Options that change nothing here."""
        return sorted(set(self.options or {}) - set(OPTIONS))

    @property
    def unloads(self) -> bool:
        """Whether the model is unloaded after the reply."""
        return self.keep_alive is not None and _is_zero(self.keep_alive)

    def common(self) -> Json:
        """The fields that both of our bodies share."""
        given = self.options or {}
        fields = {name: given[name] for name in OPTIONS if given.get(name) is not None}
        if "num_predict" in fields:
            fields["n_predict"] = fields.pop("num_predict")
        if isinstance(fields.get("seed"), int):
            fields["seed"] = max(-1, fields["seed"])
        return {"model": self.model, "stream": self.streams, **fields}


class OllamaChat(OllamaBody, frozen=True, kw_only=True):
    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def as_chat(self) -> ChatBody:
        return _chat(self, messages_of(self.messages or []), self.tools)


class OllamaGenerate(OllamaBody, frozen=True, kw_only=True):
    """One prompt. With ``raw`` the model reads it without a template; with ``suffix`` it fills in what is between them."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Annotated[list[str], Meta(max_length=MAX_IMAGES)] | None = None
    suffix: Annotated[str, Meta(max_length=MAX_TOKENIZED_CHARS)] | None = None
    template: str | None = None
    context: list[int] | None = None

    @property
    def only_loads(self) -> bool:
        return not self.prompt and not self.images and not self.suffix

    def as_chat(self) -> ChatBody:
        self._check()
        system = [OllamaMessage("system", self.system)] if self.system else []
        return _chat(self, messages_of([*system, OllamaMessage("user", self.prompt or "", images=self.images)]), None)

    def as_completion(self) -> CompletionBody:
        self._check()
        if self.images or self.system or self.format:
            raise BadRequest("system, images and format need the model's template; leave out raw: true and suffix")
        if self.suffix and len(self.prompt or "") > MAX_TOKENIZED_CHARS:
            raise BadRequest(
                f"prompt is too long to be filled in after it; give at most {MAX_TOKENIZED_CHARS} characters"
            )
        probs = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return _converted({**self.common(), **probs, "prompt": self.prompt or ""}, CompletionBody)

    def _check(self) -> None:
        """Refuses fields that would change the prompt in ways that are not supported."""
        if self.template:
            raise BadRequest("template is not supported: send raw: true and the prompt as the model shall read it")
        if self.context:
            raise BadRequest("context is not supported: send the conversation's messages to /api/chat")


class NamedBody(msgspec.Struct, frozen=True):
    """The body of a question about one model; older clients send ``name``."""

    model: Name | None = None
    name: Name | None = None


class PullBody(NamedBody, frozen=True):
    stream: bool = True
    insecure: bool = False  # the Hub is always asked as it is set up


def messages_of(given: list[OllamaMessage]) -> list[Json]:
    """OpenAI's messages. Calls and their results are matched: by id, by the tool's name, else in order."""
    messages: list[Json] = []
    waiting = _Waiting()
    n_calls = 0
    for one in given:
        message: Json = {"role": one.role, "content": _content(one)}
        if one.thinking:
            message["reasoning_content"] = one.thinking
        if one.tool_calls:
            named = [(call.id or f"call{n_calls + i:05}", call) for i, call in enumerate(one.tool_calls)]
            n_calls += len(named)
            waiting = _Waiting([(id, call.function.name) for id, call in named])
            message["tool_calls"] = [_call(id, call.function) for id, call in named]
        if one.role == "tool":
            message |= _answered(one, waiting)
        messages.append(message)
    return messages


class _Waiting:
    """Calls without a result. Each lookup is O(1) amortised, however many calls wait."""

    def __init__(self, calls: Sequence[tuple[str, str]] = ()) -> None:
        self._calls = calls
        self._is_taken = [False] * len(calls)
        self._all = deque(range(len(calls)))
        self._by_id: defaultdict[str, deque[int]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[int]] = defaultdict(deque)
        for i, (id, name) in enumerate(calls):
            self._by_id[id].append(i)
            self._by_name[name].append(i)

    def take(self, id: str | None, name: str | None) -> tuple[str, str] | None:
        """The first of that id, else of that name, else of all."""
        for calls in (self._by_id.get(id or ""), self._by_name.get(name or ""), self._all):
            while calls:
                i = calls.popleft()
                if not self._is_taken[i]:
                    self._is_taken[i] = True
                    return self._calls[i]
        return None


def _content(message: OllamaMessage) -> str | list[Json]:
    text = message.content or ""
    if not message.images:
        return text
    images: list[Json] = [part_of(image) for image in message.images]
    return [*images, {"type": "text", "text": text}] if text else images


def _call(id: str, function: Function) -> Json:
    arguments = json.dumps(function.arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _answered(message: OllamaMessage, waiting: _Waiting) -> Json:
    """The call that a result belongs to; it is removed from ``waiting``."""
    id, name = waiting.take(message.tool_call_id, message.tool_name) or (message.tool_call_id, message.tool_name)
    about = {"tool_call_id": message.tool_call_id or id, "name": message.tool_name or name}
    return {key: value for key, value in about.items() if value is not None}


def _chat(body: OllamaBody, messages: list[Json], tools: list[Json] | None) -> ChatBody:
    probs = {"logprobs": True, "top_logprobs": body.top_logprobs} if body.logprobs else {}
    about: Json = {
        **probs,
        "messages": messages,
        "tools": tools or None,
        "response_format": _response_format(body.format),
    }
    if body.think is not None:
        level = {"reasoning_effort": body.think} if isinstance(body.think, str) else {}
        about["chat_template_kwargs"] = {"enable_thinking": bool(body.think), **level}
    return _converted({**body.common(), **about}, ChatBody)


def _response_format(format: str | Json | None) -> Json | None:
    if not format:
        return None
    if format == "json":
        return {"type": "json_object"}
    if isinstance(format, str):
        raise BadRequest(f"format is {format[:40]!r}; give 'json' or a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": format}}


def _converted(fields: Json, kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body cannot be used: {error}") from None


def _is_zero(duration: float | str) -> bool:
    """``0``, ``"0"``, ``"0s"`` …; a text that is no duration is an error."""
    if not isinstance(duration, str):
        return duration == 0
    if not _DURATION.fullmatch(duration):
        raise BadRequest(f"keep_alive is {duration[:40]!r}; give seconds, or a duration such as '5m'")
    return not any(digit in "123456789" for digit in duration)
