"""The official Anthropic client against a real server: the everyday calls and Claude Code's own shape."""

import base64
import io
import json
import shutil
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import PIL.Image
import pytest

from everwarm.gateway.anthropic.schema import CountBody, chat_body, read_body
from support.models import EMBEDDED, tiny_vision
from support.prompts import anthropic_tokens, n_common
from support.server import GUARD, Server, frozen, serving, serving_models, words

KEY = "a-key-of-some-length"
GREEDY: dict[str, Any] = {"model": "any", "max_tokens": 200, "extra_body": {"temperature": 0}}
THINKING: dict[str, Any] = {"thinking": {"type": "adaptive"}}
CACHED = {"type": "ephemeral"}
WEATHER = {
    "name": "get_weather",
    "description": "the weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        yield client


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def ask(client: anthropic.Anthropic, messages: list[Any], **more: Any) -> Any:
    return client.messages.create(messages=messages, **GREEDY | more)


def streamed(client: anthropic.Anthropic, messages: list[Any], **more: Any) -> Any:
    with client.messages.stream(messages=messages, **GREEDY | more) as stream:
        return stream.get_final_message()


def blocks(message: Any) -> list[Any]:
    """A reply's content, without what differs between two calls."""
    shown = [block.model_dump(exclude_none=True) for block in message.content]
    return [{key: value for key, value in block.items() if key != "id"} for block in shown]


def n_prompt(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


def n_processed(usage: Any) -> int:
    return n_prompt(usage) - int(usage.cache_read_input_tokens)


def test_a_last_message_of_the_assistant_is_continued(server, client):
    talk = [user("Who are you?"), {"role": "assistant", "content": "I am"}]
    whole = ask(client, talk).content[0].text
    chat = server.ask("/v1/chat/completions", {"messages": talk, "temperature": 0, "max_tokens": 200})
    assert whole == chat["choices"][0]["message"]["content"] and whole != ask(client, talk[:1]).content[0].text
    with pytest.raises(anthropic.BadRequestError, match="tool calls"):
        ask(
            client,
            [talk[0], {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}],
        )


# the everyday calls


@pytest.mark.parametrize("say", [ask, streamed])
def test_a_message_is_answered(client, say):
    answer = say(client, [user("Who are you?")], system="You are a helpful assistant.")
    (text,) = answer.content
    assert text.type == "text" and "Everwarm Tiny" in text.text
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", "any", "end_turn")
    assert answer.id.startswith("msg_") and answer.usage.output_tokens > 0


@pytest.mark.parametrize("more", [{}, THINKING, {"tools": [WEATHER]}, {"tools": [WEATHER], **THINKING}])
@pytest.mark.parametrize("text", ["What is 7 + 8?", "What is the weather in Rome?"])
def test_a_stream_adds_up_to_the_whole_reply(client, text, more):
    whole = ask(client, [user(text)], **more)
    parts = streamed(client, [user(text)], **more)
    assert blocks(parts) == blocks(whole) != []
    assert (parts.stop_reason, parts.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert n_prompt(parts.usage) == n_prompt(whole.usage) and parts.usage.output_tokens == whole.usage.output_tokens


def test_thinking_is_there_when_it_was_asked_for(client):
    question = [user("What is 7 + 8?")]
    for asked in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}):
        thought, output = ask(client, question, thinking=asked).content
        assert thought.type == "thinking" and "sum" in thought.thinking and thought.signature
        assert output.type == "text" and "15" in output.text
    for more in ({}, {"thinking": {"type": "disabled"}}):
        (output,) = ask(client, question, **more).content
        assert output.type == "text" and "15" in output.text


def test_the_order_of_events_is_anthropics(server):
    body = {"messages": [user("What is 7 + 8?")], "max_tokens": 200, "temperature": 0, "stream": True, **THINKING}
    reply = server.post("/v1/messages?beta=true", body)
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split(b"\n", 1) for frame in reply.data.strip().split(b"\n\n")]
    events = [json.loads(data.removeprefix(b"data: ")) for _, data in frames]
    assert [name.removeprefix(b"event: ").decode() for name, _ in frames] == [event["type"] for event in events]
    kinds = [event.get("delta", {}).get("type") or event["type"] for event in events if event["type"] != "ping"]
    seen = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    thinking = ["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"]
    text = ["content_block_start", "text_delta", "content_block_stop"]
    assert seen == ["message_start", *thinking, *text, "message_delta", "message_stop"]
    assert kinds.count("signature_delta") == 1
    assert events[0]["message"]["usage"]["output_tokens"] == 0 and events[0]["message"]["content"] == []
    assert {event["index"] for event in events if "index" in event} == {0, 1}


