"""Replies as Ollama's clients expect them: a line of JSON for each piece, or one for all of it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import msgspec

from everwarm.engine.process import messages as m
from everwarm.errors import EverwarmError
from everwarm.gateway.openai.encode import logprobs
from everwarm.gateway.parsing.output_parser import Piece, message_of
from everwarm.gateway.parsing.reasoning import Reasoning, Text
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded
from everwarm.gateway.serving.generate import Choice, ReplyEvent
from everwarm.gateway.serving.replies import Dialect
from everwarm.types import Json

MEDIA_TYPE = "application/x-ndjson"

ReplyFields = Callable[..., Json]  # takes text, thinking and calls; returns the fields of a line

_encode = msgspec.json.Encoder().encode


def line(body: Json) -> bytes:
    return _encode(body) + b"\n"


def chat_fields(text: str, thinking: str = "", calls: list[Json] | None = None) -> Json:
    message: Json = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    return {"message": message | ({"tool_calls": calls} if calls else {})}


def generate_fields(text: str, thinking: str = "", calls: list[Json] | None = None) -> Json:  # noqa: ARG001 - has none
    return {"response": text} | ({"thinking": thinking} if thinking else {})


class OllamaEncoder(Dialect):
    """The encoder of one reply. A call is sent when it is complete; an incomplete call is sent as text."""

    media_type = MEDIA_TYPE

    def __init__(self, model: str, reply_fields: ReplyFields) -> None:
        self._model = model
        self._reply_fields = reply_fields
        self._began_at = time.monotonic()
        self._name = ""
        self._arguments: list[str] = []
        self.keep_alive = self._line({**reply_fields(""), "done": False})

    def loading(self, model: str, fraction: float) -> list[bytes]:  # noqa: ARG002 - Ollama has no such line
        return []

    def encode(self, event: ReplyEvent) -> list[bytes]:
        found = [fields for fields in map(self._line_fields, event.pieces) if fields is not None]
        if isinstance(event.message, m.TextPiece) and event.message.probs:
            first, *others = found or [self._reply_fields("")]
            found = [{**first, "logprobs": logprobs(event.message.probs)["content"]}, *others]
        lines = [self._line({**fields, "done": False}) for fields in found]
        if isinstance(event.message, m.Done):
            lines.append(self._line(self._end(self._reply_fields(""), event.message, event.finish)))
        return lines

    def error(self, error: EverwarmError, body: Json) -> bytes:  # noqa: ARG002 - the body is the line
        return line(body)

    def whole(self, choice: Choice) -> Json:
        message = message_of(choice.pieces)
        functions = [one["function"] for one in message.get("tool_calls", ())]
        calls = [_call(function["name"], function["arguments"]) for function in functions]
        fields = self._reply_fields(message["content"] or "", message.get("reasoning_content", ""), calls)
        probs = {"logprobs": logprobs(choice.probs)["content"]} if choice.probs else {}
        return self.dated(self._end({**fields, **probs}, choice.done, choice.finish))

    def dated(self, fields: Json) -> Json:
        """A line with the fields that every line begins with."""
        now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **fields}

    def _line(self, fields: Json) -> bytes:
        return line(self.dated(fields))

    def _line_fields(self, piece: Piece) -> Json | None:
        """The fields of a piece's line; None: it has no line."""
        match piece:
            case Reasoning(text=text):
                return self._reply_fields("", text)
            case Text(text=text):
                return self._reply_fields(text) if text else None
            case CallBegun(name=name):
                self._name = name
                self._arguments = []
            case CallArguments(json_fragment=fragment):
                self._arguments.append(fragment)
            case CallEnded(complete=True):
                return self._reply_fields("", "", [_call(self._name, "".join(self._arguments))])
            case CallEnded(raw=raw):
                return self._reply_fields(raw)
        return None

    def _end(self, fields: Json, done: m.Done, finish: str) -> Json:
        """The last line, with the accounting. Time that the engine does not account for counts as loading."""
        reason = "length" if finish == "length" else "stop"
        return {**fields, "done": True, "done_reason": reason, **_durations(done, time.monotonic() - self._began_at)}


def _call(name: str, arguments: str) -> Json:
    return {"function": {"name": name, "arguments": msgspec.json.decode(arguments or "{}")}}


def _durations(done: m.Done, seconds: float) -> Json:
    prompt_s = done.restore_s + done.prefill_s
    return {
        "total_duration": _ns(seconds),
        "load_duration": _ns(seconds - done.queue_s - prompt_s - done.decode_s),
        "prompt_eval_count": done.n_prompt,
        "prompt_eval_duration": _ns(prompt_s),
        "eval_count": done.n_reply,
        "eval_duration": _ns(done.decode_s),
    }


def _ns(seconds: float) -> int:
    return max(0, int(1e9 * seconds))
