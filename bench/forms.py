"""The cost of constrained decoding: per token on vocabularies of real sizes, per constraint, and beside llama-server.

Target: at most 200 µs for the mask and the commit of a token on a vocabulary of 32k tokens.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from bench.measure import EMBEDDED, median_s, table
from bench.peer import PeerOptions, llama_server
from bench.server import Server, everwarm, post
from everwarm.config import Constraint
from everwarm.gateway.constraints.json_schema import answer_schema
from everwarm.gateway.constraints.reply_constraint import chat_constraint
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.parsing.output_parser import ModelSyntax
from everwarm.llama.constraints.matcher import Matcher
from everwarm.llama.constraints.trial import NamedTokens
from everwarm.llama.constraints.trial_worker import LIMITS, grammar_of

N_ROUNDS, N_REPLY = 12, 256
BEFORE = ("", " ", " ", '"', "\n", ", ")
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "customer": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "vip": {"type": "boolean"}},
            "required": ["name", "vip"],
        },
        "lines": {
            "type": "array",
            "minItems": 40,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"enum": ["pear", "plum", "quince"]},
                    "n": {"type": "integer", "minimum": 1, "maximum": 99},
                    "price": {"type": "number"},
                },
                "required": ["sku", "n", "price"],
            },
        },
    },
    "required": ["id", "customer", "lines"],
}
TOOLS = [
    {"type": "function", "function": {"name": f"order_{i}", "parameters": ORDER | {"description": f"{i}"}}}
    for i in range(8)
]


def run() -> None:
    rows = [row for n in (32_000, 152_000) for row in _costs(n)]
    table(
        "Constrained decoding",
        ("vocabulary", "constraint", "to compile", "mask + commit, mean", "99 of 100", "longest"),
        rows,
    )
    print()
    _beside_llama_server()


class Vocabulary:
    """Words as a byte-level tokenizer has them: the bytes, and pieces of made-up words, with and without a space."""

    bos_token_id = None

    def __init__(self, n_tokens: int) -> None:
        rng = random.Random(0)
        pieces = {bytes([i]): None for i in range(256)}
        while len(pieces) < n_tokens - 2:
            word = "".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 9)))
            pieces[(rng.choice(BEFORE) + word).encode()] = None
        self.tokens = [*pieces, b"<tool_call>", b"<|im_end|>"]
        self.eos_token_id = n_tokens - 1
        self.special_token_ids = [self.eos_token_id]
        self._ids = {piece: i for i, piece in enumerate(self.tokens)}

    def __call__(self, text: bytes) -> list[int]:
        """The longest piece first."""
        found, at = [], 0
        while at < len(text):
            n = next(n for n in range(min(11, len(text) - at), 0, -1) if text[at : at + n] in self._ids)
            found.append(self._ids[text[at : at + n]])
            at += n
        return found


def _costs(n_tokens: int) -> Iterator[tuple[str, ...]]:
    tokenizer = LLTokenizer(TokenizerWrapper(Vocabulary(n_tokens)), eos_token=n_tokens - 1)
    words = NamedTokens(n_tokens, {"<|im_end|>": n_tokens - 1}, {"<tool_call>": n_tokens - 2}, [n_tokens - 1])
    for name, constraint, text in _constraints():
        grammar = grammar_of(constraint, words)
        compile_s = median_s(
            lambda grammar=grammar: LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS),
            9,
        )
        native = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        assert not native.is_error(), native.get_error()
        times = sorted(1e6 * t for _ in range(5) for t in _follow(native, tokenizer, n_tokens, text))
        shown = (
            f"{1e3 * compile_s:.1f} ms",
            *(f"{t:.0f} µs" for t in (statistics.mean(times), times[-len(times) // 100], times[-1])),
        )
        yield f"{n_tokens}", name, *shown


def _constraints() -> Iterator[tuple[str, Constraint, str]]:
    line = {"sku": "plum", "n": 12, "price": 3.25}
    order = {"id": 417, "customer": {"name": "Ada the third of her name", "vip": True}, "lines": [line] * 40}
    yield "nested schema", Constraint("json_schema", answer_schema(ORDER, strict=True)), json.dumps(order)
    body = ChatBody(messages=[{"role": "user", "content": "x"}], tools=TOOLS, tool_choice="required")
    constraint = chat_constraint(body, ModelSyntax("<tool_call>"), "")
    assert constraint is not None
    call = json.dumps({"name": "order_5", "arguments": order})
    yield "call of one of 8 tools", constraint, f"<tool_call>\n{call}\n</tool_call>"


def _follow(native: LLMatcher, tokenizer: LLTokenizer, n_tokens: int, text: str) -> Iterator[float]:
    matcher = Matcher(native.deep_copy(), n_tokens, np.empty(0, np.int32))
    for token in tokenizer.tokenize_str(text):
        began = time.perf_counter()
        assert matcher.look() and matcher.allows(token)
        matcher.allowed()
        matcher.accept(token)
        yield time.perf_counter() - began
    assert matcher.error is None


def _beside_llama_server() -> None:
    options = PeerOptions(EMBEDDED, n_ctx=8192, n_parallel=1, n_threads=1)
    flags = ("-c", "8192", "-np", "1", "-t", "1", "--disk-cache", "0")
    with llama_server(options) as peer, everwarm(str(EMBEDDED), *flags) as ours:
        servers = (ours, Server("llama-server", peer._host))
        rows = [
            _row(*servers, name, more)
            for name, more in (("free", {}), ("with the nested schema", {"json_schema": ORDER}))
        ]
    table("Tokens/s of one reply, everwarm-tiny, 1 thread", ("", "Everwarm", "llama-server", "ratio"), rows)


def _row(ours: Server, theirs: Server, name: str, more: dict[str, Any]) -> tuple[str, ...]:
    speeds: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    for i in range(N_ROUNDS + 1):  # the first one warms up; now one server begins and now the other
        for server in (ours, theirs) if i % 2 else (theirs, ours):
            body = {"prompt": f"Order {i}: ", "n_predict": N_REPLY, "temperature": 0, "ignore_eos": not more, **more}
            began = time.perf_counter()
            n = int(post(server, "/completion", body)["tokens_predicted"])
            speeds[server.name].append(n / (time.perf_counter() - began))
    a, b = (statistics.median(each[1:]) for each in speeds.values())
    return name, f"{a:.0f}", f"{b:.0f}", f"{a / b:.2f}×"
