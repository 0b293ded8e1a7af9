"""The engine's own part of a step, beyond libllama's decode and the pick of a token, as slots become many."""

from __future__ import annotations

import statistics
import time

import numpy as np

from bench.loop import Stopwatch
from bench.measure import EMBEDDED
from bench.scaling.fit import Curve, Growth
from everwarm.config import GREEDY
from everwarm.engine.build import assemble
from everwarm.engine.core import Core
from everwarm.engine.request import Ask
from everwarm.engine.settings import EngineSettings
from everwarm.llama.sampler import Sampler
from everwarm.prompt.prompt import Prompt

SIZES = (1, 2, 4, 8, 16, 32)
N_STEPS, N_PROMPT = 80, 64

WANTED: dict[str, tuple[Growth, str]] = {
    "a step, all slots running": ("linear", "each has a token to be looked at"),
    "a step, one of the slots running": ("constant", "idle ones have nothing to be looked at"),
}


def curves(sizes: tuple[int, ...] = SIZES) -> list[Curve]:
    running = iter((lambda n: n, lambda _: 1))
    return [
        Curve(name, *wanted, tuple((float(n), _measure(n, how(n))) for n in sizes))
        for (name, wanted), how in zip(WANTED.items(), running, strict=True)
    ]


def _measure(n_slots: int, n_running: int) -> float:
    watch = Stopwatch()
    core = assemble(EMBEDDED, EngineSettings(n_slots=n_slots, n_ctx=16384))
    lib_decode, pick = core.context._lib.decode, Sampler.pick
    core.context._lib.decode = watch.wrap(lib_decode)
    Sampler.pick = watch.wrap(pick)  # type: ignore[method-assign]
    try:
        return _own_s(core, watch, n_running)
    finally:
        core.context._lib.decode, Sampler.pick = lib_decode, pick  # type: ignore[method-assign]
        core.close()


def _own_s(core: Core, watch: Stopwatch, n_running: int) -> float:
    rng = np.random.default_rng(0)
    for _ in range(n_running):
        prompt = Prompt.of_tokens(rng.integers(12, 2000, N_PROMPT))
        core.submit(Ask(prompt, sampling=GREEDY, max_tokens=N_STEPS + 100, ignore_eos=True))
    while any(s.request is None or s.n_fed < s.request.n_prompt + 8 for s in core.slots[:n_running]):
        core.step()
    own = []
    for _ in range(N_STEPS):
        watch.inside_s = 0.0
        began = time.perf_counter()
        core.step()
        own.append(time.perf_counter() - began - watch.inside_s)
    return statistics.quantiles(own, n=10)[0]  # the quickest tenth: without other work on the machine
