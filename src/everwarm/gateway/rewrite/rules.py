"""Rules of ``--rewrite FILE``: what to do with lines of system text that differ from request to request.

    [[rule]]
    name = "date"                     # shown in answers
    match = "Today's date: .*"        # a regular expression for a whole line
    action = "end"                    # end: moved behind the last message · drop: left out · freeze: always ``value``

Pure: text and messages in, rules and messages out. Changes whole lines of system text only, and says which rules did.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from everwarm.errors import BadRequest
from everwarm.types import Json

MAX_RULES, MAX_PATTERN, MAX_LINE = 64, 500, 4096
SYSTEM_ROLES = ("system", "developer")

Action = Literal["freeze", "drop", "end"]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    match: str  # of a whole line
    action: Action
    value: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: list[Rule]


Rules = tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Messages with some lines changed, and the names of the rules that changed them."""

    messages: list[Json]
    rules: tuple[str, ...] = ()


def parse_rules(text: str) -> Rules:
    try:
        given = msgspec.convert(tomllib.loads(text), _File).rule
    except (tomllib.TOMLDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"{error}; give [[rule]] tables with name, match and action") from None
    if not 0 < len(given) <= MAX_RULES:
        raise BadRequest(f"there are {len(given)} rules; give 1 to {MAX_RULES}")
    for rule in given:
        _check(rule)
    return tuple(given)


def _check(given: Rule) -> None:
    where = f"the rule {given.name[:40]!r}"
    if not re.fullmatch(r"[\w.-]{1,40}", given.name):
        raise BadRequest(f"{where}: its name must be 1 to 40 letters, digits, dots or hyphens")
    if (given.action == "freeze") != (given.value is not None):
        raise BadRequest(f"{where}: give a value with freeze, and only with it")
    if not 0 < len(given.match) <= MAX_PATTERN or "\n" in (given.value or ""):
        raise BadRequest(f"{where}: match must have 1 to {MAX_PATTERN} characters, and a value one line")
    try:
        pattern = re.compile(given.match)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadRequest(f"{where}: match is no regular expression: {error}") from None
    if pattern.fullmatch(""):
        raise BadRequest(f"{where}: match would match empty lines")


def rewritten(messages: list[Json], rules: Rules) -> Rewritten:
    """The messages as the rules want them. A rule that changed something is named once. A line that is moved goes behind
    the last message of a user or a tool; where there is none, it stays."""
    if not rules:
        return Rewritten(messages)
    last = next((i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") in ("user", "tool")), None)
    usable = rules if last is not None else tuple(rule for rule in rules if rule.action != "end")
    used: dict[str, None] = {}
    moved: list[str] = []
    changed = [
        _mapped(message, usable, used, moved) if message.get("role") in SYSTEM_ROLES else message
        for message in messages
    ]
    if last is not None and moved:
        changed[last] = _extended(changed[last], moved)
    return Rewritten(changed, tuple(used)) if used else Rewritten(messages)


def _mapped(message: Json, rules: Sequence[Rule], used: dict[str, None], moved: list[str]) -> Json:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _lines(content, rules, used, moved)}
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            parts.append(part)
        else:
            text = _lines(text, rules, used, moved)
            parts.append({**part, "text": text} if isinstance(part, dict) else text)
    return {**message, "content": parts}


def _lines(text: str, rules: Sequence[Rule], used: dict[str, None], moved: list[str]) -> str:
    kept = []
    for line in text.split("\n"):
        rule = next((rule for rule in rules if len(line) <= MAX_LINE and re.fullmatch(rule.match, line)), None)
        if rule is None or (rule.action == "freeze" and line == rule.value):
            kept.append(line)
            continue
        used[rule.name] = None
        if rule.action == "freeze":
            kept.append(rule.value or "")
        elif rule.action == "end":
            moved.append(line)
    return "\n".join(kept)


def _extended(message: Json, lines: Sequence[str]) -> Json:
    content = message.get("content")
    more = "\n".join(("", *lines))
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": more}]}
    return {**message, "content": (content or "") + more}
