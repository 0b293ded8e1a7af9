"""Drafts that are looked up, by simulation: the engine itself and the texts of ``speculation``, on machines whose steps
cost what a table says. No clock is read, so the figures are the same on any machine with the same Python, whose library is
one of the texts; ``python -m bench lookup``.

The CPUs' costs were measured: a q8_0 model of 100 MB, AVX2 (the wheel) and AVX-512 (``everwarm backend install native``).
The GPU's are those of an H200 up to four rows, and made up beyond. The second table knows how much of every draft is right,
and drafts from the reply's own text alone: the engine finds drafts in other conversations, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.imposed import Imposed
from bench.measure import model_file, table
from bench.speculation import texts
from everwarm.config import GREEDY
from everwarm.demo.tiny import TinySpec
from everwarm.engine.engine import Engine
from everwarm.engine.lifecycle import starting
from everwarm.engine.settings import EngineSettings
from everwarm.engine.speculation import speculator
from everwarm.engine.speculation.lookup import SuffixLookup
from everwarm.engine.speculation.step_cost import RepeatedStepCost
from everwarm.llama.batch import Feed, Tokens
from everwarm.llama.context import Context
from everwarm.llama.model import Model

SEEDS = range(100, 108)  # what was chosen was chosen on 0 to 5
N_MOST = EngineSettings().max_draft
ONE_ROW_S = 0.008
LOOK_S = 1.5e-4  # between two decodes, which leave no line of the caches behind
ROWS = (1, 2, 4, 8, 16, 17, 24, 32, 48, 64, 512)
MACHINES = {
    "CPU, the wheel": (1, 2.4, 3.4, 4.9, 8.3, 8.8, 12.0, 15.5, 23.0, 30.0, 230.0),
    "the wheel, two threads": (1, 2.56, 2.89, 3.96, 7.0, 7.63, 10.2, 13.0, 18.9, 24.6, 192.0),
    "CPU, native": (1, 2.4, 2.9, 3.8, 6.0, 6.4, 8.6, 11.0, 16.5, 22.0, 160.0),
    "native, two threads": (1, 2.62, 3.77, 4.03, 5.41, 6.07, 8.28, 10.4, 14.7, 18.2, 136.0),
    "another CPU, the wheel": (1, 3.82, 4.25, 5.43, 9.95, 10.5, 14.7, 19.5, 27.0, 34.2, 261.0),
    "another CPU, native": (1, 3.46, 5.15, 5.63, 8.07, 8.6, 12.0, 15.9, 21.7, 27.5, 197.0),
    "the embedded model, two threads": (1, 1.17, 1.78, 2.86, 5.0, 5.33, 7.22, 9.25, 14.2, 18.3, 144.0),
    "GPU": (1, 1.06, 1.19, 1.3, 1.5, 1.55, 1.75, 2.0, 2.5, 3.0, 12.5),
    "GPU that repeats steps": (1, 1.06, 1.27, 1.5, 1.75, 1.78, 2.0, 2.3, 2.7, 3.0, 12.5),
}
# More, where the step before had another number of rows, and where only the one before that had: libllama builds its graph
# anew, and CUDA records it one step later.
CHANGED = {"GPU that repeats steps": (0.36, 1.3)}


class Costs:
    """In place of clocks: only decoding and looking take time."""

    def __init__(self) -> None:
        self.multiples: Sequence[float] = ()
        self.changed = (0.0, 0.0)
        self._before = (0, 0)  # rows of the last two steps
        self.decoded_s = self._looked_s = 0.0
        self._decode = Context.decode

    def step_s(self, n_rows: int) -> float:
        return ONE_ROW_S * float(np.interp(n_rows, ROWS, self.multiples))

    def decode(self, context: Context, feeds: Sequence[Feed]) -> None:
        self._decode(context, feeds)
        n_rows, before = sum(len(feed.tokens) for feed in feeds), self._before
        changed = self.changed[0] if n_rows != before[0] else self.changed[1] if n_rows != before[1] else 0.0
        self._before = (n_rows, before[0])
        self.decoded_s += self.step_s(n_rows) + ONE_ROW_S * changed

    def thread_time(self) -> float:
        """Asked before and after a look."""
        self._looked_s += LOOK_S
        return self._looked_s


def run() -> None:
    costs = Costs()
    starting.Sampler = Imposed  # type: ignore[misc,assignment]
    speculator.time = costs  # type: ignore[assignment]
    Context.decode = lambda context, feeds: costs.decode(context, feeds)  # type: ignore[method-assign,assignment]
    found = {machine: _speeds(costs, machine) for machine in MACHINES}
    replies = tuple(found["GPU"])
    rows = [(machine, *(_shown(found[machine][text]) for text in replies)) for machine in MACHINES]
    table(f"of plain decoding, mean (least) of {len(SEEDS)} replies", ("", *replies), rows)
    print()
    rows = [(machine, *(_shown(most) for most in _most(machine).values())) for machine in MACHINES]
    table(
        f"the same if every draft from its own text, of at most {N_MOST} tokens, were as long as pays best",
        ("", *replies),
        rows,
    )


def _speeds(costs: Costs, machine: str) -> dict[str, list[float]]:
    """Of every reply of an engine's life, by its text: how many times faster than without drafts."""
    costs.multiples, costs.changed = MACHINES[machine], CHANGED.get(machine, (0.0, 0.0))
    speeds: dict[str, list[float]] = {}
    model = model_file(TinySpec(arch="qwen35", n_layers=4, width=128))
    with Engine(model, EngineSettings(n_slots=1, n_ctx=8192, n_threads=1)) as engine:
        engine.call(lambda core: setattr(core.speculator, "clock", lambda: costs.decoded_s))
        if machine in CHANGED:
            engine.call(lambda core: setattr(core.speculator.pacing, "cost", RepeatedStepCost()))
        for text in (text for seed in SEEDS for text in texts(seed)):
            Imposed.reply = engine.model.vocab.tokenize(text.reply, add_special=False, parse_special=False).tolist()
            engine.submit(text.prompt, GREEDY, max_tokens=1).result()
            began = engine.call(lambda _: costs.decoded_s)
            engine.submit(text.prompt, GREEDY, max_tokens=len(Imposed.reply), ignore_eos=True).result()
            took_s = engine.call(lambda _: costs.decoded_s) - began
            speeds.setdefault(text.name, []).append(len(Imposed.reply) * costs.step_s(1) / took_s)
    return speeds


