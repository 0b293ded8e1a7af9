"""What sequences that merely stay in the context cost those that run: parked checkpoints and idle conversations.

Wanted: the curve, and idle conversations moved out as soon as they cost more than 2 %.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from bench.measure import hundred_megabytes, table
from everwarm.config import ContextOptions
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.types import SeqId

N_RUNNING_TOKENS, N_IDLE_TOKENS, N_STEPS = 512, 4096, 60
PARKED, IDLE = (0, 8, 32), (0, 4, 16)


def run() -> None:
    with Model(hundred_megabytes()) as model:
        for n_running in (1, 8):
            rows = []
            base = _step_s(model, n_running, 0, 0)
            rows += [(f"{n} parked", *_cells(_step_s(model, n_running, n, 0), base)) for n in PARKED]
            rows += [(f"{n} idle of {N_IDLE_TOKENS}", *_cells(_step_s(model, n_running, 0, n), base)) for n in IDLE]
            title = f"A decode step of {n_running} running request(s) of {N_RUNNING_TOKENS} tokens"
            table(title, ("beside them", "step", "cost"), rows)
            print()


def _cells(step_s: float, base_s: float) -> tuple[str, str]:
    return f"{1e3 * step_s:.2f} ms", f"{100 * (step_s / base_s - 1):+.1f} %"


def _step_s(model: Model, n_running: int, n_parked: int, n_idle: int) -> float:
    n_ctx = n_running * (N_RUNNING_TOKENS + N_STEPS + 64) + n_idle * N_IDLE_TOKENS + 512
    options = ContextOptions(n_ctx=n_ctx, n_seq_max=n_running + n_parked + n_idle)
    tokens = np.random.default_rng(0).integers(0, 256, N_IDLE_TOKENS).astype(np.int32)
    with Context(model, options) as context:
        idle = [SeqId(n_running + n_parked + i) for i in range(n_idle)]
        if idle:
            _read(context, idle[0], tokens)
            blob = context.capture_segment(idle[0], context.end(SeqId(0)), context.end(idle[0]))
            for seq in idle[1:]:  # the same bytes again, in cells of their own
                start = context.end(SeqId(0))
                context.splice_segment(seq, blob, start, context.end(idle[0]), n_cells=N_IDLE_TOKENS, clean=False)
        for seq in range(n_running):
            _read(context, SeqId(seq), tokens[:N_RUNNING_TOKENS])
        for i in range(n_parked):
            context.park(SeqId(i % n_running), SeqId(n_running + i))
            _read(context, SeqId(i % n_running), tokens[:1])
        return _decode(context, n_running)


def _read(context: Context, seq: SeqId, tokens: np.ndarray) -> None:
    for at in range(0, len(tokens), 512):
        context.decode([Feed(seq, tokens[at : at + 512], context.end(seq), wants_logits=False)])


def _decode(context: Context, n_running: int) -> float:
    token = np.array([65], np.int32)
    times = []
    for _ in range(N_STEPS):
        feeds = [Feed(SeqId(seq), token, context.end(SeqId(seq)), wants_logits=True) for seq in range(n_running)]
        started = time.perf_counter()
        context.decode(feeds)
        context.logits(0)
        times.append(time.perf_counter() - started)
    return statistics.median(times[10:])
