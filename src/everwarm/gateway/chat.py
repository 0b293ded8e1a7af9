"""Chat messages to prompt text with a model's own Jinja template, and where that text may be cut.

The template comes with the model file, so it is untrusted: it runs in Jinja's sandbox on a copy of the messages. Knows
text; knows no tokens.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from everwarm.errors import BadRequest

Message = Mapping[str, Any]

_MAX_REMEMBERED = 4096
_PROBE = "a8f3c1"
_N_RENDERED = 8
_N_MARK, _N_TAIL = 8, 48  # characters by which the end of a message is found in a text, and known again
_NEXT_TURN = ({"role": "assistant", "content": "a"}, {"role": "user", "content": "b"})


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text. ``boundaries`` are ends of messages and ``stable`` the end of what the next turn will share, in
    characters."""

    text: str
    boundaries: tuple[int, ...]
    stable: int | None


@dataclass(frozen=True, slots=True)
class _End:
    """Where a message ends in some rendering, and what stands before that: it may end elsewhere in another one."""

    at: int
    tail: str

    def is_in(self, text: str) -> bool:
        return self.at > 0 and text.startswith(self.tail, self.at - len(self.tail))


class ChatTemplate:
    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self.source = source
        self._globals = {"bos_token": bos, "eos_token": eos}
        self._ends: OrderedDict[str, list[_End]] = OrderedDict()
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise BadRequest(f"the chat template cannot be read: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text for these messages; what the template raises is the caller's mistake."""
        try:
            values = {
                **self._globals,
                **kwargs,
                "messages": [self._as_wanted(message) for message in copy.deepcopy(list(messages))],
                "tools": copy.deepcopy(tools),
            }
            return self._template.render(values, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # noqa: BLE001 - whatever a template does wrong, it is not the server's accident
            raise BadRequest(f"the chat template refused the messages: {error or type(error).__name__}") from None

    def _as_wanted(self, message: Message) -> Message:
        """Content as the template takes it: most want one text and would print a list of parts as it is."""
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(calls, list) and self._wants_objects:
            message = {**message, "tool_calls": [_with_object(call) for call in calls]}
        if isinstance(content, list) and not self._takes_parts:
            return {**message, "content": "".join(map(_text_of, content))}
        if isinstance(content, str) and self._wants_parts:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    @functools.cached_property
    def _takes_parts(self) -> bool:
        return self._shows([{"type": "text", "text": _PROBE}])

    @functools.cached_property
    def _wants_objects(self) -> bool:
        """Whether a call's arguments as clients send them, JSON as text, would come out as text of text."""
        function = {"name": "f", "arguments": f'{{"{_PROBE}": 1}}'}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        ]
        try:
            said = self._template.render({**self._globals, "messages": messages})
        except Exception:  # noqa: BLE001 - it may have tried to look into a text
            return True
        return f'"{_PROBE}"' not in said.replace(f'\\"{_PROBE}\\"', "")

    @functools.cached_property
    def _wants_parts(self) -> bool:
        return self._takes_parts and not self._shows(_PROBE)

    def _shows(self, content: Any) -> bool:
        """Whether content of that form comes out as its text alone."""
        try:
            said = self._template.render({**self._globals, "messages": [{"role": "user", "content": content}]})
        except Exception:  # noqa: BLE001 - whatever it does, this is not its way
            return False
        return _PROBE in said and "'text'" not in said and '"text"' not in said

    def conversation(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> Rendered:
        """The prompt that asks for the next reply, with its cut hints."""
        text = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        ends = self._message_ends(text, messages, tools, kwargs)
        n_shared = self._shared_with_next_turn(text, messages, tools, kwargs)
        stable = max((end for end in ends if end <= n_shared), default=n_shared)
        return Rendered(text, ends, stable or None)

    def _message_ends(
        self, text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, kwargs: dict[str, Any]
    ) -> tuple[int, ...]:
        """Where messages end, found by rendering the conversation up to them. Only new ones near the end are rendered:
        the others are remembered, or were never seen and are not worth reading the whole history again and again."""
        ends: set[int] = set()
        key = json.dumps([tools, kwargs], sort_keys=True, default=str)
        for i, message in enumerate(messages):
            key = f"{hash((key, json.dumps(message, sort_keys=True, default=str))):x}"
            known = self._ends.get(key, [])
            is_near = i == 0 or i >= len(messages) - _N_RENDERED
            while is_near and len(known) < 2 and not any(end.is_in(text) for end in known):
                known = self._remember(key, [*known, self._end_of(messages[: i + 1], known, tools, kwargs)])
            ends.update(end.at for end in known if end.is_in(text))
        return tuple(sorted(ends))

    def _end_of(
        self,
        messages: Sequence[Message],
        known: Sequence[_End],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> _End:
        """Where the last message ends when it is the last one; where that is known, when a question follows: many
        templates show thinking only until then."""
        following = [{"role": "user", "content": _PROBE}] if known else []
        try:
            text = self.render([*messages, *following], tools=tools, add_generation_prompt=False, **kwargs)
        except BadRequest:  # some templates want a user message, or strict alternation
            return _End(0, "")
        mark = known[0].tail[-_N_MARK:] if known else ""
        before, found, _ = text.rpartition(_PROBE)[0].rpartition(mark) if mark else ("", "", "")
        at = len(before + found) if known else len(text)
        return _End(at, text[max(0, at - _N_TAIL) : at])

    def _remember(self, key: str, ends: list[_End]) -> list[_End]:
        self._ends[key] = ends
        while len(self._ends) > _MAX_REMEMBERED:
            self._ends.popitem(last=False)
        return ends

    def _shared_with_next_turn(
        self, text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, kwargs: dict[str, Any]
    ) -> int:
        """How far the next turn will agree with this text: here thinking gets stripped and generation prompts go."""
        try:
            following = self.render([*messages, *_NEXT_TURN], tools=tools, add_generation_prompt=False, **kwargs)
        except BadRequest:
            return 0
        return next((i for i, (a, b) in enumerate(zip(text, following, strict=False)) if a != b), len(text))


def _text_of(part: Any) -> str:
    text = part.get("text", part.get("refusal", "")) if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _with_object(call: Any) -> Any:
    """A tool call whose arguments are an object; what is no JSON stays as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _environment() -> jinja2.sandbox.SandboxedEnvironment:
    env = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what a model writes; for a prompt its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way of declaring tags

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """Templates want plain JSON, not JSON escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
