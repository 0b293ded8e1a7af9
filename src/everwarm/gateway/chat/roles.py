"""Who says what, in roles that a template knows. Pure but for asking the template; knows no dialect.

Clients say ``developer`` for ``system`` and send several such messages, also in the middle of a conversation. Most
templates take one, at the beginning; some drop the others without a word, some refuse them. What a template would not
show is said where it does show it: at the beginning together with the first one, later on by the user.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from everwarm.errors import BadRequest
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.types import Json

_PROBE = "c51e7d"
_INSTRUCTING = ("system", "developer")


def in_known_roles(messages: Sequence[Json], template: ChatTemplate) -> list[Json]:
    """The same messages as the template shows them."""
    named = [_as_system(message) for message in messages]
    n_first = sum(1 for _ in takewhile(_instructs, named))
    first, rest = named[:n_first], named[n_first:]
    if n_first > 1 and not _shows_second(template):
        first = [{"role": "system", "content": _joined([message.get("content") for message in first])}]
    if any(map(_instructs, rest)) and not _shows_late(template):
        rest = [{**message, "role": "user"} if _instructs(message) else message for message in rest]
    return [*first, *rest]


def _as_system(message: Json) -> Json:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _instructs(message: Json) -> bool:
    return message.get("role") in _INSTRUCTING


def _joined(contents: Sequence[Any]) -> str | list[Any]:
    """One content of several; texts stay apart by an empty line."""
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
