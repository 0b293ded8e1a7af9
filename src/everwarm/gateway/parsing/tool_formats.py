"""The formats in which models write tool calls: JSON, XML-like and Python-like, parsed while they stream.

Each format is a generator over a ``ToolReader``: it takes what it understands, yields where the text so far is too short,
and raises ``NotACall`` where the text cannot be a call. It emits only what is certain. Pure: knows text; knows no tokens,
no HTTP and no tool's meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from everwarm.gateway.parsing.tool_reader import Kind, NotACall, Reading, ToolReader, is_string
from everwarm.gateway.parsing.tool_values import (
    Emit,
    as_object,
    bare_as_json,
    escaped,
    json_text,
    json_value,
    kept,
    literal_as_json,
    python_string,
    python_value,
    quoted,
)

MAX_NAME_CHARS, MAX_KEY_CHARS = 128, 256

_NAME = re.compile(r"[\w.:/@-]+")
_XML_KEY = re.compile(r"[^<>\r\n]+")
_PYTHON_KEY = re.compile(r"[-.\w]+")
FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"

Section = Callable[[ToolReader, str, str], Reading[None]]


def json_section(r: ToolReader, opener: str, closer: str) -> Reading[None]:  # noqa: ARG001 - every format has the same signature
    """One call as an object, or several: in a list, or one after the other."""
    listed = (yield from r.spaces()) == "["
    if listed:
        r.take_one("[")
        yield from r.spaces()
    yield from _json_calls(r, closer, listed=listed)


def _json_calls(r: ToolReader, closer: str, *, listed: bool) -> Reading[None]:
    while True:
        yield from _json_call(r)
        follows = yield from r.spaces()
        if listed and follows == ",":
            r.take_one(",")
            r.end()
            yield from r.spaces()
        elif follows == "{":
            r.end()
        else:
            break
    if listed:
        r.take_one("]")
    yield from _close(r, closer)


def _close(r: ToolReader, closer: str) -> Reading[None]:
    """The closing tag may be missing at the end of a reply."""
    yield from r.spaces()
    if closer:
        yield from r.word(closer)
    r.end()


def _json_call(r: ToolReader) -> Reading[None]:
    name, arguments = "", ""
    r.take_one("{")
    while True:
        yield from r.spaces()
        key = yield from json_text(r)
        yield from r.spaces()
        r.take_one(":")
        follows = yield from r.spaces()
        if r.begun and key in ("name", "arguments", "parameters"):
            raise NotACall
        if key == "name":
            name = yield from json_text(r)
        elif key in ("arguments", "parameters") and name and follows == "{":
            _begin(r, name)
            yield from json_value(r, r.emit)
        else:
            value = yield from kept(json_value, r)
            arguments = as_object(value) if key in ("arguments", "parameters") else arguments
        if (yield from r.spaces()) == "}":
            break
        r.take_one(",")
    r.take_one("}")
    if not r.begun:
        _begin(r, name)
        r.emit(arguments or "{}")
    r.whole()


def _begin(r: ToolReader, name: str) -> None:
    if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise NotACall
    r.begin(name)


def xml_section(r: ToolReader, opener: str, closer: str) -> Reading[None]:
    """A function with its parameters as tags. The outer tag may be missing, and a model may fall back to JSON."""
    if opener != FUNCTION:
        if (yield from r.spaces()) == "{":
            yield from json_section(r, opener, closer)
            return
        if (yield from r.word(FUNCTION)) is None:
            raise NotACall
    name = yield from r.match(_NAME, MAX_NAME_CHARS)
    r.take_one(">")
    n_arguments = 0
    while True:
        yield from r.spaces()
        tag = yield from r.word(_PARAMETER, _FUNCTION_END)
        if tag is None:
            raise NotACall
        if not r.begun:
            r.begin(name)
        if tag == _FUNCTION_END:
            break
        yield from _xml_parameter(r, name, ", " if n_arguments else "{")
        n_arguments += 1
    r.emit("}" if n_arguments else "{}")
    r.whole()
    yield from _close(r, closer)


def _xml_parameter(r: ToolReader, tool: str, before: str) -> Reading[None]:
    key = (yield from r.match(_XML_KEY, MAX_KEY_CHARS)).strip()
    r.take_one(">")
    kind = r.kind(tool, key)
    if is_string(kind):
        r.emit(f'{before}{quoted(key)}: "')
        yield from _xml_text(r, lambda text: r.emit(escaped(text)))
        r.emit('"')
    else:
        value = yield from kept(_xml_text, r)
        r.emit(f"{before}{quoted(key)}: {bare_as_json(kind, value)}")


def _xml_text(r: ToolReader, emit: Emit) -> Reading[None]:
    """A parameter's text and its closing tag; one line end on either side belongs to the tags."""
    yield from r.word("\r\n", "\n")
    while True:
        tag = r.text.find(_PARAMETER_END, r.at)
        end = tag
        if tag < 0:
            end = r.text.rfind("<", r.at)
            if end < 0 or not _PARAMETER_END.startswith(r.text[end:]):
                end = len(r.text)
        if end > r.at and r.text[end - 1] == "\n":
            end -= 1
        if end > r.at and r.text[end - 1] == "\r":
            end -= 1
        if end > r.at:
            emit(r.take(end))
        if tag >= 0:
            r.take(tag + len(_PARAMETER_END))
            return
        yield from r.more()


def python_section(r: ToolReader, opener: str, closer: str) -> Reading[None]:  # noqa: ARG001 - as above
    """Calls as in Python, with named arguments, in a list; or as JSON, which a prompt may ask for."""
    begins = yield from r.spaces()
    if begins == "[":
        r.take_one("[")
        yield from r.spaces()
    if r.peek() == "{":
        yield from _json_calls(r, closer, listed=begins == "[")
        return
    while True:
        yield from _python_call(r)
        if (yield from r.spaces()) != ",":
            break
        r.take_one(",")
        r.end()
        yield from r.spaces()
    if begins == "[":
        r.take_one("]")
    yield from _close(r, closer)


def _python_call(r: ToolReader) -> Reading[None]:
    name = yield from r.match(_NAME, MAX_NAME_CHARS)
    yield from r.spaces()
    r.take_one("(")
    n_arguments = 0
    while (yield from r.spaces()) != ")":
        key = yield from r.match(_PYTHON_KEY, MAX_KEY_CHARS)
        yield from r.spaces()
        r.take_one("=")
        yield from r.spaces()
        if not r.begun:
            r.begin(name)
        r.emit(f"{', ' if n_arguments else '{'}{quoted(key)}: ")
        yield from _python_argument(r, r.kind(name, key))
        n_arguments += 1
        if (yield from r.spaces()) == ",":
            r.take_one(",")
        elif r.peek() != ")":
            raise NotACall
    r.take_one(")")
    if not r.begun:
        r.begin(name)
    r.emit("}" if n_arguments else "{}")
    r.whole()


def _python_argument(r: ToolReader, kind: Kind) -> Reading[None]:
    if is_string(kind) and r.peek() in ("'", '"'):
        yield from python_string(r, r.emit)
    else:
        value = yield from kept(python_value, r)
        r.emit(literal_as_json(kind, value))
