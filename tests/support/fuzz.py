"""Request bodies by chance, drawn from the schemas of the server's own types."""

import os
import string
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

N_EXAMPLES = 5000 if os.environ.get("EVERWARM_CAMPAIGN") else 40
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)  # beyond: see the tests of known accidents below
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
Json = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(string.ascii_letters + "_", min_size=1, max_size=8).filter(lambda name: name != "self")
CONTENT = TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=3) | Json
TOOL_CALL = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": NAMES, "arguments": TEXT | Json})}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]), "content": CONTENT},
    optional={"tool_calls": st.lists(TOOL_CALL, max_size=2), "reasoning_content": TEXT, "name": TEXT},
)
PARAMETERS = st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(NAMES, Json, max_size=2)})
TOOL = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": NAMES}, optional={"description": TEXT, "parameters": PARAMETERS | Json}
        )
    }
)
OWN: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(MESSAGE, min_size=1, max_size=4)
    | st.lists(st.dictionaries(TEXT, Json, max_size=3), max_size=3),
    "tools": st.none() | st.lists(TOOL | st.dictionaries(TEXT, Json, max_size=2), max_size=3),
    "chat_template_kwargs": st.none() | st.dictionaries(NAMES, Json, max_size=2),
    "prompt": TEXT | st.lists(st.integers(0, 2047), max_size=20) | st.lists(INT64 | TEXT | st.lists(INT64), max_size=4),
    "content": TEXT,
    "filename": st.sampled_from(["a", "b.bin", "c-1"]) | TEXT,
    "cache_salt": st.none() | st.just("salt") | Json,
    "n": st.none() | st.integers(1, 4) | Json,
}


def values(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema allows, near enough."""
    if "$ref" in schema:
        return values(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return st.one_of([values(option, defs) for option in schema["anyOf"]])
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "integer":
            return st.integers(-(1 << 63) if low is None else low, (1 << 63) - 1 if high is None else high)
        case "number":
            return st.floats(low, high, allow_nan=False, allow_infinity=False)
        case "string":
            return TEXT
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(values(schema.get("items") or {}, defs), max_size=4)
        case "object" if "properties" in schema:
            return fields(schema, defs)
    return Json


def fields(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    each = {name: OWN.get(name, values(about, defs)) for name, about in schema["properties"].items()}
    required = {name: each.pop(name) for name in schema.get("required", [])}
    return st.fixed_dictionaries(required, optional=each)


def bodies(kind: type) -> st.SearchStrategy[Any]:
    """Good ones, ones with a field of any kind in the place of another, and anything at all."""
    (schema,), defs = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    good = values(schema, defs)
    names = sorted(defs[kind.__name__]["properties"])
    spoilt = st.builds(lambda body, name, value: body | {name: value}, good, st.sampled_from(names), Json)
    return good | spoilt | Json


FUZZ = settings(
    max_examples=N_EXAMPLES,
    deadline=None,
    derandomize=not os.environ.get("EVERWARM_CAMPAIGN"),
    database=None,
    suppress_health_check=list(HealthCheck),
)
