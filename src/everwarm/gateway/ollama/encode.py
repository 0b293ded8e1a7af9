"""What a reply is in Ollama's words: a line of JSON for each thing that is heard, or one for all of it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from everwarm.engine.process import messages as m
from everwarm.gateway.chat.stream import Ended, Heard
from everwarm.gateway.parsing.reasoning import Reasoning, Text
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded
from everwarm.types import Json

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


@dataclass(slots=True)
class OllamaEncoder:
    """Of one streamed reply. A call is said when it is all there; what broke off is the text it was written as."""

    speech: Speech
    _name: str = ""
    _arguments: list[str] = field(default_factory=list)

    def of(self, heard: Heard) -> Json | None:
        """What a line says about this, if it says anything."""
        match heard:
            case Reasoning(text=text):
                return self.speech("", text)
            case Text(text=text):
                return self.speech(text) if text else None
            case CallBegun(name=name):
                self._name, self._arguments = name, []
            case CallArguments(json_fragment=fragment):
                self._arguments.append(fragment)
            case CallEnded(complete=True):
                return self.speech("", "", [call(self._name, "".join(self._arguments))])
            case CallEnded(raw=raw):
                return self.speech(raw)
        return None


def call(name: str, arguments: str) -> Json:
    return {"function": {"name": name, "arguments": msgspec.json.decode(arguments or "{}")}}


def whole(speech: Speech, message: Json) -> Json:
    """A message in OpenAI's words, in Ollama's."""
    functions = [one["function"] for one in message.get("tool_calls", ())]
    calls = [call(function["name"], function["arguments"]) for function in functions]
    return speech(message["content"] or "", message.get("reasoning_content", ""), calls)


def end(ended: Ended, seconds: float) -> Json:
    """The accounting. ``seconds``: from the request to its end; what the engine did not need was loading."""
    done = ended.done
    return {
        "done": True,
        "done_reason": "length" if ended.finish == "length" else "stop",
        **_durations(done, seconds),
    }


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
