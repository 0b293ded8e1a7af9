"""Message content in the forms that clients send and templates take, and the breakpoints that clients set in it.

Pure: changes no argument. Knows no templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from everwarm.gateway.http.json_weight import is_surely_light

Message = Mapping[str, Any]

MARKER_PART = "media_marker"  # the type of a part that stands for an image
BREAKPOINT_KEYS = ("cache_control", "prompt_cache_breakpoint")


def parts_as_text(message: Message, parts: Sequence[Any]) -> Message:
    """Texts are joined as llama-server joins them: by the end of a line, but not beside the marker of an image."""
    text = ""
    after_marker = False
    for part in parts:
        is_marker = isinstance(part, dict) and part.get("type") == MARKER_PART
        text += ("" if is_marker or after_marker or not text else "\n") + _text_of(part)
        after_marker = is_marker
    return {**message, "content": text}


def text_as_parts(message: Message, text: str) -> Message:
    return {**message, "content": [{"type": "text", "text": text}]}


def with_objects(message: Message, calls: Sequence[Any]) -> Message:
    """The message with the arguments of its calls as objects; arguments that are no JSON stay text."""
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def text_of_reply(content: Any) -> str:
    """The text of a reply that is to be continued."""
    return "\n\n".join(map(_text_of, content)) if isinstance(content, list) else str(content or "")


def joined_reply(begun: Message, reply: Message) -> Message:
    """A reply and what the model wrote after it as one message."""
    content = text_of_reply(begun.get("content")) + (reply.get("content") or "")
    thought = (begun.get("reasoning_content") or "") + (reply.get("reasoning_content") or "")
    more = {"reasoning_content": thought} if thought else {}
    return {**begun, **reply, "content": content, **more}


def _text_of(part: Any) -> str:
    text = part.get("text", part.get("refusal", "")) if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"] or "{}"
    try:
        _check_weight(text.encode("utf-8", "surrogatepass"))
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _check_weight(data: bytes) -> None:
    if not is_surely_light(data):
        from everwarm.gateway.http.json_scan import check_weight  # loads numpy, which few servers ever need

        check_weight(data)


# breakpoints: the end of a prefix that a client means to use again


def is_breakpoint(part: Any) -> bool:
    return _has_keys(part) and any(part.get(key) for key in BREAKPOINT_KEYS)


def breakpoint_in(part: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a part that make it a breakpoint."""
    return {key: part[key] for key in BREAKPOINT_KEYS if key in part}


def without_breakpoints(message: Message) -> Message:
    """A message without its breakpoints, as a template may see it; the same object if it has none."""
    content = message.get("content")
    if isinstance(content, list) and any(_has_keys(part) for part in content):
        message = {**message, "content": [_plain(part) for part in content]}
    return _plain(message) if _has_keys(message) else message


def tools_without_breakpoints(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    if not any(_has_keys(tool) or _has_keys(tool.get("function")) for tool in tools or ()):
        return tools
    return [_plain({k: _plain(v) if k == "function" else v for k, v in tool.items()}) for tool in tools or ()]


def breakpoints_of_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
    """How many tools lie before each breakpoint."""
    found = enumerate(tools or (), start=1)
    return [n for n, tool in found if is_breakpoint(tool) or is_breakpoint(tool.get("function"))]


def breakpoints_of_messages(messages: Sequence[Message]) -> list[tuple[int, int | None]]:
    """Where breakpoints are: a message, and how many of its parts lie before; None: all of it."""
    found: list[tuple[int, int | None]] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            found += [(i, n) for n, part in enumerate(content, start=1) if is_breakpoint(part)]
        if is_breakpoint(message):
            found.append((i, None))
    return found


def with_text_at(message: Message, n_parts: int | None, text: str) -> Message:
    """The message with a text inserted after so many parts, at the very end of the last one if that is text."""
    content = message.get("content")
    if isinstance(content, list):
        n = len(content) if n_parts is None else n_parts
        if n and isinstance(content[n - 1], dict) and isinstance(content[n - 1].get("text"), str):
            longer = {**content[n - 1], "text": content[n - 1]["text"] + text}
            return {**message, "content": [*content[: n - 1], longer, *content[n:]]}
        return {**message, "content": [*content[:n], {"type": "text", "text": text}, *content[n:]]}
    return {**message, "content": f"{content or ''}{text}"}


def _has_keys(part: Any) -> bool:
    return isinstance(part, dict) and ("cache_control" in part or "prompt_cache_breakpoint" in part)


def _plain(part: Any) -> Any:
    return {k: v for k, v in part.items() if k not in BREAKPOINT_KEYS} if _has_keys(part) else part
