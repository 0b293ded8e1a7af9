"""A chat reply split into thinking, text and tool calls, while it streams or when it is complete.

``ModelSyntax`` is how a model writes its thinking and its calls: detected from its template, unless the operator sets
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from everwarm.gateway.parsing.reasoning import (
    Reasoning,
    ReasoningParser,
    ReasoningStyle,
    Text,
    detect_reasoning,
    reasoning_style,
)
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded, ToolParser, detect_tools, settled
from everwarm.gateway.parsing.tool_reader import Kind
from everwarm.types import Json

Piece = Reasoning | Text | CallBegun | CallArguments | CallEnded
TAIL = 64  # characters of a prompt's end that decide how its reply begins


class OutputParser:
    """The parser of one reply, fed with its text in order. With ``one_call`` it drops everything after the first complete
    call."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        one_call: bool = False,
        opened: str = "",
    ) -> None:
        """``opened``: what the prompt has written of the reply already, and the client should see."""
        self._opened = opened
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self.n_calls = 0

    @classmethod
    def of(
        cls,
        notation: ModelSyntax,
        prompt: str,
        kinds: Mapping[str, Mapping[str, Kind]] | None,
        *,
        with_thinking: bool,
        one_call: bool = False,
    ) -> OutputParser:
        """A parser for the reply to this prompt. Without ``kinds`` (the arguments of the tools) nothing is a call; without
        ``with_thinking`` thinking stays text."""
        style = notation.thinking(prompt) if with_thinking else None
        opened = "" if with_thinking else notation.opened_by(prompt)
        format = notation.tools if kinds else None
        parser = ToolParser(format, kinds=kinds) if format else None
        return cls(ReasoningParser(style) if style else None, parser, one_call=one_call, opened=opened)

    def read(self, text: str) -> list[Piece]:
        """The pieces that are certain so far."""
        if self._opened:
            text, self._opened = self._opened + text, ""
        if self._reasoning is None and self._tools is None:
            return [Text(text)] if text else []
        found = self._with_calls(self._reasoning.feed(text) if self._reasoning else [Text(text)])
        return found if self._tools is None else self._counted(found)

    def rest(self) -> list[Piece]:
        """What was held back, at the end of the reply."""
        found = self._with_calls(self._reasoning.finish()) if self._reasoning else []
        return self._counted([*found, *(self._tools.finish() if self._tools else ())])

    def message(self, text: str) -> Json:
        """A whole reply as one message in OpenAI's shape."""
        return message_of([*self.read(text), *self.rest()])

    def _with_calls(self, events: Sequence[Text | Reasoning]) -> list[Piece]:
        if self._tools is None:
            return [event for event in events if event.text]
        found: list[Piece] = []
        for event in events:
            found += [event] if isinstance(event, Reasoning) else self._tools.feed(event.text)
        return found

    def _counted(self, events: list[Piece]) -> list[Piece]:
        counted: list[Piece] = []
        for event in events:
            if self._one_call and self.n_calls:
                break
            counted.append(event)
            self.n_calls += isinstance(event, CallEnded) and event.complete
        return counted


def message_of(pieces: Sequence[Piece]) -> Json:
    """A whole reply's pieces as one message in OpenAI's shape. An incomplete call becomes text."""
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    rest = settled(piece for piece in pieces if not isinstance(piece, Reasoning))
    calls: list[Json] = []
    for piece in rest:
        if isinstance(piece, CallBegun):
            calls.append(call_of(piece))
        elif isinstance(piece, CallArguments):
            calls[-1]["function"]["arguments"] += piece.json_fragment
    content = "".join(piece.text for piece in rest if isinstance(piece, Text))
    message: Json = {"role": "assistant", "content": content if content or not calls else None}
    if thought:
        message["reasoning_content"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def call_of(begun: CallBegun) -> Json:
    """A call without its arguments, in OpenAI's shape."""
    return {"id": begun.id, "type": "function", "function": {"name": begun.name, "arguments": ""}}


ToolFormat = Literal["auto", "none", "hermes", "qwen-xml", "jamba", "nemotron", "pythonic"]
ThinkingTags = Literal["auto", "none", "think", "start-thinking", "thinking", "bracket-think", "seed-think"]


@dataclass(frozen=True, slots=True)
class ModelSyntax:
    template: str
    tool_format: ToolFormat = "auto"
    thinking_tags: ThinkingTags = "auto"
    begun: Literal["content", "reasoning"] | None = None  # the part of a reply that the prompt has begun

    def continued(self, part: Literal["content", "reasoning"] | None) -> ModelSyntax:
        return replace(self, begun=part)

    @property
    def tools(self) -> str | None:
        """The name of the model's tool call format; None: unknown."""
        if self.tool_format == "auto":
            return detect_tools(self.template)
        return None if self.tool_format == "none" else self.tool_format

    def thinking(self, prompt: str) -> ReasoningStyle | None:
        """The reasoning style of the reply to this prompt; None: no thinking."""
        if self.begun == "content":
            return None
        style = self._style(prompt)
        if style is not None and self.begun == "reasoning":
            return ReasoningStyle(style.opening, style.closing, "within")
        return style

    def opened_by(self, prompt: str) -> str:
        """The opening of the thinking, if the prompt ends with it; else empty."""
        style = self._style(prompt) if self.begun is None else None
        return prompt[prompt.rfind(style.opening) :] if style is not None and style.begins == "inside" else ""

    def _style(self, prompt: str) -> ReasoningStyle | None:
        if self.thinking_tags == "auto":
            return detect_reasoning(self.template, prompt[-TAIL:])
        return None if self.thinking_tags == "none" else reasoning_style(self.thinking_tags, prompt[-TAIL:])
