"""Whoever waits for a model: what is said meanwhile, who leaves, who shares a load, and what is left when all must end."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from everwarm.demo import EMBEDDED_MODEL
from support.models import tiny_model
from support.server import Server, frozen, is_alive, serving_models, until, workers_of

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
TOKENS = list(range(60, 160))
MODELS = {"small": tiny_model("llama", width=64), "other": tiny_model("mamba2", width=64), "tiny": EMBEDDED_MODEL}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        shutil.copy(model, path / f"{name}.gguf")
    return path


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    with serving_models(folder) as server:
        yield server


def begun(server: Server, path: str, body: Any = None) -> http.client.HTTPConnection:
    """A request that was sent; whoever closes the connection leaves."""
    connection = server.connect()
    data = None if body is None else json.dumps(body)
    connection.request("POST" if data else "GET", path, data, {"Content-Type": "application/json"})
    return connection


def completion(model: str, n: int = 8, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": TOKENS, "n_predict": n, "temperature": 0, "ignore_eos": True} | more


def n_waiting(server: Server, model: str) -> int:
    return int(server.listed(model)["n_waiting"])


# while a model loads


def test_a_stream_says_how_far_its_model_is_loaded(server):
    golden = server.ask("/completion", completion("other"))["content"]
    server.complete("small", TOKENS)
    before = server.engine_pids
    connection = begun(server, "/completion", completion("other", stream=True))
    with frozen(server.next_engine(before)):
        response = connection.getresponse()
        lines = [response.readline() for _ in range(4)]
        assert server.status_of("other") == "loading"
    comments = [line for line in lines if line.strip()]
    assert response.status == 200 and all(line.startswith(b":") for line in comments)
    assert any(line.startswith(b": loading other ") for line in comments), comments
    rest = [json.loads(line[6:]) for line in response.read().split(b"\n\n") if line.startswith(b"data: ")]
    connection.close()
    assert "".join(event["content"] for event in rest) == golden and rest[-1]["stop"]


def test_a_load_that_fails_after_the_first_comment_is_an_event(server, folder):
    (folder / "cut.gguf").write_bytes(MODELS["small"].read_bytes()[:-16])
    server.get("/models?reload=1")
    server.complete("small", TOKENS)
    before = server.engine_pids
    connection = begun(server, "/completion", completion("cut", stream=True))
    with frozen(server.next_engine(before)):
        response = connection.getresponse()
        assert response.status == 200 and response.readline().startswith(b":")
    rest = response.read()
    connection.close()
    (event,) = (json.loads(line[6:]) for line in rest.splitlines() if line.startswith(b"data: "))
    assert event["error"]["reason"] == "unavailable_error" and "file bounds" in event["error"]["message"]
    (folder / "cut.gguf").unlink()
    server.get("/models?reload=1")


def test_the_openai_client_streams_across_a_swap(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for model, says, pause_s in (("tiny", "Everwarm Tiny", 0), ("other", "", 0), ("tiny", "Everwarm Tiny", 1.2)):
            pausing = threading.Thread(target=_pause, args=(server, server.engine_pids, pause_s))
            pausing.start()
            chunks = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Who are you?"}],
                temperature=0,
                max_tokens=24,
                stream=True,
                extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            )
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
            pausing.join()
            assert says in "".join(pieces) and "".join(pieces) and server.status_of(model) == "loaded"


def _pause(server: Server, before: list[int], pause_s: float) -> None:
    """Hold the next engine up; more than a second, and comments come before its answer."""
    with frozen(server.next_engine(before)):
        time.sleep(pause_s)


def test_an_engine_that_is_killed_while_it_loads_is_started_again(server):
    golden = server.complete("small", TOKENS)["tokens"]
    server.complete("other", TOKENS)
    before = server.engine_pids
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, "small", TOKENS)
        os.kill(server.next_engine(before), signal.SIGKILL)
        assert answer.result()["tokens"] == golden


def test_a_model_that_is_unloaded_finishes_what_it_says(server):
    connection = begun(server, "/completion", completion("small", 400, stream=True))
    response = connection.getresponse()
    response.readline()
    assert server.ask("/models/unload", {"model": "small"}) == {"success": True}
    events = [json.loads(line[6:]) for line in response.read().split(b"\n\n") if line.startswith(b"data: ")]
    connection.close()
    assert events[-1]["tokens_predicted"] == 400
    until(lambda: not server.engine_pids, "then it is unloaded")


# who leaves, and who shares


def waiting_requests() -> list[Any]:
    talk = {"model": "other", "messages": [{"role": "user", "content": "hi"}]}
    return [
        pytest.param("/completion", completion("other"), id="whole"),
        pytest.param("/completion", completion("other", stream=True), id="streamed"),
        pytest.param("/v1/chat/completions", talk, id="chat"),
        pytest.param("/v1/chat/completions", talk | {"stream": True}, id="streamed-chat"),
        pytest.param("/tokenize", {"model": "other", "content": "hi"}, id="tokenize"),
        pytest.param("/slots/0?action=erase", {"model": "other"}, id="slot"),
        pytest.param("/apply-template", talk, id="template"),
    ]


@pytest.mark.parametrize(("path", "body"), waiting_requests())
def test_who_leaves_while_waiting_leaves_the_queue(server, path, body):
    """The model that is busy is not given up for nobody."""
    until(lambda: n_waiting(server, "other") == 0, "the queue is empty")
    server.complete("small", TOKENS)
    pids, n_loads = server.engine_pids, server.n_loads
    busy = begun(server, "/completion", completion("small", 3900, stream=True))
    try:
        busy.getresponse().readline()
        waiting = begun(server, path, body)
        until(lambda: n_waiting(server, "other") == 1, "it waits")
        waiting.close()
        until(lambda: n_waiting(server, "other") == 0, "it has left")
    finally:
        busy.close()
    until(lambda: server.listed("small")["n_running"] == 0, "nobody is left")
    time.sleep(0.3)
    assert (server.engine_pids, server.n_loads) == (pids, n_loads)


def test_many_at_once_share_few_loads(server):
    golden = {name: server.complete(name, TOKENS)["tokens"] for name in MODELS}
    assert len({tuple(tokens) for tokens in golden.values()}) == len(MODELS), "this test could not fail"
    names, before = [*MODELS] * 8, server.n_loads
    random.Random(0).shuffle(names)
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: server.complete(name, TOKENS), names))
    assert [answer["tokens"] for answer in answers] == [golden[name] for name in names]
    print(f"{len(names)} requests at once: {server.n_loads - before} loads")
    assert server.n_loads - before <= 6


@pytest.mark.skipif(not CAMPAIGN, reason="waits for patience to end")
def test_a_model_that_is_never_idle_gives_way(server):
    stop = threading.Event()

    def chatter() -> int:
        n = 0
        while not stop.is_set():
            n += len(server.complete("small", TOKENS, 200, deterministic=False)["tokens"]) == 200
        return n

    server.complete("small", TOKENS)
    with ThreadPoolExecutor(3) as pool:
        chatting = [pool.submit(chatter) for _ in range(3)]
        began = time.monotonic()
        server.complete("other", TOKENS)
        waited_s = time.monotonic() - began
        stop.set()
        assert all(future.result() > 0 for future in chatting)
    assert 3 < waited_s < 15


@pytest.mark.skipif(not CAMPAIGN, reason="waits until silence is taken for death")
@pytest.mark.parametrize("who", ["loading", "leaving"])
def test_an_engine_that_hangs_during_a_swap_is_replaced(server, who):
    golden = server.complete("other", TOKENS)["tokens"]
    server.complete("small", TOKENS)
    before = server.engine_pids
    with ThreadPoolExecutor(1) as pool:
        if who == "leaving":
            os.kill(before[0], signal.SIGSTOP)
        answer = pool.submit(server.complete, "other", TOKENS)
        if who == "loading":
            os.kill(server.next_engine(before), signal.SIGSTOP)
        assert answer.result()["tokens"] == golden
    assert not is_alive(before[0]) and len(server.engine_pids) == 1


# the end


def _swap(server: Server) -> Any:
    try:
        return server.post("/completion", completion("other")).status
    except (OSError, http.client.HTTPException):
        return "cut off"


def _end_during_a_swap(folder: Path, sig: signal.Signals, moment: Callable[[Server], object]) -> tuple[int, Any]:
    """The exit code, and what whoever waited was told."""
    with serving_models(folder) as server, ThreadPoolExecutor(1) as pool:
        server.complete("small", TOKENS)
        gateway = server.process
        assert workers_of(gateway.pid) == server.engine_pids != []
        told = pool.submit(_swap, server)
        moment(server)
        gateway.send_signal(sig)
        code = gateway.wait(30)
        until(lambda: not workers_of(gateway.pid), "no engine is left")
        assert "Traceback" not in server.log and "never retrieved" not in server.log, server.log
        return code, told.result()


def _starting(server: Server) -> int:
    """Until the next engine is there and far from being ready."""
    until(lambda: server.status_of("other") == "loading" and bool(server.engine_pids), "it is loading")
    (pid,) = workers_of(server.process.pid)
    return pid


def test_a_swap_that_hangs_does_not_keep_the_server_from_stopping(folder):
    code, told = _end_during_a_swap(folder, signal.SIGTERM, lambda server: os.kill(_starting(server), signal.SIGSTOP))
    assert code == 0 and told == 503


def test_a_gateway_that_is_killed_leaves_no_engines(folder):
    assert _end_during_a_swap(folder, signal.SIGKILL, _starting) == (-signal.SIGKILL, "cut off")


@pytest.mark.skipif(not CAMPAIGN, reason="many servers")
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_a_swap_may_be_interrupted_at_any_moment(folder, sig):
    rng = random.Random(1)
    for _ in range(25):
        delay_s = rng.random() * 0.6
        code, told = _end_during_a_swap(folder, sig, lambda _, delay_s=delay_s: time.sleep(delay_s))
        wanted = (200, 503) if sig is signal.SIGTERM else (200, "cut off")
        assert code == (0 if sig is signal.SIGTERM else -sig) and told in wanted
