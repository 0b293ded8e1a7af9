"""Messages in the form that a template takes, and how it writes thinking, found out by rendering small ones.

Most templates take content as one text and would print a list of parts; many fail on content that is null, some on a
system message, and some encode the arguments of a call twice. Pure but for the template, which is passed in.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everwarm.gateway.chat.content import Message, parts_as_text, text_as_parts, with_objects
from everwarm.gateway.chat.template_family import Thinking, family_of

Render = Callable[..., str]  # messages, and the template's other arguments; may raise anything
_PROBE = "a8f3c1"
_COMMON_TAGS = ("<think>", "[THINK]")  # of families in which some models do not think
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "f"}
_IN_PARTS = [{"type": "text", "text": _PROBE}]
_THOUGHT = "a8f3c1 hm well 1c3f8a"
_ANSWER = "b7e2d0 yes indeed 0d2e7b"
_MARK = r"(?:<[^>]*>|\[[^\]]*\])"
_AROUND = re.compile(rf"({_MARK}\s*){_THOUGHT}(\s*{_MARK}\s*)")
_AFTER = re.compile(rf"{_THOUGHT}\s*({_MARK}\s*)")
_N_TAIL = 64  # characters
_OLD_SPLIT = "content.split('</think>')"  # templates that strip thinking from the history and never write any


class MessageForms:
    def __init__(self, source: str, render: Render) -> None:
        self.family = family_of(source)
        self._source = source
        self._render = render

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        found = [self._as_wanted(message) for message in messages]
        if found and found[0].get("role") == "system" and not self._shows_system:
            found = _merged_into_next(found)
        return self.family.reshape(found)

    @functools.cached_property
    def thinking(self) -> Thinking:
        """How the template writes thinking; both texts are empty if it writes none."""
        known = self.family.thinking
        if known is None:
            return find_thinking(self._source, lambda messages, **more: self._render(self.adapted(messages), **more))
        names_it = known.opening.strip() in self._source or known.opening.strip() not in _COMMON_TAGS
        return known if names_it else Thinking()

    def _as_wanted(self, message: Message) -> Message:
        content = message.get("content")
        calls = message.get("tool_calls")
        if content is None or "role" not in message:
            message = {"role": "", **message, "content": "" if content is None else content}
        if isinstance(calls, list) and self._wants_objects:
            message = with_objects(message, calls)
        if isinstance(content, list) and not self._takes(message):
            return parts_as_text(message, content)
        if isinstance(message["content"], str) and self._wants_parts:
            return text_as_parts(message, message["content"])
        return message

    def _takes(self, message: Message) -> bool:
        """Whether the template takes parts as the content of such a message."""
        return self._takes_parts and (message["role"] != "tool" or self._takes_results_in_parts)

    @functools.cached_property
    def _takes_parts(self) -> bool:
        return not self.family.joins_parts and self._shows(_IN_PARTS) and self._takes_no_parts

    @property
    def _takes_no_parts(self) -> bool:
        try:
            self._render([{"role": "user", "content": []}])
        except Exception:  # noqa: BLE001 - any error means that it does not take this form
            return False
        return True

    @functools.cached_property
    def _wants_parts(self) -> bool:
        return self._takes_parts and not self._shows(_PROBE)

    @functools.cached_property
    def _takes_results_in_parts(self) -> bool:
        try:
            text = self._render([*self._calling({"a": 1}), {**_RESULT, "content": _IN_PARTS}])
        except Exception:  # noqa: BLE001 - any error means that it does not take this form
            return False
        return _is_clean(text)

    @functools.cached_property
    def _wants_objects(self) -> bool:
        """Whether a call's arguments should be an object, not JSON as text, as clients send them."""
        try:
            text = self._render(self._calling({_PROBE: "b"}))
        except Exception:  # noqa: BLE001 - any error means that it does not take this form
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text

    def _calling(self, arguments: Any) -> list[Message]:
        asked: Message = {"role": "user", "content": "a"}
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return self.family.reshape([asked, {"role": "assistant", "content": "", "tool_calls": [call]}])

    @functools.cached_property
    def _shows_system(self) -> bool:
        for as_form in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
            try:
                asked = {"role": "user", "content": as_form("a")}
                if _PROBE in self._render([{"role": "system", "content": as_form(_PROBE)}, asked]):
                    return True
            except Exception:  # noqa: BLE001 - any error means that it does not take this form
                continue
        return False

    def _shows(self, content: Any) -> bool:
        """Whether content of that form is rendered as its text alone."""
        try:
            text = self._render([{"role": "user", "content": content}])
        except Exception:  # noqa: BLE001 - any error means that it does not take this form
            return False
        return _is_clean(text)


