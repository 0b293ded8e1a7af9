"""A form tried out in a process of its own, before the engine compiles it: ``python -m everwarm.llama.constraints.trial``.

Some schemas and grammars of a few hundred bytes take llguidance minutes, gigabytes or more stack than there is. Here they
cost a child that is killed. Whatever passes takes the engine no longer than it took here. Knows no model: a vocabulary is
its size, its control tokens and the single bytes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from everwarm.config import Constraint
from everwarm.errors import BadRequest, EverwarmError
from everwarm.llama.constraints.grammar import Words, grammar_of

LIMITS: Final = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
TRIAL_S, START_S = 1.5, 30.0
STACK_BYTES, MEMORY_BYTES = 8 << 20, 3 << 30
_MAX_WORDS = 600
_HEADER = struct.Struct("<I")
# A child is given no secret of ours.
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")


class Tried(msgspec.Struct, frozen=True):
    """``error`` is empty where the grammar can be used."""

    grammar: str = ""
    error: str = ""


class Trial:
    """The child, as the engine sees it: started when it is first needed, and again when it had to be killed."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._child: subprocess.Popen[bytes] | None = None

    def grammar(self, form: Constraint) -> str:
        """The form's grammar, or BadRequest with the reason. Not for two threads at once."""
        child = self._running()
        try:
            _send(child, msgspec.msgpack.encode(form))
            tried = msgspec.msgpack.decode(_receive(child, TRIAL_S), type=Tried)
        except (OSError, EOFError, TimeoutError):
            self.close()
            raise BadRequest(
                "the schema or grammar is too complex to be forced; make it smaller or less nested"
            ) from None
        if tried.error:
            raise BadRequest(f"the schema or grammar cannot be used: {tried.error}")
        return tried.grammar

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = self._started()
        return self._child

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", __name__]
        env = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env)
        try:
            _send(child, msgspec.msgpack.encode(self._words))
            _receive(child, START_S)
        except (OSError, EOFError, TimeoutError):
            _end(child)
            raise EverwarmError("the process that tries out schemas and grammars did not start") from None
        return child

    def close(self) -> None:
        if self._child is not None:
            _end(self._child)
            self._child = None


def _send(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    view = memoryview(_HEADER.pack(len(data)) + data)
    while view:
        view = view[child.stdin.write(view) :]


def _receive(child: subprocess.Popen[bytes], patience_s: float) -> bytes:
    deadline = time.monotonic() + patience_s
    (size,) = _HEADER.unpack(_read(child, _HEADER.size, deadline))
    return _read(child, size, deadline)


def _read(child: subprocess.Popen[bytes], n_bytes: int, deadline: float) -> bytes:
    assert child.stdout is not None
    data = b""
    while len(data) < n_bytes:
        if not select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        piece = child.stdout.read(n_bytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


# in the child


class _Bytes:
    """A tokenizer of control tokens and single bytes: enough to find out whether a grammar can be used."""

    bos_token_id = None

    def __init__(self, words: Words) -> None:
        named = {token: text.encode() for text, token in (words.control | words.defined).items()}
        self.tokens = [named.get(token, b"") for token in range(words.n_tokens)] + [bytes([i]) for i in range(256)]
        self.special_token_ids = sorted(words.control.values())
        self.eos_token_id = words.eog[0]
        self._n_named = words.n_tokens

    def __call__(self, text: bytes) -> list[int]:
        return [self._n_named + byte for byte in text]


def try_out(form: Constraint, words: Words, tokenizer: LLTokenizer) -> Tried:
    try:
        grammar = grammar_of(form, words)
    except Exception as error:  # noqa: BLE001 - whatever a text does to a parser, it is the text that is wrong
        return Tried(error=f"{type(error).__name__ if not str(error) else error}"[:_MAX_WORDS])
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()  # some only fail at the first token
    return Tried(grammar, matcher.get_error()[:_MAX_WORDS])


def _answer(words: Words, tokenizer: LLTokenizer) -> None:
    while header := sys.stdin.buffer.read(_HEADER.size):
        body = sys.stdin.buffer.read(*_HEADER.unpack(header))
        signal.alarm(int(TRIAL_S) + 3)  # if nobody is there any more to kill it
        _say(msgspec.msgpack.encode(try_out(msgspec.msgpack.decode(body, type=Constraint), words, tokenizer)))
        signal.alarm(0)
    os._exit(0)


def _say(data: bytes) -> None:
    sys.stdout.buffer.write(_HEADER.pack(len(data)) + data)
    sys.stdout.buffer.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    (size,) = _HEADER.unpack(sys.stdin.buffer.read(_HEADER.size))
    words = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=Words)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(words)), eos_token=words.eog, slices=[])
    _say(b"ready")
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_answer, args=(words, tokenizer)).start()


if __name__ == "__main__":
    main()
