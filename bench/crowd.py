"""Several cold prompts at once, and a short one behind them: when do first tokens come? Beside llama-server.

    python -m bench crowd                       medians of five rounds
    python -m bench.crowd --rounds 1 --size 0.1 a quick look

Servers take turns, and another one begins in every round. Read one after the other, all prompts but the last are done
sooner than side by side; a short prompt must not wait for long ones. Cold subagents with one head should read it once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from bench.measure import EMBEDDED, table
from bench.peer import PeerOptions, llama_server
from bench.server import Server, ask, everwarm
from everwarm.config import default_threads

N_LONG, N_PROMPTS, N_SHORT = 4700, 6, 20
N_HEAD, N_TASK, N_SUBAGENTS = 6000, 60, 8
N_ROUNDS = 5
N_CTX = 65536


@dataclass(slots=True)
class Seen:
    """Of each round: until all had their first token, the mean of these times, and the short prompt's."""

    all_s: list[float] = field(default_factory=list)
    mean_s: list[float] = field(default_factory=list)
    short_s: list[float] = field(default_factory=list)
    subagents_s: list[float] = field(default_factory=list)  # until all had their first token
    subagents_read: list[int] = field(default_factory=list)  # tokens, together


def run() -> None:
    measure(N_ROUNDS, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.crowd", description="Cold prompts that come together.")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS)
    parser.add_argument("--size", type=float, default=1.0, help="of the prompts")
    given = parser.parse_args()
    measure(given.rounds, given.size)


def measure(n_rounds: int, size: float) -> None:
    threads = default_threads()
    n_long, n_head = round(N_LONG * size), round(N_HEAD * size)
    with contextlib.ExitStack() as stack:
        servers = list(_servers(stack, threads))
        seen = {server.name: Seen() for server in servers}
        for repeat in range(n_rounds):
            at = repeat % len(servers)
            for server in (*servers[at:], *servers[:at]):
                _round(server, repeat, n_long, seen[server.name])
                _subagents(server, repeat, n_head, seen[server.name])
    rows = [
        (name, *(f"{statistics.median(each):.2f} s" for each in (found.all_s, found.mean_s, found.short_s)))
        for name, found in seen.items()
    ]
    head = ("", "all first tokens", "their mean", f"{N_SHORT} tokens, asked 0.3 s later")
    table(
        f"{N_PROMPTS} cold prompts of {n_long} tokens at once, medians of {n_rounds} rounds, {threads} threads",
        head,
        rows,
    )
    read = [
        (name, f"{statistics.median(found.subagents_read):,.0f}", f"{statistics.median(found.subagents_s):.2f} s")
        for name, found in seen.items()
    ]
    title = f"{N_SUBAGENTS} cold subagents at once, {n_head} tokens in common and {N_TASK} of their own"
    table(f"{title}, medians of {n_rounds} rounds", ("", "tokens read", "last first token"), read)
    print(f"\nLoad of the machine at the end: {os.getloadavg()[0]:.1f}")


def _servers(stack: contextlib.ExitStack, threads: int) -> Iterator[Server]:
    for n_slots in (8, 1):
        flags = ("-c", str(N_CTX), "-np", str(n_slots), "-t", str(threads), "--disk-cache", "0")
        server = stack.enter_context(everwarm(str(EMBEDDED), *flags))
        yield Server(f"Everwarm, {n_slots} slots", server.host, server.pid)
    options = PeerOptions(EMBEDDED, n_ctx=N_CTX, n_parallel=8, n_threads=threads)
    yield Server("llama-server, 8 slots", stack.enter_context(llama_server(options)).host)


def _round(server: Server, repeat: int, n_long: int, seen: Seen) -> None:
    time.sleep(1.0)  # idle work of the round before is done
    rng = np.random.default_rng(1000 + repeat)
    long = [rng.integers(12, 2000, n_long).tolist() for _ in range(N_PROMPTS)]
    short = rng.integers(12, 2000, N_SHORT).tolist()
    with ThreadPoolExecutor(N_PROMPTS + 1) as pool:
        replies = [pool.submit(ask, server, tokens, 4) for tokens in long]
        time.sleep(0.3)
        last = pool.submit(ask, server, short, 4)
        firsts = [reply.result().first_s for reply in replies]
        seen.short_s.append(last.result().first_s)
    seen.all_s.append(max(firsts))
    seen.mean_s.append(statistics.mean(firsts))


def _subagents(server: Server, repeat: int, n_head: int, seen: Seen) -> None:
    time.sleep(1.0)
    rng = np.random.default_rng(5000 + repeat)
    head = rng.integers(12, 2000, n_head).tolist()
    prompts = [[*head, *rng.integers(12, 2000, N_TASK).tolist()] for _ in range(N_SUBAGENTS)]
    with ThreadPoolExecutor(N_SUBAGENTS) as pool:
        replies = list(pool.map(lambda tokens: ask(server, tokens, 4), prompts))
    seen.subagents_s.append(max(reply.first_s for reply in replies))
    seen.subagents_read.append(sum(reply.timings["prompt_n"] for reply in replies))


if __name__ == "__main__":
    main()
