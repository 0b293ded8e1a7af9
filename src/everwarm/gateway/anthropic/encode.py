"""What Anthropic's clients expect to hear: messages, events of a stream, usage, errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from everwarm.engine.process import messages as m
from everwarm.errors import EverwarmError, PromptTooLong, Refused
from everwarm.gateway.parsing.output_parser import Event
from everwarm.gateway.parsing.reasoning import Reasoning, Text
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded, settled
from everwarm.types import Json

SIGNATURE = "everwarm"  # thinking comes back with it; nobody checks it
PING: Json = {"type": "ping"}

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class NamedEvent:
    """What is known of a reply before it begins. ``marks_cache``: the client said what is to be kept."""

    id: str
    model: str
    marks_cache: bool

    def message(self, usage: Json, **more: Any) -> Json:
        start = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": []}
        return {**start, "stop_reason": None, "stop_sequence": None, "usage": usage, **more}

    def usage(self, n_prompt: int, n_cached: int, n_stable: int, n_reply: int) -> Json:
        """The three kinds of input sum up to the prompt. What was read anew counts as written to the cache up to the stable
        point, and only for clients that said they want one."""
        n_created = max(0, min(n_stable, n_prompt) - n_cached) if self.marks_cache else 0
        return {
            "input_tokens": n_prompt - n_cached - n_created,
            "cache_creation_input_tokens": n_created,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_reply,
        }


def whole(frame: NamedEvent, begun: m.Begun, events: Iterable[Event], done: m.Done, finish: str) -> Json:
    usage = frame.usage(done.n_prompt, done.n_cached, begun.n_stable, done.n_reply)
    return frame.message(usage, content=content(events), **_end(done, finish, broke_off=False))


def content(events: Iterable[Event]) -> list[Json]:
    """The blocks of a reply that is all there. A call that broke off is the text it was written as."""
    events = list(events)
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    blocks: list[Json] = []
    for event in settled(event for event in events if not isinstance(event, Reasoning)):
        match event:
            case Text(text=text) if blocks and blocks[-1]["type"] == "text":
                blocks[-1]["text"] += text
            case Text(text=text):
                blocks.append({"type": "text", "text": text})
            case CallBegun():
                blocks.append({"type": "tool_use", "id": event.id, "name": event.name, "input": ""})
            case CallArguments():
                blocks[-1]["input"] += event.json_fragment
    thinking = [{"type": "thinking", "thinking": thought, "signature": SIGNATURE}] if thought.strip() else []
    return [*thinking, *(_settled_block(block) for block in blocks if block.get("text", "-").strip())]


def _settled_block(block: Json) -> Json:
    if block["type"] != "tool_use":
        return block
    return {**block, "input": json.loads(block["input"] or "{}", parse_int=_whole_number)}


def _whole_number(digits: str) -> int | float:
    """Models write numbers of any length; on the wire there are 64 bits."""
    number = int(digits) if len(digits) <= 20 else 1 << 64
    return number if -(1 << 63) <= number < 1 << 64 else float(digits)


class AnthropicEncoder:
    """The events of one reply, in order: its blocks are opened, filled and closed one after the other."""

    def __init__(self, frame: NamedEvent) -> None:
        self._frame = frame
        self._n_stable = 0
        self._index = -1
        self._open: str | None = None
        self._blank = ""  # held back: a block of nothing but whitespace is none
        self._broke_off = False
        self.has_begun = False

    def begun(self, begun: m.Begun) -> list[Json]:
        self._n_stable = begun.n_stable
        if self.has_begun:
            return []
        self.has_begun = True
        usage = self._frame.usage(begun.n_prompt, begun.n_cached, begun.n_stable, 0)
        return [{"type": "message_start", "message": self._frame.message(usage)}]

    def said(self, event: Event) -> list[Json]:
        match event:
            case Reasoning(text=text):
                return self._more("thinking", text, {"thinking": "", "signature": ""})
            case Text(text=text):
                return self._more("text", text, {"text": ""})
            case CallBegun():
                return self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
            case CallArguments():
                return [self._delta("input_json_delta", partial_json=event.json_fragment)]
            case CallEnded():
                self._broke_off = self._broke_off or not event.complete
                return self._close()

    def ended(self, done: m.Done, finish: str) -> list[Json]:
        usage = self._frame.usage(done.n_prompt, done.n_cached, self._n_stable, done.n_reply)
        end = _end(done, finish, broke_off=self._broke_off)
        return [*self._close(), {"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]

    def _more(self, kind: str, text: str, empty: Json) -> list[Json]:
        if self._open == kind:
            return [self._delta(f"{kind}_delta", **{kind: text})]
        self._blank += text
        if not self._blank.strip():
            return []
        text, opened = self._blank, self._begin(kind, empty)
        return [*opened, self._delta(f"{kind}_delta", **{kind: text})]

    def _begin(self, kind: str, block: Json) -> list[Json]:
        closed = self._close()
        self._index, self._open, self._blank = self._index + 1, kind, ""
        begun = {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **block}}
        return [*closed, begun]

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        signed = [self._delta("signature_delta", signature=SIGNATURE)] if self._open == "thinking" else []
        self._open = None
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, kind: str, **fields: str) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **fields}}


def _end(done: m.Done, finish: str, *, broke_off: bool) -> Json:
    """Why it ended. Half a call that was streamed already must not pass for a whole one: the reply counts as cut off."""
    if finish == "length" or broke_off:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if finish == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if done.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_text}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def error_body(error: EverwarmError, request_id: str) -> Json:
    """Clients make room when they read that a prompt is too long, and know it by these very words."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    message = str(error)
    if isinstance(error, Refused) and error.n_prompt is not None and error.code == PromptTooLong.code:
        message = f"prompt is too long: {error.n_prompt} tokens > {error.n_context} maximum ({message})"
    about = {"type": _ERROR_TYPES.get(error.status, default), "message": message}
    return {"type": "error", "error": about, "request_id": request_id}
