"""What ``--state-type`` does: bytes of a state, logits after it, and what the embedded model still recalls.

Every model reads a text, its state is packed and put back, and the text goes on: the logits of the next tokens beside those
of the same state as it was. The embedded model is told a code, reads small talk for so many tokens, and is asked for it;
its state is packed and put back before the question, and, as in a conversation, a second time before its last part.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import get_args

import numpy as np

from bench.measure import EMBEDDED, model_file, table
from everwarm.config import ContextOptions, StateType
from everwarm.demo.tiny import TinySpec
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.types import START, Mark, Position, SeqId, TokenCount

ARCHS = ("qwen35", "jamba", "falcon-h1", "granitehybrid", "nemotron_h", "lfm2", "mamba2")
TYPES: tuple[StateType, ...] = get_args(StateType)
N_READ, N_AFTER = 600, 48
N_CODES = 8
LENGTHS = (2000, 6000)
TALK = ("Tell me a short story.", "What is the capital of France?", "What is the opposite of hot?", "What is 3 + 4?")
SEQ = SeqId(0)
N_BATCH = 512


@dataclass(frozen=True, slots=True)
class Effect:
    """Of a packed state on the logits of the next tokens, beside the exact one."""

    state_bytes: int
    error: float  # the root of the mean square, as a share of the logits' own spread
    agree: float  # the share of tokens with the same most likely next one


def run() -> None:
    rows = [row for arch in ARCHS for row in _rows(arch)]
    table("State types: logits after a restored state", ["model", "type", "bytes", "error", "same first choice"], rows)
    print()
    recalled = [[kind, *(f"{_recalled(kind, n)} of {N_CODES}" for n in LENGTHS)] for kind in TYPES]
    table("State types: recall of the embedded model", ["type", *(f"{n} tokens" for n in LENGTHS)], recalled)


def _rows(arch: str) -> list[list[object]]:
    path = model_file(TinySpec(arch=arch, width=256))
    exact, _ = _after(path, "f32")
    found = []
    for kind in TYPES:
        logits, n_bytes = _after(path, kind)
        effect = _effect(exact, logits, n_bytes)
        found.append([arch, kind, f"{effect.state_bytes:,}", f"{effect.error:.1e}", f"{effect.agree:.0%}"])
    return found


def _after(path: object, kind: StateType) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng(7)
    with Model(path) as model, Context(model, _options(kind)) as context:  # type: ignore[arg-type]
        tokens = rng.integers(0, 250, N_READ + N_AFTER).tolist()
        _read(context, tokens[:N_READ])
        n_bytes = _put_back(context)
        logits = []
        for token in tokens[N_READ:]:
            _read(context, [token], wants_logits=True)
            logits.append(context.logits(0).copy())
    return np.array(logits), n_bytes


def _effect(exact: np.ndarray, packed: np.ndarray, n_bytes: int) -> Effect:
    error = float(np.sqrt(np.mean((exact - packed) ** 2)) / exact.std())
    return Effect(n_bytes, error, float((exact.argmax(axis=1) == packed.argmax(axis=1)).mean()))


def _recalled(kind: StateType, n_tokens: int) -> int:
    with Model(EMBEDDED) as model, Context(model, _options(kind)) as context:
        return sum(_recalls(model, context, random.Random(seed), n_tokens) for seed in range(N_CODES))


def _recalls(model: Model, context: Context, rng: random.Random, n_tokens: int) -> bool:
    code = str(rng.randint(10_000, 99_999))
    context.drop(SEQ)
    _say(model, context, f"My secret code is {code}.", "I will remember it.")
    while context.end(SEQ).n_tokens < n_tokens:
        if context.end(SEQ).n_tokens > n_tokens // 2 > 0:
            _put_back(context) if rng.random() < 0.1 else None
        _say(model, context, rng.choice(TALK), "Yes.")
    _put_back(context)
    _read_text(model, context, "<|im_start|>user\nWhat is my secret code?<|im_end|>\n<|im_start|>assistant\n")
    _read_text(model, context, "<think>\n\n</think>\n\n", wants_logits=True)
    written: list[int] = []
    while len(written) < 24 and (token := int(context.logits(0).argmax())) not in model.vocab.eog:
        written.append(token)
        _read(context, [token], wants_logits=True)
    return code in b"".join(map(model.vocab.piece, written)).decode(errors="replace")


def _say(model: Model, context: Context, asked: str, answered: str) -> None:
    turn = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answered}<|im_end|>\n"
    _read_text(model, context, turn)


def _read_text(model: Model, context: Context, text: str, *, wants_logits: bool = False) -> None:
    tokens = model.vocab.tokenize(text, add_special=False, parse_special=True).tolist()
    _read(context, tokens, wants_logits=wants_logits)


def _read(context: Context, tokens: list[int], *, wants_logits: bool = False) -> None:
    for at in range(0, len(tokens), N_BATCH):
        part = tokens[at : at + N_BATCH]
        is_last = at + N_BATCH >= len(tokens)
        context.decode([Feed(SEQ, np.array(part, np.int32), context.end(SEQ), wants_logits and is_last)])


def _put_back(context: Context) -> int:
    """Takes the state out and puts it back in the form that RAM holds; its bytes."""
    end = context.end(SEQ)
    blob = context.capture_packed(SEQ)
    context.restore(SEQ, blob, Mark(TokenCount(end.n_tokens), Position(end.pos)) if end != START else end, clean=False)
    return blob.nbytes


def _options(kind: StateType) -> ContextOptions:
    return ContextOptions(n_ctx=8192, n_batch=N_BATCH, n_threads=1, n_threads_batch=1, state_type=kind)
