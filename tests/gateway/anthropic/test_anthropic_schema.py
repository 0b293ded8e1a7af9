"""Anthropic's bodies as chat bodies, and replies as its blocks: pure, so every case is cheap."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest
from everwarm.gateway.anthropic.encode import AnthropicEncoder
from everwarm.gateway.anthropic.schema import CountBody, MessagesBody, chat_body, chat_messages, read_body
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.parsing.output_parser import Piece
from everwarm.gateway.parsing.reasoning import Reasoning
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded, Text
from everwarm.gateway.serving.generate import Choice
from support import fuzz
from support.server import Server, serving

N_EXAMPLES = 5000 if os.environ.get("EVERWARM_CAMPAIGN") else 200
FUZZ = settings(fuzz.FUZZ, max_examples=N_EXAMPLES)
MARK = {"type": "ephemeral"}
TOOL = {"name": "f", "description": "does", "input_schema": {"type": "object", "properties": {}}}


def text(output: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": output, **more}


def use(id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "f", "input": arguments}


def result(id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def body(*messages: Any, **more: Any) -> MessagesBody:
    return read_body(json.dumps({"messages": messages, "max_tokens": 5, **more}).encode(), MessagesBody)


def told(*messages: Any, **more: Any) -> list[dict[str, Any]]:
    return chat_messages(body(*messages, **more))


# messages


def test_a_string_and_one_block_of_text_are_the_same():
    assert told({"role": "user", "content": "Hi"}) == told(user(text("Hi"))) == [{"role": "user", "content": "Hi"}]


def test_system_text_comes_first_with_the_marks_on_its_parts():
    messages = told(
        {"role": "system", "content": "C"}, user(text("Hi")), system=[text("A", cache_control=MARK), text("B")]
    )
    parts = [text("A\n", cache_control=MARK), text("B\n"), text("C")]
    assert messages == [{"role": "system", "content": parts}, {"role": "user", "content": "Hi"}]


def test_blocks_of_the_user_are_told_apart_and_those_of_the_model_are_as_it_wrote_them():
    messages = told(user(text("a"), text("b\n"), text("c")), assistant(text("d"), text("e")), user(text("f")))
    assert [message["content"] for message in messages] == ["a\nb\nc", "de", "f"]


def test_thinking_calls_and_results_keep_their_places():
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    secret = {"type": "redacted_thinking", "data": "xx"}
    calls = assistant(thought, secret, text("Look."), use("1", a="ä"), use("2"))
    answers = user(result("1", "one"), result("2", [text("two")], cache_control=MARK), text("And?"))
    _, output, one, two, asked = told(user(text("q")), calls, answers)
    assert (output["content"], output["reasoning_content"]) == ("Look.", "hm")
    assert [call["id"] for call in output["tool_calls"]] == ["1", "2"]
    assert [call["function"]["arguments"] for call in output["tool_calls"]] == ['{"a": "ä"}', "{}"]
    assert one == {"role": "tool", "tool_call_id": "1", "content": "one"}
    assert two == {"role": "tool", "tool_call_id": "2", "content": [text("two", cache_control=MARK)]}
    assert asked == {"role": "user", "content": "And?"}


def test_a_failed_result_says_so():
    assert told(user(text("q")), assistant(use("1")), user(result("1", "no file", is_error=True)))[-1]["content"] == (
        "Error:\nno file"
    )


def test_reminders_open_no_turn_of_their_own():
    reminder = "<system-reminder>\nNote.\n</system-reminder>"
    messages = told(user(text("q")), assistant(use("1")), user(result("1", "ok"), text(reminder)))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[-1]["content"] == f"ok\n{reminder}"
    passing = {"role": "system", "content": "Note."}
    messages = told(user(text("q")), passing, assistant(text("a")), passing)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0]["content"] == f"q\n{reminder}" and messages[2]["content"] == reminder


def test_neighbours_of_one_role_are_one_message():
    messages = told(user(text("a")), user(text("b")), assistant(text("c")), assistant(text("d")), user(text("e")))
    assert [message["content"] for message in messages] == ["a\nb", "cd", "e"]


def test_images_and_documents_are_parts():
    data = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "AAAA"}}
    link = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    paper = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    (message,) = told(user(data, link, paper))
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    assert urls == ["data:image/jpeg;base64,AAAA", "https://a.example/b.png"]
    assert message["content"][2] == text("T\nD")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "image", "source": {"type": "file", "data": "AAAA"}}, "source of an image is 'file'; give base64"),
        ({"type": "image", "source": {"type": "url", "data": "AAAA"}}, "source of an image is 'url'; give base64"),
        (
            {"type": "document", "source": {"type": "base64", "data": "D"}},
            "source of a document is 'base64'; give text",
        ),
        ({"type": "document", "source": {"type": "content"}}, "source of a document is 'content'; give text"),
    ],
)
def test_sources_that_cannot_be_read_are_refused(block, words):
    for blocks in ([block], [{"type": "tool_result", "tool_use_id": "1", "content": [block]}]):
        with pytest.raises(BadRequest, match=words):
            told(user(*blocks))


@pytest.mark.parametrize(
    "messages",
    [
        [user(use("1"))],
        [user({"type": "thinking", "thinking": "x"})],
        [assistant(result("1", "x")), user(text("q"))],
        [{"role": "system", "content": [use("1")]}, user(text("q"))],
        [{"role": "system", "content": "only"}],
    ],
)
def test_what_is_out_of_place_is_refused(messages):
    with pytest.raises(BadRequest):
        told(*messages)


# everything else of a body


@pytest.mark.parametrize(
    ("choice", "wanted", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "none"}, "none", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
    ],
)
def test_tools_and_the_choice_among_them(choice, wanted, parallel):
    marked = {**TOOL, "cache_control": MARK, "type": "custom"}
    search = {"type": "tool_search_tool_regex_20251119", "name": "search"}
    chat = chat_body(body(user(text("q")), tools=[marked, search], tool_choice=choice))
    assert (chat.tool_choice, chat.parallel_tool_calls) == (wanted, parallel)
    assert chat.tools == [
        {
            "type": "function",
            "function": {"name": "f", "description": "does", "parameters": TOOL["input_schema"]},
        }
    ]


def test_numbers_stops_and_sessions_arrive():
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["x"], "stream": True, "model": "any"}
    chat = chat_body(body(user(text("q")), **asked), session="s" * 1000)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.stop, chat.stream) == (0.5, 0.9, 7, ["x"], True)
    assert (chat.max_tokens, chat.model, chat.prompt_cache_key) == (5, "any", "s" * 512)
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    for kind, thinks in (("enabled", True), ("adaptive", True), ("disabled", False)):
        assert (
            chat_body(body(user(text("q")), thinking={"type": kind})).chat_template_kwargs["enable_thinking"] is thinks
        )


@pytest.mark.parametrize(
    "more",
    [
        {"system": [text("a", cache_control=MARK)]},
        {"tools": [{**TOOL, "cache_control": MARK}]},
        {"cache_control": MARK},
        {"messages": [user(text("q", cache_control=MARK))]},
        {"messages": [user(result("1", [text("q", cache_control=MARK)]))]},
    ],
)
def test_a_mark_anywhere_is_noticed(more):
    plain: dict[str, Any] = {"messages": [user(text("q"))], "max_tokens": 1, "tools": [TOOL]}
    assert read_body(json.dumps(plain | more).encode(), MessagesBody).marks_cache
    assert not read_body(json.dumps(plain).encode(), MessagesBody).marks_cache


# any JSON

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(["text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "x"])
SOURCE = st.fixed_dictionaries(
    {"type": st.sampled_from(["base64", "url", "text", "content", "file"])},
    optional={"data": WORDS | JSON, "url": WORDS, "media_type": WORDS, "content": WORDS | JSON},
)
BLOCK = st.deferred(
    lambda: st.fixed_dictionaries(
        {"type": KINDS, "text": WORDS | JSON},
        optional={
            "thinking": WORDS,
            "id": WORDS,
            "name": WORDS,
            "input": st.dictionaries(WORDS, JSON, max_size=2) | JSON,
            "tool_use_id": WORDS,
            "content": WORDS | st.lists(BLOCK, max_size=2) | JSON,
            "source": SOURCE,
            "is_error": st.booleans(),
            "cache_control": JSON,
        },
    )
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": WORDS | st.lists(BLOCK, max_size=3) | JSON}
)
SOME_TEXT = WORDS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": WORDS}), max_size=2)
GOOD = st.builds(
    lambda turns, last, more: {"messages": [*turns, {"role": "user", "content": last}], "max_tokens": 2, **more},
    st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": SOME_TEXT}),
        max_size=3,
    ),
    SOME_TEXT,
    st.fixed_dictionaries({}, optional={"system": SOME_TEXT, "tools": st.just([TOOL]), "stream": st.booleans()}),
)
TOOLS = st.fixed_dictionaries({"name": WORDS}, optional={"type": WORDS, "input_schema": JSON, "description": WORDS})
BODY = st.fixed_dictionaries(
    {"messages": st.lists(TURN, max_size=3) | JSON, "max_tokens": st.integers(0, 8)},
    optional={
        "system": WORDS | st.lists(BLOCK, max_size=2) | JSON,
        "tools": st.lists(TOOLS, max_size=2) | JSON,
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool"])}) | JSON,
        "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "adaptive"])}) | JSON,
        "temperature": JSON,
        "stop_sequences": st.lists(WORDS, max_size=2) | JSON,
        "stream": st.booleans(),
        "chat_template_kwargs": JSON,
        "metadata": JSON,
    },
)


@FUZZ
@given(GOOD | BODY | JSON)
@example({"messages": [{"role": "user", "content": ""}], "max_tokens": 1})
def test_any_body_is_read_or_refused(sent):
    for kind in (CountBody, MessagesBody):
        with contextlib.suppress(BadRequest):
            chat = chat_body(read_body(json.dumps(sent).encode(), kind))
            assert chat.messages[-1]["role"] in ("user", "tool", "assistant")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--request-timeout", "20", "--grace", "1", n_ctx=192) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_no_body_is_an_accident(server, path):
    engine, seen = server.engine_pid, set[int]()

    @settings(FUZZ, max_examples=N_EXAMPLES // 5)
    @given(GOOD | BODY | JSON)
    def fuzz(sent: Any) -> None:
        reply = server.post(path, sent)
        seen.add(reply.status)
        assert reply.status in (200, 400), reply.data
        if reply.status == 400:
            assert reply.json["type"] == "error" and reply.json["error"]["message"]

    fuzz()
    assert seen == {200, 400}
    assert server.engine_pid == engine and server.get("/ready").json["restarts"] == 0


# replies


def done(n_reply: int) -> m.Done:
    return m.Done(1, "", "stop", None, 30, 20, 20, n_reply, 0, None, 0.0, 0.0, 0.0, 0.0)


def call(index: int, arguments: dict[str, Any]) -> list[Piece]:
    output = json.dumps(arguments)
    at = len(output) // 2
    pieces = [CallArguments(index, piece) for piece in (output[:at], output[at:]) if piece]
    return [CallBegun(index, f"call_{index}", "f"), *pieces, CallEnded(index, output)]


SAID = st.lists(
    st.lists(WORDS | st.sampled_from([" ", "\n\n"]), max_size=3) | st.dictionaries(WORDS, WORDS, max_size=2)
)
wire: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def replied(thoughts: Sequence[str], output: Sequence[Any]) -> list[Piece]:
    events: list[Piece] = [Reasoning(thought) for thought in thoughts if thought]
    n_calls = 0
    for each in output:
        if isinstance(each, dict):
            events += call(n_calls, each)
            n_calls += 1
        else:
            events += [Text(piece) for piece in each if piece]
    return events


@FUZZ
@given(st.lists(WORDS, max_size=2), SAID)
def test_every_stream_adds_up_to_the_whole(thoughts, output):
    events, begun = replied(thoughts, output), m.Begun(1, 30, 20, 0, 27)
    stream, snapshot, buffers = AnthropicEncoder("msg_1", "any", marks_cache=True), None, dict[int, bytes]()
    sent = [
        *stream.begun(begun),
        *(each for event in events for each in stream.events_of(event)),
        *stream.ended(done(4), "stop"),
    ]
    for each in sent:
        snapshot = accumulate_event(event=wire.validate_python(each), current_snapshot=snapshot, json_bufs=buffers)
    expected = stream.whole(Choice(pieces=events, begun=begun, ended=done(4), finish="stop"))
    assert snapshot is not None
    assert [block.model_dump(exclude_none=True) for block in snapshot.content] == expected["content"]
    assert snapshot.stop_reason == expected["stop_reason"] == "end_turn"
    assert expected["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 7,
        "cache_read_input_tokens": 20,
        "output_tokens": 4,
    }
    assert all(block.get("text", "-").strip() for block in expected["content"])


@pytest.mark.parametrize(
    ("digits", "value"),
    [
        ("18446744073709551615", (1 << 64) - 1),
        ("18446744073709551616", 2.0**64),
        ("-9223372036854775809", -(2.0**63)),
        ("1" + "0" * 30, 1e30),
        ("9" * 5000, None),
    ],
)
def test_numbers_of_any_length_can_be_sent(digits, value):
    events: list[Piece] = [
        CallBegun(0, "call_0", "f"),
        CallArguments(0, f'{{"n": {digits}}}'),
        CallEnded(0, ""),
    ]
    choice = Choice(pieces=events, begun=m.Begun(1, 30, 20, 0), ended=done(4), finish="tool_calls")
    reply = AnthropicEncoder("msg_1", "any", marks_cache=False).whole(choice)
    assert json.loads(json_response(reply).body)["content"][0]["input"] == {"n": value}


def test_half_a_call_ends_a_stream_as_cut_off_and_a_whole_reply_as_text():
    broken = [CallBegun(0, "call_0", "f"), CallArguments(0, '{"a"'), CallEnded(0, '<tool_call>{"a"', complete=False)]
    stream, begun = AnthropicEncoder("msg_1", "any", marks_cache=False), m.Begun(1, 30, 20, 0, 27)
    for event in broken:
        stream.events_of(event)
    end = next(each for each in stream.ended(done(4), "stop") if each["type"] == "message_delta")
    assert end["delta"]["stop_reason"] == "max_tokens"
    reply = stream.whole(Choice(pieces=broken, begun=begun, ended=done(4), finish="stop"))
    assert reply["content"] == [text('<tool_call>{"a"')] and reply["stop_reason"] == "end_turn"
    assert reply["usage"]["cache_creation_input_tokens"] == 0 and reply["usage"]["input_tokens"] == 10
