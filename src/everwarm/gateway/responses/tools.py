"""Tools as the responses dialect describes them, offered to a chat model as functions, and its calls named back. Pure.

A custom tool takes free text: it becomes a function with one string, ``input``. The functions of a namespace carry its name
in front. What runs elsewhere (web search, files, computers …) is not here: it is not offered, so no model will ask for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from everwarm.errors import BadRequest
from everwarm.types import Json

MAX_TOOLS = 1024
INPUT = "input"


class ResponsesTool(msgspec.Struct, frozen=True):
    """Of any type. ``tools``: those of a namespace; ``format``: the grammar of a custom tool's text."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: Json | None = None
    tools: list[Json] | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """What a function that is offered was described as."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Offered:
    """``functions`` in the chat dialect's shape; ``shown`` as the client described those that are offered."""

    functions: list[Json] = field(default_factory=list)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    shown: list[Json] = field(default_factory=list)

    def origin(self, name: str) -> Origin:
        """Also of what was never offered: models do that."""
        return self.origins.get(name) or Origin(name)


def offered(tools: Sequence[Json] | None) -> Offered:
    functions: list[Json] = []
    origins: dict[str, Origin] = {}
    shown = []
    for given in tools or ():
        found = list(_functions(given))
        for origin, function in found:
            name = function["name"]
            if name in origins:
                raise BadRequest(f"two tools are called {name[:80]!r}; give each a name of its own")
            origins[name] = origin
            functions.append({"type": "function", "function": function})
        shown += [given] if found else []
    if len(functions) > MAX_TOOLS:
        raise BadRequest(f"there are {len(functions)} tools; offer at most {MAX_TOOLS}")
    return Offered(functions, origins, shown)


def _functions(given: Json, namespace: str | None = None) -> Iterator[tuple[Origin, Json]]:
    tool = _read(given)
    match tool.type:
        case "function" | "custom":
            if not tool.name:
                raise BadRequest(f"a tool of type {tool.type} needs a name")
            is_custom = tool.type == "custom"
            about: Json = {"name": function_name(tool.name, namespace), "description": tool.description}
            about["parameters"] = _free_text(tool.format) if is_custom else tool.parameters
            yield Origin(tool.name, namespace, is_custom), {k: v for k, v in about.items() if v is not None}
        case "namespace" if namespace is None and tool.name:
            for inner in tool.tools or ():
                yield from _functions(inner, tool.name)
        case _:
            return


def _read(given: Json) -> ResponsesTool:
    try:
        return msgspec.convert(given, ResponsesTool)
    except msgspec.ValidationError as error:
        raise BadRequest(f"a tool cannot be used: {error}") from None


def _free_text(format: Json | None) -> Json:
    about = "the whole input, as plain text"
    if format and format.get("type") == "grammar":
        about += f", in this {format.get('syntax')} grammar:\n{format.get('definition')}"
    return {"type": "object", "properties": {INPUT: {"type": "string", "description": about}}, "required": [INPUT]}


def function_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """A custom tool's text as the arguments of the function that it is offered as."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_text(arguments: str) -> str:
    """The other way round; what is no such argument comes as it was written."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


Choice = Literal["none", "auto", "required"]


def choice(given: str | Json | None, tools: Offered) -> Choice | Json | None:
    """``tool_choice`` in the chat dialect's shape. Of allowed tools only the mode holds: all stay offered."""
    match given:
        case None | "none" | "auto":
            return given
        case "required":
            wanted: Choice | Json = "required"
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode}:
            return choice(mode, tools)
        case {"type": "function" | "custom", "name": str(own), "namespace": str(namespace)}:
            wanted = _named(function_name(own, namespace), tools)
        case {"type": "function" | "custom", "name": str(own)}:
            wanted = _named(own, tools)
        case _:
            kind = given.get("type") if isinstance(given, dict) else given
            words = "give none, auto, required, or a function that is offered"
            raise BadRequest(f"tool_choice is {str(kind)[:40]!r}; {words}")
    if not tools.functions:
        raise BadRequest(
            "tool_choice wants a call, but none of the tools can be offered: give a function or custom tool"
        )
    return wanted


def _named(name: str, tools: Offered) -> Json:
    if name not in tools.origins:
        raise BadRequest(f"tool_choice names {name[:80]!r}, which is none of the tools")
    return {"type": "function", "function": {"name": name}}
