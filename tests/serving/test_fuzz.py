"""Bodies of every kind, from the schemas of the bodies themselves: never an accident, never a dead engine."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.gateway.openai.schema import ChatBody, CompletionBody, DetokenizeBody, SlotBody, TokenizeBody
from support.fuzz import FUZZ, bodies
from support.server import Server, serving

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


def assert_no_accident(server: Server, path: str, body: bytes) -> None:
    reply = server.post(path, body)
    assert reply.status in (200, 400), f"{reply.status} {reply.data!r}"
    if reply.status == 400:
        error = reply.json["error"]
        assert error["message"] and error.get("reason", error["code"]) in (
            "invalid_request_error",
            "exceed_context_size_error",
        )


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
