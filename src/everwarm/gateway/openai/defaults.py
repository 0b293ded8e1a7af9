"""The server's own defaults, for requests that do not set a field. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from everwarm.config import Sampling
from everwarm.gateway.openai.schema import DEFAULT_SAMPLING, Body, ChatBody

ReasoningFormat = Literal["none", "auto", "deepseek"]
B = TypeVar("B", bound=Body)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestDefaults:
    """``None`` or empty: as it is without them."""

    sampling: Sampling = DEFAULT_SAMPLING
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True
    grammar: str | None = None
    json_schema: Mapping[str, Any] | None = None
    reasoning_format: ReasoningFormat | None = None
    reasoning_budget: int | None = None  # tokens of thinking
    reasoning_budget_message: str | None = None
    verbose: bool = False  # answers to chats show the prompt that was made of them
    context_shift: bool = False  # replies go on where their context is full, with less behind them
    n_keep: int = 0  # tokens that such a reply keeps from its beginning; -1: its whole prompt
    spm_infill: bool = False  # /infill: the text after the cursor comes first
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def applied(self, body: B) -> B:
        """The body with everything but its sampling filled in."""
        changes = self._for_any(body)
        if isinstance(body, ChatBody):
            changes |= self._for_chat(body)
        return msgspec.structs.replace(body, **changes) if changes else body

    def _for_any(self, body: Body) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.max_tokens is not None and body.max_tokens is body.n_predict is body.max_completion_tokens is None:
            changes["n_predict"] = self.max_tokens
        if self.stop and not body.stops():
            changes["stop"] = list(self.stop)
        if self.ignore_eos and body.ignore_eos is None:
            changes["ignore_eos"] = True
        if not self.cache_prompt and body.cache_prompt is None:
            changes["cache_prompt"] = False
        if not self.context_shift:
            changes |= {} if body.n_keep is None else {"n_keep": None}
        elif body.n_keep is None:
            changes["n_keep"] = self.n_keep
        if not body.has_form:
            changes |= {} if self.grammar is None else {"grammar": self.grammar}
            changes |= {} if self.json_schema is None else {"json_schema": dict(self.json_schema)}
        return changes

    def _for_chat(self, body: ChatBody) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.reasoning_format is not None and body.reasoning_format is None:
            changes["reasoning_format"] = self.reasoning_format
        if self.reasoning_budget is not None and body.reasoning_budget_tokens is body.thinking_budget_tokens is None:
            changes["reasoning_budget_tokens"] = self.reasoning_budget
        if self.reasoning_budget_message is not None and body.reasoning_budget_message is None:
            changes["reasoning_budget_message"] = self.reasoning_budget_message
        if self.verbose and body.verbose is None:
            changes["verbose"] = True
        if self.template_kwargs:
            changes["chat_template_kwargs"] = {**self.template_kwargs, **(body.chat_template_kwargs or {})}
        return changes
