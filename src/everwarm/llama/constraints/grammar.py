"""A constraint as one grammar for llguidance: the rules of the reply, and before them those of the thinking. Pure.

Control tokens match no text, so a tag that is one is named by its id. Every other token is the text it stands for, however
a model splits that text into tokens; a Lark text may still name it, as in ``<tool_call>``.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from llguidance import LLParserLimits, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from everwarm.config import Constraint, Thought
from everwarm.llama.constraints.trial import NamedTokens

# for one grammar, in the child and in the engine
LIMITS: Final = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
_ANY = "/(?s:.)*/"
_GAP = r"/[ \t\r\n]{0,8}/"
# A token named in a Lark text. The alternatives before it match what only looks like one: strings, comments, regular
# expressions.
_NAMED = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s"\[]+>)')


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
