"""Many clients, clients that leave, slow ones, and an engine that dies among them. Long forms with EVERWARM_CAMPAIGN=1."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from everwarm.demo.tiny import TinySpec, write_tiny
from support.server import Server, children, is_alive, metric, serving, until, words

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_HANGUPS = 1000 if CAMPAIGN else 60
LOAD_S = 60.0 if CAMPAIGN else 2.0
N_CLIENTS = 64
MAX_RSS_BYTES = 1200 << 20
QUESTION = {
    "messages": [{"role": "user", "content": "Who are you?"}],
    "temperature": 0,
    "max_tokens": 24,
    "chat_template_kwargs": {"enable_thinking": False},
}
ENDLESS = {"prompt": "Once upon a time", "n_predict": 3500, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def threads_before() -> set[threading.Thread]:
    """Of other tests in this process."""
    return set(threading.enumerate())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--max-requests", "32") as server:
        yield server


def answer(server: Server) -> str:
    return str(server.ask("/v1/chat/completions", QUESTION)["choices"][0]["message"]["content"])


def request_bytes(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    return head.encode() + b"\r\n" + data


@contextlib.contextmanager
def asking(server: Server, path: str, body: Any) -> Iterator[socket.socket]:
    """A bare connection with a request on it."""
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(request_bytes(path, body))
        yield sock


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_full_again(server: Server) -> bool:
    """Whether as many requests as ever may come in: the limit of 32 was given back whole."""
    with ThreadPoolExecutor(32) as pool:
        body = QUESTION | {"max_tokens": 1}
        return all(r.status == 200 for r in pool.map(lambda _: server.post("/v1/chat/completions", body), range(32)))


# leaving


def hang_up(server: Server, rng: random.Random) -> None:
    """Ask something, short or long, whole or streamed, and leave at a random moment, politely or not."""
    prompt = words(rng.choice([5, 50, 900]), rng.randrange(20))
    body = {"prompt": prompt, "n_predict": rng.choice([1, 20, 2000]), "stream": rng.random() < 0.5, "ignore_eos": True}
    body["return_progress"] = rng.random() < 0.3
    data = request_bytes("/completion", body)
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        time.sleep(rng.choice([0, 0.01, 0.1, 0.4]) * rng.random())
        if rng.random() < 0.3:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset instead of an end
        elif rng.random() < 0.3:
            sock.settimeout(0.2)
            with contextlib.suppress(OSError):
                sock.recv(200)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(server):
    golden, pid = answer(server), server.engine_pid
    rngs = [random.Random(seed) for seed in range(N_HANGUPS)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda rng: hang_up(server, rng), rngs))
    until(server.is_idle, "no slot is processing and nobody waits")
    assert is_full_again(server)
    assert answer(server) == golden and server.engine_pid == pid


def test_a_client_that_leaves_in_mid_stream_is_no_error_in_the_log(server):
    before = len(server.message)
    with asking(server, "/completion", ENDLESS | {"stream": True}) as sock:
        assert sock.recv(1000)
    until(server.is_idle, "the slot is free")
    answer(server)
    assert "Traceback" not in "".join(server.message[before:])


def test_a_client_that_leaves_while_waiting_gives_up_its_place(server):
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(asking(server, "/completion", ENDLESS))
        until(lambda: all(slot["is_processing"] for slot in server.get("/slots").json), "both slots are busy")
        with contextlib.ExitStack() as waiting:
            for _ in range(8):
                waiting.enter_context(asking(server, "/completion", ENDLESS))
            time.sleep(0.3)
    until(server.is_idle, "nobody runs or waits")


# too many


def hammer(server: Server, until_s: float, seed: int, seen: list[tuple[int, bool]]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        body = {
            "prompt": words(rng.choice([5, 60]), rng.randrange(10)),
            "n_predict": rng.choice([1, 8]),
            "stream": False,
        }
        body["stream"] = rng.random() < 0.5
        reply = server.post("/completion", body)
        seen.append((reply.status, "retry-after" in reply.headers))
        if reply.status == 429:
            time.sleep(0.05)


def test_under_more_load_than_it_takes_it_refuses_politely(server):
    golden, pid, seen = answer(server), server.engine_pid, []
    deadline = time.monotonic() + LOAD_S
    with ThreadPoolExecutor(N_CLIENTS) as pool:
        list(pool.map(lambda seed: hammer(server, deadline, seed, seen), range(N_CLIENTS)))
    found = Counter(status for status, _ in seen)
    assert found[200] > 0 and found[429] > 0 and set(found) == {200, 429}, found
    assert all(may_retry for status, may_retry in seen if status == 429)
    until(server.is_idle, "everything is done")
    assert answer(server) == golden and server.engine_pid == pid
    assert rss_bytes(pid) < MAX_RSS_BYTES and rss_bytes(server.process.pid) < MAX_RSS_BYTES


def test_whoever_is_refused_is_told_when_to_come_back(server):
    with contextlib.ExitStack() as stack:
        for _ in range(32):
            stack.enter_context(asking(server, "/completion", ENDLESS))
        until(lambda: server.post("/completion", ENDLESS | {"n_predict": 1}).status == 429, "nobody more is admitted")
        until(lambda: metric(server.get("/metrics").data.decode(), "llamacpp:requests_deferred") >= 30, "it is known")
        until(lambda: int(server.post("/completion", ENDLESS).headers["retry-after"]) > 1, "the engine has reported it")
        refused = [server.post("/completion", ENDLESS) for _ in range(40)]
        waits = [int(reply.headers["retry-after"]) for reply in refused]
        assert {reply.status for reply in refused} == {429} and min(waits) >= 1 and 1 < max(waits) <= 600
        assert all(f"in about {s} s" in r.json["error"]["message"] for r, s in zip(refused, waits, strict=True))
    until(server.is_idle, "nobody runs or waits")


def test_a_reader_that_does_not_read_holds_up_nobody_else(server):
    wide = ENDLESS | {"stream": True, "n_probs": 100, "n_predict": 1500}
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request_bytes("/completion", wide))
        for _ in range(5):
            assert answer(server)
    until(server.is_idle, "its slot is free")


# an engine that dies


def test_a_killed_engine_is_noticed_replaced_and_answers_as_before():
    with serving("--max-requests", "32") as server:
        golden, dead, seen = answer(server), server.engine_pid, []
        stop = time.monotonic() + 2
        with ThreadPoolExecutor(9) as pool:
            clients = [pool.submit(hammer, server, stop, seed, seen) for seed in range(8)]
            time.sleep(0.5)
            os.kill(dead, signal.SIGKILL)
            until(lambda: server.get("/ready").status == 503 or dead not in server.engine_pids, "it is noticed")
            while (ready := server.get("/ready")).status == 503:
                assert server.get("/health").status == 200 and "retry-after" in ready.headers
            for client in clients:
                client.result()
        assert {status for status, _ in seen} <= {200, 429, 503}
        assert all(may_retry for status, may_retry in seen if status != 200)
        assert server.engine_pid != dead and answer(server) == golden
        assert server.get("/ready").json["restarts"] == 1 and not is_alive(dead)


def test_a_stopped_engine_is_not_ready_within_two_seconds_and_may_go_on(server):
    pid = server.engine_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: server.get("/ready").status == 503, "it is not ready", 2)
        assert server.get("/ready").json["status"] == "stalled" and server.get("/health").status == 200
        assert server.get("/metrics").status == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    until(server.is_ready, "it goes on")
    assert answer(server) and server.engine_pid == pid


# stopping


def test_told_to_stop_it_finishes_a_stream_and_exits_with_0():
    with serving() as server:
        engine = server.engine_pid
        body = ENDLESS | {"stream": True, "n_predict": 400}
        with asking(server, "/completion", body) as sock:
            got = sock.recv(1000)
            server.process.send_signal(signal.SIGTERM)
            while piece := sock.recv(1 << 16):
                got += piece
        last = json.loads(got.rpartition(b"data: ")[2].partition(b"\n\n")[0])
        assert last["stop"] is True and last["tokens_predicted"] == 400
        assert server.process.wait(20) == 0 and not is_alive(engine)


def test_told_to_stop_it_does_not_wait_longer_than_its_grace():
    with serving("--grace", "1") as server:
        engine = server.engine_pid
        with asking(server, "/completion", ENDLESS | {"stream": True, "prompt": words(600, 3)}) as sock:
            assert sock.recv(1000)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(15) == 0
        assert not is_alive(engine)


def test_a_stream_that_outlives_the_grace_is_told_and_nothing_is_logged_as_an_accident():
    with serving("--grace", "0") as server:
        with asking(server, "/completion", ENDLESS | {"stream": True}) as sock:
            got = sock.recv(1000)
            server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(OSError):
                while piece := sock.recv(1 << 16):
                    got += piece
        server.process.wait(15)
    assert b"unavailable_error" in got and "Traceback" not in server.log


def test_told_to_stop_by_ctrl_c_it_exits_quietly():
    with serving() as server:
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(15) in (0, 130)
        assert "Traceback" not in server.log and children(server.process.pid) == []


def test_a_request_takes_no_longer_than_allowed():
    with serving("--request-timeout", "0.5") as server:
        reply = server.post("/completion", ENDLESS)
        assert reply.status == 504 and reply.json["error"]["reason"] == "timeout"
        until(server.is_idle, "the slot is free")


def test_a_stream_takes_no_longer_than_allowed_either():
    with serving("--request-timeout", "0.5") as server:
        reply = server.post("/completion", ENDLESS | {"stream": True, "n_predict": 1500})
        assert reply.status == 504 or reply.events[-1].get("error", {}).get("reason") == "timeout"


def test_threads_of_this_test_are_gone(threads_before):
    assert len(set(threading.enumerate()) - threads_before) < 8


def test_the_gateway_never_loads_libllama(server):
    def maps(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert "xllamacpp" not in maps(server.process.pid) and "libgomp" not in maps(server.process.pid)
    assert "xllamacpp" in maps(server.engine_pid), "this test could not fail"


def test_told_to_stop_while_the_model_loads_it_exits_soon_and_leaves_nobody(tmp_path):
    write_tiny(tmp_path / "m.gguf", TinySpec(arch="qwen35", n_layers=8, width=1024))
    command = [sys.executable, "-m", "everwarm", "serve", str(tmp_path / "m.gguf"), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    until(lambda: bool(children(process.pid)), "the engine process has begun")
    (engine,) = children(process.pid)
    process.terminate()
    assert process.wait(15) == 0
    until(lambda: not is_alive(engine), "the engine is gone")
