"""What the server was started with holds where a request says nothing, and nothing that is sent is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from everwarm.config import Sampling
from everwarm.errors import BadRequest
from everwarm.gateway.openai.schema import ChatBody, CompletionBody, RequestDefaults, unknown_fields
from everwarm.gateway.serving.request_gate import RequestGate
from support.server import Server, serving

MESSAGES = [{"role": "user", "content": "Tell me a story about a river."}]
STORY = {"prompt": "Once upon a time", "n_predict": 12, "return_tokens": True}
FLAGS = (
    "--temp",
    "0.9",
    "--seed",
    "42",
    "-n",
    "5",
    "-a",
    "one,two",
    "--chat-template-kwargs",
    '{"enable_thinking": false}',
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*FLAGS) as server:
        yield server


def test_a_default_holds_unless_the_request_says_otherwise() -> None:
    defaults = RequestDefaults(
        Sampling(temperature=0.1, seed=5, top_k=3),
        max_tokens=7,
        stop=("END",),
        ignore_eos=True,
        cache_prompt=False,
        grammar="root ::= x",
        reasoning_format="none",
        template_kwargs={"a": 1, "b": 1},
    )
    bare = defaults.applied(ChatBody(messages=MESSAGES))
    assert (bare.n_predict, bare.stop, bare.ignore_eos, bare.cache_prompt) == (7, ["END"], True, False)
    assert (bare.grammar, bare.reasoning_format, bare.chat_template_kwargs) == ("root ::= x", "none", {"a": 1, "b": 1})
    sampling = bare.sampling(defaults.sampling)
    assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.1, 5, 3)
    message = ChatBody(
        messages=MESSAGES,
        max_tokens=2,
        stop="X",
        ignore_eos=False,
        cache_prompt=True,
        json_schema={},
        reasoning_format="auto",
        chat_template_kwargs={"b": 2},
        temperature=1.5,
        seed=-1,
    )
    full = defaults.applied(message)
    assert full.chat_template_kwargs == {"a": 1, "b": 2} and full.grammar is None
    assert (full.reply_tokens(99), full.stops(), full.ignore_eos, full.cache_prompt) == (2, ("X",), False, True)
    sampling = full.sampling(defaults.sampling)
    assert (sampling.temperature, sampling.seed, sampling.top_k) == (1.5, None, 3)
    assert RequestDefaults().applied(message) is message


def test_the_servers_seed_makes_replies_the_same(server: Server) -> None:
    first, again = (server.ask("/completion", STORY)["tokens"] for _ in range(2))
    assert first == again
    assert server.ask("/completion", {**STORY, "seed": 43})["tokens"] != first  # the temperature is not 0
    assert len(server.ask("/completion", {"prompt": "Once", "return_tokens": True, "ignore_eos": True})["tokens"]) == 5


def test_a_model_has_all_its_names(server: Server) -> None:
    for name in ("one", "two"):
        assert server.ask("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})["model"] == name
    assert server.get("/v1/models").json["data"][0]["id"] == "one"


def test_values_for_the_template_hold(server: Server) -> None:
    closed = server.rendered(MESSAGES)
    assert closed != server.rendered(MESSAGES, chat_template_kwargs={"enable_thinking": True})
    assert closed == server.rendered(MESSAGES, chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/completion", {"prompt": "x", "n_predict": 1, "foo": 1, "bar": {"a": [1]}}, "foo, bar"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "logit_biases": {}}, "logit_biases"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "typo": 1}, "typo"),
        (
            "/api/chat",
            {"messages": MESSAGES, "stream": False, "options": {"num_predict": 1, "num_ctx": 9}},
            "options.num_ctx",
        ),
        ("/completion", {"prompt": "x", "n_predict": 1, "a\r\nx-evil: 1": 1, "ü,": 2}, "a??x-evil:?1, ??"),
        ("/completion", {"prompt": "x", "n_predict": 1, "stream": True, "foo": None}, "foo"),
    ],
)
def test_a_field_that_nothing_uses_is_named(server: Server, path: str, body: dict[str, Any], ignored: str) -> None:
    reply = server.post(path, body)
    assert reply.status == 200, reply.data
    assert reply.headers["x-everwarm-ignored"] == ignored
    assert "x-evil" not in reply.headers


def test_nothing_is_named_where_all_is_used(server: Server) -> None:
    body = {
        "prompt": "x",
        "n_predict": 1,
        "dry_multiplier": 0.5,
        "xtc_probability": 0.1,
        "samplers": "kt",
        "top_k": 40.0,
    }
    reply = server.post("/completion", body)
    assert reply.status == 200 and "x-everwarm-ignored" not in reply.headers


def test_many_long_names_make_a_short_header(server: Server) -> None:
    reply = server.post("/tokenize", {"content": "x"} | {f"{i}" * 200: 1 for i in range(500)})
    assert reply.status == 200 and len(reply.headers["x-everwarm-ignored"]) < 3000


def test_a_strict_server_refuses_what_it_does_not_know() -> None:
    gate = RequestGate(None, None, None, None, strict=True)  # type: ignore[arg-type]
    request = SimpleNamespace(state=SimpleNamespace())
    parse = gate.noting(request, CompletionBody, lambda _: "read")  # type: ignore[arg-type]
    assert parse(b'{"prompt": "x"}') == "read"
    with pytest.raises(BadRequest, match="does not know foo; leave it out"):
        parse(b'{"prompt": "x", "foo": 1}')


@pytest.mark.parametrize(
    "field",
    [
        {"mirostat": 3},
        {"samplers": ["nothing"]},
        {"samplers": "q"},
        {"dry_sequence_breakers": []},
        {"dry_sequence_breakers": ["x" * 41]},
        {"xtc_probability": 2},
        {"adaptive_decay": 1},
        {"dry_penalty_last_n": 1 << 20},
        {"min_keep": -1},
        {"top_k": 0.5e9},
    ],
    ids=str,
)
def test_a_bad_value_is_the_clients_error(server: Server, field: dict[str, Any]) -> None:
    assert server.post("/completion", {"prompt": "x", "n_predict": 1} | field).status == 400


def test_unknown_fields_are_those_of_the_body_alone() -> None:
    assert unknown_fields(b'{"prompt": {"model_": 1}, "model": "a", "n_predict_": 2}', CompletionBody) == ["n_predict_"]
