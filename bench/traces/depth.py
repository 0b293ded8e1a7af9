"""Tokens per second at the end of a long context, as a client sees them: 32 tokens after a new prompt of 4,096."""

from __future__ import annotations

import contextlib
import time

import numpy as np

from bench.measure import EMBEDDED
from bench.peer import PeerOptions, llama_server
from bench.server import Server, ask, everwarm

N_DEPTH, N_REPLY = 4096, 32
N_CTX, N_SLOTS = 16384, 4


def tokens_per_s(server: Server, seed: int) -> float:
    """From the first token to the last one. The prompt is another one for every seed."""
    tokens = np.random.default_rng(seed).integers(12, 2000, N_DEPTH).tolist()
    at = ask(server, tokens, N_REPLY).at_s
    return (len(at) - 1) / (at[-1] - at[0])


def measured(n_threads: int, n_rounds: int) -> dict[str, list[float]]:
    with contextlib.ExitStack() as stack:
        flags = ("-c", str(N_CTX), "-np", str(N_SLOTS), "-t", str(n_threads))
        ours = stack.enter_context(everwarm(str(EMBEDDED), *flags, "--disk-cache", "0"))
        peer = stack.enter_context(llama_server(PeerOptions(EMBEDDED, N_CTX, N_SLOTS, n_threads)))
        servers = [Server("Everwarm", ours.host), Server("llama-server", peer.host)]
        found: dict[str, list[float]] = {server.name: [] for server in servers}
        for seed in range(3 * n_rounds):
            for server in servers[:: -1 if seed % 2 else 1]:
                found[server.name].append(tokens_per_s(server, seed))
                time.sleep(0.3)  # idle work is done before the other one is measured
    return found
