"""Recordings to sessions. Every number from a file is bounded. Pure: text in, sessions out.

Two public forms. Mooncake's JSON lines, as AIPerf reads them: ``messages`` (with ``tools``) or ``hash_ids`` of blocks, with
``session_id``, ``output_length``, and ``timestamp`` or ``delay`` in milliseconds. Traces of coding agents, one JSON object
for each session: ``block_size`` and ``requests`` with ``hash_ids``, ``in`` and ``out``, and subagents that have requests of
their own. A block of which only the hash is known becomes a text of its own: the same hash, the same text.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.workload.text import prose
from everwarm.errors import BadRequest

MAX_BLOCKS, MAX_BLOCK_TOKENS, MAX_OUT, MAX_REQUESTS = 1 << 16, 4096, 1 << 16, 1 << 16
MOONCAKE_BLOCK = 512
TOKENS_PER_WORD = 3.5  # of the invented words, for the embedded model's vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A request body without sampling, the length of its reply, and how long the client waited before it."""

    body: Mapping[str, Any]
    n_reply: int
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AgentSession:
    name: str
    turns: tuple[Turn, ...]


def parse(data: str, scale: float = 1.0) -> list[AgentSession]:
    """The sessions of a recording. ``scale``: of the length of blocks that are known by their hash only."""
    try:
        first = json.loads(data)
        lines = first if isinstance(first, list) else [first]
    except ValueError:
        lines = list(_lines(data.splitlines()))
    traces = [line for line in lines if isinstance(line, dict) and "requests" in line]
    if traces:
        return [session for trace in traces for session in _of_trace(trace, scale)]
    return _of_mooncake(lines, scale)


def _lines(lines: Iterable[str]) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise BadRequest(f"line {number} of the recording is not JSON: {error}") from None


def _of_mooncake(lines: Sequence[Any], scale: float) -> list[AgentSession]:
    sessions: dict[str, list[Turn]] = {}
    last_ms: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not {"messages", "hash_ids"} & line.keys():
            raise BadRequest(f"line {number} of the recording has neither messages nor hash_ids")
        name = str(line.get("session_id") or "all")
        at_ms = _number(line, "timestamp", number, 1e15, last_ms.get(name, 0.0))
        delay_ms = _number(line, "delay", number, 1e15, at_ms - last_ms.get(name, at_ms))
        last_ms[name] = at_ms
        n_reply = int(_number(line, "output_length", number, MAX_OUT, 1))
        sessions.setdefault(name, []).append(Turn(_body(line, number, scale), n_reply, max(0.0, delay_ms) / 1e3))
    return [AgentSession(name, tuple(turns)) for name, turns in sessions.items()]


def _body(line: Mapping[str, Any], number: int, scale: float) -> dict[str, Any]:
    if "messages" not in line:
        return _of_blocks(line["hash_ids"], "", MOONCAKE_BLOCK, scale, number)
    messages, tools = line["messages"], line.get("tools")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRequest(f"line {number} of the recording: messages must be a list of objects")
    return {"messages": messages} | ({"tools": tools} if tools else {})


def _of_trace(trace: Mapping[str, Any], scale: float) -> Iterator[AgentSession]:
    name = str(trace.get("id") or "trace")
    size = int(_number(trace, "block_size", 0, MAX_BLOCK_TOKENS, 64))
    scope = "" if trace.get("hash_id_scope") == "global" else name
    turns: list[Turn] = []
    for number, request in enumerate(_requests(trace), 1):
        if request.get("type") == "subagent":
            inner = [_of_request(each, scope, size, scale, number) for each in _requests(request)]
            yield AgentSession(f"{name}/{request.get('agent_id', number)}", tuple(inner))
        else:
            turns.append(_of_request(request, scope, size, scale, number))
    yield AgentSession(name, tuple(turns))


def _requests(of: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = of.get("requests")
    if not isinstance(found, list) or len(found) > MAX_REQUESTS or not all(isinstance(each, dict) for each in found):
        raise BadRequest(f"requests must be a list of at most {MAX_REQUESTS} objects")
    return found


def _of_request(request: Mapping[str, Any], scope: str, size: int, scale: float, number: int) -> Turn:
    body = _of_blocks(request.get("hash_ids", []), scope, size, scale, number)
    n_reply = int(_number(request, "out", number, MAX_OUT, 1))
    return Turn(body, n_reply, _number(request, "think_time", number, 1e9, 0.0))


def _of_blocks(hash_ids: Any, scope: str, size: int, scale: float, number: int) -> dict[str, Any]:
    if not isinstance(hash_ids, list) or not 0 < len(hash_ids) <= MAX_BLOCKS:
        raise BadRequest(f"request {number} of the recording needs 1 to {MAX_BLOCKS} hash_ids")
    n_words = max(1, round(size * scale / TOKENS_PER_WORD))
    text = "\n".join(prose(random.Random(zlib.crc32(f"{scope}/{each}".encode())), n_words) for each in hash_ids)
    return {"messages": [{"role": "user", "content": text}]}


def _number(line: Mapping[str, Any], name: str, number: int, most: float, usual: float) -> float:
    value = line.get(name)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise BadRequest(f"request {number} of the recording: {name} is {str(value)[:40]}; give 0 to {most:g}")
    return float(value)
