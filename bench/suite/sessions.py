"""What is played: scenarios as requests to a chat endpoint, the same bytes for every server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.workload import text
from bench.workload.chat import Message, Step
from bench.workload.scenarios import SCENARIOS, Session, mixed, scenario

N_MIXED = 10


@dataclass(frozen=True, slots=True)
class Played:
    """A scenario to play. ``ram_mib``: what states may take, unless each server's default."""

    name: str
    ram_mib: int | None = None

    @property
    def swaps(self) -> bool:
        return self.name == "swap"

    def steps(self, seed: int, size: float) -> list[Step]:
        if self.name.startswith("mixed"):
            return mixed(seed, N_MIXED, size=size)
        if self.name in OWN:
            session = Session(f"{self.name}-{seed}", random.Random(f"{self.name}/{seed}"), size)
            OWN[self.name](session)
            return sorted(session.steps, key=lambda step: step.at_s)
        return scenario(self.name, seed, size)


def long_result_edited(s: Session) -> None:
    """A tool gives a long result; later the client sends it with a line changed in its middle, and goes on."""
    s.open()
    s.user()
    s.messages.append(s.ask(s.reply(calls=True)))
    at = len(s.messages)
    s.messages.append({"role": "tool", "content": text.tool_result(s.rng, s.n(250))})
    s.messages.append(s.ask(wait_s=4.0))
    s.turn()
    for _ in range(3):
        lines = s.messages[at]["content"].split("\n")
        lines[len(lines) // 2] = text.tool_result(s.rng, 1)
        s.messages[at] = {"role": "tool", "content": "\n".join(lines)}
        s.turn()


OWN: Mapping[str, Callable[[Session], None]] = {"long_result_edited": long_result_edited}

# Images are left out: the embedded model has no projector (`python -m bench pictures`).
ALL = (
    *(Played(name) for name in SCENARIOS if name != "images"),
    *(Played(name) for name in OWN),
    Played("mixed"),
    Played("mixed, little RAM", ram_mib=64),
)


def request(step: Step) -> dict[str, Any]:
    """The body of a chat completion."""
    body: dict[str, Any] = {"messages": [_on_the_wire(message) for message in step.messages]}
    return body | ({"tools": list(step.tools)} if step.tools else {})


def _on_the_wire(message: Message) -> dict[str, Any]:
    """Arguments of calls are JSON in a string there."""
    calls = [_call(call) for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
