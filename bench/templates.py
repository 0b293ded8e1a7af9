"""What a chat request costs before the engine sees it, and what its reply costs to read, beside llama-server's template.

Wanted: at most 3 ms for a prompt with its cut hints, 100 messages of about 30k tokens of which one is new.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import EMBEDDED, table
from bench.peer import PeerOptions, llama_server
from everwarm.config import default_threads
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.parsing.output_parser import ModelSyntax, OutputParser
from everwarm.gateway.parsing.tool_parser import kinds_of
from everwarm.llama.model import Model
from everwarm.prompt.tokenizer import Tokenizer

N_MESSAGES, N_REPEATS = 100, 40
STYLE = Path(__file__).parent.parent / "tests/support/templates/qwen35.jinja"
WORDS = (
    "reader",
    "the",
    "of",
    "table",
    "point",
    "a",
    "value",
    "test",
    "build",
    "path",
    "line",
    "index",
    "result",
    "and",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}",
            "description": "Does one thing and says how it went. " * 3,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for i in range(12)
]


def run() -> None:
    messages = conversation(N_MESSAGES)
    with Model(EMBEDDED) as model:
        assert model.chat_template is not None
        tokenizer = Tokenizer(model.vocab)
        rows = _templates(STYLE.read_text(), "Qwen3.5's style", messages)
        rows += _templates(model.chat_template, "everwarm-tiny", messages)
        rows.append(("llama-server's /apply-template, everwarm-tiny", *_peer(messages)))
        rows += _tokenizing(tokenizer, ChatTemplate(model.chat_template), messages)
        rows.append(("reading a reply, per token", *_reading(model.chat_template)))
        n_tokens = len(tokenizer.tokenize(ChatTemplate(STYLE.read_text()).render(messages, tools=TOOLS)))
    title = f"Before the engine: {N_MESSAGES} messages, {n_tokens} tokens, {len(TOOLS)} tools"
    table(title, ("", "median", "best"), rows)


def conversation(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Questions, each answered after four calls of tools."""
    rng = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": _words(rng, 300)}]
    for i in range(1, n):
        kind = i % 10
        if kind == 1:
            messages.append({"role": "user", "content": _words(rng, 120)})
        elif kind == 0:
            messages.append({"role": "assistant", "content": _words(rng, 160), "reasoning_content": _words(rng, 40)})
        elif kind % 2 == 0:
            arguments = json.dumps({"path": _words(rng, 1), "n": rng.randrange(100)})
            call = {"id": f"call{i:05}", "type": "function", "function": {"name": "tool_1", "arguments": arguments}}
            message = {"role": "assistant", "content": _words(rng, 15), "reasoning_content": _words(rng, 25)}
            messages.append(message | {"tool_calls": [call]})
        else:
            messages.append({"role": "tool", "tool_call_id": f"call{i - 1:05}", "content": _words(rng, 280)})
    return messages


def _words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(WORDS, k=n))


def _templates(source: str, name: str, messages: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    fresh = [ChatTemplate(source) for _ in range(N_REPEATS)]
    known = ChatTemplate(source)
    known.conversation(messages[:-1], tools=TOOLS)
    return [
        (f"text alone, {name}", *_times(lambda _: known.render(messages, tools=TOOLS))),
        (f"text and hints, first time, {name}", *_times(lambda i: fresh[i].conversation(messages, tools=TOOLS))),
        (f"text and hints, one new message, {name}", *_times(lambda _: known.conversation(messages, tools=TOOLS))),
        (f"text after a reply, {name}", *_times(lambda _: known.after_reply(messages, _REPLY, tools=TOOLS))),
    ]


_REPLY = {"role": "assistant", "content": "Done.", "reasoning_content": "Is it?"}


def _peer(messages: list[dict[str, Any]]) -> tuple[str, str]:
    options = PeerOptions(EMBEDDED, n_ctx=4096, n_parallel=1, n_threads=default_threads())
    with llama_server(options) as peer:
        return _times(lambda _: peer.post("/apply-template", {"messages": messages, "tools": TOOLS}))


def _tokenizing(
    tokenizer: Tokenizer, template: ChatTemplate, messages: list[dict[str, Any]]
) -> list[tuple[str, str, str]]:
    """With hints as the engine counts them; the new message is another one each time."""
    rendered = [
        template.conversation([*messages[:-1], {"role": "user", "content": f"{i}"}], tools=TOOLS) for i in range(40)
    ]
    cold = Tokenizer(tokenizer._vocab)
    before = time.perf_counter()
    cold.tokenize(rendered[0].text)
    first = f"{1e3 * (time.perf_counter() - before):.2f} ms"

    def one_new(i: int) -> None:
        tokenizer.tokenize(rendered[i].text)
        tokenizer.count_at(rendered[i].text, rendered[i].hints.boundaries)

    tokenizer.tokenize(rendered[0].text)
    return [("tokens, first time", first, first), ("tokens and hints, one new message", *_times(one_new))]


def _reading(source: str) -> tuple[str, str]:
    text = "<think>\n" + "so it goes " * 200 + "\n</think>\n\n" + "and on " * 300
    text += '<tool_call>\n{"name": "tool_1", "arguments": {"path": "a b c", "n": 4}}\n</tool_call>'
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]

    def read(_: int) -> None:
        reader = OutputParser.of(
            ModelSyntax(source), "<|im_start|>assistant\n<think>\n", kinds_of(TOOLS), with_thinking=True
        )
        for piece in pieces:
            reader.read(piece)
        reader.rest()

    return _times(read, scale=1e6 / len(pieces), unit="µs")


def _times(action: Callable[[int], object], scale: float = 1e3, unit: str = "ms") -> tuple[str, str]:
    times = []
    for i in range(N_REPEATS):
        began = time.perf_counter()
        action(i)
        times.append(time.perf_counter() - began)
    return f"{scale * statistics.median(times):.2f} {unit}", f"{scale * min(times):.2f} {unit}"
