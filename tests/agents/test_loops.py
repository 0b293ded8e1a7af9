"""Twenty turns with a tool in every dialect, with and without thinking, whole and streamed: next to nothing is read twice.

Regret is what was read although the server had read or written it before, in whichever conversation. It says so itself, and
what it says is held against the prompts that the clients stand for and against what the turn before had read and written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from support.campaign import crossed
from support.loops import Anthropic, Chat, LoopReply, Ollama, Previous, Responses, Talk, talking
from support.server import GUARD, Server, metric, serving
from support.shown import Shown

CITIES = (
    "Rome Oslo Paris Berlin Madrid Vienna Lisbon Athens Dublin Warsaw Prague London Cairo Tokyo Lima Bern Kyoto Delhi"
)
SKIES = ("sunny", "rain", "fog", "snow")
ALLOWED = 0.005  # of the prompts' tokens
LOOPS = [
    *crossed((Chat, Responses, Anthropic, Ollama), (False, True), (False, True)),
    *((Previous, True, stream) for stream in (False, True)),
]


@dataclass
class Reader:
    """The server, and every prompt that it has ever been shown."""

    server: Server
    shown: Shown = field(default_factory=Shown)
    _counts: list[int] = field(default_factory=lambda: [0, 0])

    def counted(self) -> tuple[int, int]:
        """Prompt tokens that were read since the last time, and those of them that were known."""
        text = self.server.get("/metrics").data.decode()
        names = ("llamacpp:prompt_tokens_total", "everwarm_tokens_read_again_total")
        before, self._counts = self._counts, [int(metric(text, name)) for name in names]
        return self._counts[0] - before[0], self._counts[1] - before[1]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with serving() as server:
        yield Reader(server)


@dataclass(frozen=True)
class Turn:
    message: LoopReply
    n_read: int
    n_new: int  # what no prompt had
    n_again: int  # by the server's count, which knows replies as well


class Loop:
    """One conversation, every turn measured."""

    def __init__(self, reader: Reader, talk: Talk) -> None:
        self._reader, self._talk = reader, talk
        self.turns: list[Turn] = []

    def say(self) -> LoopReply:
        prompt, message = self._talk.prompt(), self._talk.say()
        n_read, n_again = self._reader.counted()
        assert message.n_prompt == len(prompt)
        assert message.n_cached is None or message.n_prompt - message.n_cached == n_read
        n_new = len(prompt) - self._reader.shown.n_known(prompt)
        assert n_read <= n_new + GUARD
        assert n_again >= n_read - n_new, "the server must not know less than what it was shown"
        self._reader.shown.add(prompt)
        self.turns.append(Turn(message, n_read, n_new, n_again))
        return message


def hold(loop: Loop, talk: Talk, cities: Sequence[str], *, think: bool) -> None:
    for i, city in enumerate(cities):
        talk.ask(f"What is the weather in {city}?")
        called = loop.say()
        assert called.city == city
        sky = SKIES[i % len(SKIES)]
        talk.give(sky)
        answer = loop.say()
        assert answer.city is None and sky in answer.thought + answer.text
        assert bool(called.thought) == bool(answer.thought) == think
        n_beyond = answer.n_prompt - called.n_prompt - called.n_written
        assert loop.turns[-1].n_read <= n_beyond + GUARD, "nothing of what the model wrote is read again"


@pytest.mark.parametrize(("dialect", "think", "stream"), LOOPS)
def test_a_loop_of_tools_reads_only_what_is_new(reader, dialect, think, stream):
    cities = CITIES.split()
    first = LOOPS.index((dialect, think, stream))
    cities = [*cities[first:], *cities[:first]][:10]  # nobody has begun like that
    with talking(dialect, reader.server, think=think, stream=stream) as talk:
        loop = Loop(reader, talk)
        hold(loop, talk, cities, think=think)
    n_prompt, n_again = (sum(of) for of in zip(*((t.message.n_prompt, t.n_again) for t in loop.turns), strict=True))
    assert len(loop.turns) == 20 and n_prompt > 5000
    assert n_again <= ALLOWED * n_prompt, [turn.n_again for turn in loop.turns]
