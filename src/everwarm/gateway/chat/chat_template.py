"""Renders chat messages to prompt text with a model's own template, and finds where that text should be cut.

Hints are a function of the template, its arguments and, if the template uses it, the time. Knows text; knows no tokens.

Clients also use ``developer`` for ``system`` and send several such messages, also in the middle of a conversation. Most
templates take one, at the beginning; some drop the others silently, some refuse them. A system message that a template
would not show is moved: at the beginning it is merged with the first one, later on it becomes a user message.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from everwarm.engine.process.messages import CutHints
from everwarm.errors import BadRequest
from everwarm.gateway.chat import stable_points
from everwarm.gateway.chat.content import Message, tools_without_breakpoints, without_breakpoints
from everwarm.gateway.chat.jinja_template import Given, Layout, Template
from everwarm.state.policy import MAX_BREAKPOINTS
from everwarm.types import Json

Tools = Sequence[Mapping[str, Any]]

_N_ENDS = 4  # messages whose ends are searched for if the layout does not give them


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text and its cut hints, in characters."""

    text: str
    hints: CutHints


class ChatTemplate:
    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self.source = source
        self.bos = bos
        self._template = Template(source, bos=bos, eos=eos)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text for these messages; what the template raises becomes ``BadRequest``."""
        given = Given(tools_without_breakpoints(tools), kwargs)
        wanted = self._template.adapted(list(map(without_breakpoints, messages)))
        return self._template.lay_out(wanted, given, add_generation_prompt=add_generation_prompt).text

    def conversation(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> Rendered:
        """The prompt that asks for the next reply, with its cut hints."""
        given = Given(tools_without_breakpoints(tools), kwargs)
        plain = list(map(without_breakpoints, messages))
        wanted = self._template.adapted(plain)
        layout = self._template.lay_out(wanted, given, add_generation_prompt=add_generation_prompt)
        ends = self._ends(layout, wanted, given)
        points = stable_points.stable_points(
            layout, wanted, self._next_text(given), end=ends[-1] if ends else len(layout.text), with_tools=bool(tools)
        )
        marked = stable_points.in_messages(
            layout.text,
            messages,
            plain,
            lambda others: self._text(self._template.adapted(others), given, add_generation_prompt),
        ) | stable_points.in_tools(
            layout.text,
            tools,
            given.tools,
            lambda others: self._text(wanted, given.with_tools(others), add_generation_prompt),
        )
        last = tuple(sorted(marked))[-MAX_BREAKPOINTS:]
        return Rendered(layout.text, CutHints(ends, points[0] if points else None, points, last))

    def after_reply(
        self,
        messages: Sequence[Message],
        reply: Message,
        /,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,  # noqa: ARG002 - the same options as for the prompt itself
        **kwargs: Any,
    ) -> str | None:
        """The text that the next request is sure to begin with, after this reply.

        It holds whether the client sends thinking back or leaves it out, for any next question, and after tool calls for
        any results, as long as only results follow. None: the template refuses such messages, or nothing is shared.
        """
        given = Given(tools_without_breakpoints(tools), kwargs)
        plain = list(map(without_breakpoints, messages))
        return stable_points.after_reply(plain, without_breakpoints(reply), self._next_text(given))

    def _next_text(self, given: Given) -> stable_points.Render:
        later = given.later
        return lambda messages: self._text(self._template.adapted(messages), later, True)

    def _text(self, messages: Sequence[Message], given: Given, add_generation_prompt: bool) -> str | None:
        try:
            return self._template.lay_out(messages, given, add_generation_prompt=add_generation_prompt).text
        except BadRequest:  # some want a user's message, strict alternation, or no tools
            return None

    def _ends(self, layout: Layout, messages: Sequence[Message], given: Given) -> tuple[int, ...]:
        """Where messages end. If the layout does not give the ends, prefixes of the conversation are rendered."""
        if layout.end is not None:
            return tuple(sorted({at for at in (*(start for _, start in layout.starts), layout.end) if at > 0}))
        found = set()
        for n in {1, *range(max(1, len(messages) - _N_ENDS + 1), len(messages) + 1)}:
            text = self._text(messages[:n], given, False)
            if text is not None and layout.text.startswith(text):
                found.add(len(text))
        return tuple(sorted(found - {0}))


_PROBE = "c51e7d"
_INSTRUCTING = ("system", "developer")
_ROLES = (*_INSTRUCTING, "user", "assistant", "tool", "function")
_MAX_ROLE_CHARS = 64


def in_known_roles(messages: Sequence[Json], template: ChatTemplate) -> list[Json]:
    """The same messages as the template shows them; ``BadRequest`` for a role that it would leave out."""
    for i, message in enumerate(messages):
        _require_role(i, message.get("role"), template)
    named = [_as_system(message) for message in messages]
    n_first = sum(1 for _ in takewhile(_instructs, named))
    first, rest = named[:n_first], named[n_first:]
    if n_first > 1 and not _shows_second(template):
        first = [{"role": "system", "content": _joined([message.get("content") for message in first])}]
    if any(map(_instructs, rest)) and not _shows_late(template):
        rest = [{**message, "role": "user"} if _instructs(message) else message for message in rest]
    return [*first, *rest]


def _require_role(i: int, role: Any, template: ChatTemplate) -> None:
    """A role that this model's template names is fine, too."""
    if role in _ROLES or role is None:
        return
    is_named = isinstance(role, str) and 0 < len(role) <= _MAX_ROLE_CHARS and role.isidentifier()
    if not is_named or not any(f"{quote}{role}{quote}" in template.source for quote in "'\""):
        raise BadRequest(f"messages[{i}].role is {str(role)[:_MAX_ROLE_CHARS]!r}; give system, user, assistant or tool")


def _as_system(message: Json) -> Json:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _instructs(message: Json) -> bool:
    return message.get("role") in _INSTRUCTING


def _joined(contents: Sequence[Any]) -> str | list[Any]:
    """Several contents as one; an empty line separates texts."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts: list[Any] = []
    for content in contents:
        own = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        parts += [*([{"type": "text", "text": "\n\n"}] if parts else []), *own]
    return parts


@functools.lru_cache(maxsize=64)
def _shows_second(template: ChatTemplate) -> bool:
    return _shows(template, ("system", "a"), ("system", _PROBE), ("user", "b"))


@functools.lru_cache(maxsize=64)
def _shows_late(template: ChatTemplate) -> bool:
    return _shows(template, ("user", "a"), ("assistant", "b"), ("system", _PROBE), ("user", "c"))


def _shows(template: ChatTemplate, *messages: tuple[str, str]) -> bool:
    try:
        return _PROBE in template.render([{"role": role, "content": text} for role, text in messages])
    except BadRequest:
        return False
