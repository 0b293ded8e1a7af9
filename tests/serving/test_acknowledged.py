"""The engine is killed the moment the last frame of a reply has arrived: the prompt is not read again, whoever asks how."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server import GUARD, Server, metric, serving, until, words

THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_ROUNDS = 20 if CAMPAIGN else 1
N_REPLY = 12
N_NEW = 60  # the reply, the next question, and what the template puts around them

Body = dict[str, Any]
Way = Callable[[int], tuple[str, Body]]


def question(seed: int) -> Body:
    return {
        "messages": [{"role": "user", "content": words(400, seed)}],
        "temperature": 0,
        "max_tokens": N_REPLY,
    } | THINKING


def chat(seed: int, **more: Any) -> tuple[str, Body]:
    return "/v1/chat/completions", question(seed) | more


def completion(seed: int, **more: Any) -> tuple[str, Body]:
    return "/completion", {"prompt": words(400, seed), "n_predict": N_REPLY, "temperature": 0} | more


WAYS: dict[str, Way] = {
    "chat": chat,
    "chat, streamed": lambda seed: chat(seed, stream=True),
    "chat, two choices": lambda seed: chat(seed, n=2),
    "chat, deterministic": lambda seed: chat(seed, deterministic=True),
    "completion, streamed": lambda seed: completion(seed, stream=True),
}
if CAMPAIGN:
    WAYS |= {
        "chat, one token": lambda seed: chat(seed, max_tokens=1),
        "chat, until a word": lambda seed: chat(seed, stop=["e"]),
        "completion": completion,
        "completion, no token": lambda seed: completion(seed, n_predict=0),
    }


def read_then_kill(server: Server, path: str, body: Body) -> bytes:
    """Everything up to the last byte; the engine dies as soon as that is here."""
    pid, connection = server.engine_pid, server.connect()
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = _all(response)
        os.kill(pid, signal.SIGKILL)
        assert response.status == 200, data
    finally:
        connection.close()
    server.next_engine([pid])
    until(server.is_ready, "it is back")
    return data


def _all(response: http.client.HTTPResponse) -> bytes:
    """A stream ends for its reader with the frame that says how, before the connection says so."""
    if "event-stream" not in (response.getheader("content-type") or ""):
        return response.read()
    data = b""
    while line := response.readline():
        data += line
        if b'"finish_reason":"' in line.replace(b" ", b"") or b'"stop":true' in line.replace(b" ", b""):
            break
    return data


def n_read(server: Server, path: str, body: Body) -> int:
    timings = server.ask(path, body | {"stream": False})["timings"]
    return int(timings["prompt_n"])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--slots", "3", "--max-requests", "16") as server:
        yield server


@pytest.mark.timeout(3600 if CAMPAIGN else 120)
@pytest.mark.parametrize("name", WAYS)
def test_after_the_last_frame_nothing_is_read_again(server, name):
    """An identical request reads its guard tokens at most, and the next turn what is new."""
    for i in range(N_ROUNDS):
        path, body = WAYS[name](len(WAYS) * i + list(WAYS).index(name))
        data = read_then_kill(server, path, body)
        assert n_read(server, path, body) <= GUARD
        if "messages" in body:
            message = _said(data) if body.get("stream") else json.loads(data)["choices"][0]["message"]["content"]
            turns = [{"role": "assistant", "content": message}, {"role": "user", "content": "And?"}]
            assert n_read(server, path, body | {"messages": [*body["messages"], *turns]}) <= N_NEW + GUARD


def _said(data: bytes) -> str:
    lines = [json.loads(line.removeprefix(b"data: ")) for line in data.splitlines() if line.startswith(b"data: {")]
    return "".join(line["choices"][0]["delta"].get("content") or "" for line in lines)


def test_a_client_that_left_in_the_middle_finds_its_prompt(server):
    path, body = chat(300, stream=True, max_tokens=2000, ignore_eos=True)
    connection = server.connect()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    while not _said(response.readline()):
        pass
    connection.close()
    response.close()
    until(server.is_idle, "it has heard of that")
    pid = server.engine_pid
    server.kill_engine()
    server.next_engine([pid])
    until(server.is_ready, "it is back")
    assert n_read(server, path, body | {"max_tokens": 2, "stream": False}) <= GUARD


@contextlib.contextmanager
def load(server: Server) -> Iterator[None]:
    """Two others whose replies never end, asked again whenever they were cut off."""
    is_over = threading.Event()

    def write(seed: int) -> None:
        path, body = completion(seed, stream=True, n_predict=3000, ignore_eos=True)
        while not is_over.is_set():
            connection = server.connect()
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                while not is_over.is_set() and response.readline():
                    pass
            connection.close()

    others = [threading.Thread(target=write, args=(900 + i,)) for i in range(2)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        is_over.set()
        for other in others:
            other.join()


@pytest.mark.timeout(3600 if CAMPAIGN else 120)
def test_under_load_nothing_that_was_answered_is_read_again(server):
    with load(server):
        for seed in range(N_ROUNDS):
            path, body = chat(400 + seed, stream=True)
            read_then_kill(server, path, body)
            assert n_read(server, path, body) <= GUARD
    until(server.is_idle, "the others are gone")


def test_a_reply_says_where_its_turn_is_and_how_long_it_waited(server):
    timings = server.ask(*chat(600))["timings"]
    assert timings["kept"] == "ram" and timings["keep_ms"] > 0
    text = server.get("/metrics").data.decode()
    assert metric(text, 'everwarm_turns_kept_total{where="ram"}') > 0
    assert metric(text, "everwarm_keep_seconds_count") >= metric(text, 'everwarm_turns_kept_total{where="ram"}')


def test_an_engine_that_keeps_turns_only_later_loses_them(monkeypatch):
    """The control: without waiting, the same tests are red; and the reply says so."""
    monkeypatch.setenv("EVERWARM_TEST_HOOK", "support.offload_hook:keep_late")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    with serving() as server:
        path, body = chat(1)
        reply = json.loads(read_then_kill(server, path, body))
        assert reply["timings"]["kept"] == "none" and n_read(server, path, body) > 300
