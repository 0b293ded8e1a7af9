"""Processor time of a streamed token, process by process: it holds on a machine that has other work, too. Beside
llama-server.

Each reply is asked for twice, short and long, to a prompt that is known: the difference is what tokens cost. The engine
counts what it spends inside libllama (decoding, and libllama's own samplers); the rest of its threads' time is ours.
Wanted with one stream: at most 120 µs per token in the gateway, and 100 µs in the engine beyond libllama.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.measure import EMBEDDED, hundred_megabytes, table
from bench.peer import PeerOptions, llama_server
from bench.server import everwarm
from bench.traces.recorded import TOKENS_PER_WORD
from bench.workload.text import prose
from everwarm.engine.core import Core

N_CTX, N_SLOTS = 32768, 8
N_SHORT, N_LONG = 16, 272
N_ROUNDS = 5
COUNTER = "EVERWARM_BENCH_COUNTER"  # names the file in which an engine counts
HOOK = "bench.token_cost:count_inside"


class Cost(NamedTuple):
    """Microseconds of processor time per token."""

    gateway: float
    engine: float  # without libllama
    libllama: float

    @property
    def all(self) -> float:
        return sum(self)


@dataclass(frozen=True, slots=True)
class Measured:
    """A server with clocks of what its processes have used, in seconds."""

    name: str
    host: str
    clocks: tuple[Callable[[], float], ...]


def run() -> None:
    for title, model in (("everwarm-tiny", EMBEDDED), ("100 MB", hundred_megabytes())):
        with _ours(model) as ours, _theirs(model) as theirs:
            rows = [row for n, depth in ((1, 64), (1, 4096), (8, 64)) for row in _rows(ours, theirs, n, depth)]
        head = ("streams", "depth", "server", "gateway", "engine", "libllama", "together")
        table(f"Processor time per streamed token of a chat, {title}, one thread", head, rows)
        print(flush=True)
    print(f"Load of the machine at the end: {os.getloadavg()[0]:.1f}")


def _rows(ours: Measured, theirs: Measured, n_streams: int, depth: int) -> Iterator[tuple[str, ...]]:
    found: dict[str, list[list[float]]] = {ours.name: [], theirs.name: []}
    for repeat in range(N_ROUNDS + 1):
        for server in (ours, theirs)[:: -1 if repeat % 2 else 1]:
            found[server.name].append(_round(server, n_streams, depth))
    medians = {
        name: [statistics.median(column) for column in zip(*each[1:], strict=True)] for name, each in found.items()
    }
    gateway, engine, inside = medians[ours.name]
    cost = Cost(gateway, engine - inside, inside)
    shown = [f"{value:.0f} µs" for value in (*cost, cost.all)]
    yield str(n_streams), str(depth), ours.name, *shown
    (whole,) = medians[theirs.name]
    yield str(n_streams), str(depth), theirs.name, "", "", "", f"{whole:.0f} µs"


def _round(server: Measured, n_streams: int, depth: int) -> list[float]:
    """What a token costs by each clock, in microseconds."""
    prompts = [_prompt(i, depth) for i in range(n_streams)]
    with concurrent.futures.ThreadPoolExecutor(n_streams) as pool:
        used = []
        for n_reply in (N_SHORT, N_LONG):
            before = [clock() for clock in server.clocks]
            n_tokens = sum(pool.map(lambda text, n=n_reply: _stream(server.host, text, n), prompts))
            time.sleep(0.3)  # what is done after a reply is counted, too
            used.append((n_tokens, [clock() - b for clock, b in zip(server.clocks, before, strict=True)]))
    (n_few, few), (n_many, many) = used
    return [1e6 * (b - a) / (n_many - n_few) for a, b in zip(few, many, strict=True)]


def _prompt(number: int, n_tokens: int) -> str:
    return prose(random.Random(number), round(n_tokens / TOKENS_PER_WORD))


def _stream(host: str, prompt: str, n_reply: int) -> int:
    """How many tokens were written."""
    more = {"temperature": 0, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": n_reply, **more}
    connection = http.client.HTTPConnection(host, timeout=600)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    last: dict[str, Any] = {}
    for line in connection.getresponse():
        if b'"usage"' in line:
            last = json.loads(line[6:])
    connection.close()
    n_tokens: int = last["usage"]["completion_tokens"]
    assert n_tokens == n_reply, f"{host} wrote {n_tokens} of {n_reply} tokens"
    return n_tokens


# clocks


def cpu_clock(pid: int) -> Callable[[], float]:
    """The processor time of all threads of a process, also of those that have ended."""
    return lambda: time.clock_gettime(~pid << 3 | 2)  # Linux' number of a process's own clock


@contextlib.contextmanager
def _ours(model: Path) -> Iterator[Measured]:
    with tempfile.TemporaryDirectory(prefix="everwarm-bench-") as folder:
        counter = Path(folder) / "inside"
        counter.write_bytes(bytes(8))
        given = {"EVERWARM_TEST_HOOK": HOOK, COUNTER: str(counter)}
        flags = ("-c", str(N_CTX), "-np", str(N_SLOTS), "-t", "1", "--disk-cache", "0")
        with _environment(given), everwarm(str(model), *flags) as server, counter.open("r+b") as file:
            inside = np.frombuffer(mmap.mmap(file.fileno(), 8), np.float64)
            assert server.pid is not None
            engine = _child(server.pid)
            yield Measured(
                "Everwarm", server.host, (cpu_clock(server.pid), cpu_clock(engine), lambda: float(inside[0]))
            )


@contextlib.contextmanager
def _theirs(model: Path) -> Iterator[Measured]:
    with llama_server(PeerOptions(model, N_CTX, N_SLOTS, 1)) as peer:
        assert peer.pid is not None
        yield Measured("llama-server", peer.host, (cpu_clock(peer.pid),))


@contextlib.contextmanager
def _environment(given: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _child(pid: int) -> int:
    """The engine's process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(child) for child in children if b"engine" in Path(f"/proc/{child}/cmdline").read_bytes())


# inside the engine


def count_inside(core: Core) -> None:
    """Adds up, in a file, the time of the loop's thread inside libllama."""
    with open(os.environ[COUNTER], "r+b") as file:
        inside = np.frombuffer(mmap.mmap(file.fileno(), 8), np.float64)
    lib: Any = core.context._lib
    for name in ("decode", "sampler_sample"):
        setattr(lib, name, _counted(getattr(lib, name), inside))


def _counted(function: Callable[..., Any], inside: np.ndarray[Any, Any]) -> Callable[..., Any]:
    clock = time.thread_time

    def counted(*args: Any) -> Any:
        began = clock()
        result = function(*args)
        inside[0] += clock() - began
        return result

    return counted
