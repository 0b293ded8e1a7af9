"""The child of ``trial``: ``python -m everwarm.llama.constraints.trial_worker``. Compiles each constraint that it is sent.

Knows no model: a vocabulary is its size, its control tokens and the single bytes. Its memory and its stack are limited.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from everwarm.config import Constraint
from everwarm.llama.constraints.grammar import LIMITS, grammar_of
from everwarm.llama.constraints.trial import HEADER, STACK_BYTES, TRIAL_S, NamedTokens, TrialResult

MEMORY_BYTES = 3 << 30
_MAX_ERROR_CHARS = 600


class _ByteTokenizer:
    """A tokenizer of control tokens and single bytes: enough to tell whether a grammar can be used."""

    bos_token_id = None

    def __init__(self, names: NamedTokens) -> None:
        named = {token: text.encode() for text, token in (names.control | names.defined).items()}
        self.tokens = [named.get(token, b"") for token in range(names.n_tokens)] + [bytes([i]) for i in range(256)]
        self.special_token_ids = sorted(names.control.values())
        self.eos_token_id = names.eog[0]
        self._n_named = names.n_tokens

    def __call__(self, text: bytes) -> list[int]:
        return [self._n_named + byte for byte in text]


def try_out(constraint: Constraint, names: NamedTokens, tokenizer: LLTokenizer) -> TrialResult:
    try:
        grammar = grammar_of(constraint, names)
    except Exception as error:  # noqa: BLE001 - any error of the parser is the fault of the text
        return TrialResult(error=f"{type(error).__name__ if not str(error) else error}"[:_MAX_ERROR_CHARS])
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()  # some fail only at the first token
    return TrialResult(grammar, matcher.get_error()[:_MAX_ERROR_CHARS])


def _answer(names: NamedTokens, tokenizer: LLTokenizer) -> None:
    while header := sys.stdin.buffer.read(HEADER.size):
        body = sys.stdin.buffer.read(*HEADER.unpack(header))
        signal.alarm(int(TRIAL_S) + 3)  # in case the engine is gone and cannot kill it
        _send(msgspec.msgpack.encode(try_out(msgspec.msgpack.decode(body, type=Constraint), names, tokenizer)))
        signal.alarm(0)
    os._exit(0)


def _send(data: bytes) -> None:
    sys.stdout.buffer.write(HEADER.pack(len(data)) + data)
    sys.stdout.buffer.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    (size,) = HEADER.unpack(sys.stdin.buffer.read(HEADER.size))
    names = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=NamedTokens)
    tokenizer = LLTokenizer(TokenizerWrapper(_ByteTokenizer(names)), eos_token=names.eog, slices=[])
    _send(b"ready")
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_answer, args=(names, tokenizer)).start()


if __name__ == "__main__":
    main()
