"""The server over HTTP beside llama-server: warm turns, streams, and what the gateway itself costs.

Wanted: time to first token of a warm turn (8k-token history, 50 new tokens) at least as good as llama-server's, aim 2×;
0.97× its tokens/s with one stream, 1× with eight; at most 1.5 ms per request and 60 µs per streamed token for the gateway.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import EMBEDDED, table
from bench.peer import PeerOptions, llama_server
from everwarm.config import default_threads

N_HISTORY, N_NEW, N_REPLY, TURNS = 8192, 50, 16, 12
N_STREAM, N_ROUNDS = 256, 12


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    host: str
    pid: int | None = None


def run() -> None:
    threads = default_threads()
    peer_options = PeerOptions(EMBEDDED, n_ctx=32768, n_parallel=8, n_threads=threads)
    with llama_server(peer_options) as peer, _everwarm(EMBEDDED, threads) as ours:
        theirs = Server("llama-server", peer._host)
        rows = [_warm_turns(ours, theirs), *_streams(ours, theirs)]
        table(f"Over HTTP, everwarm-tiny, {threads} threads", ("", "Everwarm", "llama-server", "ratio"), rows)
        print()
        _gateway_cost(ours)


@contextlib.contextmanager
def _everwarm(model: Path, threads: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="everwarm-bench-") as states:
        yield from _serving(model, threads, states)


def _serving(model: Path, threads: int, states: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "everwarm.cli", "serve", str(model), "--port", "0", "-c", "32768", "-np", "8"]
    command += ["--state-dir", states]
    environment = os.environ | {"EVERWARM_LOG": "WARNING"}
    process = subprocess.Popen([*command, "-t", str(threads)], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.search(r"http://([^/\s]+)", line)
            if found:
                yield Server("Everwarm", found[1], process.pid)
                return
        raise RuntimeError("everwarm did not start")
    finally:
        process.terminate()
        process.wait(20)


def _ask(server: Server, tokens: list[int], n_predict: int) -> tuple[float, float, list[int], dict[str, Any]]:
    """Seconds to the first token, seconds in all, the reply's tokens, and the server's own timings."""
    body = {"prompt": tokens, "n_predict": n_predict, "temperature": 0, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection(server.host, timeout=600)
    began = time.perf_counter()
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    first, reply, timings = 0.0, [], {}
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            first = first or time.perf_counter() - began
            reply += chunk.get("tokens", [])
            timings = chunk.get("timings", timings)
    connection.close()
    return first, time.perf_counter() - began, reply, timings


def _warm_turns(*servers: Server) -> tuple[str, str, str, str]:
    """The same growing conversation on both, turn by turn."""
    rng = np.random.default_rng(0)
    history = {server.name: rng.integers(12, 2000, N_HISTORY).tolist() for server in servers}
    for server in servers:
        history[server.name] += _ask(server, history[server.name], N_REPLY)[2]
    firsts: dict[str, list[float]] = {server.name: [] for server in servers}
    for _ in range(TURNS):
        new = rng.integers(12, 2000, N_NEW).tolist()
        for server in servers:
            time.sleep(0.3)  # a person reads; idle work is done
            history[server.name] += new
            first, _, reply, _ = _ask(server, history[server.name], N_REPLY)
            firsts[server.name].append(first)
            history[server.name] += reply
    a, b = (statistics.median(firsts[server.name]) for server in servers)
    return (
        f"first token, {N_HISTORY} + {N_NEW} tokens",
        f"{1e3 * a:.1f} ms",
        f"{1e3 * b:.1f} ms",
        f"{b / a:.2f}× sooner",
    )


def _streams(*servers: Server) -> Iterator[tuple[str, str, str, str]]:
    for n in (1, 8):
        speeds: dict[str, list[float]] = {server.name: [] for server in servers}
        for repeat in range(N_ROUNDS + 1):  # the first one warms up; now one server begins and now the other
            for server in servers if repeat % 2 else servers[::-1]:
                speeds[server.name].append(_total_speed(server, n, repeat))
        ours, theirs = (speeds[server.name][1:] for server in servers)
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        shown = (f"{statistics.median(each):.0f}" for each in (ours, theirs))
        yield f"tokens/s, {n} stream{'s' if n > 1 else ''}", *shown, f"{ratio:.2f}×"


def _total_speed(server: Server, n: int, seed: int) -> float:
    prompts = [np.random.default_rng(100 * seed + i).integers(12, 2000, 64).tolist() for i in range(n)]
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        list(pool.map(lambda tokens: _ask(server, tokens, N_STREAM), prompts))
    return n * N_STREAM / (time.perf_counter() - began)


def _gateway_cost(server: Server) -> None:
    prompt = np.random.default_rng(7).integers(12, 2000, 256).tolist()
    _ask(server, prompt, 1)
    extra = []
    for _ in range(50):
        _, wall, _, t = _ask(server, prompt, 1)
        extra.append(wall - 1e-3 * (t["queue_ms"] + t["prompt_ms"] + t["predicted_ms"]))
    assert server.pid is not None
    before = _cpu_s(server.pid)
    n_tokens = sum(len(_ask(server, prompt, 1024)[2]) for _ in range(3))
    per_token = (_cpu_s(server.pid) - before) / n_tokens
    rows = [
        ("per request, beyond the engine", f"{1e3 * statistics.median(extra):.2f} ms"),
        ("per streamed token, CPU of the gateway", f"{1e6 * per_token:.0f} µs"),
    ]
    table("What the gateway costs", ("", "time"), rows)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
