"""Lines of system text that differ from request to request: known noise is left out; rules of ``--rewrite FILE`` do more.

Noise are lines that clients put at the head of a system text for other servers; each makes every prompt a new one. It is
matched by anchored patterns with a name, and only whole lines at the head of a text or of one of its parts are removed.

    [[rule]]
    name = "date"                     # shown in answers
    match = "Today's date: .*"        # a regular expression for a whole line
    action = "end"                    # end: moved behind the last message · drop: left out · freeze: always ``value``

Messages in, messages and the names of the rules that changed them out. Never looks at messages of users, tools or models.
Only ``read_rules`` opens a file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from everwarm.errors import BadRequest
from everwarm.types import Json

MAX_FILE_BYTES = 1 << 20
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


def read_rules(path: Path) -> Rules:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"--rewrite: {path} cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise BadRequest(f"--rewrite: {path} has more than {MAX_FILE_BYTES >> 10} KiB")
    try:
        return parse_rules(data.decode())
    except (BadRequest, UnicodeDecodeError) as error:
        raise BadRequest(f"--rewrite: {path}: {error}") from None


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


# noise

# The name of a kind of noise, and what must match a whole line, without its end.
NOISE_PATTERNS = {
    "attribution": re.compile(r"x-anthropic-billing-header:[^\n]*"),  # Claude Code: version, entry point, checksum
    "checksum": re.compile(r"cch=[0-9A-Za-z]{3,64};?[ \t\r]*"),  # the checksum on a line of its own
}


def canonical(messages: Sequence[Json]) -> Rewritten:
    """Messages without noise, and the rule by which each line was removed."""
    kept, removed = [], []
    for message in messages:
        cleaned, names = _cleaned(message) if message.get("role") in SYSTEM_ROLES else (message, [])
        removed += names
        if cleaned is not None:
            kept.append(cleaned)
    return Rewritten(kept, tuple(removed))


def without_noise(text: str) -> tuple[str, list[str]]:
    """The text from its first line that is no noise, and the rules that removed the lines before it."""
    names, at = [], 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        rule = next((name for name, line in NOISE_PATTERNS.items() if line.fullmatch(text, at, end)), None)
        if rule is None:
            break
        names.append(rule)
        at = end + 1
    return text[at:], names


def _cleaned(message: Json) -> tuple[Json | None, list[str]]:
    """None if it was only noise."""
    content = message.get("content")
    if isinstance(content, str):
        text, names = without_noise(content)
        return ({**message, "content": text} if text or not names else None), names
    if not isinstance(content, list):
        return message, []
    parts, removed = [], []
    for part in content:
        content_text = part.get("text") if isinstance(part, dict) else part
        text, names = without_noise(content_text) if isinstance(content_text, str) else ("", [])
        removed += names
        if not names:
            parts.append(part)
        elif text:
            parts.append({**part, "text": text} if isinstance(part, dict) else text)
    return ({**message, "content": parts} if parts or not removed else None), removed
