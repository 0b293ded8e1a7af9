"""llama-server's ``timings_per_token``: what was read and written so far, with every chunk of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from everwarm.engine.process import messages as m
from everwarm.gateway.openai.schema import Body
from everwarm.gateway.serving.generate import ReplyEvent
from everwarm.types import Json


@dataclass(slots=True)
class _Choice:
    """Times are those of the gateway's clock."""

    n_prompt: int = 0
    n_cached: int = 0
    n_read: int = 0
    n_reply: int = 0
    began_s: float = 0.0
    first_s: float | None = None
    now_s: float = 0.0

    def timings(self) -> Json:
        read_ms = 1e3 * ((self.now_s if self.first_s is None else self.first_s) - self.began_s)
        write_ms = 0.0 if self.first_s is None else 1e3 * (self.now_s - self.first_s)
        n_decoded = max(0, self.n_reply - 1)  # the first token comes with the prompt
        return {
            "cache_n": self.n_cached,
            "prompt_n": self.n_read,
            "prompt_ms": read_ms,
            "prompt_per_token_ms": read_ms / max(1, self.n_read),
            "prompt_per_second": 1e3 * self.n_read / read_ms if read_ms else 0.0,
            "predicted_n": self.n_reply,
            "predicted_ms": write_ms,
            "predicted_per_token_ms": write_ms / n_decoded if n_decoded else 0.0,
            "predicted_per_second": 1e3 * n_decoded / write_ms if write_ms else 0.0,
        }


def live_timings(body: Body) -> LiveTimings:
    return LiveTimings(time.monotonic if body.timings_per_token else None)


class LiveTimings:
    """Of one request. ``clock``: None if it did not ask for them."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._choices: dict[int, _Choice] = {}

    def after(self, event: ReplyEvent) -> Json:
        """The field of a chunk for this event; nothing for one that has none, and for the last, which has its own."""
        if self._clock is None:
            return {}
        now_s, message = self._clock(), event.message
        choice = self._choices.setdefault(event.index, _Choice(began_s=now_s))
        choice.now_s = now_s
        match message:
            case m.Begun():
                choice.n_prompt = message.n_prompt
                choice.n_cached = message.n_cached
                return {}
            case m.PromptRead():
                choice.n_read = message.n_read - message.n_cached
                if not choice.n_read:  # the first report, before anything is read
                    choice.began_s = now_s
            case m.TextPiece():
                choice.first_s = now_s if choice.first_s is None else choice.first_s
                choice.n_read = choice.n_prompt - choice.n_cached
                choice.n_reply += len(message.tokens)
            case m.Done():
                return {}
        return {"timings": choice.timings()}
