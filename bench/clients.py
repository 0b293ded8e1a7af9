"""Many clients at once with short and long prompts: who waits how long for a first word, and do words stand still?

Beside llama-server, in turns. Every prompt is new. The clients are the same on both servers, prompt by prompt: each sends
its next request when it has its last reply. Long prompts must not make short ones wait, nor replies stand still.

    python -m bench clients                                     4, 16 and 64 clients, three rounds
    python -m bench.clients --clients 4 --rounds 1 --size 0.1   a quick look
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from bench.measure import EMBEDDED, table
from bench.peer import PeerOptions, llama_server
from bench.server import Reply, Server, ask, everwarm
from bench.suite.summary import quantile
from everwarm.config import default_threads

LENGTHS = (20, 400, 4000)  # tokens of prompts
MIX = (0, 1, 0, 2, 0, 1)  # which of them a client sends, in order; clients begin at different places
N_REPLY = 32
N_REQUESTS = {4: 6, 16: 2, 64: 1}  # of each client
N_CTX, N_SLOTS = 65536, 8
N_ROUNDS = 3


@dataclass(slots=True)
class Seen:
    first_s: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in LENGTHS})
    gaps_s: list[float] = field(default_factory=list)


def run() -> None:
    measure(tuple(N_REQUESTS), N_ROUNDS, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description="First tokens beside many clients.")
    parser.add_argument("--clients", type=int, nargs="+", default=tuple(N_REQUESTS))
    parser.add_argument("--rounds", type=int, default=N_ROUNDS)
    parser.add_argument("--size", type=float, default=1.0, help="of the longest prompts")
    given = parser.parse_args()
    measure(given.clients, given.rounds, given.size)


def measure(clients: Sequence[int], n_rounds: int, size: float) -> None:
    threads = default_threads()
    sizes = {n: n if n < LENGTHS[-1] else round(n * size) for n in LENGTHS}
    with _servers(threads) as servers:
        for n_clients in clients:
            seen = {server.name: Seen() for server in servers}
            for repeat in range(n_rounds):
                for server in servers[:: -1 if repeat % 2 else 1]:
                    _round(server, n_clients, repeat, sizes, seen[server.name])
            head = ("", *(f"{sizes[n]} tokens: p50, p99" for n in LENGTHS), "between chunks: p99", "longest")
            rows = [(name, *_shown(found)) for name, found in seen.items()]
            table(
                f"First token, {n_clients} clients, {N_SLOTS} slots, {n_rounds} rounds, {threads} threads", head, rows
            )
            print(flush=True)
    print(f"Load of the machine at the end: {os.getloadavg()[0]:.1f}")


def _shown(seen: Seen) -> Iterator[str]:
    for found in seen.first_s.values():
        yield f"{quantile(found, 0.5):.2f} s, {quantile(found, 0.99):.2f} s" if found else ""
    yield f"{1e3 * quantile(seen.gaps_s, 0.99):.0f} ms"
    yield f"{1e3 * max(seen.gaps_s):.0f} ms"


def _round(server: Server, n_clients: int, repeat: int, sizes: dict[int, int], seen: Seen) -> None:
    def client(number: int) -> list[tuple[int, Reply]]:
        rng = np.random.default_rng([repeat, number, n_clients])
        chosen = [LENGTHS[MIX[(number + i) % len(MIX)]] for i in range(N_REQUESTS.get(n_clients, 1))]
        return [(n, ask(server, rng.integers(12, 2000, sizes[n]).tolist(), N_REPLY)) for n in chosen]

    with ThreadPoolExecutor(n_clients) as pool:
        for n, reply in (each for some in pool.map(client, range(n_clients)) for each in some):
            seen.first_s[n].append(reply.first_s)
            seen.gaps_s += reply.gaps_s


@contextlib.contextmanager
def _servers(threads: int) -> Iterator[list[Server]]:
    flags = ("-c", str(N_CTX), "-np", str(N_SLOTS), "-t", str(threads), "--disk-cache", "0")
    options = PeerOptions(EMBEDDED, N_CTX, N_SLOTS, threads)
    with everwarm(str(EMBEDDED), *flags) as ours, llama_server(options) as peer:
        yield [Server("Everwarm", ours.host, ours.pid), Server("llama-server", peer.host)]


if __name__ == "__main__":
    main()