def test_a_reply_says_why_it_ended(client):
    cut = ask(client, [user("Tell me a story.")], max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    text = ask(client, [user("Who are you?")]).content[0].text
    stopped = ask(client, [user("Who are you?")], stop_sequences=[text.split()[2]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text.split()[2])
    assert text.startswith(stopped.content[0].text) and len(stopped.content[0].text) < len(text)
    called = ask(client, [user("What is the weather in Rome?")], tools=[WEATHER])
    assert called.stop_reason == "tool_use"
    nothing = ask(client, [user(f"Only read this. {words(60, 5)}")], max_tokens=0)
    assert nothing.content == [] and nothing.usage.output_tokens == 0
    assert ask(client, [user(f"Only read this. {words(60, 5)}")], max_tokens=1).usage.input_tokens <= GUARD


def test_a_call_that_breaks_off_is_no_call(client):
    question, tools = [user("What is the weather in Rome?")], {"tools": [WEATHER]}
    n_tokens = ask(client, question, **tools).usage.output_tokens
    whole = ask(client, question, **tools, max_tokens=n_tokens - 6)
    assert [block.type for block in whole.content] == ["text"] and whole.stop_reason == "max_tokens"
    parts = streamed(client, question, **tools, max_tokens=n_tokens - 6)
    assert parts.stop_reason == "max_tokens"


# counting


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER]}, {**THINKING, "system": "Be brief."}])
def test_counting_says_what_the_call_will_say(client, more):
    messages = [user([{"type": "text", "text": words(40, 9)}, {"type": "text", "text": "Who are you?"}])]
    counted = client.messages.count_tokens(model="any", messages=messages, **more).input_tokens
    assert counted == n_prompt(ask(client, messages, **more).usage)
    assert client.messages.count_tokens(model="any", messages=[user("Hi")], **more).input_tokens < counted


def test_usage_tells_new_and_old_apart(client):
    text = words(80, 31)
    first = ask(client, [user(text)]).usage
    assert (first.cache_creation_input_tokens, first.cache_read_input_tokens) == (0, 0) and first.input_tokens > 80
    marked = [user([{"type": "text", "text": words(80, 32), "cache_control": CACHED}])]
    counted = client.messages.count_tokens(model="any", messages=marked).input_tokens
    usage = ask(client, marked).usage
    assert usage.cache_creation_input_tokens > 80 and usage.cache_read_input_tokens == 0
    assert usage.input_tokens + usage.cache_creation_input_tokens == counted
    again = ask(client, marked).usage
    assert n_prompt(again) == counted and n_processed(again) <= GUARD
    unmarked = ask(client, [user(words(80, 32))]).usage  # the mark is no part of what is compared
    assert n_prompt(unmarked) == counted and n_processed(unmarked) <= GUARD


# a tool and its result


def test_an_answer_comes_from_the_result(client):
    messages: list[Any] = [user("What is the weather in Oslo?")]
    call = ask(client, messages, tools=[WEATHER])
    (use,) = call.content
    assert use.type == "tool_use" and use.input == {"city": "Oslo"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "snow"}]}
    messages += [{"role": "assistant", "content": call.content}, user([result])]
    assert "snow" in ask(client, messages, tools=[WEATHER]).content[0].text


# refusals


def test_a_forced_call_and_a_forced_form_obey(client):
    """``any`` forces a call although nobody asked for one; ``output_config.format`` forces JSON."""
    reply = ask(client, [user("Tell me a story.")], tools=[WEATHER], tool_choice={"type": "any"})
    assert reply.stop_reason == "tool_use" and reply.content[-1].name == "get_weather"
    assert isinstance(reply.content[-1].input["city"], str)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"extra_body": {"temperature": 0, "output_config": {"format": {"type": "json_schema", "schema": schema}}}}
    output = json.loads(ask(client, [user("What is 7 + 8?")], **form).content[-1].text)
    assert list(output) == ["n"] and isinstance(output["n"], int)


