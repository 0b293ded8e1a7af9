"""Grammars of calls against the readers of the same notations: what one lets through the other reads as calls that obey.

No model writes here: every token is drawn from those that the grammar allows.
"""

import json
import random
from typing import Any

import pytest

from everwarm.gateway.constraints.reply_constraint import chat_constraint
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.parsing.output_parser import ModelSyntax, OutputParser
from everwarm.gateway.parsing.tool_parser import kinds_of
from everwarm.llama.constraints.matcher import ConstraintCompiler, Matcher
from everwarm.llama.model import Model
from everwarm.llama.vocab import Vocab
from support.constraint_cases import SCHEMAS, TOOLS, WORDS_OF, obeys

N_WALKS, MAX_TOKENS = 40, 300
END_OF_TEXT = b"\n</parameter>"
PROMPT = [{"role": "user", "content": "Hello"}]
MORE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "free": {"type": "string"},
        "maybe": {"type": ["boolean", "null"]},
        "which": {"anyOf": [{"type": "integer"}, {"type": "string", "enum": ["auto", 'it\'s "so"']}]},
        "inner": {"type": "object", "properties": {"flags": {"type": "array", "items": {"type": "boolean"}}}},
    },
    "required": ["free", "inner"],
}
REFERRED = {
    "$ref": "#/$defs/all",
    "$defs": {"all": {"type": "object", "properties": {"i": {"type": "integer"}}, "required": ["i"]}},
}
ALL = [
    *TOOLS,
    {"type": "function", "function": {"name": "more", "parameters": MORE}},
    {"type": "function", "function": {"name": "referred", "parameters": REFERRED}},
]


def is_right(name: str, arguments: Any) -> bool:
    if name == "more":
        which = arguments.pop("which", 1)
        plain = {key: output for key, output in MORE["properties"].items() if key != "which"}
        good = isinstance(which, int) or which in ("auto", 'it\'s "so"')
        return good and obeys(MORE | {"properties": plain}, arguments)
    return obeys(REFERRED["$defs"]["all"] if name == "referred" else SCHEMAS[name], arguments)


def walked(matcher: Matcher, vocab: Vocab, rng: random.Random) -> str | None:
    """A text the grammar allows, drawn with a liking for endings; None if it does not end."""
    text = b""
    for _ in range(MAX_TOKENS):
        if matcher.is_complete or not matcher.look():
            break
        ids = matcher.allowed().tolist()
        if rng.random() < 0.5 and any(token in vocab.eog for token in ids):
            break
        token = rng.choice(ending(ids, text, vocab, rng) or [token for token in ids if token not in vocab.eog] or ids)
        if token in vocab.eog:
            break
        matcher.accept(token)
        text += vocab.piece(token)
    else:
        return None
    assert matcher.error is None
    return text.decode("utf-8", "replace")


def ending(ids: list[int], text: bytes, vocab: Vocab, rng: random.Random) -> list[int]:
    """Sometimes what brings an open text or list nearer to its end."""
    if rng.random() < 0.4:
        return []
    n = max(n for n in range(len(END_OF_TEXT)) if text.endswith(END_OF_TEXT[:n]))
    wanted = (END_OF_TEXT[n : n + 1], b'"', b"]", b"}", b")")
    return next((found for end in wanted if (found := [t for t in ids if vocab.piece(t) == end])), [])


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("notation", [*WORDS_OF, "granite"])
def test_whatever_a_grammar_of_calls_allows_is_read_as_calls_that_obey(
    embedded_model: Model, notation: str, many: bool
) -> None:
    template = WORDS_OF.get(notation, "<|tool_call|>")
    body = ChatBody(messages=PROMPT, tools=ALL, tool_choice="required", parallel_tool_calls=many)
    form = chat_constraint(body, ModelSyntax(template), "")
    assert form is not None
    rng, vocab = random.Random(f"{notation} {many}"), embedded_model.vocab
    with ConstraintCompiler(vocab) as forms:
        compiled = forms.compile(form)
        texts = [walked(compiled.matcher(), vocab, rng) for _ in range(N_WALKS)]
    whole = [text for text in texts if text is not None]
    assert len(whole) > N_WALKS // 2
    for text in whole:
        message = OutputParser.of(ModelSyntax(template), "", kinds_of(ALL), with_thinking=True).message(text)
        calls = [call["function"] for call in message["tool_calls"]]
        assert not message["content"] and (many or len(calls) == 1), text
        assert all(is_right(call["name"], json.loads(call["arguments"])) for call in calls), text
    assert len(set(whole)) > N_WALKS // 4


def test_a_walk_without_the_grammar_is_no_call(embedded_model: Model) -> None:
    rng = random.Random(1)
    text = embedded_model.vocab.detokenize(rng.randrange(12, 2000) for _ in range(50)).decode("utf-8", "replace")
    assert "tool_calls" not in OutputParser.of(
        ModelSyntax("<tool_call>"), "", kinds_of(ALL), with_thinking=True
    ).message(text)
