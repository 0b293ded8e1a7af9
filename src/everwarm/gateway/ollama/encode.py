"""Replies as Ollama's clients expect them: a line of JSON for each piece, or one for all of it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import msgspec

from everwarm.engine.process import messages as m
from everwarm.errors import EverwarmError
from everwarm.gateway.parsing.output_parser import Piece, message_of
from everwarm.gateway.parsing.reasoning import Reasoning, Text
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded
from everwarm.gateway.serving.generate import Choice, ReplyEvent
from everwarm.gateway.serving.replies import Dialect
from everwarm.types import Json

MEDIA_TYPE = "application/x-ndjson"

Speech = Callable[..., Json]  # text, thinking and calls as fields of a line

_encode = msgspec.json.Encoder().encode


def line(body: Json) -> bytes:
    return _encode(body) + b"\n"


def chat_speech(text: str, thinking: str = "", calls: list[Json] | None = None) -> Json:
    message: Json = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    return {"message": message | ({"tool_calls": calls} if calls else {})}


def generate_speech(text: str, thinking: str = "", calls: list[Json] | None = None) -> Json:  # noqa: ARG001 - has none
    return {"response": text} | ({"thinking": thinking} if thinking else {})


class OllamaEncoder(Dialect):
    """Of one reply. A call is written when it is complete; what broke off is the text it was written as."""

    media_type = MEDIA_TYPE

    def __init__(self, model: str, speech: Speech) -> None:
        self._model = model
        self._speech = speech
        self._began_at = time.monotonic()
        self._name = ""
        self._arguments: list[str] = []
        self.keep_alive = self._line({**speech(""), "done": False})

    def loading(self, model: str, fraction: float) -> list[bytes]:  # noqa: ARG002 - Ollama says nothing of it
        return []

    def encode(self, event: ReplyEvent) -> list[bytes]:
        told = [self._fields(piece) for piece in event.pieces]
        lines = [self._line({**fields, "done": False}) for fields in told if fields is not None]
        if isinstance(event.message, m.Done):
            lines.append(self._line(self._end(self._speech(""), event.message, event.finish)))
        return lines

    def error(self, error: EverwarmError, body: Json) -> bytes:  # noqa: ARG002 - the body is the line
        return line(body)

    def whole(self, choice: Choice) -> Json:
        message = message_of(choice.pieces)
        functions = [one["function"] for one in message.get("tool_calls", ())]
        calls = [_call(function["name"], function["arguments"]) for function in functions]
        told = self._speech(message["content"] or "", message.get("reasoning_content", ""), calls)
        return self.dated(self._end(told, choice.done, choice.finish))

    def dated(self, fields: Json) -> Json:
        """With what every line begins with."""
        now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **fields}

    def _line(self, fields: Json) -> bytes:
        return line(self.dated(fields))

    def _fields(self, piece: Piece) -> Json | None:
        """What a line says about a piece, if it says anything."""
        match piece:
            case Reasoning(text=text):
                return self._speech("", text)
            case Text(text=text):
                return self._speech(text) if text else None
            case CallBegun(name=name):
                self._name = name
                self._arguments = []
            case CallArguments(json_fragment=fragment):
                self._arguments.append(fragment)
            case CallEnded(complete=True):
                return self._speech("", "", [_call(self._name, "".join(self._arguments))])
            case CallEnded(raw=raw):
                return self._speech(raw)
        return None

    def _end(self, fields: Json, done: m.Done, finish: str) -> Json:
        """With the accounting. What the engine did not need of the time since the request came was loading."""
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
