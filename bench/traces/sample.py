"""A small recording from a seed: coding agents that read, edit and think, with subagents that share their head. Pure.

The bodies have the forms of real clients: a long system prompt with a date and a working directory at its end, tools as
JSON schemas, tool calls with compact JSON and call ids, results with ``tool_call_id``, and a request for a title beside the
first turn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from bench.workload import text

N_SESSIONS, N_TURNS, N_SUBAGENTS = 3, 10, 2
TITLE = "You are a title generator. You output ONLY a thread title. Generate a brief title for the conversation."
Line = dict[str, Any]


def messages_recording(seed: int = 0, size: float = 1.0) -> str:
    """Mooncake's lines with the messages themselves."""
    rng = random.Random(f"head/{seed}")
    tools = text.tools(rng, 8, round(40 * size))
    head = text.prose(rng, round(500 * size))
    sessions = [_session(seed, i, head, tools, size) for i in range(N_SESSIONS)]
    rounds = max(len(session) for session in sessions)
    ordered = [session[i] for i in range(rounds) for session in sessions if i < len(session)]
    return "".join(json.dumps(line) + "\n" for line in ordered)


def _session(seed: int, number: int, head: str, tools: list[Any], size: float) -> list[Line]:
    rng = random.Random(f"{seed}/{number}")
    name = f"session-{number}"
    folder = "/srv/" + rng.choice(text.WORDS)
    environment = f"\n<env>\nWorking directory: {folder}\nToday's date: 2026-03-{number + 1:02d}\n</env>"
    asked = {"role": "user", "content": text.prose(rng, round(40 * size))}
    messages: list[Line] = [{"role": "system", "content": head + environment}, asked]
    lines = [_line(name, messages, tools, 12), _line(f"{name}/title", [_system(TITLE), asked], None, 8)]
    for i in range(1, N_TURNS):
        messages = [*messages, *_step(rng, number, i, folder, size)]
        lines.append(_line(name, messages, tools, 12))
    for i in range(N_SUBAGENTS if number == 0 else 0):
        task = {"role": "user", "content": text.prose(rng, round(30 * size))}
        lines.append(_line(f"{name}/subagent-{i}", [_system(head + environment), task], tools, 12))
    return lines


def _step(rng: random.Random, session: int, number: int, folder: str, size: float) -> Iterator[Line]:
    """A tool call with its result, or, at every fourth turn, an answer and another question."""
    if number % 4 == 0:
        yield {"role": "assistant", "content": text.prose(rng, round(50 * size))}
        yield {"role": "user", "content": text.prose(rng, round(30 * size))}
        return
    call_id = f"call_{session}_{number}"
    arguments = json.dumps({"filePath": f"{folder}/{rng.choice(text.WORDS)}.py"}, separators=(",", ":"))
    function = {"name": "read_file_0", "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    yield {"role": "assistant", "content": text.prose(rng, 8), "tool_calls": calls}
    result = text.source_file(rng, round(rng.randint(20, 80) * size) + 1)
    yield {"role": "tool", "tool_call_id": call_id, "content": result}


def _system(content: str) -> Line:
    return {"role": "system", "content": content}


def _line(name: str, messages: list[Line], tools: list[Any] | None, n_reply: int) -> Line:
    line: Line = {"session_id": name, "messages": list(messages), "output_length": n_reply, "delay": 50}
    return line | ({"tools": tools} if tools else {})


def blocks_recording(seed: int = 0, n_turns: int = 12) -> str:
    """A coding agent's trace with a subagent, as hashes of blocks."""
    rng = random.Random(f"blocks/{seed}")
    requests: list[Line] = []
    blocks = list(range(1, 41))
    for i in range(n_turns):
        requests.append(_blocks_request(float(i), blocks, rng))
        if i == n_turns // 2:
            inner = [_blocks_request(float(i), [*blocks[:30], *range(500, 500 + 4 * k)], rng) for k in (1, 2, 3)]
            requests.append({"t": float(i), "type": "subagent", "agent_id": "a1", "requests": inner})
        if i == 2 * n_turns // 3:
            blocks = [*blocks[:20], *range(900, 906)]  # compaction: the history became a summary
        blocks = [*blocks, *range(len(blocks) + 1000 * i, len(blocks) + 1000 * i + rng.randint(2, 8))]
    trace = {"id": f"trace-{seed}", "models": ["any"], "block_size": 64, "hash_id_scope": "local"}
    return json.dumps(trace | {"requests": requests})


def _blocks_request(t: float, blocks: list[int], rng: random.Random) -> Line:
    n_out = rng.randint(8, 16)
    return {"t": t, "type": "n", "model": "any", "in": 64 * len(blocks), "out": n_out, "hash_ids": list(blocks)}
