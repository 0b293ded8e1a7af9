"""The child of ``trial``: ``python -m everwarm.llama.constraints.trial_worker``. Writes each constraint that it is sent as
one grammar for llguidance, and compiles that.

A grammar has the rules of the reply, and before them those of the thinking. Control tokens match no text, so a tag that is
one is named by its id. Every other token is the text it stands for, however a model splits that text into tokens; a Lark
text may still name it, as in ``<tool_call>``.

Knows no model: a vocabulary is its size, its control tokens and the single bytes. Its memory and its stack are limited.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import threading
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from everwarm.config import Constraint, Thought
from everwarm.llama.constraints.trial import HEADER, STACK_BYTES, TRIAL_S, NamedTokens, TrialResult

MEMORY_BYTES = 3 << 30
_MAX_ERROR_CHARS = 600
# for one grammar, in the child and in the engine
LIMITS: Final = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
_ANY = "/(?s:.)*/"
_GAP = r"/[ \t\r\n]{0,8}/"
# A token named in a Lark text. The alternatives before it match what only looks like one: strings, comments, regular
# expressions.
_NAMED = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s"\[]+>)')


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


def grammar_of(constraint: Constraint, names: NamedTokens) -> str:
    """Raises what parsing the constraint's text raises."""
    body = _body(constraint, names)
    if constraint.thought is None:
        return json.dumps({"grammars": [body]})
    return json.dumps({"grammars": [{"lark_grammar": _thinking(constraint.thought, names)}, {"name": "body", **body}]})


def _body(constraint: Constraint, names: NamedTokens) -> dict[str, Any]:
    match constraint.kind:
        case "json_schema":
            return {"json_schema": json.loads(constraint.text)}
        case "regex":
            return {"lark_grammar": f"start: /{regex_to_lark(constraint.text)}/"}
        case "gbnf":
            return {"lark_grammar": gbnf_to_lark(constraint.text)}
        case "lark":
            rules = (f"tag_{i}: {_tag(tag, names)}" for i, tag in enumerate(constraint.tags))
            return {
                "lark_grammar": "\n".join((_NAMED.sub(lambda found: _by_id(found, names), constraint.text), *rules))
            }


def _by_id(found: re.Match[str], names: NamedTokens) -> str:
    return f"<[{names.defined[found[1]]}]>" if found[1] in names.defined else found[0]


def _thinking(thought: Thought, names: NamedTokens) -> str:
    begins = f"{_GAP} ({_tag(thought.opening, names)} thought {_GAP})?" if thought.opening else f"thought {_GAP}"
    return f"start: {begins} @body\n{_until(thought.closing, names)}\n"


def _until(closing: str, names: NamedTokens) -> str:
    if closing in names.control:
        return f"thought: {_ANY} {_tag(closing, names)}"
    return f"thought[suffix={json.dumps(closing)}]: {_ANY}"


def _tag(text: str, names: NamedTokens) -> str:
    return f"<[{names.control[text]}]>" if text in names.control else json.dumps(text)


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
