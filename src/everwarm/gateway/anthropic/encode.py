"""Replies as Anthropic's clients expect them: messages, events of a stream, usage. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from everwarm.engine.process import messages as m
from everwarm.errors import EverwarmError
from everwarm.gateway.http.sse import sse_named
from everwarm.gateway.parsing.output_parser import Piece
from everwarm.gateway.parsing.reasoning import Reasoning, Text
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded, settled
from everwarm.gateway.serving.generate import Choice, ReplyEvent
from everwarm.gateway.serving.replies import Dialect
from everwarm.types import Json

SIGNATURE = "everwarm"  # clients send it back with the thinking; it is not checked
PING: Json = {"type": "ping"}


def _content(pieces: Sequence[Piece]) -> list[Json]:
    """The blocks of a complete reply. A call that broke off is the text it was written as."""
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    blocks: list[Json] = []
    for event in settled(piece for piece in pieces if not isinstance(piece, Reasoning)):
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
    """Models write integers of any length; one that needs more than 64 bits becomes a float."""
    number = int(digits) if len(digits) <= 20 else 1 << 64
    return number if -(1 << 63) <= number < 1 << 64 else float(digits)


class AnthropicEncoder(Dialect):
    """One reply, whole or as events in order: its blocks are opened, filled and closed one after the other."""

    keep_alive = sse_named("ping", PING)

    def __init__(self, id: str, model: str, *, marks_cache: bool) -> None:
        """``marks_cache``: the client set ``cache_control``."""
        self._id = id
        self._model = model
        self._marks_cache = marks_cache
        self._n_stable = 0
        self._index = -1
        self._open: str | None = None
        self._blank = ""  # held back: a block of only whitespace is left out
        self._broke_off = False
        self.has_begun = False

    def loading(self, model: str, fraction: float) -> list[bytes]:  # noqa: ARG002 - a ping has no fields
        return [self.keep_alive]

    def encode(self, event: ReplyEvent) -> list[bytes]:
        groups = [self.events_of(piece) for piece in event.pieces]
        match event.message:
            case m.Begun() as begun:
                groups.append(self.begun(begun))
            case m.PromptRead():
                groups.append([PING])
            case m.Done() as done:
                groups.append(self.ended(done, event.finish))
        return [b"".join(sse_named(each["type"], each) for each in events) for events in groups if events]

    def error(self, error: EverwarmError, body: Json) -> bytes:  # noqa: ARG002 - the body is the event
        return sse_named("error", body)

    def whole(self, choice: Choice) -> Json:
        """A complete reply, with the same blocks in the same order as its stream."""
        done, begun = choice.done, choice.begun
        assert begun is not None, "a reply ended that never began"
        usage = self._usage(done.n_prompt, done.n_cached, begun.n_stable, done.n_reply)
        return self._message(usage, content=_content(choice.pieces), **_end(done, choice.finish, broke_off=False))

    def _message(self, usage: Json, **more: Any) -> Json:
        start = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": []}
        return {**start, "stop_reason": None, "stop_sequence": None, "usage": usage, **more}

    def _usage(self, n_prompt: int, n_cached: int, n_stable: int, n_reply: int) -> Json:
        """The three kinds of input tokens sum to the prompt. Tokens that were read count as cache writes up to the stable
        point, and only for clients that set ``cache_control``."""
        n_created = max(0, min(n_stable, n_prompt) - n_cached) if self._marks_cache else 0
        return {
            "input_tokens": n_prompt - n_cached - n_created,
            "cache_creation_input_tokens": n_created,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_reply,
        }

    def begun(self, begun: m.Begun) -> list[Json]:
        self._n_stable = begun.n_stable
        if self.has_begun:
            return []
        self.has_begun = True
        usage = self._usage(begun.n_prompt, begun.n_cached, begun.n_stable, 0)
        return [{"type": "message_start", "message": self._message(usage)}]

    def events_of(self, piece: Piece) -> list[Json]:
        match piece:
            case Reasoning(text=text):
                return self._more("thinking", text, {"thinking": "", "signature": ""})
            case Text(text=text):
                return self._more("text", text, {"text": ""})
            case CallBegun():
                return self._begin("tool_use", {"id": piece.id, "name": piece.name, "input": {}})
            case CallArguments():
                return [self._delta("input_json_delta", partial_json=piece.json_fragment)]
            case CallEnded():
                self._broke_off = self._broke_off or not piece.complete
                return self._close()

    def ended(self, done: m.Done, finish: str) -> list[Json]:
        usage = self._usage(done.n_prompt, done.n_cached, self._n_stable, done.n_reply)
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
        self._index += 1
        self._open = kind
        self._blank = ""
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
    """Why the reply ended. If an incomplete call was streamed, the reply counts as cut off: no client may run it."""
    if finish == "length" or broke_off:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if finish == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if done.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_text}
    return {"stop_reason": "end_turn", "stop_sequence": None}
