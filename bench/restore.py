"""Coming back to an 8k-token point: unparked, from RAM, and a plain memory copy of the same bytes for scale.

Wanted: unpark at most 1 ms; from RAM within 2× of the memory copy.
"""

from __future__ import annotations

import numpy as np

from bench.measure import hundred_megabytes, median_s, much_kv, table
from everwarm.config import ContextOptions
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.types import START, SeqId

N_TOKENS, REPEATS = 8192, 15
SLOT, SPARE = SeqId(0), SeqId(1)


def run() -> None:
    """On two models: with little KV per token the bookkeeping per cell shows, with much of it the bytes do."""
    options = ContextOptions(n_ctx=2 * N_TOKENS + 512, n_seq_max=2)
    for path in (hundred_megabytes(), much_kv()):
        with Model(path) as model, Context(model, options) as context:
            _measure(context)
            print()


def _measure(context: Context) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, N_TOKENS).astype(np.int32)
    for at in range(0, N_TOKENS, 512):
        context.decode([Feed(SLOT, tokens[at : at + 512], context.end(SLOT), wants_logits=False)])
    end = context.end(SLOT)
    state, segment = context.capture(SLOT), context.capture_segment(SLOT, START, end)
    context.park(SLOT, SPARE)
    unpark_s = median_s(lambda: context.unpark(SPARE, SLOT), REPEATS)
    in_place_s = median_s(lambda: context.restore(SLOT, state, end, clean=True), REPEATS)
    context.drop(SPARE)

    def reload() -> None:
        context.splice_segment(SLOT, segment, START, end, n_cells=N_TOKENS, clean=True)
        context.restore(SLOT, state, end, clean=True)

    reload_s = median_s(reload, REPEATS, before=lambda: context.drop(SLOT))
    room = np.empty(len(state) + len(segment), np.uint8)

    def copy() -> None:
        room[: len(state)] = state
        room[len(state) :] = segment

    copy_s = median_s(copy, REPEATS)
    copy_state_s = median_s(lambda: np.copyto(room[: len(state)], state), REPEATS)
    rows = [
        ("unpark", "–", f"{1e3 * unpark_s:.2f} ms", "–"),
        ("in place: state", _mib(len(state)), f"{1e3 * in_place_s:.2f} ms", f"{in_place_s / copy_state_s:.2f}× memcpy"),
        ("reload: KV and state", _mib(len(room)), f"{1e3 * reload_s:.2f} ms", f"{reload_s / copy_s:.2f}× memcpy"),
    ]
    name = context.model.path.stem
    table(f"Coming back to {N_TOKENS} tokens ({name})", ("way", "bytes", "time", "beside a copy"), rows)


def _mib(n: int) -> str:
    return f"{n / (1 << 20):.1f} MiB"
