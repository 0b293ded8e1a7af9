"""What happens to conversations: each scenario is a function from a seed to steps.

``size`` scales the lengths: at 1 a session starts with about 8,000 tokens of system prompt, tools and instructions, and
grows to some 30,000; at 0.02 it fits a context of 2,048 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bench.workload import text
from bench.workload.chat import Message, Step

THINKING_TIME_S = 45.0  # of the user, on average
_PRUNED = "[old output was cleared]"


@dataclass
class Session:
    """A conversation that grows. ``ask`` is the only way steps come about."""

    name: str
    rng: random.Random
    size: float = 1.0
    thinks: bool = False
    keeps_thinking: bool = False
    now: float = 0.0
    messages: list[Message] = field(default_factory=list)
    tools: tuple[Any, ...] = ()
    steps: list[Step] = field(default_factory=list)

    def n(self, number: float) -> int:
        return max(1, round(number * self.size))

    def open(self, layers: random.Random | None = None, *, n_files: int = 3) -> Session:
        """System prompt and tools, instructions of the repository, opened files. ``layers``: shared with other sessions."""
        rng = layers or self.rng
        self.tools = tuple(text.tools(rng, self.n(12), self.n(70)))
        self.messages.append({"role": "system", "content": text.prose(rng, self.n(700))})
        parts = ["# Instructions\n" + text.prose(rng, self.n(500))]
        parts += [f"# File {i}\n{text.source_file(rng, self.n(120))}" for i in range(n_files)]
        self.messages.append({"role": "user", "content": "\n\n".join(parts)})
        self.messages.append({"role": "assistant", "content": "I have read them."})
        return self

    def user(self, n_words: int = 60) -> None:
        self.messages.append({"role": "user", "content": text.prose(self.rng, self.n(n_words))})

    def reply(self, *, calls: bool = False, n_words: int = 160) -> Message:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text.prose(self.rng, self.n(20 if calls else n_words)),
        }
        if self.thinks:
            message["reasoning_content"] = text.prose(self.rng, self.n(220))
        if calls:
            name, arguments = self.rng.choice(text.TOOL_NAMES), {"path": "/".join(self.rng.choices(text.WORDS, k=3))}
            function = {"name": name, "arguments": arguments}
            message["tool_calls"] = [{"id": f"call_{len(self.steps)}", "type": "function", "function": function}]
        return message

    def ask(self, reply: Message | None = None, *, wait_s: float = THINKING_TIME_S, **happens: Any) -> Message:
        """Send what there is; the reply is not yet part of the conversation."""
        self.now += self.rng.expovariate(1 / wait_s)
        written = reply or self.reply()
        messages = tuple(self.messages)
        self.steps.append(Step(self.name, messages, written, self.now, self.tools, self.keeps_thinking, **happens))
        return written

    def turn(self, **happens: Any) -> None:
        self.user()
        self.messages.append(self.ask(**happens))

    def tool_loop(self, n_calls: int) -> None:
        self.user()
        for i in range(n_calls):
            self.messages.append(self.ask(self.reply(calls=True), wait_s=THINKING_TIME_S if i == 0 else 4.0))
            output = text.tool_result(self.rng, self.n(self.rng.randint(8, 60)))
            self.messages.append({"role": "tool", "content": output})
        self.messages.append(self.ask(wait_s=4.0))


def append(s: Session) -> None:
    s.open()
    for _ in range(12):
        s.turn()


def tool_loops(s: Session) -> None:
    s.open()
    for _ in range(3):
        s.tool_loop(6)


def thinking_stripped(s: Session) -> None:
    s.thinks = True
    append(s)
    s.tool_loop(4)
    s.turn()


def thinking_kept(s: Session) -> None:
    s.keeps_thinking = True
    thinking_stripped(s)


def resend(s: Session) -> None:
    """Everything is sent twice, with the same reply."""
    s.open()
    for _ in range(6):
        s.user()
        answer = s.ask()
        s.messages.append(s.ask(answer))


def regenerate(s: Session) -> None:
    """A second reply replaces the first."""
    s.open()
    for _ in range(6):
        s.user()
        s.ask()
        s.messages.append(s.ask())


def edit(s: Session) -> None:
    """A message is changed somewhere in the middle and the conversation goes on from there."""
    s.open()
    for _ in range(8):
        s.turn()
    for _ in range(3):
        users = [i for i, m in enumerate(s.messages) if m["role"] == "user"][1:]
        del s.messages[s.rng.choice(users) :]
        s.turn()
        s.turn()


def prune(s: Session) -> None:
    """Old tool outputs are cleared when the conversation has grown, all but the newest few."""
    s.open()
    for _ in range(4):
        s.tool_loop(5)
        old = [i for i, m in enumerate(s.messages) if m["role"] == "tool"][:-3]
        for i in old:
            s.messages[i] = {"role": "tool", "content": _PRUNED}
    s.turn()


def compaction(s: Session) -> None:
    """The history becomes a summary; system prompt and tools stay."""
    s.open()
    for _ in range(3):
        s.tool_loop(6)
        s.turn()
        summary = {"role": "user", "content": "Summary so far:\n" + text.prose(s.rng, s.n(400))}
        s.messages[1:] = [summary, {"role": "assistant", "content": "Understood."}]
    s.turn()


def fan_out(s: Session) -> None:
    """Eight helpers start from the same beginning, work, and report to the one that sent them."""
    s.open()
    s.turn()
    n_shared, reports = len(s.messages), []
    for i in range(8):
        helper = Session(f"{s.name}/{i}", s.rng, s.size, now=s.now, tools=s.tools, messages=s.messages[:n_shared])
        helper.tool_loop(3)
        s.steps += helper.steps
        reports.append(text.prose(s.rng, s.n(80)))
    s.now = max(step.at_s for step in s.steps)
    s.messages.append({"role": "user", "content": "\n\n".join(reports)})
    s.messages.append(s.ask())
    s.turn()


def interleave(s: Session) -> None:
    """Six conversations with the same tools take turns."""
    seed = s.rng.random()
    others = [
        Session(f"{s.name}/{i}", random.Random(f"{seed}/{i}"), s.size).open(random.Random(seed)) for i in range(6)
    ]
    for _ in range(6):
        for other in s.rng.sample(others, len(others)):
            other.now = s.now
            other.turn(wait_s=8.0)
            s.now = other.now
    s.steps += [step for other in others for step in other.steps]


def volatile_date(s: Session) -> None:
    """The system prompt tells the time, in its middle: what comes after is new each time."""
    s.open()
    system = s.messages[0]["content"]
    half = len(system) // 2
    for minute in range(8):
        clock = f"\nIt is 10:{minute:02d}.\n"
        s.messages[0] = {"role": "system", "content": system[:half] + clock + system[half:]}
        s.turn()


def cancel_retry(s: Session) -> None:
    """The client hangs up while its prompt is read, and asks again."""
    s.open()
    for _ in range(5):
        s.messages.append({"role": "user", "content": text.source_file(s.rng, s.n(150))})
        s.ask(stops_at=s.rng.uniform(0.2, 0.95))
        s.messages.append(s.ask(wait_s=5.0))


def kill_restart(s: Session) -> None:
    s.open()
    for i in range(8):
        s.turn(before="kill" if i in (3, 6) else "")


def swap(s: Session) -> None:
    """Another model has the place for a while, every other turn."""
    s.open()
    for i in range(8):
        s.turn(before="swap" if i % 2 else "")


def images(s: Session) -> None:
    """Images come with messages; they are sent again with every turn and recognised by their digest."""
    s.open()
    for i in range(6):
        names = [f"{s.name}/picture {i}"] + (["a logo everybody has"] if i % 2 else [])
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": name}} for name in names]
        s.messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text.prose(s.rng, s.n(40))}]})
        s.messages.append(s.ask())


SCENARIOS: dict[str, Callable[[Session], None]] = {
    each.__name__: each
    for each in (
        append,
        tool_loops,
        thinking_stripped,
        thinking_kept,
        resend,
        regenerate,
        edit,
        prune,
        compaction,
        fan_out,
        interleave,
        volatile_date,
        cancel_retry,
        kill_restart,
        swap,
        images,
    )
}


def scenario(name: str, seed: int, size: float = 1.0) -> list[Step]:
    """The steps of one scenario in their order."""
    session = Session(f"{name}-{seed}", random.Random(f"{name}/{seed}"), size)
    SCENARIOS[name](session)
    return sorted(session.steps, key=lambda step: step.at_s)


def mixed(seed: int, n_sessions: int = 24, hours: float = 2.0, size: float = 1.0) -> list[Step]:
    """Sessions of every kind that begin at random over some hours. Nothing is killed or swapped."""
    rng = random.Random(f"mixed/{seed}")
    kinds = [name for name in SCENARIOS if name not in ("kill_restart", "swap")]
    steps: list[Step] = []
    for i in range(n_sessions):
        start = rng.uniform(0, 3600 * hours)
        steps += [
            replace(step, at_s=step.at_s + start) for step in scenario(kinds[i % len(kinds)], seed * 1000 + i, size)
        ]
    return sorted(steps, key=lambda step: step.at_s)
