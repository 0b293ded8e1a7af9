"""A reply split into text and tool calls while it streams.

A call is emitted piece by piece as soon as it is certain to be one; what turns out to be no call is emitted as text, in
order. Pure but for the calls' random ids: knows text and the tools' schemas; knows no tokens and no HTTP.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from everwarm.gateway.constraints.json_schema import allowed_types, referred
from everwarm.gateway.parsing.reasoning import Text
from everwarm.gateway.parsing.tool_formats import FUNCTION, Section, json_section, python_section, xml_section
from everwarm.gateway.parsing.tool_reader import (
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    Kind,
    NotACall,
    Reading,
    ToolReader,
)

__all__ = [
    "TOOL_FORMATS",
    "CallArguments",
    "CallBegun",
    "CallEnded",
    "Event",
    "Text",
    "ToolParser",
    "detect_tools",
    "settled",
]


class _Format(msgspec.Struct, frozen=True):
    """Tags that open a section of calls, each with its closing tag ("" where there is none)."""

    tags: dict[str, str]
    section: Section


TOOL_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "hermes": _Format({"<tool_call>": "</tool_call>", "<|tool_call|>": ""}, json_section),
        "qwen-xml": _Format({"<tool_call>": "</tool_call>", FUNCTION: "</tool_call>"}, xml_section),
        "jamba": _Format({"<tool_calls>": "</tool_calls>"}, json_section),
        "nemotron": _Format({"<TOOLCALL>": "</TOOLCALL>"}, json_section),
        "pythonic": _Format({"<|tool_call_start|>": "<|tool_call_end|>"}, python_section),
    }
)


def detect_tools(template_source: str) -> str | None:
    """The name of the format that a model's template teaches; None if it is unknown."""

    def has(*tags: str) -> bool:
        return all(tag in template_source for tag in tags)

    if has("<TOOLCALL>"):
        return "nemotron"
    if has("<|tool_call_start|>") or has("<|tool_list_start|>") or has("List of tools: ["):
        return "pythonic"
    if has("<tool_call>", FUNCTION, "<parameter="):
        return "qwen-xml"
    if has("<tool_calls>"):
        return "jamba"
    if has("<arg_key>") or has("<invoke name="):  # other model families use the same tag
        return None
    return "hermes" if has("<tool_call>") or has("<|tool_call|>") else None


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """Fed with text in order. ``format`` is a name from ``TOOL_FORMATS``; ``tools`` are as clients send them: their
    schemas decide what is a string where the format does not. ``kinds``: the result of ``kinds_of``, if it is known."""

    def __init__(
        self,
        format: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        kinds: Mapping[str, Mapping[str, Kind]] | None = None,
        new_id: Callable[[], str] = call_id,
    ) -> None:
        self._format = TOOL_FORMATS[format]
        self._opener = re.compile("|".join(map(re.escape, self._format.tags)))
        self._reader = ToolReader(kinds_of(tools) if kinds is None else kinds, new_id)
        self._reading = self._read()

    def feed(self, text: str) -> list[Event]:
        assert not self._reader.final, "the reply has ended"
        self._reader.add(text)
        next(self._reading)
        return self._reader.drain()

    def finish(self) -> list[Event]:
        """What was held back, at the end of the reply."""
        self._reader.final = True
        self._reader.add("")
        next(self._reading, None)
        return self._reader.drain()

    def _read(self) -> Reading[None]:
        r = self._reader
        while (opener := (yield from self._text())) is not None:
            try:
                yield from self._format.section(r, opener, self._format.tags[opener])
            except NotACall:
                r.give_up()

    def _text(self) -> Reading[str | None]:
        """Emits text up to a tag that opens a section, and takes the tag; None at the end of the reply."""
        r = self._reader
        while True:
            opener = self._opener.search(r.text, r.at)
            if opener:
                r.text_until(opener.start())
                return r.take(opener.end())
            r.text_until(len(r.text) if r.final else self._n_certain())
            if r.final:
                r.text_ended()
                return None
            yield

    def _n_certain(self) -> int:
        """The end of the text that cannot begin a tag; a tag contains one ``<``, its first character."""
        text = self._reader.text
        at = text.rfind("<", self._reader.at)
        return at if at >= 0 and any(tag.startswith(text[at:]) for tag in self._format.tags) else len(text)


def settled(events: Iterable[Event]) -> list[Event]:
    """The events of a complete reply: incomplete calls become text, and the other calls are renumbered."""
    done: list[Event] = []
    call: list[Event] = []
    n_calls = 0
    for event in events:
        match event:
            case Text():
                done.append(event)
            case CallBegun():
                call = [CallBegun(n_calls, event.id, event.name)]
            case CallArguments():
                call.append(CallArguments(n_calls, event.json_fragment))
            case CallEnded(complete=True):
                done += [*call, CallEnded(n_calls, event.raw)]
                n_calls += 1
            case CallEnded():
                done.append(Text(event.raw))
    return done


# the tools' schemas


def kinds_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Kind]]:
    """The kind of each argument of each tool."""
    kinds = {}
    for tool in tools:
        name, root = name_and_schema(tool)
        schema = referred(root["$ref"], root) if isinstance(root.get("$ref"), str) else root
        properties = _mapping(_mapping(schema).get("properties"))
        types = allowed_types(list(properties.values()), root)
        kinds[name] = dict(zip(map(str, properties), types, strict=True))
    return kinds


def name_and_schema(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The name and schema of a tool in any dialect."""
    function = _mapping(tool.get("function")) or tool
    schema = function.get("parameters") or function.get("input_schema")
    return str(function.get("name")), _mapping(schema)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
