"""Ways to shorten a conversation, on a real server: each reads what follows the first change, and the plan says so before.

What must be read is counted from the prompts themselves: all behind the beginning that the edited prompt shares with what
was read. Where the edit is at a message, no more than the guard tokens are read beyond that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.loops import FUNCTION
from support.server import GUARD, Server, serving, words

Messages = list[dict[str, Any]]
N_TURNS = 5


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(n_ctx=16384) as server:
        yield server


def turn(i: int) -> Messages:
    """A question, a call with its result, and an answer with thinking."""
    call = {"id": f"c{i}", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    return [
        {"role": "user", "content": f"Question {i}: {words(20, i)}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{i}", "content": words(120, 100 + i)},
        {"role": "assistant", "content": f"Answer {i}: {words(30, 200 + i)}", "reasoning_content": words(25, 300 + i)},
    ]


def body(messages: Messages, salt: str) -> dict[str, Any]:
    return {"messages": messages, "tools": [FUNCTION], "max_tokens": 1, "temperature": 0, "cache_salt": salt}


def tokens(server: Server, messages: Messages) -> list[int]:
    prompt = server.rendered(messages, tools=[FUNCTION])
    return list(server.ask("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"])


def compacted(messages: Messages) -> Messages:
    return [messages[0], {"role": "user", "content": f"So far: {words(40, 7)}"}, *messages[-1:]]


def pruned(messages: Messages) -> Messages:
    at = [i for i, message in enumerate(messages) if message["role"] == "tool"][1]
    return [*messages[:at], {**messages[at], "content": "[cleared]"}, *messages[at + 1 :]]


def without_thinking(messages: Messages) -> Messages:
    return [{name: value for name, value in each.items() if name != "reasoning_content"} for each in messages]


def last_swapped(messages: Messages) -> Messages:
    other = turn(50)
    return [*messages[:-5], *other[:4], {"role": "user", "content": "And now?"}]


EDITS: dict[str, Callable[[Messages], Messages]] = {
    "compaction": compacted,
    "a pruned tool result": pruned,
    "thinking dropped": without_thinking,
    "the last messages swapped": last_swapped,
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_reads_what_follows_it_and_the_plan_says_so(server, name):
    messages: Messages = [{"role": "system", "content": f"You are an agent. {words(150, 1)}"}]
    read: list[list[int]] = []
    for i in range(N_TURNS):
        messages = [*messages, *turn(i)[:1]]
        server.ask("/v1/chat/completions", body(messages, name))
        read.append(tokens(server, messages))
        messages = [*messages, *turn(i)[1:]]
    messages = [*messages, {"role": "user", "content": "Go on."}]
    server.ask("/v1/chat/completions", body(messages, name))
    read.append(tokens(server, messages))

    edited = EDITS[name](messages)
    prompt = tokens(server, edited)
    n_must = len(prompt) - max(n_common(prompt, each) for each in read)
    (planned,) = server.ask("/cache/plan", {"candidates": [body(edited, name)]})["candidates"]
    timings = server.ask("/v1/chat/completions", body(edited, name))["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == len(prompt)
    assert timings["prompt_n"] <= n_must + GUARD, f"{timings['prompt_n']} read, {n_must} must be"
    assert abs(planned["read_tokens"] - timings["prompt_n"]) <= GUARD
    if name == "thinking dropped":
        assert n_must <= GUARD, "this template drops it itself"
    else:
        assert n_must > GUARD


def n_common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
