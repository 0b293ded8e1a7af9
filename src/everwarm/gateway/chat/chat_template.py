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
from typing import Any, Literal

from everwarm.engine.process.messages import CutHints
from everwarm.errors import BadRequest
from everwarm.gateway.chat import stable_points, volatile_text
from everwarm.gateway.chat.content import Message, joined_reply, tools_without_breakpoints, without_breakpoints
from everwarm.gateway.chat.jinja_template import Given, Layout, Template
from everwarm.gateway.chat.message_forms import plain_tools
from everwarm.state.policy import MAX_BREAKPOINTS
from everwarm.types import Json

Tools = Sequence[Mapping[str, Any]]
Continues = Literal["content", "reasoning"] | None  # which part of the last message the reply goes on with

CHATML = (  # for a model without a template
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
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

    @property
    def keeps_developer(self) -> bool:
        """Whether ``developer`` is a role of its own in this template."""
        return self._template.forms.family.keeps_developer

    @property
    def thinking_end(self) -> str:
        """What the template writes after a thought; empty: it knows none."""
        return self._template.forms.thinking.closing

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
        plain = list(map(without_breakpoints, messages))
        return self._lay_out(plain, self._given(tools, kwargs), add_generation_prompt=add_generation_prompt).text

    def conversation(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continues: Continues = None,
        **kwargs: Any,
    ) -> Rendered:
        """The prompt that asks for the next reply, with its cut hints. ``continues``: the last message is the beginning of
        that reply."""
        given = self._given(tools, kwargs)
        render = functools.partial(self._text, add_generation_prompt=add_generation_prompt, continues=continues)
        plain = list(map(without_breakpoints, messages))
        layout = self._lay_out(plain, given, add_generation_prompt=add_generation_prompt, continues=continues)
        ends = self._ends(layout, plain[:-1] if continues else plain, given)
        end = len(layout.text) if continues or not ends else ends[-1]
        points = stable_points.stable_points(layout, plain, self._next_text(given), end=end, with_tools=bool(tools))
        marked = stable_points.in_messages(
            layout.text, messages, plain, lambda others: render(others, given)
        ) | stable_points.in_tools(
            layout.text,
            tools,
            given.tools,
            lambda others: render(plain, given.with_tools(others)),
        )
        last = tuple(sorted(marked))[-MAX_BREAKPOINTS:]
        volatile, joints = volatile_text.places_in(layout, plain)
        opening = next((at for i, at in layout.starts if plain[i].get("role") not in _INSTRUCTING), None)
        stable = points[0] if points else None
        return Rendered(layout.text, CutHints(ends, stable, points, last, volatile, joints, opening))

    def after_reply(
        self,
        messages: Sequence[Message],
        reply: Message,
        /,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,  # noqa: ARG002 - the same options as for the prompt itself
        continues: Continues = None,
        **kwargs: Any,
    ) -> str | None:
        """The text that the next request is sure to begin with, after this reply.

        It holds whether the client sends thinking back or leaves it out, for any next question, and after tool calls for
        any results, as long as only results follow. None: the template refuses such messages, or nothing is shared.
        """
        plain = list(map(without_breakpoints, messages))
        if continues:
            reply = joined_reply(plain.pop(), reply)
        return stable_points.after_reply(plain, without_breakpoints(reply), self._next_text(self._given(tools, kwargs)))

    def after_results(
        self,
        messages: Sequence[Message],
        reply: Message,
        calls: Message,
        results: Sequence[str],
        /,
        *,
        tools: Tools | None = None,
        **options: Any,
    ) -> str | None:
        """The text that the next request begins with, if these are the results of the reply's first calls. Options are
        those of the prompt itself."""
        plain = list(map(without_breakpoints, messages))
        kwargs = {k: v for k, v in options.items() if k not in ("add_generation_prompt", "continues")}
        render = self._next_text(self._given(tools, kwargs))
        return stable_points.after_results(plain, without_breakpoints(reply), calls, results, render)

    def _given(self, tools: Tools | None, kwargs: Mapping[str, Any]) -> Given:
        thinking = self._template.forms.thinking
        thinks = bool(thinking.opening or thinking.closing)
        return Given(plain_tools(tools_without_breakpoints(tools)), {"enable_thinking": thinks, **kwargs})

    def _next_text(self, given: Given) -> stable_points.Render:
        later = given.later
        return lambda messages: self._text(messages, later)

    def _text(
        self,
        messages: Sequence[Message],
        given: Given,
        *,
        add_generation_prompt: bool = True,
        continues: Continues = None,
    ) -> str | None:
        try:
            return self._lay_out(messages, given, add_generation_prompt=add_generation_prompt, continues=continues).text
        except BadRequest:  # some want a user's message, strict alternation, or no tools
            return None

    def _lay_out(
        self, messages: Sequence[Message], given: Given, *, add_generation_prompt: bool, continues: Continues = None
    ) -> Layout:
        wanted = self._template.forms.adapted(messages[:-1] if continues else messages)
        if not continues:
            layout = self._template.lay_out(wanted, given, add_generation_prompt=add_generation_prompt)
            if not add_generation_prompt:
                return layout
            return Layout(self._template.forms.family.reopened(layout.text), layout.starts, layout.end)
        before = self._template.lay_out(wanted, given, add_generation_prompt=False)
        asking = self._template.lay_out(wanted, given, add_generation_prompt=True).text
        thinking = self._template.forms.thinking
        n_shared = stable_points.common_prefix(before.text, asking)
        if n_shared == len(asking):  # the template asks for a reply in any case
            unclosed = before.text.rstrip().removesuffix(thinking.closing.strip())
            n_shared = len(unclosed.rstrip().removesuffix(thinking.opening.strip()))
        opening = self._template.forms.family.reopened(asking)[n_shared:]
        begun = thinking.begun_reply(opening, messages[-1], with_content=continues == "content")
        return Layout(before.text[:n_shared] + begun, before.starts, before.end)

    def _ends(self, layout: Layout, messages: Sequence[Message], given: Given) -> tuple[int, ...]:
        """Where messages end. If the layout does not give the ends, prefixes of the conversation are rendered."""
        if layout.end is not None:
            return tuple(sorted({at for at in (*(start for _, start in layout.starts), layout.end) if at > 0}))
        found = set()
        for n in {1, *range(max(1, len(messages) - _N_ENDS + 1), len(messages) + 1)}:
            text = self._text(messages[:n], given, add_generation_prompt=False)
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
    named = list(messages) if template.keeps_developer else [_as_system(message) for message in messages]
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
