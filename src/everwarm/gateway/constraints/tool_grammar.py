"""Grammars of tool calls, in each format that a model's template may teach. What such a grammar lets a model write, the
parser of the same format reads as calls that obey the tools' schemas, as far as the format can express them.

Pure: makes Lark text; knows no tokens. ``tag_0`` and ``tag_1`` stand for the tags around calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everwarm.config import MAX_CONSTRAINT_CHARS, Constraint
from everwarm.errors import BadRequest
from everwarm.gateway.constraints.json_schema import referred, value_schema
from everwarm.gateway.parsing.tool_parser import kinds_of, name_and_schema
from everwarm.gateway.parsing.tool_reader import Kind

MAX_CALLS = 32
_MAX_REFERENCES = 8
_NAME = re.compile(r"[\w.:/@-]{1,128}")
_XML_KEY = re.compile(r"[^<>\r\n]{1,256}")
_PYTHON_KEY = re.compile(r"[-.\w]{1,256}")
_MAX_MADE_CHARS = 4 * MAX_CONSTRAINT_CHARS  # of all schemas that are written, duplicates included
_ANYTHING: Mapping[str, Any] = {}
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_SAY_MORE = ("$ref", "allOf", "anyOf", "oneOf")
_TEXT_RULE = 'text[suffix="</parameter>"]: /(?s:.)*/'


def call_constraint(
    format: str, template: str, tools: Sequence[Mapping[str, Any]], start: str = "calls", *, many: bool
) -> Constraint:
    """Calls of these tools, one or (``many``) more, as the format of that name spells them. ``start``: the rule of a whole
    reply, in which ``calls`` stands for the calls."""
    write = _WRITERS[format]
    rules = _Rules()
    calls = [write(rules, *tool) for tool in _told(tools)]
    frame = _FRAMES["granite"] if format == "hermes" and "<tool_call>" not in template else _FRAMES[format]
    more = f"({frame.between} {frame.one}){{0,{MAX_CALLS - 1}}}" if many else ""
    first = f"calls: {frame.before} {frame.one} {more} {frame.after}"
    lines = (f"start: {start}", first, *frame.rules, f"call: {' | '.join(calls)}", *rules.lines)
    return Constraint("lark", "\n".join(lines), frame.tags)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The text before, around, between and after calls."""

    tags: tuple[str, ...]
    before: str
    one: str
    between: str
    after: str
    rules: tuple[str, ...] = ()


def _listed(*tags: str, gap: str = "") -> _Frame:
    """Calls in one list."""
    closing = "tag_1" if len(tags) > 1 else ""
    return _Frame(
        tags, f'tag_0 "[" {gap}', "call", f'"," {gap or _q(" ")}', f'{gap} "]" {closing}', _GAP if gap else ()
    )


def _q(text: str) -> str:
    """Literal text, in Lark's syntax."""
    return json.dumps(text)


_NEWLINE = _q("\n")
_PARAMETER_ENDS = _q("\n</parameter>")
_GAP = (r"GAP: /[ \n]{0,8}/",)
_ONE = (f"one: tag_0 {_NEWLINE} call {_NEWLINE} tag_1",)
_FRAMES = {
    "hermes": _Frame(("<tool_call>", "</tool_call>"), "", "one", _NEWLINE, "", _ONE),
    "granite": _listed("<|tool_call|>"),
    "qwen-xml": _Frame(("<tool_call>", "</tool_call>"), "", "one", _NEWLINE, "", _ONE),
    "jamba": _listed("<tool_calls>", "</tool_calls>", gap="GAP"),
    "nemotron": _listed("<TOOLCALL>", "</TOOLCALL>", gap="GAP"),
    "pythonic": _listed("<|tool_call_start|>", "<|tool_call_end|>"),
}


