"""Bodies of every kind, from the schemas of the bodies themselves: never an accident, never a dead engine."""

import json
import os
import string
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everwarm.gateway.openai.schema import ChatBody, CompletionBody, DetokenizeBody, SlotBody, TokenizeBody
from support.server import Server, serving

N_EXAMPLES = 5000 if os.environ.get("EVERWARM_CAMPAIGN") else 40
KINDS = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/completion": CompletionBody,
    "/apply-template": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/slots/0?action=save": SlotBody,
    "/slots/1?action=restore": SlotBody,
    "/slots/1?action=erase": SlotBody,
}
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


def broken(body: Any, at: float, junk: bytes) -> bytes:
    data = json.dumps(body).encode()
    i = int(at * len(data))
    return data[:i] + junk + data[i + len(junk) :]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    slots = ("--slot-save-path", str(tmp_path_factory.mktemp("slots")))
    with serving("--request-timeout", "20", "--grace", "1", *slots, n_ctx=192) as server:
        yield server


@pytest.fixture(scope="module")
def engine(server: Server) -> int:
    return server.engine_pid


FUZZ = settings(
    max_examples=N_EXAMPLES,
    deadline=None,
    derandomize=not os.environ.get("EVERWARM_CAMPAIGN"),
    database=None,
    suppress_health_check=list(HealthCheck),
)


def assert_no_accident(server: Server, path: str, body: bytes) -> None:
    reply = server.post(path, body)
    assert reply.status in (200, 400), f"{reply.status} {reply.data!r}"
    if reply.status == 400:
        error = reply.json["error"]
        assert error["message"] and error["code"] in ("invalid_request_error", "exceed_context_size_error")


@pytest.mark.parametrize("path", KINDS)
def test_no_body_is_an_accident(server, engine, path):
    @FUZZ
    @given(body=bodies(KINDS[path]))
    def fuzz(body: Any) -> None:
        assert_no_accident(server, path, json.dumps(body).encode())

    fuzz()
    assert server.engine_pid == engine


@pytest.mark.parametrize("path", KINDS)
def test_no_broken_bytes_are_an_accident(server, engine, path):
    @FUZZ
    @given(body=bodies(KINDS[path]), at=st.floats(0, 1), junk=st.binary(max_size=4))
    def fuzz(body: Any, at: float, junk: bytes) -> None:
        assert_no_accident(server, path, broken(body, at, junk))

    fuzz()
    assert server.engine_pid == engine


def test_everything_is_quiet_afterwards(server, engine):
    assert server.is_idle() and server.engine_pid == engine
    assert server.get("/ready").json["restarts"] == 0


# known accidents

USER = [{"role": "user", "content": "x"}]
KNOWN = [
    ("/completion", {"prompt": [1 << 64], "n_predict": 1}),
    ("/completion", {"prompt": [-(1 << 70)], "n_predict": 1}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 1, "logit_bias": {str(1 << 64): 1}}),
]


@pytest.mark.parametrize(("path", "body"), KNOWN)
def test_integers_over_64_bits_are_no_accident(server, path, body):
    assert_no_accident(server, path, json.dumps(body).encode())


def test_a_token_id_of_2_to_the_63_kills_nobody():
    with serving("--request-timeout", "20", "--grace", "1", n_ctx=192) as server:
        pid = server.engine_pid
        assert_no_accident(server, "/completion", json.dumps({"prompt": [1 << 63], "n_predict": 1}).encode())
        assert server.engine_pid == pid
