"""What sequences that merely stay in the context cost those that run: parked checkpoints and idle conversations.

Wanted: the curve, and idle conversations moved out as soon as they cost more than 2 %. Every arrangement has a context of
its own, and short bursts of all of them take turns in random order, so that what the machine does meanwhile hits all
alike; each burst is compared with the burst of the same round that had nothing beside it.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from bench.measure import hundred_megabytes, model_file, table
from everwarm.config import ContextOptions
from everwarm.demo.tiny import TinySpec
from everwarm.engine.settings import EngineSettings
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.types import START, SeqId

N_RUNNING_TOKENS, N_ROUNDS, N_STEPS = 512, 40, 6
CONVERSATION = 4096


@dataclass(frozen=True)
class Beside:
    """What stays beside the running requests."""

    n_parked: int = 0
    n_idle: int = 0
    n_tokens: int = CONVERSATION

    def __str__(self) -> str:
        if self.n_parked:
            return f"{self.n_parked} parked"
        return f"{self.n_idle} idle of {self.n_tokens} tokens" if self.n_idle else "nothing"


NOTHING = Beside()
CURVE = (
    NOTHING,
    Beside(n_parked=8),
    Beside(n_parked=32),
    *(Beside(n_idle=1, n_tokens=n) for n in (256, 512, 1024, 2048)),
    *(Beside(n_idle=n) for n in (1, 4, 16)),
)


def run() -> None:
    small, big_kv = hundred_megabytes(), model_file(TinySpec(arch="falcon-h1", n_layers=16, width=1024, dtype="q8_0"))
    for path, n_running in ((small, 1), (small, 8), (big_kv, 1)):
        with Model(path) as model:
            rows = _curve(model, n_running)
        cap = n_running * EngineSettings().idle_cells
        title = f"A decode step of {n_running} × {N_RUNNING_TOKENS} tokens ({path.stem}); {cap} idle cells may stay"
        table(title, ("beside", "step", "cost", "middle half"), rows)
        print(flush=True)


def _curve(model: Model, n_running: int) -> list[tuple[str, str, str, str]]:
    bursts: dict[Beside, list[float]] = {beside: [] for beside in CURVE}
    with ExitStack() as stack:
        contexts = {beside: stack.enter_context(_arrange(model, n_running, beside)) for beside in CURVE}
        for _ in range(N_ROUNDS + 1):
            for beside in random.sample(CURVE, len(CURVE)):
                bursts[beside].append(_burst_s(contexts[beside], n_running))
    rows = []
    for beside in CURVE:
        times, base = bursts[beside][1:], bursts[NOTHING][1:]  # the first round warms up
        costs = sorted(100 * (a / b - 1) for a, b in zip(times, base, strict=True))
        low, middle, high = statistics.quantiles(costs)
        step = f"{1e3 * statistics.median(times):.2f} ms"
        rows.append((str(beside), step, f"{middle:+.1f} %", f"{low:+.1f} … {high:+.1f} %"))
    return rows


def _arrange(model: Model, n_running: int, beside: Beside) -> Context:
    n_grow = (N_ROUNDS + 1) * N_STEPS + beside.n_parked
    n_ctx = n_running * (N_RUNNING_TOKENS + n_grow) + beside.n_idle * beside.n_tokens + 512
    context = Context(model, ContextOptions(n_ctx=n_ctx, n_seq_max=n_running + beside.n_parked + beside.n_idle))
    tokens = np.random.default_rng(0).integers(0, 256, max(beside.n_tokens, N_RUNNING_TOKENS)).astype(np.int32)
    idle = [SeqId(n_running + beside.n_parked + i) for i in range(beside.n_idle)]
    if idle:
        _read(context, idle[0], tokens[: beside.n_tokens])
        end = context.end(idle[0])
        blob = context.capture_segment(idle[0], START, end)
        for seq in idle[1:]:  # the same bytes again, in cells of their own
            context.splice_segment(seq, blob, START, end, n_cells=beside.n_tokens, clean=False)
    for seq in range(n_running):
        _read(context, SeqId(seq), tokens[:N_RUNNING_TOKENS])
    for i in range(beside.n_parked):
        context.park(SeqId(i % n_running), SeqId(n_running + i))
        _read(context, SeqId(i % n_running), tokens[:1])
    return context


def _read(context: Context, seq: SeqId, tokens: np.ndarray) -> None:
    for at in range(0, len(tokens), 512):
        context.decode([Feed(seq, tokens[at : at + 512], context.end(seq), wants_logits=False)])


def _burst_s(context: Context, n_running: int) -> float:
    token = np.array([65], np.int32)
    started = time.perf_counter()
    for _ in range(N_STEPS):
        context.decode(
            [Feed(SeqId(seq), token, context.end(SeqId(seq)), wants_logits=True) for seq in range(n_running)]
        )
        context.logits(0)
    return (time.perf_counter() - started) / N_STEPS