def _most(machine: str) -> dict[str, list[float]]:
    """As if it were known how many tokens of every draft are right. Drafts come from the reply's own text; changes of the
    number of rows cost nothing here."""
    costs = np.interp(np.arange(N_MOST + 2), ROWS, MACHINES[machine])
    found: dict[str, list[float]] = {}
    with Model(model_file(TinySpec(arch="qwen35", n_layers=4, width=128))) as model:
        for text in (text for seed in SEEDS for text in texts(seed)):
            prompt, reply = (
                model.vocab.tokenize(part, add_special=False, parse_special=False) for part in (text.prompt, text.reply)
            )
            found.setdefault(text.name, []).append((len(reply) - 1) / _least(prompt, reply, costs))
    return found


def _least(prompt: Tokens, reply: Tokens, costs: NDArray[np.float64]) -> float:
    """The least time for a reply whose first token is there, in plain steps."""
    drafter, whole, n = SuffixLookup(), np.concatenate([prompt, reply]), len(reply)
    least = np.zeros(n + 1)
    for i in range(n - 1, 0, -1):
        at = len(prompt) + i
        draft = drafter.propose(whole[:at], N_MOST, "")
        n_right = 0 if draft is None else _n_equal(draft.tokens, whole[at:])
        least[i] = min(costs[1 + k] + least[min(n, i + 1 + k)] for k in range(n_right + 1))
    return float(least[1])


def _n_equal(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    is_equal = a[:n] == b[:n]
    return n if is_equal.all() else int(is_equal.argmin())


def _shown(speeds: Sequence[float]) -> str:
    return f"{statistics.mean(speeds):.2f}× ({min(speeds):.2f})"
