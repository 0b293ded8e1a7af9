"""Replies as the responses dialect says them: every event is what the real client's types say, and any JSON is answered."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest, EverwarmError, Overloaded, PromptTooLong
from everwarm.gateway.chat.chat_template import ChatTemplate, in_known_roles
from everwarm.gateway.openai.schema import read
from everwarm.gateway.parsing.output_parser import Piece
from everwarm.gateway.parsing.reasoning import Reasoning, Text
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded
from everwarm.gateway.responses.encode import ResponsesEncoder, skeleton
from everwarm.gateway.responses.schema import ResponsesBody, chat_body, offered, own_items, sealed, unsealed
from support.fuzz import Json, bodies
from support.server import Server, serving

FUZZ = settings(
    max_examples=5000 if os.environ.get("EVERWARM_CAMPAIGN") else 150,
    deadline=None,
    derandomize=not os.environ.get("EVERWARM_CAMPAIGN"),
    database=None,
    suppress_health_check=list(HealthCheck),
)
SAID = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
DONE = m.Done(1, "", "stop", None, 10, 4, 4, 5, 0, None, 0.0, 0.0, 0.0, 0.0)
CUSTOM: Any = {"type": "custom", "name": "patch", "description": "changes files"}
TOOLS: Any = [
    CUSTOM,
    {"type": "function", "name": "f", "parameters": {}, "strict": False},
    {"type": "namespace", "name": "ns", "description": "", "tools": [{"type": "function", "name": "g"}, CUSTOM]},
]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def encoded(pieces: list[Piece], finish: str = "stop", **body: Any) -> list[dict[str, Any]]:
    wish = msgspec.convert({"input": "a", "tools": TOOLS, **body}, ResponsesBody)
    tools = offered(TOOLS)
    encoder = ResponsesEncoder.of(wish, skeleton(wish, "resp_0", "any", 1, tools), tools)
    events = [
        *encoder.begin(),
        *(event for piece in pieces for event in encoder.encode(piece)),
        *encoder.end(DONE, finish),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event, strict=False)
    Response.model_validate(events[-1]["response"])
    return events


def output(events: list[dict[str, Any]]) -> list[Any]:
    """What was answered; it must match the events of the items."""
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert len({item["id"] for item in done}) == len(done)
    return done


def call(name: str, arguments: str, *, complete: bool = True) -> list[Piece]:
    pieces = [arguments[:3], arguments[3:]]
    return [CallBegun(0, "c", name), *(CallArguments(0, piece) for piece in pieces), CallEnded(0, "raw", complete)]


def test_calls_are_named_as_the_client_named_its_tools():
    def message(name: str, arguments: str) -> Any:
        (item,) = output(encoded(call(name, arguments)))
        return [item["type"], item["name"], item.get("namespace"), item.get("arguments"), item.get("input")]

    assert message("f", '{"a": 1}') == ["function_call", "f", None, '{"a": 1}', None]
    assert message("ns__g", "{}") == ["function_call", "g", "ns", "{}", None]
    assert message("patch", '{"input": "a\\nb"}') == ["custom_tool_call", "patch", None, None, "a\nb"]
    assert message("ns__patch", '{"input": "x"}') == ["custom_tool_call", "patch", "ns", None, "x"]
    assert message("patch", '{"other": 1}') == ["custom_tool_call", "patch", None, None, '{"other": 1}']
    assert message("unknown", "{}") == ["function_call", "unknown", None, "{}", None]


def test_spaces_around_calls_are_no_message():
    message = encoded([Reasoning("hm"), Text("\n"), *call("f", "{}"), Text("\n"), *call("f", "{}"), Text(" \n")])
    assert [item["type"] for item in output(message)] == ["reasoning", "function_call", "function_call"]
    message = encoded([Text(" "), Text("Yes. "), *call("f", "{}"), Text("\n"), Text("So.")])
    assert [item["type"] for item in output(message)] == ["message", "function_call", "message"]
    assert [item["content"][0]["text"] for item in output(message)[::2]] == [" Yes. ", "\nSo."]


def test_what_breaks_off_is_incomplete():
    message = encoded([Reasoning("hm"), Text("Ye")], "length")
    assert [item["status"] for item in output(message)] == ["completed", "incomplete"]
    assert message[-1]["type"] == "response.incomplete" and message[-1]["response"]["status"] == "incomplete"
    (item,) = output(encoded(call("f", '{"a": ', complete=False), "length"))
    assert item["status"] == "incomplete" and item["arguments"] == '{"a": '


def test_thinking_comes_as_content_or_as_summary():
    heard: list[Piece] = [Reasoning("a"), Reasoning("b"), Text("c")]
    plain, summed = output(encoded(heard))[0], output(encoded(heard, reasoning={"summary": "auto"}))[0]
    assert (plain["content"][0]["text"], plain["summary"], "encrypted_content" in plain) == ("ab", [], False)
    assert (summed["summary"][0]["text"], summed["content"]) == ("ab", [])
    both = output(encoded(heard, include=["reasoning.encrypted_content"]))[0]
    assert unsealed(both["encrypted_content"]) == "ab"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PromptTooLong(9, 8), "context_length_exceeded"),
        (Overloaded("x"), "rate_limit_exceeded"),
        (BadRequest("x"), "invalid_prompt"),
        (EverwarmError("x"), "server_error"),
    ],
)
def test_a_failure_is_an_event_with_a_code_clients_know(error, code):
    wish = msgspec.convert({"input": "a"}, ResponsesBody)
    encoder = ResponsesEncoder.of(wish, skeleton(wish, "resp_0", "any", 1, offered(None)), offered(None))
    events = encoder.fail(error)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"] == {"code": code, "message": str(error)}


@FUZZ
@given(SAID, SAID)
def test_a_seal_gives_back_what_was_thought_and_nothing_else_does(thought, other):
    assert unsealed(sealed(thought)) == thought
    assert unsealed(other) is None


# roles

PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
FIRST_ONLY = PLAIN.replace("[", "{% if m.role != 'system' or loop.first %}[").replace("]", "]{% endif %}")
STRICT = PLAIN.replace("[", "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}[")


def test_roles_are_those_the_template_shows():
    roles = ("developer", "system", "user", "assistant", "developer", "user")
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]

    def message(source: str, messages: list[Any] = messages) -> list[tuple[str, str]]:
        return [(x["role"], x["content"]) for x in in_known_roles(messages, ChatTemplate(source))]

    assert [role for role, _ in message(PLAIN)] == ["system", "system", "user", "assistant", "system", "user"]
    merged = [("system", "0\n\n1"), ("user", "2"), ("assistant", "3"), ("user", "4"), ("user", "5")]
    assert message(FIRST_ONLY) == merged == message(STRICT)
    assert message(STRICT, messages[1:4]) == [("system", "1"), ("user", "2"), ("assistant", "3")]


# anything at all

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
SEAL = TEXT | st.builds(sealed, TEXT)


def made(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Good ones of a type, and now and then one that is not."""
    good = st.fixed_dictionaries({"type": st.just(kind), **fields})
    spoilt = st.builds(lambda x, name, value: x | {name: value}, good, st.sampled_from(["type", *fields]), Json)
    return st.one_of(good, good, good, good, spoilt)


