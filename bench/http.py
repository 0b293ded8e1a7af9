"""The server over HTTP beside llama-server: warm turns, streams, and what the gateway itself costs.

Wanted: time to first token of a warm turn (8k-token history, 50 new tokens) at least as good as llama-server's, aim 2×;
0.97× its tokens/s with one stream, 1× with eight; at most 1.5 ms per request and 60 µs per streamed token for the gateway.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.measure import EMBEDDED, table
from bench.peer import PeerOptions, llama_server
from bench.server import Server, ask, everwarm
from everwarm.config import default_threads

N_HISTORY, N_NEW, N_REPLY, TURNS = 8192, 50, 16, 12
N_STREAM, N_ROUNDS = 256, {1: 48, 8: 12}  # one stream is over soon, and the machine's noise is not


def run() -> None:
    threads = default_threads()
    peer_options = PeerOptions(EMBEDDED, n_ctx=32768, n_parallel=8, n_threads=threads)
    with llama_server(peer_options) as peer, _everwarm(threads) as ours:
        theirs = Server("llama-server", peer._host)
        rows = [_warm_turns(ours, theirs), *_streams(ours, theirs)]
        table(f"Over HTTP, everwarm-tiny, {threads} threads", ("", "Everwarm", "llama-server", "ratio"), rows)
        print()
        _gateway_cost(ours)


@contextlib.contextmanager
def _everwarm(threads: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="everwarm-bench-") as states:
        flags = ("-c", "32768", "-np", "8", "-t", str(threads), "--state-dir", states)
        with everwarm(str(EMBEDDED), *flags) as server:
            yield server


def _warm_turns(*servers: Server) -> tuple[str, str, str, str]:
    """The same growing conversation on both, turn by turn."""
    rng = np.random.default_rng(0)
    history = {server.name: rng.integers(12, 2000, N_HISTORY).tolist() for server in servers}
    for server in servers:
        history[server.name] += ask(server, history[server.name], N_REPLY).tokens
    firsts: dict[str, list[float]] = {server.name: [] for server in servers}
    for _ in range(TURNS):
        new = rng.integers(12, 2000, N_NEW).tolist()
        for server in servers:
            time.sleep(0.3)  # a person reads; idle work is done
            history[server.name] += new
            reply = ask(server, history[server.name], N_REPLY)
            firsts[server.name].append(reply.first_s)
            history[server.name] += reply.tokens
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
        for repeat in range(N_ROUNDS[n] + 1):  # the first one warms up; now one server begins and now the other
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
        list(pool.map(lambda tokens: ask(server, tokens, N_STREAM), prompts))
    return n * N_STREAM / (time.perf_counter() - began)


def _gateway_cost(server: Server) -> None:
    prompt = np.random.default_rng(7).integers(12, 2000, 256).tolist()
    ask(server, prompt, 1)
    extra = []
    for _ in range(50):
        reply = ask(server, prompt, 1)
        t = reply.timings
        extra.append(reply.total_s - 1e-3 * (t["queue_ms"] + t["prompt_ms"] + t["predicted_ms"]))
    assert server.pid is not None
    before = _cpu_s(server.pid)
    n_tokens = sum(len(ask(server, prompt, 1024).tokens) for _ in range(3))
    per_token = (_cpu_s(server.pid) - before) / n_tokens
    rows = [
        ("per request, beyond the engine", f"{1e3 * statistics.median(extra):.2f} ms"),
        ("per streamed token, CPU of the gateway", f"{1e6 * per_token:.0f} µs"),
    ]
    table("What the gateway costs", ("", "time"), rows)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
