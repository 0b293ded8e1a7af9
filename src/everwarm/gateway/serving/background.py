"""Background calls: titles, tags and the like, which a client sends beside a conversation; no user waits for them.

A header or a ``priority`` says so; without either, what real clients send is recognised by how its text begins. What is
recognised runs later, and what it leaves is evicted first: a wrong guess costs time and changes no reply. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from everwarm.gateway.openai.schema import ChatBody, CompletionBody

HEADER = "x-everwarm-background"
MAX_MESSAGES = 4  # a call has its instructions and what it is about
SHORT_REPLY = 256  # tokens, of calls that are recognised by their purpose alone
_HEAD = 400  # characters of a message

# By how the system text begins, or the only message. Queries for a search are not among them: the user waits for those.
_OF_CLIENTS = {
    "title": (
        r"You are a title generator\b",  # opencode
        r"You will generate a short title\b",  # crush
        r"### Task:\s*Generate a concise\b[^\n]{0,80}\btitle\b",  # Open WebUI
        r"Please write a \d+-\d+ word title\b",  # Claude Code
        r"Summarize this coding conversation in under\b",
        r"Analyze if this message indicates a new conversation topic\b",
        r"Provide a concise, \d+-word-or-less title\b",  # LibreChat
    ),
    "tags": (r"### Task:\s*Generate \d+-\d+ broad tags\b",),  # Open WebUI
    "follow-ups": (r"### Task:\s*Suggest \d+-\d+ relevant follow-?up\b",),
}
_KNOWN = {kind: re.compile("|".join(f"(?:{form})" for form in forms), re.I) for kind, forms in _OF_CLIENTS.items()}
_PURPOSE = re.compile(r"\b(?:generate|write|create|produce|output|suggest)\b[^\n]{0,80}\b(title|tag|summary)", re.I)


def background_kind(headers: Mapping[str, str], body: ChatBody | CompletionBody) -> str | None:
    """What a background call is for; None: a user waits for this request. A header decides alone."""
    marked = headers.get(HEADER, "").strip().lower()
    if marked:
        return None if marked in ("0", "false", "no") else "marked"
    if isinstance(body, CompletionBody) or body.tools or body.deterministic or len(body.messages) > MAX_MESSAGES:
        return None
    return _recognised(body)


def _recognised(body: ChatBody) -> str | None:
    system = next((_head(each) for each in body.messages if each.get("role") in ("system", "developer")), None)
    users = [_head(each) for each in body.messages if each.get("role") == "user"]
    texts = [*([] if system is None else [system]), *users[:1]]
    for kind, pattern in _KNOWN.items():
        if any(pattern.match(text) for text in texts):
            return kind
    n_reply = body.max_completion_tokens or body.max_tokens
    if system is None or n_reply is None or not 0 < n_reply <= SHORT_REPLY:
        return None
    found = _PURPOSE.search(system)
    return None if found is None else found[1].lower()


def _head(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = (part.get("text") if isinstance(part, dict) else part for part in content)
        content = next((part for part in parts if isinstance(part, str)), "")
    return content[:_HEAD].lstrip() if isinstance(content, str) else ""