@dataclass(slots=True)
class _Rules:
    """Rules as they are made, each under a name of its own, up to ``MAX_CONSTRAINT_CHARS`` together. Equal schemas share a
    rule, and a schema that many arguments refer to is visited once."""

    lines: list[str] = field(default_factory=list)
    n_chars: int = 0
    n_made: int = 0
    _values: dict[tuple[int, int], str] = field(default_factory=dict)  # by the ids of a schema and of its root
    _written: dict[str, str] = field(default_factory=dict)  # by a rule's text
    _texts: dict[int, str | None] = field(default_factory=dict)  # by a schema's id
    free: set[int] = field(default_factory=set)  # ids of schemas of which no string is bounded

    def rule(self, body: str) -> str:
        return self._added(f"r{len(self.lines)}", body)

    def terminal(self, body: str) -> str:
        return self._added(f"T{len(self.lines)}", body)

    def _added(self, name: str, body: str) -> str:
        self._add(f"{name}: {body}")
        return name

    def _add(self, line: str) -> None:
        self.n_chars += len(line) + 1
        _check_size(self.n_chars, MAX_CONSTRAINT_CHARS)
        self.lines.append(line)

    def once(self, line: str) -> None:
        if line not in self._written:
            self._written[line] = line
            self._add(line)

    def value(self, schema: Mapping[str, Any], root: Mapping[str, Any], write: Callable[[], str]) -> str:
        """What ``write`` makes of a schema, made once. ``schema`` and ``root`` outlive these rules, so their ids are
        the keys."""
        key = id(schema), id(root)
        if key not in self._values:
            self._values[key] = write()
        return self._values[key]

    def json(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """The rule of a value in JSON."""
        return self.json_text(value_schema(schema, root))

    def json_text(self, schema: str) -> str:
        self.n_made += len(schema)
        _check_size(self.n_made, _MAX_MADE_CHARS)
        if schema not in self._written:
            self._written[schema] = self.rule(f"%json {schema}")
        return self._written[schema]

    def bounded_text(self, schema: Mapping[str, Any]) -> str | None:
        """A terminal for strings that are not free; None for those that are."""
        if id(schema) not in self._texts:
            self._texts[id(schema)] = _bounded_text(schema)
        return self._texts[id(schema)]


def _check_size(n_chars: int, most: int) -> None:
    if n_chars > most:
        raise BadRequest(
            f"the tools' schemas make a grammar of more than {most:,} characters, which cannot be forced: "
            "offer fewer tools, or smaller schemas"
        )


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    schema: Mapping[str, Any]
    kind: Kind
    required: bool


def _told(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any], list[_Argument]]]:
    kinds = kinds_of(tools)
    for tool in tools:
        name, root = name_and_schema(tool)
        if not _NAME.fullmatch(name):
            raise BadRequest(f"a call of a tool named {name[:40]!r} cannot be forced; use letters, digits, _ and -")
        schema = _resolved(root, root)
        wanted = schema.get("required")
        required = {key for key in wanted if isinstance(key, str)} if isinstance(wanted, list) else set()
        properties = schema.get("properties")
        arguments = [
            _Argument(key, _resolved(schema, root), kinds[name].get(key, frozenset()), key in required)
            for key, schema in (properties.items() if isinstance(properties, Mapping) else ())
        ]
        yield name, root, arguments


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        schema = referred(schema["$ref"], root)
    return schema if isinstance(schema, Mapping) else _ANYTHING


# JSON


def _json_call(rules: _Rules, name: str, root: Mapping[str, Any], _: list[_Argument]) -> str:
    begins = _q(f'{{"name": {json.dumps(name)}, "arguments": ')
    schema = root if any(key in root for key in _SAY_MORE) else {**(root or _NOTHING), "type": "object"}
    return rules.rule(f'{begins} {rules.json_text(value_schema(schema, {}))} "}}"')


# XML


def _xml_call(rules: _Rules, name: str, root: Mapping[str, Any], arguments: list[_Argument]) -> str:
    parts = []
    for argument in arguments:
        if not _XML_KEY.fullmatch(argument.name):
            raise BadRequest(f"an argument named {argument.name[:40]!r} cannot be forced in this format")
        begins = _q(f"<parameter={argument.name}>\n")
        part = rules.rule(f"{begins} {_xml_value(rules, argument, root)} {_NEWLINE}")
        parts.append(part if argument.required else f"{part}?")
    return rules.rule(" ".join((_q(f"<function={name}>\n"), *parts, _q("</function>"))))


