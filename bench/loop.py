"""What the engine's own loop costs per step, beyond libllama's decode and the pick of a token.

Wanted: at most 100 µs with one running request and 250 µs with eight, on the embedded model.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from bench.measure import EMBEDDED, table
from everwarm.config import GREEDY
from everwarm.engine.build import assemble
from everwarm.engine.core import Core
from everwarm.engine.request import Ask
from everwarm.engine.settings import EngineSettings
from everwarm.llama.sampler import Sampler
from everwarm.prompt.prompt import Prompt

N_STEPS = 400


class Stopwatch:
    """Counts the time spent inside libllama: decode, the logits it waits for, and the pick."""

    def __init__(self) -> None:
        self.inside_s = 0.0

    def wrap(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside_s += time.perf_counter() - started

        return timed


def run() -> None:
    rows = [(n, f"{overhead:.0f} µs", f"{step:.0f} µs") for n, overhead, step in map(_measure, (1, 8))]
    table("Engine loop overhead per step", ("running requests", "ours", "whole step"), rows)


def _measure(n_running: int) -> tuple[int, float, float]:
    watch = Stopwatch()
    core = assemble(EMBEDDED, EngineSettings(n_slots=8, n_ctx=16384))
    lib_decode, pick = core.context._lib.decode, Sampler.pick
    core.context._lib.decode = watch.wrap(lib_decode)  # the C call itself
    Sampler.pick = watch.wrap(pick)  # type: ignore[method-assign]
    try:
        return (n_running, *_run(core, watch, n_running))
    finally:
        core.context._lib.decode, Sampler.pick = lib_decode, pick  # type: ignore[method-assign]
        core.close()


def _run(core: Core, watch: Stopwatch, n_running: int) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    for _ in range(n_running):
        prompt = Prompt.of_tokens(rng.integers(12, 2000, 200))
        core.submit(Ask(prompt, sampling=GREEDY, max_tokens=N_STEPS + 100, ignore_eos=True))
    while any(s.request is None or s.n_fed < s.request.n_prompt + 8 for s in core.slots[:n_running]):
        core.step()
    overheads, steps = [], []
    for _ in range(N_STEPS):
        watch.inside_s = 0.0
        started = time.perf_counter()
        core.step()
        whole = time.perf_counter() - started
        overheads.append(whole - watch.inside_s)
        steps.append(whole)
    return 1e6 * statistics.median(overheads), 1e6 * statistics.median(steps)
