"""Schemas of tools: work and output grow with what was sent, however the parts of a schema refer to each other."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from everwarm.config import MAX_CONSTRAINT_CHARS
from everwarm.errors import BadRequest
from everwarm.gateway.constraints.json_schema import allowed_types, used_definitions, value_schema
from everwarm.gateway.constraints.reply_constraint import chat_constraint
from everwarm.gateway.constraints.tool_grammar import call_constraint
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.parsing.output_parser import ModelSyntax
from everwarm.gateway.parsing.tool_parser import kinds_of

FORMATS = ("hermes", "qwen-xml", "pythonic")


class Counted(dict[str, Any]):
    """An object of a schema that knows how often anything in any of them was looked at."""

    n_looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counted.n_looks += 1
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        Counted.n_looks += 1
        return super().__getitem__(key)


def counted(value: Any) -> Any:
    if isinstance(value, dict):
        return Counted({key: counted(inner) for key, inner in value.items()})
    return [counted(inner) for inner in value] if isinstance(value, list) else value


def tool(root: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": root}}


def itself(n: int) -> dict[str, Any]:
    return {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * n}}, "properties": {"x": {"$ref": "#/$defs/a"}}}


def ring(n: int) -> dict[str, Any]:
    """Each refers to the next, the last to the first, and every argument to another of them."""
    names = {f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{(i + 1) % n}"}, {"type": "null"}]} for i in range(n)}
    return {"$defs": names, "properties": {f"p{i}": {"allOf": [{"$ref": f"#/$defs/d{i}"}]} for i in range(n)}}


def mesh(n: int) -> dict[str, Any]:
    """Layers in which everything refers to everything of the next one: paths without number."""
    width = max(2, round(n**0.5))
    names = {
        f"l{layer}_{i}": {"anyOf": [{"$ref": f"#/$defs/l{layer + 1}_{j}"} for j in range(width)]}
        for layer in range(width)
        for i in range(width)
    }
    last = {f"l{width}_{i}": {"type": "integer"} for i in range(width)}
    return {"$defs": names | last, "properties": {f"p{i}": {"$ref": f"#/$defs/l0_{i}"} for i in range(width)}}


def shared(n: int) -> dict[str, Any]:
    """Many arguments that all refer to one large definition."""
    large = {"anyOf": [{"enum": [i]} for i in range(n)]}
    return {"$defs": {"a": large}, "properties": {f"p{i}": {"anyOf": [{"$ref": "#/$defs/a"}]} for i in range(n)}}


def nested(n: int) -> dict[str, Any]:
    fixed: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        fixed = {"anyOf": [fixed]}
    return {"properties": {"x": fixed}}


SHAPES = (itself, ring, mesh, shared, nested)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_arguments_may_be_is_found_in_steps_that_grow_with_the_schema(shape: Callable[[int], dict[str, Any]]):
    looks = []
    for n in (30, 150):
        root = counted(shape(n))
        size = len(json.dumps(root))
        Counted.n_looks = 0
        kinds_of([tool(root)])
        looks.append(Counted.n_looks / size)
    assert looks[1] <= 1.5 * looks[0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_so_are_the_rules_of_calls_or_there_are_none(shape: Callable[[int], dict[str, Any]], format: str):
    """Where a schema would have to be copied too often it is refused, after as many steps as the limit allows."""
    for n in (30, 150):
        root = counted(shape(n))
        size = len(json.dumps(root))
        Counted.n_looks = 0
        with contextlib.suppress(BadRequest):
            assert len(call_constraint(format, "<tool_call>", [tool(root)], many=True).text) <= MAX_CONSTRAINT_CHARS
        assert Counted.n_looks <= 12 * (size + 4 * MAX_CONSTRAINT_CHARS)


def test_types_are_found_through_circles_and_from_every_place_in_them():
    root = {
        "$defs": {
            "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]},
            "b": {"oneOf": [{"$ref": "#/$defs/a"}, {"const": 7}, {"type": ["string", "frob"]}]},
            "lost": {"$ref": "#/$defs/lost"},
        }
    }
    fixed = [{"$ref": f"#/$defs/{name}"} for name in ("a", "b", "lost", "nowhere")]
    everything = {"null", "integer", "string", "other"}
    assert allowed_types([*fixed, 7, None], root) == [everything, everything, set(), set(), set(), set()]


def test_a_value_brings_the_definitions_it_uses_and_no_others():
    root = {
        "$defs": {"a": {"items": {"$ref": "#/definitions/b~1c"}}, "big": {"description": "x" * 1000}, "d": {}},
        "definitions": {"b/c": {"$ref": "#/$defs/a"}, "e": {}},
    }
    used = {"$defs": {"a": root["$defs"]["a"]}, "definitions": {"b/c": root["definitions"]["b/c"]}}
    assert used_definitions({"properties": {"x": {"$ref": "#/$defs/a/items"}}}, root) == used
    assert used_definitions({"type": "integer"}, root) == {}
    assert used_definitions({"$ref": "#anchor"}, root) == root  # it may be in any of them
    assert "xxx" not in value_schema({"$ref": "#/$defs/a"}, root)


@pytest.mark.parametrize("format", ["qwen-xml", "pythonic"])
def test_definitions_are_not_copied_for_every_argument(format: str):
    """Without a bound, 3,000 arguments with a megabyte of definitions made three gigabytes of grammar."""
    names, defs = [f"p{i}" for i in range(300)], {"d": {"description": "A" * 100_000}}
    unused = {"$defs": defs, "properties": {name: {"type": "integer"} for name in names}}
    assert len(call_constraint(format, "", [tool(unused)], many=False).text) < 100_000
    one = {"$defs": defs, "properties": {name: {"$ref": "#/$defs/d", "type": "integer"} for name in names}}
    assert len(call_constraint(format, "", [tool(one)], many=False).text) < 300_000
    lists = {name: {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": i} for i, name in enumerate(names)}
    each = {"$defs": defs, "properties": lists}
    with pytest.raises(BadRequest, match=f"more than {MAX_CONSTRAINT_CHARS:,} characters"):
        call_constraint(format, "", [tool(each)], many=False)


@pytest.mark.parametrize(
    "grammar", ["\n" * 300_000 + "x", " " * 300_000, "start" + " " * 300_000, "\n start " * 100_000]
)
def test_what_kind_a_grammar_is_is_told_in_one_pass(grammar: str):
    """A pattern that may begin at every line and go on over all of them takes hours for this."""
    body = ChatBody(messages=[{"role": "user", "content": "a"}], grammar=grammar)
    with pytest.raises(BadRequest, match="neither GBNF"):
        chat_constraint(body, ModelSyntax(""), "")


def test_a_grammar_that_is_too_long_is_refused_unread():
    body = ChatBody(messages=[{"role": "user", "content": "a"}], grammar="x" * (MAX_CONSTRAINT_CHARS + 1))
    with pytest.raises(BadRequest, match=f"has {MAX_CONSTRAINT_CHARS + 1} characters"):
        chat_constraint(body, ModelSyntax(""), "")
