"""A chat reply: thinking, text and tool calls, told apart while it streams or when it is all there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everwarm.gateway.parsing.model_syntax import ModelSyntax
from everwarm.gateway.parsing.reasoning import Reasoning, ReasoningParser, Text
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded, ToolParser, settled
from everwarm.gateway.parsing.tool_reader import Kind
from everwarm.types import Json

Event = Reasoning | Text | CallBegun | CallArguments | CallEnded


class OutputParser:
    """Of one reply: fed with its text in order. With ``one_call`` nothing is said after the first whole call."""

    def __init__(
        self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None, *, one_call: bool = False
    ) -> None:
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
        """As the model writes after a prompt that ends so. Without ``kinds``, of the tools there are, nothing is a call;
        thinking may stay text."""
        style = notation.thinking(prompt) if with_thinking else None
        format = notation.tools if kinds else None
        parser = ToolParser(format, kinds=kinds) if format else None
        return cls(ReasoningParser(style) if style else None, parser, one_call=one_call)

    def read(self, text: str) -> list[Event]:
        """What can be said by now."""
        return self._counted(self._said(self._reasoning.feed(text) if self._reasoning else [Text(text)]))

    def rest(self) -> list[Event]:
        """What was held back, when the reply ends."""
        found = self._said(self._reasoning.finish()) if self._reasoning else []
        return self._counted([*found, *(self._tools.finish() if self._tools else ())])

    def feed(self, text: str) -> list[Json]:
        """The same as OpenAI's deltas."""
        return _deltas(self.read(text))

    def finish(self) -> list[Json]:
        return _deltas(self.rest())

    def message(self, text: str) -> Json:
        """A whole reply as one message."""
        events = [*self.read(text), *self.rest()]
        thought = "".join(event.text for event in events if isinstance(event, Reasoning))
        rest = settled(event for event in events if not isinstance(event, Reasoning))
        calls: list[Json] = []
        for event in rest:
            if isinstance(event, CallBegun):
                calls.append(_call(event))
            elif isinstance(event, CallArguments):
                calls[-1]["function"]["arguments"] += event.json_fragment
        self.n_calls = len(calls)
        content = "".join(event.text for event in rest if isinstance(event, Text))
        message: Json = {"role": "assistant", "content": content if content or not calls else None}
        if thought:
            message["reasoning_content"] = thought
        return message | ({"tool_calls": calls} if calls else {})

    def _said(self, events: Sequence[Text | Reasoning]) -> list[Event]:
        if self._tools is None:
            return [event for event in events if event.text]
        found: list[Event] = []
        for event in events:
            found += [event] if isinstance(event, Reasoning) else self._tools.feed(event.text)
        return found

    def _counted(self, events: list[Event]) -> list[Event]:
        said: list[Event] = []
        for event in events:
            if self._one_call and self.n_calls:
                break
            said.append(event)
            self.n_calls += isinstance(event, CallEnded) and event.complete
        return said


def _deltas(events: Sequence[Event]) -> list[Json]:
    return [delta for delta in map(_delta, events) if delta is not None]


def _delta(event: Event) -> Json | None:
    match event:
        case Reasoning(text=text):
            return {"reasoning_content": text}
        case Text(text=text):
            return {"content": text}
        case CallBegun():
            return {"tool_calls": [{"index": event.index, **_call(event)}]}
        case CallArguments():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.json_fragment}}]}
        case CallEnded():
            return None


def _call(event: CallBegun) -> Json:
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
