"""What Ray adds to a warm turn: the same conversation at one server and behind Ray's proxy, the ingress and a replica.

Target: at most 20 ms. Shorter paths show where it goes: a request that the ingress answers itself, and one that a
replica answers without its engine. Needs ``everwarm[ray]``: ``python -m bench ray``.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.measure import EMBEDDED, table
from bench.server import Server, ask, everwarm

N_HISTORY, N_NEW, N_REPLY, TURNS, N_STREAM = 4096, 50, 16, 40, 256
CONFIG = """
[server]
port = {port}
[engine]
slots = 2
threads = 1
ctx-size = 16384
disk-cache = 0
cache-ram = "512MiB"
[models.tiny]
path = "{path}"
[models.tiny.replicas]
count = {n}
cpus = 0.2
"""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "EVERWARM_LOG": "WARNING",
    "RAY_ADDRESS": "local",
}


def run() -> None:
    flags = ("-c", "16384", "-np", "2", "-t", "1", "--disk-cache", "0", "--cache-ram", "512MiB")
    with everwarm(str(EMBEDDED), *flags) as alone, fleet(2) as behind:
        turns = _turns(alone, behind)
        rows = [
            (name, f"{1e3 * a:.1f} ms", f"{1e3 * b:.1f} ms", f"{1e3 * (b - a):.1f} ms")
            for name, a, b in (
                (f"warm turn, {N_HISTORY} + {N_NEW} tokens, to the first token", *turns["first"]),
                (f"the same, to the last of {N_REPLY} tokens", *turns["total"]),
                ("GET /, answered without an engine", *(_median_get(server, "/") for server in (alone, behind))),
                (
                    "GET /health, answered by the ingress",
                    *(_median_get(server, "/health") for server in (alone, behind)),
                ),
            )
        ]
        speeds = [_speed(server) for server in (alone, behind)]
        rows.append(("tokens/s of one stream", *(f"{speed:.0f}" for speed in speeds), f"{speeds[1] / speeds[0]:.2f}×"))
        table("What Ray adds, everwarm-tiny, 2 replicas on one machine", ("", "alone", "behind Ray", "more"), rows)


@contextlib.contextmanager
def fleet(n_replicas: int) -> Iterator[Server]:
    """``everwarm serve --ray`` on a cluster of this machine alone, which goes with it."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder, socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        sock.close()
        config = Path(folder) / "cluster.toml"
        config.write_text(CONFIG.format(port=port, path=EMBEDDED.absolute(), n=n_replicas))
        command = [sys.executable, "-m", "everwarm", "serve", "--ray", str(config)]
        env = os.environ | ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": folder}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, text=True, env=env, **pipes) as process:  # type: ignore[call-overload]
            log: list[str] = []
            for line in process.stdout:
                log.append(line)
                if found := re.match(r"http://([^/\s]+)/v1$", line):
                    break
            else:
                raise RuntimeError(f"the cluster did not start: {''.join(log)[-4000:]}")
            threading.Thread(target=lambda: log.extend(process.stdout), daemon=True).start()
            try:
                yield Server("Ray", found[1], process.pid, log)
            finally:
                process.terminate()
                process.wait(120)


def _turns(*servers: Server) -> dict[str, list[float]]:
    """The same growing conversation at both, turn by turn."""
    rng = np.random.default_rng(0)
    start = rng.integers(12, 2000, N_HISTORY).tolist()
    history = {server.name: start + ask(server, start, N_REPLY).tokens for server in servers}
    seen: dict[str, dict[str, list[float]]] = {s.name: {"first": [], "total": []} for s in servers}
    for _ in range(TURNS):
        new = rng.integers(12, 2000, N_NEW).tolist()
        for server in servers:
            time.sleep(0.2)
            history[server.name] += new
            reply = ask(server, history[server.name], N_REPLY)
            assert reply.timings["prompt_n"] <= N_NEW + 2 * N_REPLY, "the turn was not warm"
            seen[server.name]["first"].append(reply.first_s)
            seen[server.name]["total"].append(reply.total_s)
            history[server.name] += reply.tokens
    return {what: [statistics.median(seen[server.name][what]) for server in servers] for what in ("first", "total")}


def _median_get(server: Server, path: str) -> float:
    taken = []
    for _ in range(200):
        connection = http.client.HTTPConnection(server.host, timeout=60)
        began = time.perf_counter()
        connection.request("GET", path)
        connection.getresponse().read()
        taken.append(time.perf_counter() - began)
        connection.close()
    return statistics.median(taken)


def _speed(server: Server) -> float:
    prompt = np.random.default_rng(1).integers(12, 2000, 64).tolist()
    return statistics.median(N_STREAM / ask(server, prompt, N_STREAM).stream_s for _ in range(5))
