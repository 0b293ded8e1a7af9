"""One stream loop for every dialect: what a token passes on its way, and how errors are written on it."""

import asyncio
import gc
import json
from types import AsyncGeneratorType
from typing import Any

import pytest
from tests.support.gateway import REPLY, FakeGateway

from everwarm.engine.process import messages as m
from everwarm.gateway.serving import generate

HELLO = [{"role": "user", "content": "Hi"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "stream": True},
    "/v1/completions": {"prompt": "Hi", "stream": True},
    "/completion": {"prompt": "Hi", "stream": True},
    "/v1/responses": {"input": "Hi", "stream": True},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9, "stream": True},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hi", "raw": True},
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_token_passes_three_generators_between_the_engine_and_the_socket(path, monkeypatch):
    """Those that are alive while a message of the engine is on its way."""
    seen: list[list[str]] = []

    class Looking(generate.ReplyEvent, frozen=True):
        def __post_init__(self) -> None:
            alive = [
                each for each in gc.get_objects() if type(each) is AsyncGeneratorType and each.ag_frame is not None
            ]
            ours = ("everwarm/gateway/", "support/gateway.py")
            inside = [each for each in alive if any(name in each.ag_frame.f_code.co_filename for name in ours)]
            seen.append([each.__qualname__ for each in inside if not each.__qualname__.endswith(("within", "watched"))])

    monkeypatch.setattr(generate, "ReplyEvent", Looking)
    answer = asyncio.run(FakeGateway().post(path, STREAMS[path]))
    assert answer.status_code == 200 and "teen" in answer.text
    assert len(seen) == len(REPLY)
    for names in seen:
        assert sorted(names) == ["FakeSupervisor.stream", "Replies._frames", "generate"]


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        ("/v1/chat/completions", 'data: {"error":{"message":"broken","type":"server_error","param":null,"code":"oops"'),
        ("/completion", 'data: {"error":{"message":"broken","type":"server_error","param":null,"code":500'),
        ("/v1/responses", "event: response.failed\ndata: {"),
        ("/v1/messages", 'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"broken"}'),
        ("/api/chat", '{"error":"broken"}\n'),
    ],
)
def test_what_fails_in_the_midst_of_a_stream_is_told_in_the_words_of_its_dialect(path, ending):
    gateway = FakeGateway()
    gateway.supervisor.reply = [*REPLY[:2], m.Failed(1, 500, "oops", "broken")]
    answer = asyncio.run(gateway.post(path, STREAMS[path]))
    assert answer.status_code == 200 and "Four" in answer.text
    assert ending in answer.text, answer.text


@pytest.mark.parametrize("path", STREAMS)
def test_what_fails_before_the_first_frame_keeps_its_status(path):
    gateway = FakeGateway()
    gateway.supervisor.reply = [m.Failed(1, 429, "rate_limit_error", "later")]
    answer = asyncio.run(gateway.post(path, STREAMS[path]))
    assert answer.status_code == 429 and "later" in json.dumps(answer.json())
