"""JSON schemas as clients send them, made fit to bind a reply. Pure: knows what JSON Schema's words mean to a writer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from everwarm.errors import BadRequest

Json = dict[str, Any]

MAX_DEPTH = 96  # of JSON; llguidance reads 128
_OBJECTS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
_SAY_WHAT_ELSE = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf")

# A little freedom for whitespace, and no room to go on with it for ever.
_LOOSE = {"whitespace_pattern": r"[ ]|\r?\n[ \t]{0,32}"}
_TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def answer_schema(schema: Any, *, strict: bool) -> str:
    """For an answer in JSON. Unless ``strict``, words that cannot be enforced are passed over."""
    return json.dumps(_bound(schema, _LOOSE | {"lenient": not strict}))


def value_schema(schema: Any, root: Mapping[str, Any]) -> str:
    """For a value inside a call, spelled as models are taught to. ``root``: the schema that it is a part of."""
    named = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return json.dumps(_bound({**named, **schema} if isinstance(schema, dict) else schema, _TIGHT | {"lenient": True}))


def _bound(schema: Any, options: Mapping[str, Any]) -> Json:
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"a JSON schema is an object; this one is {json.dumps(schema)[:40]}")
    _check_depth(schema)
    if schema is False:
        raise BadRequest("a schema that is false allows no reply at all")
    said: Json = {} if schema is True else schema
    closed = said if '"allOf"' in json.dumps(said) else _closed(said)
    return {**closed, "x-guidance": {"coerce_one_of": True, **options}}


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
        if not level:
            return
    raise BadRequest(f"the schema is nested too deeply; give at most {MAX_DEPTH} levels")


def _inside(value: Json | list[Any]) -> list[Any]:
    return value if isinstance(value, list) else list(value.values())


def _closed(schema: Any) -> Any:
    """Objects with named properties take no others unless the schema says something about others. Parts of ``allOf`` must
    not be closed one by one."""
    if not isinstance(schema, dict):
        return [_closed(part) for part in schema] if isinstance(schema, list) else schema
    closed = dict(schema)
    for key in _OBJECTS_OF_SCHEMAS:
        if isinstance(schema.get(key), dict):
            closed[key] = {name: _closed(part) for name, part in schema[key].items()}
    for key in (*_LISTS_OF_SCHEMAS, *_SCHEMAS):
        if key in schema:
            closed[key] = _closed(schema[key])
    if isinstance(schema.get("properties"), dict) and not any(key in schema for key in _SAY_WHAT_ELSE):
        closed["additionalProperties"] = False
    return closed
