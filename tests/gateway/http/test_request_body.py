"""Bodies: weighed before they are parsed, worked on beside the event loop when large, read within a budget and a time."""

import asyncio
import itertools
import json
import re
import threading
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from everwarm.errors import BadRequest, HttpError, Overloaded
from everwarm.gateway.chat import jinja_template
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.stable_points import common_prefix
from everwarm.gateway.http import json_scan
from everwarm.gateway.http.json_scan import check_weight, weights
from everwarm.gateway.http.json_weight import MAX_WEIGHT, Weight, most_weight
from everwarm.gateway.http.request_body import LARGE_BYTES, SMALL_BYTES, BodyReader
from everwarm.gateway.ollama.schema import Call, Function, OllamaMessage, messages_of
from everwarm.gateway.openai.schema import ChatBody, read
from everwarm.gateway.responses.schema import ReasoningItem, chat_messages

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
ANY = st.recursive(
    st.text('ab\\"{}[],: é\n', max_size=30) | st.integers(0, 999),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\:', max_size=6), inner, max_size=4),
    max_leaves=20,
)


def chat(content: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":' + content + b"}]}"


# what a body weighs


@given(ANY, st.booleans(), st.sampled_from([8, 64, 1 << 18]))
def test_what_stands_in_strings_is_only_text(value: Any, ascii: bool, slice_bytes: int):
    data = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_scan, "SLICE_BYTES", slice_bytes)
        weight = sum(weights(data), Weight())
    outside = STRING.sub(b"", data)
    n_containers = outside.count(b"{") + outside.count(b"[")
    assert (weight.n_containers, weight.n_keys, weight.n_commas) == (
        n_containers,
        outside.count(b":"),
        outside.count(b","),
    )
    assert weight.n_text_bytes + weight.n_base64_bytes == len(data)
    assert weight.total <= most_weight(data).total


ABSURD = {
    "objects": chat(b"[" + b",".join([b"{}"] * 2_000_000) + b"]"),
    "unread": b'{"junk":[' + b",".join([b"[]"] * 2_000_000) + b'],"messages":[{}]}',
    "keys": chat(b"{" + b",".join([b'"":1'] * 1_000_000) + b"}"),
    "numbers": chat(b"[" + b",".join([b"1"] * 2_000_000) + b"]"),
    "text": chat(b'"' + b"a b " * 2_500_000 + b'"'),
    "escapes": chat(b'"' + b"\\n" * 5_000_000 + b'"'),
    "blanks": b" " * 9_000_000 + chat(b'"a"'),
    "a long number": chat(b"1" * 300_000),
    "depth": chat(b"[" * 300_000 + b"]" * 300_000),
    "a string that never ends": chat(b'"' + b"a b\\" * 2_500_000),
}
FINE = {
    "an image": chat(b'"data:image/png;base64,' + b"aB3/" * 5_000_000 + b'"'),
    "a conversation of 20,000 messages": json.dumps(
        {"messages": [{"role": "user", "content": "Well, {then} [a], 'b': c"}] * 20_000}
    ).encode(),
    "a megabyte of code": chat(json.dumps("def f(x): return {'a': [x, 1], 'b': g(x)}\n" * 25_000).encode()),
    "JSON in a string": chat(json.dumps(json.dumps([{"a": i, "b": [1, {"c": 2}]} for i in range(50_000)])).encode()),
    "300,000 tokens": b'{"prompt":[' + b",".join([b"31999"] * 300_000) + b"]}",
}


@pytest.mark.parametrize("kind", ABSURD)
def test_absurd_bodies_are_refused_unparsed_at_little_cost(kind: str):
    data = ABSURD[kind]
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="the body"):
            check_weight(data)
        assert tracemalloc.get_traced_memory()[1] < 160 * json_scan.SLICE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", FINE)
def test_large_bodies_that_make_sense_are_taken(kind: str):
    check_weight(FINE[kind])


def test_what_is_taken_makes_few_objects_for_its_bytes():
    """The most objects that a body may have: memory is bounded by the weight, not by what a byte can become."""
    n = next(n for n in itertools.count(1000, 1000) if Weight(3 * n, 0, n, 0, n).total > MAX_WEIGHT) - 2000
    data = chat(b"[" + b",".join([b"{}"] * n) + b"]")
    check_weight(data)
    tracemalloc.start()
    try:
        body = read(data, ChatBody)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_WEIGHT
    finally:
        tracemalloc.stop()
    assert len(body.messages[0]["content"]) == n


def test_the_reason_of_a_refusal_does_not_quote_megabytes():
    with pytest.raises(BadRequest) as refused:
        read(json.dumps({"messages": [{}], "reasoning_format": "x" * 1_000_000}).encode(), ChatBody)
    assert len(str(refused.value)) < 600
    assert "$.reasoning_format" in str(refused.value)


# reading them


def request(pieces: AsyncIterator[bytes], client: str = "a", length: int | None = None) -> Request:
    async def receive() -> dict[str, Any]:
        piece = await anext(pieces, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "client": (client, 1), "state": {}}
    return Request(scope, receive)


async def of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def thread_of(data: bytes | bytearray) -> str:
    return threading.current_thread().name


