"""Traces of conversations that compete for memory: token ids only, no text, seeded.

They are what ``python -m bench.policy`` and ``tests/simulate/test_memory_traces.py`` replay. Every one exists in three
forms: ``hinted`` (boundaries and stable points, as a chat request has), ``plain`` (the same tokens without hints) and
``blocks`` (Mooncake's form: of a prompt only the hashes of whole blocks of 512 tokens are known, and of a reply nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import blake3
import msgspec
import numpy as np

from everwarm.prompt.prompt import Codes, Prompt
from everwarm.simulate.trace import MOONCAKE_BLOCK, TraceTurn, parse

ANY = 1 << 30  # a vocabulary of which no two draws agree
_END = np.array([3], np.int32)  # the token that ends a reply


@dataclass(slots=True)
class Talk:
    """One conversation: what was said so far, and where its messages begin."""

    name: str
    codes: Codes
    boundaries: list[int] = field(default_factory=list)

    def copy(self) -> Talk:
        return Talk(self.name, self.codes, list(self.boundaries))


class Writer:
    """Draws tokens and times, and writes turns."""

    def __init__(self, seed: int, size: float, n_vocab: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._size = size
        self._n_vocab = n_vocab
        self.turns: list[TraceTurn] = []
        self.now = 0.0
        self._n_talks = 0

    def scaled(self, n: int) -> int:
        return max(4, int(n * self._size))

    def tokens(self, n: int) -> Codes:
        return self.rng.integers(10, self._n_vocab, self.scaled(n)).astype(np.int32)

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def pause(self, mean_s: float) -> None:
        self.now += float(self.rng.exponential(mean_s))

    def talk(self, head: Codes | None = None) -> Talk:
        self._n_talks += 1
        codes = np.zeros(0, np.int32) if head is None else head
        return Talk(f"talk {self._n_talks}", codes, [len(codes)] if len(codes) else [])

    def turn(self, talk: Talk, n_user: int, n_reply: int) -> None:
        talk.boundaries.append(len(talk.codes))
        prompt = np.concatenate([talk.codes, self.tokens(n_user)])
        reply = self.tokens(n_reply)
        inside = tuple(at for at in talk.boundaries if 0 < at < len(prompt))
        ended = np.concatenate([reply, _END])
        self.turns.append(TraceTurn(talk.name, Prompt(prompt), ended, self.now, inside, len(prompt) - 4))
        talk.codes = np.concatenate([prompt, reply])


def in_turn(
    seed: int, size: float = 1.0, n_vocab: int = ANY, n_talks: int = 6, n_requests: int = 120
) -> list[TraceTurn]:
    """Conversations one after the other, each from 4,000 to 14,000 tokens."""
    writer = Writer(seed, size, n_vocab)
    talks = [writer.talk() for _ in range(n_talks)]
    step = 10_000 * n_talks // (n_requests - n_talks)
    for i in range(n_requests):
        talk = talks[i % n_talks]
        writer.pause(20)
        writer.turn(talk, (step if len(talk.codes) else 4000) - 100, 100)
    return writer.turns


def popular(
    seed: int, size: float = 1.0, n_vocab: int = ANY, n_talks: int = 40, n_requests: int = 400
) -> list[TraceTurn]:
    """Few conversations go on often, many seldom; all begin with the same 2,000 tokens."""
    writer = Writer(seed, size, n_vocab)
    head = writer.tokens(2000)
    talks = [writer.talk(head) for _ in range(n_talks)]
    shares = 1 / np.arange(1, n_talks + 1) ** 1.1
    for _ in range(n_requests):
        talk = talks[int(writer.rng.choice(n_talks, p=shares / shares.sum()))]
        writer.pause(10)
        writer.turn(talk, writer.number(100, 900), writer.number(50, 500))
    return writer.turns


def agents(
    seed: int, size: float = 1.0, n_vocab: int = ANY, n_agents: int = 8, n_requests: int = 240
) -> list[TraceTurn]:
    """Agents that work in bursts of two to six turns, up to 60,000 tokens; three beginnings of 20,000 are shared."""
    writer = Writer(seed, size, n_vocab)
    heads = [writer.tokens(20_000) for _ in range(3)]
    talks = [writer.talk(heads[i % 3]) for i in range(n_agents)]
    while len(writer.turns) < n_requests:
        i = writer.number(0, n_agents)
        for _ in range(writer.number(2, 7)):
            writer.pause(4)
            writer.turn(talks[i], writer.number(200, 3000), writer.number(50, 400))
            if len(talks[i].codes) > writer.scaled(60_000):
                talks[i] = writer.talk(heads[writer.number(0, 3)])
        writer.pause(15)
    return writer.turns[:n_requests]


def branches(
    seed: int, size: float = 1.0, n_vocab: int = ANY, n_talks: int = 10, n_requests: int = 200
) -> list[TraceTurn]:
    """Conversations that often step back a few turns and go on from there."""
    writer = Writer(seed, size, n_vocab)
    past: list[list[Talk]] = [[writer.talk()] for _ in range(n_talks)]
    for _ in range(n_requests):
        history = past[writer.number(0, n_talks)]
        if len(history) > 3 and writer.rng.random() < 0.35:
            del history[-writer.number(1, min(6, len(history) - 1)) :]
        talk = history[-1].copy()
        writer.pause(12)
        writer.turn(talk, writer.number(200, 2500) if len(talk.codes) else 3000, writer.number(100, 700))
        history.append(talk)
    return writer.turns


def documents(
    seed: int, size: float = 1.0, n_vocab: int = ANY, n_documents: int = 30, n_requests: int = 200
) -> list[TraceTurn]:
    """Single questions about documents of 3,000 to 20,000 tokens, some of them asked about often."""
    writer = Writer(seed, size, n_vocab)
    head = writer.tokens(1500)
    texts = [np.concatenate([head, writer.tokens(writer.number(3000, 20_000))]) for _ in range(n_documents)]
    shares = 1 / np.arange(1, n_documents + 1) ** 0.9
    for _ in range(n_requests):
        talk = writer.talk(texts[int(writer.rng.choice(n_documents, p=shares / shares.sum()))])
        writer.pause(8)
        writer.turn(talk, writer.number(30, 200), writer.number(50, 400))
    return writer.turns


def one_offs(seed: int, size: float = 1.0, n_vocab: int = ANY, n_requests: int = 200) -> list[TraceTurn]:
    """Four long conversations among many prompts that never come back."""
    writer = Writer(seed, size, n_vocab)
    talks = [writer.talk() for _ in range(4)]
    for _ in range(n_requests):
        writer.pause(10)
        if writer.rng.random() < 0.6:
            writer.turn(writer.talk(), writer.number(2000, 15_000), writer.number(50, 400))
        else:
            talk = talks[writer.number(0, 4)]
            writer.turn(talk, writer.number(300, 1500) if len(talk.codes) else 6000, writer.number(50, 400))
    return writer.turns


def subagents(seed: int, size: float = 1.0, n_vocab: int = ANY, n_requests: int = 200) -> list[TraceTurn]:
    """A long main conversation that starts short-lived ones with its beginning, each of a few turns, and goes on."""
    writer = Writer(seed, size, n_vocab)
    main = writer.talk(writer.tokens(12_000))
    while len(writer.turns) < n_requests:
        writer.pause(20)
        writer.turn(main, writer.number(200, 1500), writer.number(100, 500))
        for talk in [writer.talk(main.codes[: writer.scaled(12_000)]) for _ in range(writer.number(0, 4))]:
            for _ in range(writer.number(1, 5)):
                writer.pause(3)
                writer.turn(talk, writer.number(300, 4000), writer.number(50, 300))
        if len(main.codes) > writer.scaled(50_000):
            main = writer.talk(main.codes[: writer.scaled(12_000)])
    return writer.turns[:n_requests]


def shifts(seed: int, size: float = 1.0, n_vocab: int = ANY, n_requests: int = 240) -> list[TraceTurn]:
    """Three shifts: in each another five conversations go on, and those of the first come back in the third."""
    writer = Writer(seed, size, n_vocab)
    head = writer.tokens(3000)
    teams = [[writer.talk(head) for _ in range(5)] for _ in range(2)]
    for i in range(n_requests):
        team = teams[1] if n_requests // 3 <= i < 2 * n_requests // 3 else teams[0]
        writer.pause(15)
        writer.turn(team[writer.number(0, 5)], writer.number(100, 800), writer.number(50, 500))
    return writer.turns


TRACES: dict[str, Callable[[int, float, int], list[TraceTurn]]] = {
    "in turn": in_turn,
    "popular": popular,
    "agents": agents,
    "branches": branches,
    "documents": documents,
    "one-offs": one_offs,
    "sub-agents": subagents,
    "shifts": shifts,
}


# forms


def plain(turns: Sequence[TraceTurn]) -> list[TraceTurn]:
    return [TraceTurn(turn.conversation, turn.prompt, turn.reply, turn.at_s) for turn in turns]


def blocks(turns: Sequence[TraceTurn]) -> list[TraceTurn]:
    """As Mooncake's traces are: prefixes agree by whole blocks, and replies are not known."""
    ids: dict[bytes, int] = {}
    return list(parse(_mooncake_line(turn, ids) for turn in turns))


def _mooncake_line(turn: TraceTurn, ids: dict[bytes, int]) -> bytes:
    digest, hashes = blake3.blake3(), []
    for start in range(0, len(turn.prompt), MOONCAKE_BLOCK):
        digest.update(turn.prompt.codes[start : start + MOONCAKE_BLOCK].tobytes())
        hashes.append(ids.setdefault(digest.digest(), len(ids) + 1))
    line = {"timestamp": 1e3 * turn.at_s, "input_length": len(turn.prompt), "hash_ids": hashes}
    return msgspec.json.encode({**line, "output_length": max(0, len(turn.reply) - 1)})


FORMS: dict[str, Callable[[Sequence[TraceTurn]], list[TraceTurn]]] = {"hinted": list, "plain": plain, "blocks": blocks}


def trace(name: str, form: str, seed: int, size: float = 1.0, n_vocab: int = ANY) -> list[TraceTurn]:
    """``size`` scales all lengths."""
    return FORMS[form](TRACES[name](seed, size, n_vocab))
