"""Volatile noise in system text: lines that clients put there for other servers and that differ from request to request.

One such line at the beginning makes every prompt a new one. Known noise, matched by an anchored pattern with a name, is
removed: whole lines at the head of a system text or of one of its parts. Pure: never looks at messages of users, tools or
models, and changes no other byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from everwarm.gateway.rewrite.rules import Rewritten
from everwarm.types import Json

SYSTEM_ROLES = ("system", "developer")


# The name of a rule, and what must match a whole line, without its end.
RULES = {
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
        rule = next((name for name, line in RULES.items() if line.fullmatch(text, at, end)), None)
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
