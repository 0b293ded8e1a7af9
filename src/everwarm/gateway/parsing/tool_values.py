"""Values inside tool calls as JSON text: JSON itself, Python literals, and bare text whose type a schema gives.

JSON and Python values are parsed while they stream. Pure: knows nothing about the calls around them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import TypeVar

from everwarm.gateway.parsing.tool_reader import Kind, NotACall, Reading, ToolReader, is_string

T = TypeVar("T")
Emit = Callable[[str], object]

MAX_ATOM_CHARS = 400
MAX_DEPTH, MAX_PYTHON_DEPTH = 128, 32

_ATOM = re.compile(r"[-+.\w]+")
_JSON_ATOM = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_JSON_PLAIN = re.compile(r'[^"\\]+')
_JSON_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_JSON_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_PYTHON_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_PYTHON_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U(?:0010|000[0-9a-fA-F])[0-9a-fA-F]{4}|[^xuU])", re.DOTALL
)
_PYTHON_ESCAPE_BEGUN = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?\Z")
_PYTHON_STRING_ENDS = re.compile(r"['\"][ \t\r\n]{0,16}[],:)}]")
_PYTHON_STRING_MAY_END = re.compile(r"['\"][ \t\r\n]{0,16}\Z")
_CLOSES = {"{": "}", "[": "]", "(": ")"}
_PYTHON_ESCAPES = {c: f"\\{c}" for c in 'nrtbf\\"'} | {"'": "'", "/": "/", "\n": "", "a": "\\u0007", "v": "\\u000b"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def kept(value: Callable[[ToolReader, Emit], Reading[None]], r: ToolReader) -> Reading[str]:
    """A value's JSON as a text, not emitted."""
    pieces: list[str] = []
    yield from value(r, pieces.append)
    return "".join(pieces)


def json_text(r: ToolReader) -> Reading[str]:
    text: str = json.loads((yield from kept(_json_string, r)))
    return text


def json_value(r: ToolReader, emit: Emit) -> Reading[None]:
    """Any value, spelled as the model did, so that the next turn renders the same text."""
    inside: list[str] = []
    while True:
        begins = yield from r.spaces(emit)
        if begins == '"':
            yield from _json_string(r, emit)
        elif begins and begins in "{[" and len(inside) < MAX_DEPTH:
            emit(r.take_one("{["))
            if (yield from r.spaces(emit)) != _CLOSES[begins]:
                inside.append(begins)
                yield from _json_key(r, emit, begins)
                continue
            emit(r.take_one("}]"))
        else:
            atom = yield from r.match(_ATOM, MAX_ATOM_CHARS)
            if not _JSON_ATOM.fullmatch(atom):
                raise NotACall
            emit(atom)
        while inside and (yield from r.spaces(emit)) == _CLOSES[inside[-1]]:
            emit(r.take_one("}]"))
            inside.pop()
        if not inside:
            return
        emit(r.take_one(","))
        yield from _json_key(r, emit, inside[-1])


def _json_key(r: ToolReader, emit: Emit, inside: str) -> Reading[None]:
    if inside == "{":
        yield from r.spaces(emit)
        yield from _json_string(r, emit)
        yield from r.spaces(emit)
        emit(r.take_one(":"))


def _json_string(r: ToolReader, emit: Emit) -> Reading[None]:
    """Line ends are escaped where the model forgot to, and so are backslashes that begin no escape."""
    emit(r.take_one('"'))
    while True:
        plain = _JSON_PLAIN.match(r.text, r.at)
        if plain:
            emit(escaped(r.take(plain.end())))
        follows = r.peek()
        if follows == '"':
            emit(r.take_one('"'))
            return
        if follows == "\\" and (escape := _JSON_ESCAPE.match(r.text, r.at)):
            emit(r.take(escape.end()))
        elif follows and not _JSON_ESCAPE_BEGUN.match(r.text, r.at):
            r.take_one("\\")
            emit("\\\\")
        else:
            yield from r.more()


def python_value(r: ToolReader, emit: Emit, depth: int = 0) -> Reading[None]:
    """A Python literal, as JSON."""
    begins = yield from r.spaces()
    if begins in ("'", '"'):
        yield from python_string(r, emit)
    elif begins in _CLOSES and depth < MAX_PYTHON_DEPTH:
        yield from _python_container(r, emit, depth)
    else:
        emit(_python_atom((yield from r.match(_ATOM, MAX_ATOM_CHARS))))


