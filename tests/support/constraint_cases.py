"""Schemas and tools to force replies to, and a reading of JSON Schema of our own that says whether they obey."""

from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["town", "river", 7, None]},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 3},
        "at": {
            "type": "object",
            "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90}, "ok": {"type": "boolean"}},
            "required": ["lat", "ok"],
        },
    },
    "required": ["name", "kind", "tags", "at"],
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "hourly": {"type": "boolean"},
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    },
    "required": ["city", "unit", "hourly"],
    "$defs": {"place": {"type": "string", "maxLength": 8}},
}
NOTE = {"type": "object", "properties": {"level": {"type": ["integer", "null"], "maximum": 3}}, "required": ["level"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "note", "parameters": NOTE}},
    {"type": "function", "function": {"name": "now"}},
]
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
SCHEMAS = {"get_weather": WEATHER, "note": NOTE, "now": NOTHING}

# What a template teaches shows in the words it contains; the prompt itself is the embedded model's in every notation.
WORDS_OF = {
    "hermes": "<tool_call>",
    "qwen-xml": "<tool_call> <function=f> <parameter=k>",
    "jamba": "<tool_calls>",
    "nemotron": "<TOOLCALL>",
    "pythonic": "<|tool_call_start|>",
}


def obeys(schema: dict[str, Any], value: Any, root: dict[str, Any] | None = None) -> bool:
    """A reading of JSON Schema of our own, for the words used here."""
    root = root or schema
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        return False
    types = schema.get("type", [])
    if types and not any(_is(name, value) for name in ([types] if isinstance(types, str) else types)):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        named = value.keys() <= properties.keys() and all(key in value for key in schema.get("required", ()))
        return named and all(obeys(properties[key], inner, root) for key, inner in value.items())
    if isinstance(value, list):
        few = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30)
        return few and all(obeys(schema["items"], item, root) for item in value)
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", 1 << 30)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return True


def _is(name: str, value: Any) -> bool:
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": int | float,
        "boolean": bool,
        "null": type(None),
    }
    return isinstance(value, kinds[name]) and (name == "boolean" or not isinstance(value, bool))