def test_images_are_refused_by_a_model_that_reads_text(client):
    source = {"type": "base64", "media_type": "image/png", "data": make_image()}
    image = {"type": "image", "source": source}
    for content in ([image], [{"type": "tool_result", "tool_use_id": "a", "content": [image]}]):
        with pytest.raises(anthropic.BadRequestError, match="--mmproj") as refused:
            ask(client, [user(content)])
        assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "get_weather"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"messages": [user([{"type": "video"}])]}, "video"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "source"),
        ({"messages": []}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": [user(words(9000, 1))]}, "prompt is too long: [0-9]+ tokens > 4096 maximum"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(client, more, why):
    options = {"messages": [user("Hello")], **more}
    with pytest.raises(anthropic.BadRequestError, match=why):
        ask(client, **options)
    with pytest.raises(anthropic.BadRequestError, match=why), client.messages.stream(**GREEDY | options) as stream:
        stream.get_final_message()


def test_a_key_is_needed_and_taken_from_either_header():
    with serving("--api-key", KEY) as locked:
        for given, works in (({"api_key": KEY}, True), ({"auth_token": KEY}, True), ({"api_key": "wrong"}, False)):
            with anthropic.Anthropic(base_url=locked.url, max_retries=0, **given) as client:
                if works:
                    assert ask(client, [user("Who are you?")], max_tokens=1).usage.output_tokens == 1
                    assert client.models.retrieve("everwarm-tiny").id == "everwarm-tiny"
                    continue
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    ask(client, [user("Who are you?")])
                assert refused.value.type == "authentication_error"
                with pytest.raises(anthropic.AuthenticationError):
                    client.messages.count_tokens(model="any", messages=[user("Hi")])
        both = locked.post("/v1/messages", {}, X_Api_Key=KEY, Authorization="Bearer something-else")
        assert both.status == 400 and both.json["type"] == "error"


def test_models_are_listed_and_found_by_name(server, client):
    listed = client.models.list(limit=1000)
    assert [model.id for model in listed] == ["everwarm-tiny"] and not listed.has_more
    assert client.models.retrieve("everwarm-tiny").display_name == "everwarm-tiny"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("nobody")
    missing = server.post("/v1/messages/nowhere", {}).json
    assert missing["type"] == "error" and missing["error"]["type"] == "not_found_error"


def test_a_sleeping_model_is_woken_and_an_unknown_one_is_not_found(tmp_path):
    shutil.copy(EMBEDDED, tmp_path / "one.gguf")
    with (
        serving_models(tmp_path) as many,
        anthropic.Anthropic(base_url=many.url, api_key="-", max_retries=0) as client,
    ):
        for say in (ask, streamed):
            with pytest.raises(anthropic.NotFoundError, match="there are: one") as refused:
                say(client, [user("Who are you?")], model="nobody")
            assert refused.value.type == "not_found_error"
        assert many.n_loads == 0
        assert "Everwarm Tiny" in streamed(client, [user("Who are you?")], model="one").content[0].text
        assert many.n_loads == 1


# Claude Code


def tool(i: int) -> dict[str, Any]:
    properties = {"path": {"type": "string"}, "limit": {"type": "integer"}}
    schema = {"type": "object", "properties": properties}
    return {"name": f"Tool{i}", "description": f"Does thing {i}.", "input_schema": schema}


def claude_code(n: int, messages: list[Any]) -> dict[str, Any]:
    """A request in the shape that Claude Code sends; ``n`` changes what differs from request to request."""
    attribution = f"x-anthropic-billing-header: cc_version=2.1.{n}.f3a; cc_entrypoint=cli; cch={n * 7919:05x};"
    system = [
        {"type": "text", "text": attribution},
        {"type": "text", "text": "You are a coding agent.", "cache_control": CACHED},
        {"type": "text", "text": f"# Tone\n{words(160, 3)}", "cache_control": {**CACHED, "ttl": "1h"}},
    ]
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 40,
        "temperature": 0,
        "system": system,
        "tools": [tool(i) for i in range(23)] + [WEATHER],
        "messages": messages,
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "5e55"})},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "betas": ["interleaved-thinking-2025-05-14"],
        "stream": True,
    }


def first_turn() -> list[Any]:
    reminder = {"type": "text", "text": f"<system-reminder>\nToday is a day.\n{words(20, 4)}\n</system-reminder>\n"}
    asked = {"type": "text", "text": "What is the weather in Rome?", "cache_control": CACHED}
    return [user([reminder, asked]), {"role": "system", "content": "The user opened a file."}]


