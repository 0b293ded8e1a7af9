"""Usual causes of a changed prompt, guessed from two request bodies. Pure; an unknown cause is not reported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from everwarm.types import Json

_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec"
_TIME = re.compile(
    r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    rf"|\b(?:{_MONTHS.replace(' ', '|')})[a-z]*\.? \d{{1,2}}|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b",
    re.IGNORECASE,
)
_RANDOM = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|\b(?=[a-z]*\d)(?=\d*[a-z])[0-9a-z]{16,}", re.IGNORECASE)
_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_NEAR = 24  # characters around a difference that are searched for its cause
_SYSTEM = ("system", "developer")


def hints(first: Json, second: Json, *, before: str, known: str, given: str) -> list[str]:
    """``before``, ``known`` and ``given`` are the text around the first difference."""
    found = [*_of_settings(first, second), *_of_tools(first, second), *_of_messages(first, second)]
    if known and given:
        found += _of_text(before, known, given)
    return list(dict.fromkeys(found))


def _of_settings(first: Json, second: Json) -> Iterator[str]:
    if (first.get("cache_salt") or "") != (second.get("cache_salt") or ""):
        yield "another cache_salt: nothing is shared between the two, whatever their content"
    if second.get("cache_prompt") is False or _mode(second) == "off":
        yield "the second switches the cache off (cache_prompt or prompt_cache_options)"
    if (first.get("model") or "") != (second.get("model") or ""):
        yield "another model is named; where that is another file nothing can be shared"
    if (first.get("chat_template_kwargs") or {}) != (second.get("chat_template_kwargs") or {}):
        yield "other chat_template_kwargs: templates often write them near the beginning"


def _mode(body: Json) -> Any:
    options = body.get("prompt_cache_options")
    return options.get("mode") if isinstance(options, dict) else None


def _of_tools(first: Json, second: Json) -> Iterator[str]:
    old = first.get("tools") or []
    new = second.get("tools") or []
    if old == new or not isinstance(old, list) or not isinstance(new, list):
        return
    if sorted(map(_canonical, old)) == sorted(map(_canonical, new)):
        yield "the same tools in another order: templates write them first, so keep their order"
        return
    names = [_tool_name(tool) for tool in old], [_tool_name(tool) for tool in new]
    gone = [n for n in names[0] if n not in names[1]]
    come = [n for n in names[1] if n not in names[0]]
    what = "; ".join(f"{word}: {', '.join(some[:5])}" for word, some in (("gone", gone), ("new", come)) if some)
    yield f"another list of tools ({what or 'the same names, other descriptions or parameters'}); templates write it first"


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name", "?"))[:60] if isinstance(function, dict) else "?"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _of_messages(first: Json, second: Json) -> Iterator[str]:
    old, new = first.get("messages"), second.get("messages")
    if not isinstance(old, list) or not isinstance(new, list):
        return
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if at is None:
        if len(new) < len(old):
            yield "the second has fewer messages"
        return
    a, b = old[at], new[at]
    yield f"message {at} ({b.get('role', '?')}) is the first that differs"
    if a.get("role") != b.get("role"):
        yield f"another order of roles: message {at} was {a.get('role', '?')} and is {b.get('role', '?')} now"
        if b in old[at + 1 :]:
            yield f"message {at} of the second is a later one of the first: messages in between were cut out"
        return
    yield from _of_message(a, b)


def _of_message(a: Json, b: Json) -> Iterator[str]:
    if b.get("role") in _SYSTEM:
        yield "another system prompt: everything after it is read again"
    old = _text(a.get("content"))
    new = _text(b.get("content"))
    if old != new:
        if "".join(old.split()) == "".join(new.split()):
            yield "only white space differs"
        elif _THINKING.sub("", old) == _THINKING.sub("", new):
            yield "thinking was stripped from an earlier reply, or added to it"
    elif a.get("reasoning_content") != b.get("reasoning_content"):
        yield "reasoning_content of an earlier reply differs: send it back as it came, or never"
    elif a.get("tool_calls") != b.get("tool_calls"):
        yield "tool_calls of an earlier reply differ: send arguments and ids back as they came"


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def _of_text(before: str, known: str, given: str) -> Iterator[str]:
    near = [before[-_NEAR:] + side[:_NEAR] for side in (known, given)]
    if all(_reaches(_TIME, text, len(before[-_NEAR:])) for text in near):
        yield "a date or time: put it into the last message, or round it, so that what comes after it can be reused"
    elif all(_reaches(_RANDOM, text, len(before[-_NEAR:])) for text in near):
        yield "an id or another random text: leave it out, or put it at the end"


def _reaches(pattern: re.Pattern[str], text: str, at: int) -> bool:
    """Whether the pattern matches at the difference itself."""
    return any(match.start() <= at + 2 and match.end() > at for match in pattern.finditer(text))
