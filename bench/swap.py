"""A model swapped out and back: what each part takes, beside llama-server started again and reading again.

Wanted: bringing back the state is at least 20× faster than reading it again; the whole swap is mostly the model's own load.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.measure import hundred_megabytes, model_file, table
from bench.peer import PeerOptions, llama_server
from bench.server import Server, ask, everwarm
from everwarm.config import default_threads
from everwarm.demo.tiny import TinySpec

N_LONG, N_SWAPS = 8192, 5
_LINES = {
    "put away (drain, flush)": r"put away what is worth keeping in ([\d.]+) s",
    "old engine stopped, all of it": r"was put to sleep in ([\d.]+) s",
    "new engine: start and load": r"was loaded in ([\d.]+) s",
}


def run() -> None:
    tokens = np.random.default_rng(0).integers(0, 256, N_LONG).tolist()
    with tempfile.TemporaryDirectory(prefix="everwarm-bench-") as name:
        folder = Path(name)
        other = model_file(TinySpec(arch="qwen35", n_layers=8, width=960, dtype="q8_0", seed=1))
        for id, path in (("main", hundred_megabytes()), ("other", other)):
            (folder / f"{id}.gguf").symlink_to(path)
        flags = ("--models-max", "1", "-np", "1", "-c", "16384", "-t", str(default_threads()))
        with everwarm("--models", name, *flags, "--state-dir", f"{name}/states", log="INFO") as server:
            cold_s, rows = _ours(server, tokens)
    theirs_s, read_s = _theirs(tokens)
    total = statistics.median(row[-1] for row in rows)
    restore = statistics.median(row[-2] for row in rows)
    shown = [(title, f"{1e3 * statistics.median(row[i] for row in rows):.0f} ms") for i, title in enumerate(_LINES)]
    shown += [
        (f"restore of {N_LONG} tokens, and those left to read", f"{1e3 * restore:.1f} ms"),
        ("reading them instead (cold)", f"{1e3 * cold_s:.0f} ms, {cold_s / restore:.0f}× longer"),
        ("from request to first token, the whole swap", f"{1e3 * total:.0f} ms"),
        ("llama-server started again, its first token", f"{1e3 * theirs_s:.0f} ms ({theirs_s / total:.1f}× longer)"),
        ("of that, reading the prompt again", f"{1e3 * read_s:.0f} ms"),
    ]
    table(f"Swapped out and back, {N_LONG} tokens, 102 MB", ("part", "median"), shown)


def _ours(server: Server, tokens: list[int]) -> tuple[float, list[list[float]]]:
    cold_s = 1e-3 * ask(server, tokens, 1, model="main").timings["prompt_ms"]
    rows = []
    for _ in range(N_SWAPS):
        ask(server, tokens[:64], 1, model="other")
        before = len(server.log)
        reply = ask(server, tokens, 1, model="main")
        assert reply.timings["prompt_n"] <= 16, f"{reply.timings['prompt_n']} tokens were read again"
        time.sleep(0.2)
        parts = [_last(pattern, server.log[before:]) for pattern in _LINES.values()]
        rows.append([*parts, 1e-3 * reply.timings["prompt_ms"], reply.first_s])
    return cold_s, rows


def _theirs(tokens: list[int]) -> tuple[float, float]:
    """Started again for every swap, as without a router; neither its start nor the load of its model is counted."""
    firsts, reads = [], []
    for _ in range(2):
        with llama_server(PeerOptions(hundred_megabytes(), 16384, 1, default_threads())) as peer:
            reply = ask(Server("llama-server", peer._host), tokens, 1)
            firsts.append(reply.first_s)
            reads.append(1e-3 * reply.timings["prompt_ms"])
    return statistics.median(firsts), statistics.median(reads)


def _last(pattern: str, lines: Sequence[str]) -> float:
    return float([found[1] for line in lines if (found := re.search(pattern, line))][-1])
