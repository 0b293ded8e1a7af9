"""Conversations whose text changes inside a message: a volatile system prompt, and long results that are edited later.

Two sets that share no format: patterns were chosen on ``TUNED``, and ``HELD_OUT`` judges them, with other seeds. A system
prompt is prose, then a block that tells a moment, then prose again. It changes while a conversation goes on, and another
conversation begins with the same prose and another moment.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from bench.workload import text
from bench.workload.chat import Step
from bench.workload.scenarios import Session

TUNED_SEEDS, HELD_OUT_SEEDS = (1, 2), (11, 12)
SIZE = 0.3  # of a conversation: system prompts of some 1,500 tokens, results of 3,000
N_TURNS = 3


@dataclass(frozen=True, slots=True)
class Moment:
    """What volatile text tells: ``at`` and ``n`` change from request to request, ``place`` from one conversation to the
    next."""

    at: datetime
    n: int
    place: str

    def word(self) -> str:
        return random.Random(self.place).choice(text.WORDS)


Block = Callable[[Moment], str]


# a volatile system prompt: what is known while patterns are chosen


def _environment(m: Moment) -> str:
    path = f"/workspace/{m.word()}/{m.word()}"
    return (
        f"<env>\nWorking directory: {path}\nIs directory a git repo: Yes\nPlatform: linux\n"
        f"Today's date: {m.at:%Y-%m-%d}\n</env>"
    )


def _clock(m: Moment) -> str:
    return f"It is {m.at:%H:%M}."


def _time_stamp(m: Moment) -> str:
    return f"Current date and time: {m.at:%Y-%m-%dT%H:%M:%S}Z"


def _session_id(m: Moment) -> str:
    return f"Session: {uuid.UUID(int=random.Random(f'{m.at}').getrandbits(128))}"


def _git_status(m: Moment) -> str:
    return (
        f"gitStatus: This is the git status at the start.\nCurrent branch: {m.word()}-{m.n}\n\nStatus:\n"
        f"M src/{m.word()}.py\n\nRecent commits:\n{m.n:07x} Repair {m.word()}"
    )


# and what is held out


def _written_date(m: Moment) -> str:
    return f"Knowledge cutoff: June 2024\nToday is {m.at:%A, %B} {m.at.day}, {m.at:%Y}, and the user is in {m.word()}."


def _european_date(m: Moment) -> str:
    return f"- Datum: {m.at:%d.%m.%Y}, {m.at:%H:%M} Uhr\n- Ort: {m.word()}"


def _american_clock(m: Moment) -> str:
    return f"# Current Time\n{m.at:%m/%d/%Y}, {m.at:%I:%M:%S %p} (Europe/Paris, UTC+2:00)\n# Mode\n{m.word()}"


def _environment_tags(m: Moment) -> str:
    return (
        f"<environment_context>\n  <cwd>/srv/{m.word()}</cwd>\n  <shell>bash</shell>\n"
        f"  <current_date>{m.at:%Y/%m/%d}</current_date>\n</environment_context>"
    )


def _counters(m: Moment) -> str:
    return f"You have {100 - m.n} messages left. Context used: {10 + m.n}% ({12_000 + 911 * m.n} tokens)."


def _windows_folder(m: Moment) -> str:
    return f"Workspace root: C:\\Users\\{m.word()}\\work\nHEAD is at {m.n * 77_777_777 + 4096:07x} ({m.word()})\nRun #{m.n}"


def _mood(m: Moment) -> str:
    """Nothing that a pattern could know."""
    return f"The assistant feels {text.WORDS[m.n * 37 % len(text.WORDS)]} and the weather is {m.word()}."


# results that are edited: from a source of randomness and a number of lines to elements, and how they are joined


@dataclass(frozen=True, slots=True)
class Result:
    element: Callable[[random.Random, int], str]
    join: Callable[[list[str]], str]


def _file_shown(rng: random.Random, n_lines: int) -> str:
    return f"==> src/{rng.choice(text.WORDS)}.py <==\n{text.source_file(rng, n_lines)}"


def _row(rng: random.Random, n_lines: int) -> str:
    return text.tool_result(rng, max(1, n_lines // 6))


def _fields(rng: random.Random) -> dict[str, object]:
    return {"id": rng.randint(1, 9999), "title": text.prose(rng, 6), "body": text.prose(rng, 30)}


def _numbered(rng: random.Random, n_lines: int) -> str:
    lines = text.source_file(rng, n_lines).split("\n")
    return "\n".join(f"{i:6}\t{line}" for i, line in enumerate(lines, 1))


def _paragraph(rng: random.Random, n_lines: int) -> str:
    return f"## {rng.choice(text.WORDS)}\n{text.prose(rng, 6 * n_lines)}"


def _tagged(rng: random.Random, n_lines: int) -> str:
    return f'<file path="lib/{rng.choice(text.WORDS)}.ts">\n{text.source_file(rng, n_lines)}\n</file>'


def _log_line(rng: random.Random, n_lines: int) -> str:
    rows = (f"[{rng.randint(1, 999)}.{rng.randint(0, 999):03}] {text.prose(rng, 8)}" for _ in range(n_lines))
    return "\n".join(rows)


def _encoded(rng: random.Random, n_lines: int) -> str:
    return json.dumps([_fields(rng) for _ in range(max(1, n_lines // 12))])[1:-1]


@dataclass(frozen=True, slots=True)
class Kinds:
    seeds: tuple[int, ...]
    blocks: Mapping[str, Block]
    results: Mapping[str, Result]


def _in_lines(parts: list[str]) -> str:
    return "\n".join(parts)


TUNED = Kinds(
    TUNED_SEEDS,
    {
        "environment": _environment,
        "clock": _clock,
        "time stamp": _time_stamp,
        "session id": _session_id,
        "git status": _git_status,
    },
    {
        "files": Result(_file_shown, _in_lines),
        "rows": Result(_row, _in_lines),
        "JSON": Result(_encoded, lambda parts: f"[{', '.join(parts)}]"),
    },
)
HELD_OUT = Kinds(
    HELD_OUT_SEEDS,
    {
        "written date": _written_date,
        "European date": _european_date,
        "American clock": _american_clock,
        "environment in tags": _environment_tags,
        "counters": _counters,
        "Windows folder": _windows_folder,
        "mood": _mood,
    },
    {
        "numbered file": Result(_numbered, _in_lines),
        "sections": Result(_paragraph, lambda parts: "\n\n".join(parts)),
        "files in tags": Result(_tagged, lambda parts: "\n\n".join(parts)),
        "log": Result(_log_line, _in_lines),
        "indented JSON": Result(
            _encoded, lambda parts: json.dumps(json.loads(f"[{', '.join(parts)}]"), indent=2, ensure_ascii=False)
        ),
    },
)


def volatile_system(name: str, block: Block, seed: int, size: float = SIZE) -> list[Step]:
    """Two conversations with the same prose. In each the moment passes between requests."""
    rng = random.Random(f"volatile/{name}/{seed}")
    before, after = (text.prose(rng, round(rng.randint(500, 1300) * size)) for _ in range(2))
    steps: list[Step] = []
    at = datetime(2026, 2, 17, 9, 41, 7) + timedelta(days=rng.randint(0, 300), minutes=rng.randint(0, 600))
    for number in range(2):
        session = Session(f"{name} {seed}/{number}", random.Random(f"{name}/{seed}/{number}"), size)
        session.messages = [{"role": "system", "content": ""}]
        for turn in range(N_TURNS):
            at += timedelta(days=1, minutes=session.rng.randint(1, 90), seconds=7)
            moment = Moment(at, 1 + N_TURNS * number + turn, session.name)
            session.messages[0] = {"role": "system", "content": f"{before}\n\n{block(moment)}\n\n{after}"}
            session.turn()
        steps += session.steps
    return steps


def edited_result(name: str, result: Result, seed: int, size: float = SIZE) -> list[Step]:
    """A tool gives a long result; the client sends it again with one element changed, shortened or left out, each time
    another one, and goes on."""
    s = Session(f"{name} {seed}", random.Random(f"edited/{name}/{seed}"), size)
    s.messages = [{"role": "system", "content": text.prose(s.rng, s.n(200))}]
    s.user()
    s.messages.append(s.ask(s.reply(calls=True)))
    at, parts = len(s.messages), [result.element(s.rng, s.n(s.rng.randint(40, 110))) for _ in range(8)]
    s.messages.append({"role": "tool", "content": result.join(parts)})
    s.messages.append(s.ask(wait_s=4.0))
    for i in s.rng.sample(range(1, 8), 4):
        parts[i] = _changed(s.rng, parts[i], result, s.n(60))
        s.messages[at] = {"role": "tool", "content": result.join([part for part in parts if part])}
        s.turn()
    return s.steps


def _changed(rng: random.Random, part: str, result: Result, n_lines: int) -> str:
    """Another element, none, or the same with a line changed somewhere."""
    kind = rng.choice(("other", "none", "line", "line"))
    if kind == "other":
        return result.element(rng, n_lines)
    lines = part.split("\n")
    if kind == "none" or len(lines) < 3:
        return "" if kind == "none" else result.element(rng, n_lines)
    at = rng.randrange(1, len(lines) - 1)
    lines[at] = lines[at][: len(lines[at]) // 2] + " " + rng.choice(text.WORDS)
    return "\n".join(lines)


def conversations(kinds: Kinds, size: float = SIZE) -> dict[str, list[Step]]:
    """All of a set, by name; each seed adds one."""
    found = {}
    for seed in kinds.seeds:
        for name, block in kinds.blocks.items():
            found[f"{name}, seed {seed}"] = volatile_system(name, block, seed, size)
        for name, result in kinds.results.items():
            found[f"{name}, seed {seed}"] = edited_result(name, result, seed, size)
    return found