@pytest.mark.parametrize(
    ("data", "leaves"),
    [
        (b"x" * SMALL_BYTES, False),
        (b"x" * LARGE_BYTES, False),
        (b"x" * (LARGE_BYTES + 1), True),
        (b"[" + b"{}," * (LARGE_BYTES // 4) + b"0]", False),
        (b"{" * LARGE_BYTES, True),  # too deep: this is found out beside the loop as well
    ],
)
def test_large_bodies_are_weighed_and_parsed_beside_the_loop(data: bytes, leaves: bool):
    async def parsed() -> None:
        reader = BodyReader(1 << 30)
        try:
            if data.startswith(b"{{"):
                with pytest.raises(BadRequest, match="nested too deeply"):
                    await reader.read(request(of(data)), thread_of)
                return
            where, n_bytes = await reader.read(asked := request(of(data)), thread_of)
            assert (where.startswith("everwarm-bodies"), n_bytes) == (leaves, len(data))
            prepared = await reader.for_request(asked, lambda: thread_of(b""))
            assert prepared.startswith("everwarm-bodies") == leaves
            assert prepared != threading.main_thread().name
        finally:
            reader.close()

    asyncio.run(parsed())


def test_there_is_room_for_so_many_bytes_and_half_of_it_for_one_client():
    async def read_some() -> None:
        reader, gate = BodyReader(100), asyncio.Event()

        async def slowly(first: bytes) -> AsyncIterator[bytes]:
            yield first
            await gate.wait()

        def start(client: str, n_bytes: int) -> asyncio.Task[Any]:
            return asyncio.create_task(reader.read(request(slowly(b"x" * n_bytes), client), bytes))

        running = [start("a", 40), start("b", 40)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert reader.n_bytes == 80
        with pytest.raises(Overloaded, match="from a"):
            await reader.read(request(of(b"x" * 11), "a"), bytes)
        with pytest.raises(Overloaded, match="from a"):  # it says so before anything was read
            await reader.read(request(of(), "a", length=11), bytes)
        with pytest.raises(Overloaded, match="80 bytes"):
            await reader.read(request(of(b"x" * 21), "c"), bytes)
        _, n_bytes = await reader.read(request(of(b"x" * 10, b"y" * 10), "c"), bytes)
        assert n_bytes == 20
        gate.set()
        await asyncio.gather(*running)
        assert reader.n_bytes == 0

    asyncio.run(read_some())


def test_a_body_that_comes_too_slowly_is_not_waited_for():
    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def wait() -> None:
        reader = BodyReader(100, first_s=0.05)
        with pytest.raises(HttpError, match="1 bytes of the body arrived") as refused:
            await reader.read(request(never()), bytes)
        assert refused.value.status == 408
        assert reader.n_bytes == 0

    asyncio.run(wait())


# what is made of them


def test_a_template_that_makes_far_more_of_a_conversation_is_stopped(monkeypatch):
    monkeypatch.setattr(jinja_template, "MAX_PROMPT_CHARS", 100_000)
    inner: Any = [1] * 200
    for _ in range(90):
        inner = [inner]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": inner}}}]
    hello = [{"role": "user", "content": "hi"}]
    for source in ("{{ tools | tojson(indent=40) }}", "{% for i in range(9000) %}{{ tools | tojson }}{% endfor %}"):
        with pytest.raises(BadRequest, match="more than 100,000 characters"):
            ChatTemplate(source).conversation(hello, tools=tools)
    assert ChatTemplate("{{ tools | tojson }}").render(hello, tools=tools).count("[") == 92


@pytest.mark.parametrize("n", [10, 20_000])
def test_json_in_a_template_is_the_same_however_large(n: int):
    sent = {"a": list(range(n)), "b": {"c": None, "d": "é"}}
    assert ChatTemplate("{{ x | tojson }}").render([], x=sent) == json.dumps(sent, ensure_ascii=False)


def test_calls_whose_arguments_are_json_without_end_are_refused():
    calls = [{"type": "function", "function": {"name": "f", "arguments": "[" + "{}," * 400_000 + "{}]"}}]
    each_call = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    shown = ChatTemplate(f"{{% for m in messages %}}{each_call}{{% endfor %}}")
    with pytest.raises(BadRequest, match="is parsed at once"):
        shown.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}])
    deep = [{"type": "function", "function": {"name": "f", "arguments": "[" * 5000 + "]" * 5000}}]
    text = shown.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": deep}])
    assert json.loads(text) == "[" * 5000 + "]" * 5000  # what cannot be read stays as it is


@given(st.text("ab", max_size=12), st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_what_two_texts_share_is_found_block_by_block(same: str, a: str, b: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("everwarm.gateway.chat.stable_points._BLOCK", 4)
        n = next(
            (i for i, (x, y) in enumerate(zip(same + a, same + b, strict=False)) if x != y),
            len(same) + min(len(a), len(b)),
        )
        assert common_prefix(same + a, same + b) == n


def test_results_of_tools_find_their_calls_in_one_pass():
    calls = [Call(Function(f"tool{i % 3}"), id=f"c{i}") for i in range(6)]
    results = [
        OllamaMessage("tool", "", tool_call_id="c4"),
        OllamaMessage("tool", "", tool_name="tool1"),
        *(OllamaMessage("tool", "") for _ in range(5)),
    ]
    told = messages_of([OllamaMessage("assistant", "", tool_calls=calls), *results])[1:]
    assert [message.get("tool_call_id") for message in told] == ["c4", "c1", "c0", "c2", "c3", "c5", None]


def test_many_thoughts_become_one_text():
    (message,) = chat_messages([ReasoningItem(content=[{"text": f"{i},"}]) for i in range(5000)])
    assert message["reasoning_content"] == "".join(f"{i}," for i in range(5000))