PART = made("input_text", text=TEXT) | made("output_text", text=TEXT) | made("refusal", refusal=TEXT)
CONTENT = TEXT | st.lists(PART, max_size=2)
CALLED = {"call_id": TEXT, "name": TEXT, "namespace": st.none() | TEXT}
ITEM = st.one_of(
    made("message", role=st.sampled_from(["user", "assistant", "system", "developer"]), content=CONTENT),
    made("function_call", arguments=TEXT | st.just("{}"), **CALLED),
    made("custom_tool_call", input=TEXT, **CALLED),
    made("function_call_output", call_id=TEXT, output=CONTENT),
    made("reasoning", summary=st.lists(PART, max_size=2), encrypted_content=st.none() | SEAL),
    made("item_reference", id=TEXT),
)
TOOL = st.one_of(
    made("function", name=TEXT, parameters=st.just({"type": "object", "properties": {}})),
    made("custom", name=TEXT, format=st.none() | st.just({"type": "grammar", "syntax": "lark", "definition": "x"})),
    made("web_search", external_web_access=st.booleans()),
)
GROUP = made("namespace", name=TEXT, tools=st.lists(TOOL, max_size=2))
OWN = st.fixed_dictionaries(
    {"input": TEXT | st.lists(ITEM, max_size=5), "max_output_tokens": st.just(2)},
    optional={
        "instructions": TEXT | st.lists(ITEM, max_size=1),
        "tools": st.lists(TOOL | GROUP, max_size=3),
        "tool_choice": st.sampled_from(["none", "auto", "required"]) | TOOL,
        "reasoning": st.fixed_dictionaries({"effort": st.sampled_from(["none", "low", "max"])}),
        "stream": st.booleans(),
        "previous_response_id": st.none() | TEXT,
    },
)
ANY = OWN | st.builds(lambda a, b: a | b if isinstance(a, dict) else a, bodies(ResponsesBody), OWN) | OWN


@FUZZ
@given(ANY)
def test_any_body_becomes_a_chat_or_is_refused(body):
    try:
        wish = read(msgspec.json.encode(body), ResponsesBody)
        wish.check()
        items = own_items(wish, "0", lambda _: None)
        tools = offered(wish.tools)
        chat = chat_body(wish, tools, items)
    except BadRequest:
        return
    assert chat.messages and all(item["id"] and item["type"] for item in items)
    ResponsesEncoder.of(wish, skeleton(wish, "resp_0", "any", 1, tools), tools).end(DONE, "stop")


@pytest.fixture(scope="module")
def server() -> Any:
    with serving("--request-timeout", "20", "--grace", "1", n_ctx=192) as server:
        yield server


DEEP: Any = []
for _ in range(880):
    DEEP = [DEEP]


@pytest.mark.parametrize("odd", [1 << 63, 1 << 64, -(10**30), DEEP], ids=["63", "64", "100", "deep"])
def test_numbers_and_depths_beyond_all_reason_are_no_accident(server: Server, odd: Any):
    for body in (
        {"input": [{"role": "user", "content": "a", "odd": odd}]},
        {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"odd": odd}}]},
        {"input": "a", "chat_template_kwargs": {"odd": odd}},
    ):
        for stream in (False, True):
            whole = {**body, "max_output_tokens": 1, "stream": stream}
            assert server.post("/v1/responses", msgspec.json.encode(whole)).status in (200, 400)


def test_no_body_is_an_accident(server: Server):
    @settings(FUZZ, max_examples=5000 if os.environ.get("EVERWARM_CAMPAIGN") else 60)
    @given(ANY)
    def fuzz(body: Any) -> None:
        reply = server.post("/v1/responses", msgspec.json.encode(body))
        assert reply.status in (200, 400, 404), f"{reply.status} {reply.data!r}"
        if reply.status == 404:
            assert reply.json["error"]["code"] == "previous_response_not_found"

    engine = server.engine_pid
    fuzz()
    assert server.engine_pid == engine and server.get("/ready").json["restarts"] == 0
