"""How a model writes its thoughts and its calls: as its template says, unless whoever runs it knows better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everwarm.gateway.parsing.reasoning import ReasoningStyle, detect_reasoning, reasoning_style
from everwarm.gateway.parsing.tool_parser import detect_tools

ToolFormat = Literal["auto", "none", "hermes", "qwen-xml", "jamba", "nemotron", "pythonic"]
ThinkingTags = Literal["auto", "none", "think", "start-thinking", "thinking", "bracket-think", "seed-think"]

TAIL = 64  # characters of a prompt's end that say how its reply begins


@dataclass(frozen=True, slots=True)
class ModelSyntax:
    template: str
    tool_format: ToolFormat = "auto"
    thinking_tags: ThinkingTags = "auto"

    @property
    def tools(self) -> str | None:
        """The name of the format of its calls; None: it has none that we know."""
        if self.tool_format == "auto":
            return detect_tools(self.template)
        return None if self.tool_format == "none" else self.tool_format

    def thinking(self, prompt: str) -> ReasoningStyle | None:
        """How it thinks in the reply to this prompt; None: not at all."""
        if self.thinking_tags == "auto":
            return detect_reasoning(self.template, prompt[-TAIL:])
        return None if self.thinking_tags == "none" else reasoning_style(self.thinking_tags, prompt[-TAIL:])