def _xml_value(rules: _Rules, argument: _Argument, root: Mapping[str, Any]) -> str:
    """The value with its closing tag. A value that can be a string is parsed as one, so only strings are written then."""
    if argument.kind and "string" not in argument.kind:
        rule = rules.value(argument.schema, root, lambda: rules.json(argument.schema, root))
        return f"{rule} {_PARAMETER_ENDS}"
    bounded = _bounded_texts(rules, argument.schema, root)
    if bounded:
        return f"{rules.terminal(' | '.join(bounded))} {_PARAMETER_ENDS}"
    rules.once(_TEXT_RULE)
    return "text"


def _bounded_texts(rules: _Rules, schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
    """Terminals for the strings that a schema allows; none if it leaves some of them free."""
    parts = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(parts, list):
        text = rules.bounded_text(schema)
        return [] if text is None else [text]
    if id(schema) in rules.free:
        return []
    found = []
    for part in parts:
        resolved = _resolved(part, root)
        if resolved.get("type") == "string" or "enum" in resolved or "const" in resolved:
            text = rules.bounded_text(resolved)
            if text is None:
                rules.free.add(id(schema))
                return []
            found.append(text)
    if not found:
        rules.free.add(id(schema))
    return found


def _bounded_text(schema: Mapping[str, Any]) -> str | None:
    """A terminal for strings that are not free; None for those that are."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        texts = [value for value in values if isinstance(value, str) and "</parameter>" not in value]
        return " | ".join(map(_q, texts)) or None
    low, high = (_length(schema.get(key)) for key in ("minLength", "maxLength"))
    pattern = _searched(schema["pattern"]) if isinstance(schema.get("pattern"), str) else None
    if not low and high is None and pattern is None:
        return None
    plain = rf"/[^<\r\n]{{{low or 0},{'' if high is None else high}}}/"
    return plain if pattern is None else f"({plain} & /{pattern}/)"


def _length(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _searched(pattern: str) -> str | None:
    """A pattern that may match anywhere as one that matches a whole text; None if that cannot be decided."""
    begins = pattern.startswith("^")
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    if "^" in re.sub(r"\[\^", "", inner) or "$" in inner or ("|" in inner and (begins or ends)):
        return None
    slashed = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), inner)
    return f"{'' if begins else '(?s:.*)'}(?:{slashed}){'' if ends else '(?s:.*)'}"


# Python


def _python_call(rules: _Rules, name: str, root: Mapping[str, Any], arguments: list[_Argument]) -> str:
    for argument in arguments:
        if not _PYTHON_KEY.fullmatch(argument.name):
            raise BadRequest(f"an argument named {argument.name[:40]!r} cannot be forced in this format")
    given = [rules.rule(f"{_q(a.name + '=')} {_python_argument(rules, a, root)}") for a in arguments]
    return rules.rule(f'{_q(name + "(")} {_comma_list(rules, given, [a.required for a in arguments])} ")"')


def _comma_list(rules: _Rules, items: list[str], required: list[bool]) -> str:
    """Items in order, optional ones possibly left out, with commas between them."""
    more, first = '""', '""'
    for item, must in zip(reversed(items), reversed(required), strict=True):
        first = rules.rule(f"{item} {more}" + ("" if must else f" | {first}"))
        more = rules.rule(f'", " {item} {more}' + ("" if must else f" | {more}"))
    return first


def _python_argument(rules: _Rules, argument: _Argument, root: Mapping[str, Any]) -> str:
    return rules.value(argument.schema, root, lambda: _python_value(rules, argument.schema, root))


def _python_value(rules: _Rules, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """JSON is Python but for three words: Python's at the top level, JSON's inside lists and objects."""
    named = schema.get("type")
    types = named if isinstance(named, list) else [named]
    if "enum" in schema or "const" in schema or not all(isinstance(name, str) for name in types):
        return rules.json(schema, root)
    words = [_q(word) for name in types for word in _WORDS.get(str(name), ())]
    others = [name for name in types if name not in _WORDS]
    json_rule = [rules.json({**schema, "type": others}, root)] if others else []
    return f"({' | '.join((*words, *json_rule))})"


_WORDS: Mapping[str, tuple[str, ...]] = {"boolean": ("True", "False"), "null": ("None",)}
_Writer = Callable[[_Rules, str, Mapping[str, Any], list[_Argument]], str]
_WRITERS: Mapping[str, _Writer] = {
    "hermes": _json_call,
    "qwen-xml": _xml_call,
    "jamba": _json_call,
    "nemotron": _json_call,
    "pythonic": _python_call,
}
