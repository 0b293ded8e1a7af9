"""OpenAI's responses over HTTP, with the real client and the embedded model, which thinks and calls tools."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from everwarm.gateway.responses.schema import ResponsesBody, chat_body, offered, own_items
from support.openai_client import openai_client
from support.prompts import responses_tokens
from support.server import GUARD, is_alive, serving, until, words

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "the weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
RECORDED = Path(__file__).parents[2] / "support" / "recorded"


def ask(client: openai.OpenAI, input: Any, **more: Any) -> Any:
    options = {"model": "any", "input": input, "temperature": 0, "max_output_tokens": 200}
    return client.responses.create(**options | more)


def streamed(client: openai.OpenAI, input: Any, **more: Any) -> Any:
    options = {"model": "any", "input": input, "temperature": 0, "max_output_tokens": 200}
    with client.responses.stream(**options | more) as stream:
        numbers = [event.sequence_number for event in stream if hasattr(event, "sequence_number")]
        assert numbers == sorted(numbers) and numbers[0] == 0
        return stream.get_final_response()


def message(response: Any) -> Any:
    """What two responses to the same question share: all but names, times and what was cached."""
    found = response.model_dump(exclude={"id", "created_at", "usage"})
    for item in found["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return found


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


def thoughts(response: Any) -> str:
    return "".join(part.text for item in response.output if item.type == "reasoning" for part in item.content or ())


def test_whole_and_streamed_are_the_same(client):
    for more in ({}, {"tools": [WEATHER]}, {"reasoning": {"effort": "none"}}, {"reasoning": {"summary": "auto"}}):
        for question in ("What is 7 + 8?", "What is the weather in Rome?"):
            whole, parts = ask(client, question, **more), streamed(client, question, **more)
            assert message(whole) == message(parts) and whole.status == "completed"
            assert whole.usage.input_tokens == parts.usage.input_tokens
            assert whole.usage.output_tokens == parts.usage.output_tokens > 0
    assert message(ask(client, "What is 7 + 8?")) != message(ask(client, "What is 7 + 9?")), "this test could not fail"


def test_thinking_is_an_item_of_its_own(client):
    plain = ask(client, "What is 7 + 8?")
    assert kinds(plain) == ["reasoning", "message"] and "15" in plain.output_text and "sum" in thoughts(plain)
    assert plain.output[0].encrypted_content is None and plain.output[0].summary == []
    sealed = ask(client, "What is 7 + 8?", include=["reasoning.encrypted_content"], reasoning={"summary": "auto"})
    assert sealed.output[0].summary[0].text == thoughts(plain) and sealed.output[0].encrypted_content
    for effort in ("none", "minimal"):
        without = ask(client, "What is 7 + 8?", reasoning={"effort": effort})
        assert kinds(without) == ["message"] and "15" in without.output_text


def test_a_reply_that_breaks_off_is_incomplete(client):
    cut = ask(client, "What is 7 + 8?", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[-1].status == "incomplete" and cut.usage.output_tokens == 3
    events = list(ask(client, "What is 7 + 8?", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete" and message(events[-1].response) == message(cut)


def test_events_come_in_the_order_clients_count_on(client):
    events = list(ask(client, "What is the weather in Rome?", tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    once = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    thinking = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
    calling = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", *thinking, "output_item.done"),
        *("output_item.added", *calling, "output_item.done"),
        "completed",
    ]
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert json.loads(deltas) == {"city": "Rome"} == json.loads(events[-1].response.output[-1].arguments)


# loops of tools


def n_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def dumped(response: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]


def test_thinking_that_does_not_come_back_is_read_again(server, client):
    """What ``test_loops`` claims can fail."""
    first = ask(client, "What is the weather in Rome?", tools=[WEATHER], extra_body={"cache_salt": "control"})
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"}
    user = {"role": "user", "content": "What is the weather in Rome?"}
    whole = [user, *dumped(first), output]
    without = [item for item in whole if item.get("type") != "reasoning"]
    read = []
    for input in (without, whole):
        usage = ask(client, input, tools=[WEATHER], extra_body={"cache_salt": "control"}).usage
        read.append(usage.input_tokens_details.cached_tokens)
    assert read[0] < first.usage.total_tokens - GUARD <= read[1]


def test_several_calls_and_custom_tools_go_both_ways():
    shell = {"type": "custom", "name": "shell", "description": "runs", "format": {"type": "text"}}
    inside = {"type": "namespace", "name": "files", "description": "", "tools": [{**WEATHER, "name": "read"}, shell]}
    search = {"type": "web_search", "external_web_access": True}
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"type": "function_call", "call_id": "a", "name": "read", "namespace": "files", "arguments": '{"city": "x"}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "shell", "namespace": "files", "input": 'echo "é"'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]
    chat = chat_body(ResponsesBody(), offered([WEATHER, inside, search]), items)
    assert [tool["function"]["name"] for tool in chat.tools or ()] == ["get_weather", "files__read", "files__shell"]
    calls = [("a", "files__read", '{"city": "x"}'), ("b", "files__shell", '{"input": "echo \\"é\\""}')]
    assert chat.messages == [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "Yes.",
            "tool_calls": [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in calls
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "reasoning_content": "so", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]


# what is kept


def test_a_response_can_be_looked_at_gone_on_from_and_deleted(client):
    first = ask(client, "The code is 4711.", metadata={"a": "b"})
    assert client.responses.retrieve(first.id) == first
    (item,) = client.responses.input_items.list(first.id).data
    assert item.content[0].text == "The code is 4711." and item.role == "user"  # type: ignore[union-attr]
    second = ask(client, "What is the code?", previous_response_id=first.id)
    assert "4711" in second.output_text and second.previous_response_id == first.id
    reference: Any = [{"type": "item_reference", "id": item.id}, {"role": "user", "content": "What is the code?"}]
    assert "4711" in ask(client, reference).output_text
    client.responses.delete(first.id)
    for refused in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            refused(first.id)
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, "What is the code?", previous_response_id=second.id)
    assert missing.value.code == "previous_response_not_found" and first.id in str(missing.value)


def test_instructions_hold_for_one_response_only(client):
    first = ask(client, "Hello.", instructions="You are called Nils.")
    second = ask(client, "Hello again.", previous_response_id=first.id)
    hello, again = ({"role": "user", "content": text} for text in ("Hello.", "Hello again."))
    plain = ask(client, [hello, *dumped(first), again])
    assert second.usage.input_tokens == plain.usage.input_tokens and second.instructions is None


def test_what_is_not_stored_cannot_be_gone_on_from(client):
    unkept = ask(client, "Hello.", store=False)
    for id in (unkept.id, "resp_0", "resp_" + "0" * 24):
        with pytest.raises(openai.NotFoundError, match="not stored here"):
            ask(client, "Hello.", previous_response_id=id)


def test_another_namespace_sees_nothing(client):
    kept = ask(client, "The code is 4711.", extra_body={"cache_salt": "mine"})
    for salt in (None, "yours"):
        with pytest.raises(openai.NotFoundError):
            ask(client, "What is the code?", previous_response_id=kept.id, extra_body={"cache_salt": salt})
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(kept.id, extra_query={"cache_salt": salt} if salt else None)
    assert client.responses.retrieve(kept.id, extra_query={"cache_salt": "mine"}).id == kept.id


def test_after_a_kill_the_next_turn_reads_only_what_is_new_and_other_keys_see_nothing(tmp_path: Path):
    flags = ("--disk-cache", "1GiB", "--state-dir", str(tmp_path / "states"), "--restore-policy", "always")
    calm = {"temperature": 0, "reasoning": {"effort": "none"}}
    with serving(*flags, "--api-key", "one") as server:
        first = {**calm, "input": f"The code is 4711. {words(400)}", "max_output_tokens": 12}
        kept = server.post("/v1/responses", first, Authorization="Bearer one").json
        engine = server.engine_pid
        until(lambda: any((tmp_path / "states").glob("*/state-*.ew")), "the turn's state is on disk, after its KV")
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(30)
        until(lambda: not is_alive(engine), "the engine is gone")
    path, body = (
        f"/v1/responses/{kept['id']}",
        {**calm, "input": "What is the code?", "previous_response_id": kept["id"]},
    )
    with serving(*flags, "--api-key", "two") as server:
        assert server.post("/v1/responses", body, Authorization="Bearer two").status == 404
        assert server.call("DELETE", path, Authorization="Bearer two").status == 404
    with serving(*flags, "--api-key", "one") as server:
        answer = server.post("/v1/responses", body, Authorization="Bearer one").json
        assert "4711" in answer["output"][-1]["content"][0]["text"]
        n_read = answer["usage"]["input_tokens"] - answer["usage"]["input_tokens_details"]["cached_tokens"]
        assert n_read <= 120 + GUARD < kept["usage"]["input_tokens"]
        assert server.call("DELETE", path, Authorization="Bearer one").status == 200
    assert [path.stat().st_mode & 0o077 for path in (tmp_path / "states").glob("responses.sqlite*")] == [0]


# Codex


def _recorded(turn: int) -> dict[str, Any]:
    """What Codex sent, with neutral words in the place of its own, and fewer of them."""
    recording = json.loads((RECORDED / "codex.json").read_text())
    body: dict[str, Any] = recording["requests"][turn - 1]["body"]
    return body


def test_what_codex_sends_is_understood_and_read_once(server):
    headers = {"session_id": "s", "thread_id": "t", "accept": "text/event-stream"}
    prompts, n_reads = [], []
    for turn in (1, 2):
        body = _recorded(turn) | {"temperature": 0, "max_output_tokens": 8}
        reply = server.post("/v1/responses", body, **headers)
        assert reply.status == 200, reply.data
        events = [json.loads(line[6:]) for line in reply.data.split(b"\n") if line.startswith(b"data: ")]
        response = events[-1]["response"]
        assert events[0]["type"] == "response.created" and response["status"] in ("completed", "incomplete")
        assert {tool["type"] for tool in body["tools"]} - {tool["type"] for tool in response["tools"]} == {"web_search"}
        prompts.append(responses_tokens(server, body, []))
        usage = response["usage"]
        assert usage["input_tokens"] == len(prompts[-1])
        n_reads.append(usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"])
    n_new = len(prompts[1]) - n_common(*prompts)
    assert n_reads[1] <= n_new + GUARD < n_reads[0] == len(prompts[0])
    assert server.get(f"/v1/responses/{response['id']}").status == 404  # store: false


def test_all_that_developers_say_reaches_the_model(server):
    """The template takes one system message, at the beginning."""
    body = {"input": [{"role": "developer", "content": text} for text in ("first", "second")]}
    body["input"] += [{"role": "user", "content": "a"}, {"role": "developer", "content": "third"}]
    typed = msgspec.convert(body, ResponsesBody)
    text = server.rendered(chat_body(typed, offered(None), own_items(typed, "0", lambda _: None)).messages)
    assert text.startswith("<|im_start|>system\nfirst\n\nsecond<|im_end|>") and "<|im_start|>user\nthird" in text


# what fails and what is refused


def test_an_engine_that_dies_fails_the_response():
    with serving() as server, openai_client(server) as other:
        endless = {"ignore_eos": True}
        seen = []
        for event in ask(other, "Tell me a story.", max_output_tokens=3000, stream=True, extra_body=endless):
            if len(seen) == 8:
                server.kill_engine()
            seen.append(event)
        assert seen[-1].type == "response.failed" and seen[-1].response.error.code == "server_error"
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(seen[-1].response.id)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "a", "background": True, "store": False}, "background"),
        ({"input": "a", "conversation": "c"}, "previous_response_id"),
        ({"input": []}, "at least one"),
        ({}, "at least one"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "web_search_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input_file"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "send it whole"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"input": "a", "tool_choice": "required", "tools": [{"type": "web_search"}]}, "none of the tools"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f"}, "tools": [WEATHER]}, "'f'"),
        ({"input": "a", "tools": [{"type": "function"}]}, "name"),
        ({"input": "a", "tools": [WEATHER, WEATHER]}, "two tools"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens"),
        ({"input": words(20_000)}, "context"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_said(server, body, words, stream):
    reply = server.post("/v1/responses", {**body, "stream": stream})
    assert reply.status == 400 and words in reply.json["error"]["message"], reply.data


def test_lists_of_items_come_in_pages(server, client):
    many: Any = [{"role": "user", "content": f"{i}"} for i in range(5)]
    id = ask(client, many, max_output_tokens=1).id
    texts = [item.content[0].text for item in client.responses.input_items.list(id, order="asc", limit=2)]
    assert texts == ["0", "1", "2", "3", "4"]
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nothing"):
        assert server.get(f"/v1/responses/{id}/input_items?{query}").status == 400
