"""Thinking and tool calls over HTTP, with the real client and the embedded model, which does both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from everwarm.gateway.chat.chat_template import ChatTemplate
from support.loops import FUNCTION as WEATHER
from support.server import Server, serving

NO_THINKING = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    options = {"model": "any", "messages": messages, "temperature": 0, "max_tokens": 200}
    return client.chat.completions.create(**options | more)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def streamed(client: openai.OpenAI, messages: list[Any], **more: Any) -> dict[str, Any]:
    """What the deltas add up to."""
    found: dict[str, Any] = {"reasoning_content": "", "content": "", "calls": {}, "finish": None}
    for chunk in ask(client, messages, stream=True, **more):
        for choice in chunk.choices:
            found["finish"] = choice.finish_reason or found["finish"]
            found["content"] += choice.delta.content or ""
            found["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                at = found["calls"].setdefault(call.index, {"id": None, "name": "", "arguments": ""})
                at["id"] = call.id or at["id"]
                at["name"] += call.function.name or ""
                at["arguments"] += call.function.arguments or ""
    return found


def test_thinking_is_told_apart_from_the_answer(client):
    whole = ask(client, [user("What is 7 + 8?")]).choices[0].message
    assert "15" in whole.content and "think" not in whole.content
    assert "sum" in whole.reasoning_content
    parts = streamed(client, [user("What is 7 + 8?")])
    assert (parts["content"], parts["reasoning_content"]) == (whole.content, whole.reasoning_content)
    plain = ask(client, [user("What is 7 + 8?")], extra_body={"reasoning_format": "none"}).choices[0].message
    assert "</think>" in plain.content and not getattr(plain, "reasoning_content", None)
    without = ask(client, [user("What is 7 + 8?")], **NO_THINKING).choices[0].message
    assert "15" in without.content and not getattr(without, "reasoning_content", None)


def test_a_tool_is_called_whole_and_streamed_alike(client):
    messages = [user("What is the weather in Rome?")]
    whole = ask(client, messages, tools=[WEATHER], **NO_THINKING).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"} and not whole.message.content
    parts = streamed(client, messages, tools=[WEATHER], **NO_THINKING)
    assert parts["finish"] == "tool_calls" and parts["content"] == ""
    assert parts["calls"][0]["name"] == "get_weather" and parts["calls"][0]["id"].startswith("call_")
    assert parts["calls"][0]["arguments"] == call.function.arguments
    plain = ask(client, messages, tools=[WEATHER], tool_choice="none", **NO_THINKING).choices[0]
    assert plain.message.tool_calls is None and "get_weather" in plain.message.content


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ ARGUMENTS }}{% endfor %}{% endfor %}"
TEXT_OF_TEXT = CALLS.replace("ARGUMENTS", "c.function.arguments | tojson")
AS_IT_IS = CALLS.replace("ARGUMENTS", "c.function.arguments")


@pytest.mark.parametrize("source", [TEXT_OF_TEXT, AS_IT_IS])
def test_arguments_come_as_the_template_takes_them(source):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    output = ChatTemplate(source).render([user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert output == '{"city": "Rome"}'
