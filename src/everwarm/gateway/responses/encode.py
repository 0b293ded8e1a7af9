"""A reply in the responses dialect: items and typed, numbered events. Pure; knows no HTTP.

A stream and a whole answer have the same content: the last event carries the response.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from everwarm.engine.process import messages as m
from everwarm.errors import EverwarmError
from everwarm.gateway.parsing.output_parser import Piece
from everwarm.gateway.parsing.reasoning import Reasoning, Text
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded
from everwarm.gateway.responses.schema import Offered, Origin, ResponsesBody, custom_text, sealed
from everwarm.types import Json


def skeleton(body: ResponsesBody, id: str, model: str, created_at: int, tools: Offered) -> Json:
    """A response before anything is generated."""
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning else None,
            "summary": body.reasoning.summary if body.reasoning else None,
        },
        "store": body.is_stored,
        "temperature": body.temperature,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools.shown,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def usage(done: m.Done) -> Json:
    """``cached_tokens`` is part of ``input_tokens``; the rest was read now. Tokens of thinking are not counted apart."""
    return {
        "input_tokens": done.n_prompt,
        "input_tokens_details": {"cached_tokens": done.n_cached, "cache_write_tokens": done.n_prompt - done.n_cached},
        "output_tokens": done.n_reply,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": done.n_prompt + done.n_reply,
    }


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    index: int
    item: Json
    pieces: list[str] = field(default_factory=list)
    origin: Origin | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def where(self) -> Json:
        return {"item_id": self.item["id"], "output_index": self.index}


class ResponsesEncoder:
    """The encoder of one response: takes the pieces of the reply, returns events."""

    def __init__(self, response: Json, tools: Offered, *, seals: bool = False, summarises: bool = False) -> None:
        self.response = response
        self._tail = response["id"].removeprefix("resp_")
        self._tools, self._seals, self._summarises = tools, seals, summarises
        self._output: list[Json] = []
        self._open: _Open | None = None
        self._spaces = ""  # before a message: sent only if text follows
        self._n_events = 0
        self.has_begun = False

    @classmethod
    def of(cls, body: ResponsesBody, response: Json, tools: Offered) -> ResponsesEncoder:
        return cls(response, tools, seals=body.seals_reasoning, summarises=body.wants_summary)

    def begin(self) -> list[Json]:
        if self.has_begun:
            return []
        self.has_begun = True
        now = {"response": dict(self.response)}
        return [self._event("response.created", **now), self._event("response.in_progress", **now)]

    def progress(self, read: Json) -> list[Json]:
        """For requests with llama-server's ``return_progress``: how far the prompt is read."""
        return [*self.begin(), self._event("response.in_progress", response=dict(self.response), prompt_progress=read)]

    def encode(self, event: Piece) -> list[Json]:
        match event:
            case Reasoning(text=text):
                return self._more_thought(text)
            case Text(text=text):
                return self._more_text(text)
            case CallBegun():
                return self._begun(event)
            case CallArguments(json_fragment=fragment):
                return self._more_arguments(fragment)
            case CallEnded(complete=complete):
                return self._close("completed" if complete else "incomplete")

    def end(self, done: m.Done, finish: str) -> list[Json]:
        """The remaining events; the last one carries the response."""
        status = "incomplete" if finish == "length" else "completed"
        events = [*self.begin(), *self._close(status)]
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        self._become(status, incomplete_details=details, usage=usage(done))
        return [*events, self._event(f"response.{status}", response=self.response)]

    def fail(self, error: EverwarmError) -> list[Json]:
        events = self.begin()
        self._become("failed", error={"code": _code(error), "message": str(error)})
        return [*events, self._event("response.failed", response=self.response)]

    def _become(self, status: str, **more: Any) -> None:
        self.response = {**self.response, "status": status, "output": self._output, **more}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    # items

    def _opened(self, prefix: str, kind: str, origin: Origin | None = None, **fields: Any) -> tuple[_Open, list[Json]]:
        closing = self._close("completed")
        id = f"{prefix}_{self._tail}{len(self._output):04x}o"
        opened = _Open(len(self._output), {"id": id, "type": kind, "status": "in_progress", **fields}, origin=origin)
        self._open = opened
        added = self._event("response.output_item.added", output_index=opened.index, item=dict(opened.item))
        return opened, [*closing, added]

    def _close(self, status: str) -> list[Json]:
        opened, self._open, self._spaces = self._open, None, ""
        if opened is None:
            return []
        item = {**opened.item, "status": status}
        match item["type"]:
            case "reasoning":
                events = self._close_thought(opened, item)
            case "message":
                events = self._close_text(opened, item)
            case _:
                events = self._close_call(opened, item)
        self._output.append(item)
        return [*events, self._event("response.output_item.done", output_index=opened.index, item=item)]

    # thinking

    def _more_thought(self, text: str) -> list[Json]:
        events: list[Json] = []
        opened = self._open
        if opened is None or opened.item["type"] != "reasoning":
            opened, events = self._opened("rs", "reasoning", summary=[], content=[])
            empty = {"part": self._thought_part(""), **opened.where, **self._thought_at}
            kind = "reasoning_summary_part" if self._summarises else "content_part"
            events.append(self._event(f"response.{kind}.added", **empty))
        opened.pieces.append(text)
        kind = "reasoning_summary_text" if self._summarises else "reasoning_text"
        return [*events, self._event(f"response.{kind}.delta", **opened.where, **self._thought_at, delta=text)]

    def _close_thought(self, opened: _Open, item: Json) -> list[Json]:
        text = opened.text
        part = self._thought_part(text)
        item["summary" if self._summarises else "content"] = [part]
        if self._seals:
            item["encrypted_content"] = sealed(text)
        where = {**opened.where, **self._thought_at}
        of_text, of_part = ("reasoning_text", "content_part")
        if self._summarises:
            of_text, of_part = ("reasoning_summary_text", "reasoning_summary_part")
        return [
            self._event(f"response.{of_text}.done", **where, text=text),
            self._event(f"response.{of_part}.done", **where, part=part),
        ]

    def _thought_part(self, text: str) -> Json:
        return {"type": "summary_text" if self._summarises else "reasoning_text", "text": text}

    @property
    def _thought_at(self) -> Json:
        return {"summary_index": 0} if self._summarises else {"content_index": 0}

    # text

    def _more_text(self, text: str) -> list[Json]:
        events: list[Json] = []
        opened = self._open
        if opened is None or opened.item["type"] != "message":
            text = self._spaces + text
            if not text.strip():
                self._spaces = text
                return []
            opened, events = self._opened("msg", "message", role="assistant", content=[])
            events.append(self._event("response.content_part.added", **opened.where, content_index=0, part=_text("")))
        opened.pieces.append(text)
        at = {**opened.where, "content_index": 0}
        return [*events, self._event("response.output_text.delta", **at, delta=text, logprobs=[])]

    def _close_text(self, opened: _Open, item: Json) -> list[Json]:
        item["content"] = [_text(opened.text)]
        at = {**opened.where, "content_index": 0}
        return [
            self._event("response.output_text.done", **at, text=opened.text, logprobs=[]),
            self._event("response.content_part.done", **at, part=_text(opened.text)),
        ]

    # calls

    def _begun(self, call: CallBegun) -> list[Json]:
        origin = self._tools.origin(call.name)
        fields: Json = {"call_id": call.id, "name": origin.name}
        if origin.namespace is not None:
            fields["namespace"] = origin.namespace
        if origin.is_custom:
            return self._opened("ctc", "custom_tool_call", origin, **fields, input="")[1]
        return self._opened("fc", "function_call", origin, **fields, arguments="")[1]

    def _more_arguments(self, fragment: str) -> list[Json]:
        opened = self._open
        assert opened is not None and opened.origin is not None, "arguments belong to a call"
        opened.pieces.append(fragment)
        if opened.origin.is_custom:  # its text is known only when the JSON around it is complete
            return []
        return [self._event("response.function_call_arguments.delta", **opened.where, delta=fragment)]

    def _close_call(self, opened: _Open, item: Json) -> list[Json]:
        if opened.origin is not None and opened.origin.is_custom:
            item["input"] = custom_text(opened.text)
            return [
                self._event("response.custom_tool_call_input.delta", **opened.where, delta=item["input"]),
                self._event("response.custom_tool_call_input.done", **opened.where, input=item["input"]),
            ]
        item["arguments"] = opened.text
        done = {"name": item["name"], "arguments": opened.text}
        return [self._event("response.function_call_arguments.done", **opened.where, **done)]


def _text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _code(error: EverwarmError) -> str:
    """The error code that clients of this dialect expect."""
    if error.code == "exceed_context_size_error":
        return "context_length_exceeded"
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status == 400 else "server_error"
