"""Adapts clients' JSON schemas so that a reply can be constrained by them. Pure: knows JSON Schema's keywords."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from everwarm.errors import BadRequest
from everwarm.types import Json

MAX_DEPTH = 96  # of JSON; llguidance reads 128
_OBJECTS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
_DEFINITIONS = ("$defs", "definitions")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_JSON_TYPES = (
    (bool, "boolean"),
    (str, "string"),
    (int, "integer"),
    (float, "number"),
    (list, "array"),
    (dict, "object"),
)
_TYPE_NAMES = frozenset(name for _, name in _JSON_TYPES) | {"null"}
_OTHER_TYPE = "other"  # a name that JSON does not know
_SAY_WHAT_ELSE = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf")

# Some whitespace is allowed, but not without end.
_LOOSE = {"whitespace_pattern": r"[ ]|\r?\n[ \t]{0,32}"}
_TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def answer_schema(schema: Any, *, strict: bool) -> str:
    """For an answer in JSON. Unless ``strict``, keywords that cannot be enforced are ignored."""
    _require_known_type(schema.get("type") if isinstance(schema, dict) else None)
    return json.dumps(_bound(schema, _LOOSE | {"lenient": not strict}))


def value_schema(schema: Any, root: Mapping[str, Any]) -> str:
    """For a value inside a call, spelled as models are taught to. ``root``: the schema that it is a part of; of the
    definitions of ``root``, only those that the value refers to are included."""
    whole = {**used_definitions(schema, root), **schema} if isinstance(schema, dict) else schema
    return json.dumps(_bound(whole, _TIGHT | {"lenient": True}))


def used_definitions(schema: Any, root: Mapping[str, Any]) -> Json:
    """The definitions of ``root`` that a schema refers to, and those that these refer to, under their keys."""
    used: dict[str, Json] = {}
    todo = [schema]
    while todo:
        for reference in _references(todo.pop()):
            if reference != "#" and not reference.startswith("#/"):  # by an anchor or a URI: it may be any of them
                return {key: root[key] for key in _DEFINITIONS if key in root}
            key, _, rest = reference.removeprefix("#/").partition("/")
            name = _unescaped(rest.partition("/")[0])
            there = root.get(key)
            if key in _DEFINITIONS and isinstance(there, Mapping) and name in there and name not in used.get(key, ()):
                used.setdefault(key, {})[name] = there[name]
                todo.append(there[name])
    return dict(used)


def _references(schema: Any) -> Iterator[str]:
    """Every ``$ref`` in it, at any depth."""
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            todo += value.values()


def _unescaped(step: str) -> str:
    """A step of a JSON pointer in a URI, as the key it stands for."""
    return unquote(step).replace("~1", "/").replace("~0", "~")


def _bound(schema: Any, options: Mapping[str, Any]) -> Json:
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"a JSON schema is an object; this one is {json.dumps(schema)[:40]}")
    _check_depth(schema)
    if schema is False:
        raise BadRequest("a schema that is false allows no reply at all")
    wanted: Json = {} if schema is True else schema
    closed = wanted if '"allOf"' in json.dumps(wanted) else _closed(wanted)
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


def _require_known_type(named: Any) -> None:
    if named is None:
        return
    for name in named if isinstance(named, list) else [named]:
        if name not in _TYPE_NAMES:
            known = ", ".join(sorted(_TYPE_NAMES))
            raise BadRequest(f"the schema names the type {str(name)[:40]!r}; JSON has {known}")


def _closed(schema: Any) -> Any:
    """Objects with named properties take no others unless the schema allows them. Parts of ``allOf`` must
    not be closed one by one."""
    if not isinstance(schema, dict):
        return [_closed(part) for part in schema] if isinstance(schema, list) else schema
    closed = dict(schema)
    if isinstance(schema.get("items"), list):  # the older way to write what each item is
        schema = {**{k: v for k, v in schema.items() if k != "items"}, "prefixItems": schema["items"]}
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


# what values a schema allows


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a schema's ``$ref`` points to; None if it is not found."""
    at: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        at = at.get(step) if isinstance(at, Mapping) else None
    return at


def allowed_types(schemas: Sequence[Any], root: Mapping[str, Any]) -> list[frozenset[str]]:
    """The JSON types that each of these schemas allows, as far as it lists them; ``root`` is what they refer to.

    Linear in the size of all of them: every schema is visited once, and types of its parts are propagated to it, at most
    once per type. So schemas may refer to each other in cycles."""
    found: dict[int, set[str]] = {}  # by the schema's id()
    users: defaultdict[int, list[int]] = defaultdict(list)  # which schemas a schema is an alternative of
    todo = list(schemas)
    while todo:
        schema = todo.pop()
        if id(schema) in found:
            continue
        found[id(schema)], parts = _plain_types(schema, root)
        for part in parts:
            users[id(part)].append(id(schema))
        todo += parts
    grown = [key for key, types in found.items() if types]
    while grown:
        key = grown.pop()
        for user in users[key]:
            if not found[key] <= found[user]:
                found[user] |= found[key]
                grown.append(user)
    return [frozenset(found[id(schema)]) for schema in schemas]


def _plain_types(schema: Any, root: Mapping[str, Any]) -> tuple[set[str], list[Any]]:
    """The types that a schema names itself, or the schemas that define them for it."""
    if not isinstance(schema, Mapping):
        return set(), []
    named = schema.get("type")
    if named is not None:
        names = [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
        return {name if name in _TYPE_NAMES else _OTHER_TYPE for name in names}, []
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_type_of(value) for value in values}, []
    if isinstance(schema.get("$ref"), str):
        return set(), [referred(schema["$ref"], root)]
    parts = [schema[key] for key in _ALTERNATIVES if isinstance(schema.get(key), list)]
    if parts:
        return set(), [each for part in parts for each in part]
    return {name for key, name in (("properties", "object"), ("items", "array")) if key in schema}, []


def _type_of(value: Any) -> str:
    return next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), "null")
