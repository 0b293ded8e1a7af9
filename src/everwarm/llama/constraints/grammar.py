"""A form as one grammar for llguidance: the reply's own rules, and before them what a model may think. Pure.

Control tokens match no text, so a tag that is one is named by its id. Every other token is the text it stands for, however
a model cuts that text into tokens; a Lark text may still name it, as in ``<tool_call>``.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from everwarm.config import Constraint, Thought

_ANY = "/(?s:.)*/"
_GAP = r"/[ \t\r\n]{0,8}/"
# A token named in a Lark text; before it what only looks like one: strings, comments, regular expressions.
_NAMED = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s"\[]+>)')


class Words(msgspec.Struct, frozen=True):
    """What of a vocabulary a grammar can name."""

    n_tokens: int
    control: dict[str, int]  # tokens that match no text
    defined: dict[str, int]  # tokens that are cut out of any text
    eog: list[int]  # the first one ends a reply, the others do so as well


def grammar_of(form: Constraint, words: Words) -> str:
    """Raises whatever parsing the form's text raises."""
    body = _body(form, words)
    if form.thought is None:
        return json.dumps({"grammars": [body]})
    return json.dumps({"grammars": [{"lark_grammar": _thinking(form.thought, words)}, {"name": "body", **body}]})


def _body(form: Constraint, words: Words) -> dict[str, Any]:
    match form.kind:
        case "json_schema":
            return {"json_schema": json.loads(form.text)}
        case "regex":
            return {"lark_grammar": f"start: /{regex_to_lark(form.text)}/"}
        case "gbnf":
            return {"lark_grammar": gbnf_to_lark(form.text)}
        case "lark":
            rules = (f"tag_{i}: {_tag(tag, words)}" for i, tag in enumerate(form.tags))
            return {"lark_grammar": "\n".join((_NAMED.sub(lambda found: _by_id(found, words), form.text), *rules))}


def _by_id(found: re.Match[str], words: Words) -> str:
    return f"<[{words.defined[found[1]]}]>" if found[1] in words.defined else found[0]


def _thinking(thought: Thought, words: Words) -> str:
    begins = f"{_GAP} ({_tag(thought.opening, words)} thought {_GAP})?" if thought.opening else f"thought {_GAP}"
    return f"start: {begins} @body\n{_until(thought.closing, words)}\n"


def _until(closing: str, words: Words) -> str:
    if closing in words.control:
        return f"thought: {_ANY} {_tag(closing, words)}"
    return f"thought[suffix={json.dumps(closing)}]: {_ANY}"


def _tag(text: str, words: Words) -> str:
    return f"<[{words.control[text]}]>" if text in words.control else json.dumps(text)