def _python_container(r: ToolReader, emit: Emit, depth: int) -> Reading[None]:
    begins = r.take_one("[({")
    closes, n_items = _CLOSES[begins], 0
    emit("{" if begins == "{" else "[")
    while (yield from r.spaces()) != closes:
        if n_items:
            emit(", ")
        if begins == "{":
            if r.peek() in _CLOSES:
                raise NotACall
            key = yield from kept(python_value, r)
            emit(f"{key if key.startswith(chr(34)) else quoted(key)}: ")
            yield from r.spaces()
            r.take_one(":")
        yield from python_value(r, emit, depth + 1)
        n_items += 1
        if (yield from r.spaces()) == ",":
            r.take_one(",")
        elif r.peek() != closes:
            raise NotACall
    r.take_one(closes)
    emit("}" if begins == "{" else "]")


def python_string(r: ToolReader, emit: Emit) -> Reading[None]:
    """A quote ends the string only where a value may end: models forget to escape apostrophes."""
    quote = r.take_one("'\"")
    emit('"')
    while True:
        plain = _PYTHON_PLAIN[quote].match(r.text, r.at)
        if plain:
            emit(escaped(r.take(plain.end())))
        follows = r.peek()
        if follows == quote and _PYTHON_STRING_ENDS.match(r.text, r.at):
            r.take_one(quote)
            emit('"')
            return
        if follows == quote and not _PYTHON_STRING_MAY_END.match(r.text, r.at):
            emit(escaped(r.take_one(quote)))
        elif follows == "\\" and (escape := _PYTHON_ESCAPE.match(r.text, r.at)):
            emit(_python_escape(r.take(escape.end())))
        elif follows == "\\" and not _PYTHON_ESCAPE_BEGUN.match(r.text, r.at):
            r.take_one("\\")
            emit("\\\\")
        else:
            yield from r.more()


def _python_escape(escape: str) -> str:
    """A Python escape inside a JSON string; an unknown escape is kept as text."""
    if len(escape) == 10:
        return escaped(chr(int(escape[2:], 16)))
    if len(escape) > 2:
        return f"\\u{escape[2:].rjust(4, '0')}"
    return _PYTHON_ESCAPES.get(escape[1], escaped(escape))


def _python_atom(atom: str) -> str:
    if _JSON_ATOM.fullmatch(atom):
        return atom
    if atom in _PYTHON_WORDS:
        return _PYTHON_WORDS[atom]
    try:
        return str(int(atom, 0))
    except ValueError:
        pass
    try:
        number = float("nan" if atom.isdigit() else atom)  # a postcode such as 02139 is no number
    except ValueError:
        return quoted(atom)
    return repr(number) if math.isfinite(number) else quoted(atom)


def as_object(value: str) -> str:
    """Arguments as an object; some models write that object into a string."""
    text = json.loads(value).strip() if value.startswith('"') else value
    if text in ("", "null"):
        return "{}"
    if not text.startswith("{") or not _is_json(text):
        raise NotACall
    return _encodable(text)


def bare_as_json(kind: Kind, text: str) -> str:
    """The JSON of a value written without quotes."""
    stripped = text.strip()
    if is_string(kind) or ("string" in kind and not (stripped == "null" and "null" in kind)):
        return quoted(text)
    return _encodable(stripped) if _is_json(stripped) else _python_as_json(stripped) or quoted(text)


def literal_as_json(kind: Kind, value: str) -> str:
    """The JSON of a literal that has a type of its own."""
    if value.startswith('"'):
        meant = value if not kind or "string" in kind else bare_as_json(kind, json.loads(value))
        return meant if _is_of(kind, json.loads(meant)) else value
    return quoted(value) if kind == {"string"} and value != "null" else value


def _is_of(kind: Kind, value: object) -> bool:
    """Whether a value has one of these JSON types."""
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean") in kind
    if isinstance(value, int | float):
        return "number" in kind or ("integer" in kind and float(value).is_integer())
    return ("array" if isinstance(value, list) else "object" if isinstance(value, dict) else "string") in kind


def _python_as_json(text: str) -> str | None:
    if not text.startswith(("{", "[", "(", "True", "False", "None")):
        return None
    r = ToolReader({}, str)
    r.text, r.final = text + " ", True  # a space, so that the last word is known to end
    try:
        value = _run(kept(python_value, r))
    except NotACall:
        return None
    return None if r.text[r.at :].strip() else value


def _run(reading: Reading[T]) -> T:
    """Runs a reading to its end, over complete text."""
    while True:
        try:
            next(reading)
        except StopIteration as done:
            value: T = done.value
            return value


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return False
    return True


def _no_number(name: str) -> None:
    raise ValueError(name)


def escaped(text: str) -> str:
    """The text as the inside of a JSON string."""
    return _encodable(encode_basestring(text)[1:-1])


def quoted(text: str) -> str:
    return f'"{escaped(text)}"'


def _encodable(text: str) -> str:
    """JSON text with lone surrogates, which UTF-8 cannot encode, as escapes."""
    return text if text.isascii() else _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
