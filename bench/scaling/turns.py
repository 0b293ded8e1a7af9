"""Bringing a conversation back from RAM, by the number of turns in which it came about: of the same length, in the same
context, on a whole engine that had time to tidy up after every turn."""

from __future__ import annotations

import numpy as np

from bench.measure import EMBEDDED, least_cpu_s
from bench.scaling.fit import Curve, Growth
from everwarm.config import GREEDY
from everwarm.engine.build import assemble
from everwarm.engine.cache.restore import Goal
from everwarm.engine.core import Core
from everwarm.engine.request import Ask
from everwarm.engine.settings import EngineSettings
from everwarm.prompt.prompt import Prompt
from everwarm.types import START

SIZES = (1, 2, 5, 10, 20, 40, 100)
N_CTX, N_TOKENS, N_TURN, N_REPLY, REPEATS = 65_536, 8192, 80, 8, 7

WANTED: dict[str, tuple[Growth, str]] = {
    f"bring back {N_TOKENS:,} tokens, the last in turns of {N_TURN}": ("constant", "what is small is joined on idle"),
}


def curves(sizes: tuple[int, ...] = SIZES) -> list[Curve]:
    [(name, wanted)] = WANTED.items()
    return [Curve(name, *wanted, tuple((float(n), _measure(n)) for n in sizes))]


def _measure(n_turns: int) -> float:
    core = assemble(EMBEDDED, EngineSettings(n_slots=1, n_ctx=N_CTX, n_spares=0, ram_bytes=1 << 30))
    try:
        return _bring_s(core, _talk(core, n_turns))
    finally:
        core.close()


def _talk(core: Core, n_turns: int) -> Prompt:
    """So many turns, the first of them as long as it takes to make all of them as long as they should be."""
    rng = np.random.default_rng(n_turns)
    items = rng.integers(12, 2000, N_TOKENS - N_TURN * n_turns).tolist()
    for _ in range(n_turns):
        items += rng.integers(12, 2000, N_TURN - N_REPLY).tolist()
        core.submit(Ask(Prompt.of_tokens(items), sampling=GREEDY, max_tokens=N_REPLY + 1, ignore_eos=True))
        while core.has_work:
            core.step()
        while core.tidy():
            pass
        items = core.slots[0].items.codes.tolist()
    return Prompt.of_tokens([*items, 12])


def _bring_s(core: Core, prompt: Prompt) -> float:
    def bring() -> None:
        match = core.cache.restorer.match(prompt, "", {})
        core.cache.restorer.bring(core.slots[0], Goal(prompt, ""), match, {})

    seconds = least_cpu_s(bring, REPEATS, core.cache.room.clear)
    assert core.context.end(core.slots[0].seq) > START, "nothing came back"
    assert len(prompt) - core.slots[0].n_fed < N_TURN, "not all of it came back"
    return seconds