def _is_clean(text: str) -> bool:
    """Whether the probe was written, and nothing of the form it came in."""
    return _PROBE in text and "'text'" not in text and '"text"' not in text


def _merged_into_next(messages: list[Message]) -> list[Message]:
    """A system message that the template does not take, put before the next message."""
    first, rest = messages[0], messages[1:]
    if not rest:
        return []
    before, after = first["content"], rest[0]["content"]
    if isinstance(before, str) and isinstance(after, str):
        return [{**rest[0], "content": f"{before}\n{after}"}, *rest[1:]]
    parts = [part for content in (before, after) for part in (_as_parts(content))]
    return [{**rest[0], "content": parts}, *rest[1:]]


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    """Tools with what a template may show of them; None: there are none."""
    return [_plain_tool(tool) for tool in tools] if tools else None


def _plain_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return tool
    about = {"description": "", "parameters": {}} | {k: v for k, v in function.items() if v is not None}
    return {
        "type": "function",
        "function": {"name": function["name"], "description": about["description"], "parameters": about["parameters"]},
    }


# thinking


def find_thinking(source: str, render: Render) -> Thinking:
    """By what stands around a thought, and by turning thinking off and on."""
    found = _beside_a_thought(render)
    if not (found.opening and found.closing):
        found = _by_switching(render, found)
    if not (found.opening or found.closing) and _OLD_SPLIT in source and "reasoning_content" not in source:
        return Thinking("<think>", "</think>")
    return found


def _beside_a_thought(render: Render) -> Thinking:
    asked: Message = {"role": "user", "content": "a"}
    reply: Message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    text = _tried(render, [asked, reply])
    if match := _AROUND.search(text):
        return Thinking(match[1], match[2])
    match = _AFTER.search(text)
    return Thinking("", match[1]) if match else Thinking()


def _by_switching(render: Render, known: Thinking) -> Thinking:
    """Some templates open thinking at the end of the prompt, or close it there where it is switched off."""
    asked: Message = {"role": "user", "content": "a"}
    off, on = (_tried(render, [asked], enable_thinking=thinks, add_generation_prompt=True) for thinks in (False, True))
    n = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(off, on, strict=False)))
    only_off, only_on = off[n:], on[n:]
    if not only_off.strip() and only_on.strip():
        return Thinking(known.opening or only_on, known.closing)
    marks = re.findall(_MARK, only_off)
    if not only_on.strip() and marks and not known.closing:
        before = marks[:1] if len(marks) > 1 else re.findall(_MARK, off[:n])[-1:]
        return Thinking("".join(before), marks[-1])
    for base, longer in ((on, off), (off, on)):  # other texts differ too, so only the ends are compared
        marks = _marks_after(base[-_N_TAIL:], longer)
        if len(marks) == 2:
            return Thinking(known.opening or marks[0], known.closing or marks[1])
    return known


def _marks_after(tail: str, text: str) -> list[str]:
    """The marks that follow the last place of the tail, if nothing else does."""
    at = text.rfind(tail) if tail else -1
    rest = text[at + len(tail) :].strip() if at >= 0 else ""
    marks = re.findall(_MARK, rest)
    return marks if "".join(marks) == "".join(rest.split()) else []


def _tried(render: Render, messages: Sequence[Message], **more: Any) -> str:
    try:
        return render(messages, **more)
    except Exception:  # noqa: BLE001 - a template that refuses this says nothing about thinking
        return ""