def second_turn(reply: Any) -> list[Any]:
    before = first_turn()
    del before[0]["content"][1]["cache_control"]  # the mark moves on
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
    output = [block for block in reply if block["type"] != "tool_use"]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny", "cache_control": CACHED}
    nudge = {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>"}
    return [*before, {"role": "assistant", "content": [*output, use]}, user([result, nudge])]


def claude_call(server: Server, body: dict[str, Any]) -> tuple[list[Any], dict[str, int]]:
    headers = {"x_claude_code_session_id": "5e55", "anthropic_version": "2023-06-01", "anthropic_beta": "a,b"}
    reply = server.post("/v1/messages?beta=true", body, **headers)
    assert reply.status == 200, reply.data
    events = [json.loads(line[6:]) for line in reply.data.split(b"\n") if line.startswith(b"data: ")]
    texts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    thought = "".join(delta.get("thinking", "") for delta in texts)
    return [{"type": "thinking", "thinking": thought, "signature": "s"}], events[-2]["usage"]


def two_turns(server: Server) -> tuple[int, int]:
    """How much of the second turn was read, and how much of it was new."""
    assert server.call("HEAD", "/").status == 200
    assert server.get("/v1/models?limit=1000").json["data"][0]["type"] == "model"
    one = claude_code(1, first_turn())
    reply, usage = claude_call(server, one)
    assert usage["cache_creation_input_tokens"] > 400 and usage["input_tokens"] <= GUARD
    two = claude_code(2, second_turn(reply))
    prompts = [anthropic_tokens(server, body) for body in (one, two)]
    _, usage = claude_call(server, two)
    n_new = len(prompts[1]) - n_common(*prompts)
    assert sum(usage.values()) - usage["output_tokens"] == len(prompts[1])
    return usage["input_tokens"] + usage["cache_creation_input_tokens"], n_new


def test_claude_codes_second_turn_reads_only_what_is_new(server):
    n_read, n_new = two_turns(server)
    assert 0 < n_new < 150
    assert n_read <= n_new + GUARD


def test_without_the_canonicaliser_the_header_breaks_the_prefix():
    with serving("--no-canonicalise") as plain:
        n_read, n_new = two_turns(plain)
    assert n_read > 200 and n_new > 200


def test_the_model_sees_what_claude_code_said_in_passing(server):
    text = server.rendered(chat_body(read_body(json.dumps(claude_code(1, first_turn())).encode(), CountBody)).messages)
    assert "The user opened a file." in text and "cache_control" not in text and "billing" not in text
    assert "You are a coding agent.\n# Tone" in text


# streams that go wrong


def test_an_error_in_a_stream_is_an_event_of_its_own():
    """The engine is silent: first there are signs of life, then the time is over."""
    with serving("--request-timeout", "2", "--grace", "1") as slow:
        body = {"messages": [user("Who are you?")], "max_tokens": 5, "stream": True}
        with frozen(slow.engine_pid):
            reply = slow.post("/v1/messages", body)
        with (
            anthropic.Anthropic(base_url=slow.url, api_key="-", max_retries=0) as client,
            frozen(slow.engine_pid),
            pytest.raises(anthropic.APIStatusError, match="longer than 2 s"),
        ):
            streamed(client, [user("Who are you?")])
    ping, error = reply.data.strip().split(b"\n\n")
    assert reply.status == 200 and ping == b'event: ping\ndata: {"type":"ping"}'
    assert error.startswith(b"event: error\ndata: ")
    told = json.loads(error.partition(b"data: ")[2])
    assert told["type"] == "error" and told["error"]["type"] == "timeout_error"


# images


def test_images_are_seen_counted_and_not_read_again():
    model, mmproj = tiny_vision("qwen35")
    source = {"type": "base64", "media_type": "image/png", "data": make_image()}
    look = user([{"type": "text", "text": "Look at this"}, {"type": "image", "source": source}])
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    use = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Rome"}}
    loop = [user("Look"), {"role": "assistant", "content": [use]}, user([result])]
    with (
        serving("--mmproj", str(mmproj), model=model) as seeing,
        anthropic.Anthropic(base_url=seeing.url, api_key="-", max_retries=0) as client,
    ):
        blind = client.messages.count_tokens(model="any", messages=[user("Look at this")]).input_tokens
        for messages in ([look], loop):
            counted = client.messages.count_tokens(model="any", messages=messages).input_tokens
            assert counted > blind + 10
            assert n_prompt(ask(client, messages, max_tokens=4).usage) == counted
            assert n_processed(ask(client, messages, max_tokens=4).usage) <= GUARD


def make_image() -> str:
    data = io.BytesIO()
    PIL.Image.fromarray(np.random.default_rng(1).integers(0, 255, (96, 160, 3), np.uint8)).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()
