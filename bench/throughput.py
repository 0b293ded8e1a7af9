"""Cold prefill and decode speed beside llama-server: same wheel, same threads, same ~100 MB q8_0 model.

Wanted: at least 0.97× of llama-server for both. Many short rounds in which the two take turns, now one first and now the
other: this way what else the machine does hits both alike.
"""

from __future__ import annotations

import statistics

import numpy as np

from bench.measure import hundred_megabytes, table
from bench.peer import Peer, PeerOptions, llama_server
from everwarm.config import GREEDY, default_threads
from everwarm.engine.engine import Engine
from everwarm.engine.settings import EngineSettings
from everwarm.llama.system.process import collect_rarely

N_PROMPT, N_REPLY, N_ROUNDS = 512, 96, 60


def run() -> None:
    model = hundred_megabytes()
    threads = default_threads()
    settings = EngineSettings(n_slots=1, n_ctx=4096, n_threads=threads)
    peer_options = PeerOptions(model, n_ctx=4096, n_parallel=1, n_threads=threads)
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    with llama_server(peer_options) as peer, Engine(model, settings) as engine:
        collect_rarely()  # as the engine process does
        for i in range(N_ROUNDS + 1):  # the first round warms both up
            tokens = np.random.default_rng(i).integers(0, 256, N_PROMPT).tolist()
            if i % 2:
                ours.append(_ours(engine, tokens))
            theirs.append(_theirs(peer, tokens))
            if i % 2 == 0:
                ours.append(_ours(engine, tokens))
    rows = []
    for i, name in enumerate(("cold prefill", "decode")):
        a, b = [pair[i] for pair in ours[1:]], [pair[i] for pair in theirs[1:]]
        low, middle, high = statistics.quantiles([x / y for x, y in zip(a, b, strict=True)])
        rows.append((name, _tps(a), _tps(b), f"{middle:.3f}×", f"{low:.3f} … {high:.3f}×"))
    title = (
        f"{N_PROMPT} prompt tokens, {N_REPLY} reply tokens, {model.stat().st_size / 1e6:.0f} MB q8_0, {threads} threads"
    )
    table(title, ("", "Everwarm", "llama-server", "ratio", "middle half"), rows)


def _tps(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} tok/s"


def _ours(engine: Engine, tokens: list[int]) -> tuple[float, float]:
    result = engine.submit(tokens, GREEDY, max_tokens=N_REPLY, ignore_eos=True).result()
    assert result.n_cached == 0
    return result.n_prompt / result.prefill_s, (N_REPLY - 1) / result.decode_s


def _theirs(peer: Peer, tokens: list[int]) -> tuple[float, float]:
    timings = peer.complete(tokens, N_REPLY, ignore_eos=True)["timings"]
    assert timings["prompt_n"] == len(tokens)
    return timings["prompt_per_second"], 1e3 * (N_REPLY - 1) / timings["predicted_ms"]
