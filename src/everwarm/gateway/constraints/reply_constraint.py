"""What a request's reply must look like: a schema, a grammar, or a call of a tool. Pure: bodies in, constraints out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from everwarm.config import MAX_CONSTRAINT_CHARS, Constraint, Thought, require
from everwarm.errors import BadRequest
from everwarm.gateway.constraints.json_schema import answer_schema
from everwarm.gateway.constraints.tool_grammar import call_constraint
from everwarm.gateway.openai.schema import Body, ChatBody, CompletionBody
from everwarm.gateway.parsing.output_parser import ModelSyntax
from everwarm.gateway.parsing.tool_parser import name_and_schema

Tools = Sequence[Mapping[str, Any]]

_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)


def completion_constraint(body: CompletionBody) -> Constraint | None:
    return _given_constraint(body)


def chat_constraint(body: ChatBody, syntax: ModelSyntax, prompt: str) -> Constraint | None:
    """The constraint of the body, which holds after the model's thinking. ``syntax`` and ``prompt`` give its form."""
    constraint = _given_constraint(body)
    forced = forced_tools(body.tool_choice, body.tools)
    if constraint is None and forced is None:
        return None
    thought = _thought(syntax, prompt)
    if forced is not None:
        if constraint is not None and constraint.kind != "json_schema":
            raise BadRequest("tool_choice forces a call and grammar forces something else; give one of them")
        return replace(_calls(body, syntax, forced, "calls"), thought=thought)
    assert constraint is not None
    if constraint.kind == "json_schema" and body.tools and body.tool_choice != "none" and syntax.tools:
        start = f"calls | answer\nanswer: %json {constraint.text}"
        return replace(_calls(body, syntax, body.tools, start), thought=thought)
    return Constraint(constraint.kind, constraint.text, thought=thought)


def _thought(syntax: ModelSyntax, prompt: str) -> Thought | None:
    style = syntax.thinking(prompt)
    if style is None or style.begins == "after":
        return None
    return Thought(style.closing, style.opening if style.begins == "before" else "")


# constraints of the body


def _given_constraint(body: Body) -> Constraint | None:
    given = {
        "grammar": _grammar(body.grammar) if body.grammar else None,
        "json_schema": None if body.json_schema is None else _answer(body.json_schema, strict=False),
        "response_format": None if body.response_format is None else _response_format(body.response_format),
    }
    constraints = {name: constraint for name, constraint in given.items() if constraint is not None}
    if len(constraints) > 1:
        raise BadRequest(f"{' and '.join(constraints)} each constrain the reply; give one of them")
    return next(iter(constraints.values()), None)


def _answer(schema: Any, *, strict: bool) -> Constraint:
    return Constraint("json_schema", answer_schema(schema, strict=strict))


def _grammar(text: str) -> Constraint:
    require(
        len(text) <= MAX_CONSTRAINT_CHARS,
        f"the grammar has {len(text)} characters; give at most {MAX_CONSTRAINT_CHARS}",
    )
    if _LARK.search(text):
        return Constraint("lark", text)
    if "::=" in text:
        return Constraint("gbnf", text)
    raise BadRequest("grammar is neither GBNF (with a rule `root ::= …`) nor Lark (with a rule `start: …`)")


def _response_format(format: Mapping[str, Any]) -> Constraint | None:
    match format.get("type"):
        case "text":
            return None
        case "json_object":
            return _answer(format.get("schema", {"type": "object"}), strict=False)
        case "json_schema":
            inner = format.get("json_schema", format)
            if not isinstance(inner, Mapping) or "schema" not in inner:
                raise BadRequest("response_format of type json_schema needs json_schema.schema")
            return _answer(inner["schema"], strict=inner.get("strict") is True)
        case other:
            raise BadRequest(f"response_format is of type {str(other)[:40]!r}; give text, json_object or json_schema")


# calls


def _calls(body: ChatBody, syntax: ModelSyntax, tools: Tools, start: str) -> Constraint:
    format = syntax.tools
    if format is None:
        raise BadRequest("this model's chat template has no known tool call format, so a call cannot be forced")
    return call_constraint(format, syntax.template, tools, start, many=body.parallel_tool_calls is not False)


def forced_tools(choice: str | Mapping[str, Any] | None, tools: Tools | None) -> Tools | None:
    """The tools of which one must be called; None where the model is free."""
    if choice is None or choice in ("auto", "none"):
        return None
    if not tools:
        raise BadRequest("tool_choice asks for a call, but there are no tools")
    if choice == "required":
        return tools
    assert isinstance(choice, Mapping)
    match choice.get("type"):
        case "function":
            return [_named(choice, _by_name(tools))]
        case "allowed_tools":
            allowed = choice.get("allowed_tools", choice)
            names = allowed.get("tools") if isinstance(allowed, Mapping) else None
            if not isinstance(names, list) or not all(isinstance(name, Mapping) for name in names) or not names:
                raise BadRequest("tool_choice of type allowed_tools needs a list of tools")
            by_name = _by_name(tools)
            found = [_named(name, by_name) for name in names]
            return found if allowed.get("mode") == "required" else None
        case other:
            raise BadRequest(f"tool_choice is of type {str(other)[:40]!r}; give function or allowed_tools")


def _by_name(tools: Tools) -> Mapping[str, Mapping[str, Any]]:
    """The first tool of each name."""
    return {name_and_schema(tool)[0]: tool for tool in reversed(tools)}


def _named(choice: Mapping[str, Any], tools: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    inner = choice.get("function")
    name = (inner if isinstance(inner, Mapping) else choice).get("name")
    if isinstance(name, str) and name in tools:
        return tools[name]
    known = ", ".join(list(tools)[:-21:-1])
    raise BadRequest(f"tool_choice names {str(name)[:40]!r}; the tools are: {known}")
