"""The verbs of the exactness tests: read a prompt up to its cuts, leave, come back in some way, go on.

A cut is part of a lineage: there the state is captured, and a sliding window is seated anew. So every run that is
compared with another reads with the same cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from everwarm.config import ContextOptions
from everwarm.llama.batch import Feed, Tokens
from everwarm.llama.context import Context, Logits
from everwarm.llama.model import MemoryKind, Model
from everwarm.types import Blob, Mark, Position, SeqId, TokenCount

N_UBATCH = 64  # flash attention works in tiles from 64 tokens on; below, bits would not show the layout of the cells
OPTIONS = ContextOptions(
    n_ctx=1024, n_batch=2 * N_UBATCH, n_ubatch=N_UBATCH, n_seq_max=4, n_threads=1, n_threads_batch=1
)
SLOT, SPARE, OTHER, THIRD = SeqId(0), SeqId(1), SeqId(2), SeqId(3)
TAIL_CHUNKS = (1, N_UBATCH + 1, 2, 1)  # what is decoded after coming back


def open_context(model: Model, **options: Any) -> Context:
    return Context(model, replace(OPTIONS, **options))


def text(n: int, seed: int = 1) -> Tokens:
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.int32)


def mark(n: int) -> Mark:
    return Mark(TokenCount(n), Position(n))


def say(context: Context, seq: SeqId, tokens: Tokens) -> Logits:
    """Append tokens in one batch; the logits after the last."""
    context.decode([Feed(seq, tokens, context.end(seq), wants_logits=True)])
    return context.logits(0).copy()


def read_to(context: Context, seq: SeqId, tokens: Tokens, stop: int) -> None:
    """Read on from where the sequence ends, in full batches."""
    for start in range(context.end(seq).n_tokens, stop, context.n_batch):
        say(context, seq, tokens[start : min(stop, start + context.n_batch)])


def go_on(context: Context, seq: SeqId, tokens: Tokens, chunks: Sequence[int] = TAIL_CHUNKS) -> list[Logits]:
    """Decode the following tokens in these chunks; one row of logits per chunk."""
    rows = []
    for n in chunks:
        at = context.end(seq).n_tokens
        rows.append(say(context, seq, tokens[at : at + n]))
    return rows


def wander(context: Context, seq: SeqId = SLOT) -> None:
    """Decode something else, so that coming back means something."""
    go_on(context, seq, text(context.end(seq).n_tokens + 20, seed=99), (1, 15, 1))


def wipe(context: Context) -> None:
    for seq in range(context.options.n_seq_max):
        context.drop(SeqId(seq))


def same_bits(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@dataclass(frozen=True, slots=True)
class Segment:
    start: Mark
    stop: Mark
    blob: Blob
    clean: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """All that is kept of a sequence at its last cut: KV by segments, and the state unless KV is all there is."""

    end: Mark
    segments: tuple[Segment, ...]
    state: Blob | None
    clean: bool


def read(context: Context, tokens: Tokens, cuts: Sequence[int], seq: SeqId = SLOT) -> Saved:
    """Read to the last cut, capturing at each."""
    segments: list[Segment] = []
    state = None
    for cut in cuts:
        start = context.end(seq)
        read_to(context, seq, tokens, cut)
        if context.kind.needs_checkpoints:
            state = context.capture(seq)
        if context.kind.has_attention:
            segments.append(segment_of(context, seq, start, context.end(seq)))
    return Saved(context.end(seq), tuple(segments), state, context.is_clean(seq))


def segment_of(context: Context, seq: SeqId, start: Mark, stop: Mark) -> Segment:
    return Segment(start, stop, context.capture_segment(seq, start, stop), context.cells.is_clean(seq))


def splice(context: Context, seq: SeqId, segment: Segment) -> None:
    n_cells = segment.stop.n_tokens - segment.start.n_tokens
    context.splice_segment(seq, segment.blob, segment.start, segment.stop, n_cells=n_cells, clean=segment.clean)


def load(context: Context, seq: SeqId, saved: Saved) -> None:
    """Bring an empty sequence to where it was saved."""
    for segment in saved.segments:
        splice(context, seq, segment)
    restore(context, seq, saved)


def restore(context: Context, seq: SeqId, saved: Saved) -> None:
    """Put the state back; plain attention has none, and its KV is cut instead."""
    if saved.state is None:
        context.trim(seq, saved.end)
    else:
        context.restore(seq, saved.state, saved.end, clean=saved.clean)


# Ways to come back to the last cut. Each gets a context whose slot stands there, and names the sequence that does again.

Way = Callable[[Context, Saved], SeqId]


def unparked(context: Context, saved: Saved) -> SeqId:
    context.park(SLOT, SPARE)
    wander(context)
    context.unpark(SPARE, SLOT)
    return SLOT


def unparked_elsewhere(context: Context, saved: Saved) -> SeqId:
    context.park(SLOT, SPARE)
    wander(context)
    context.drop(SLOT)
    context.unpark(SPARE, OTHER)
    return OTHER


def reloaded(context: Context, saved: Saved) -> SeqId:
    wander(context)
    wipe(context)
    load(context, SLOT, saved)
    return SLOT


def reloaded_elsewhere(context: Context, saved: Saved) -> SeqId:
    wander(context)
    wipe(context)
    load(context, OTHER, saved)
    return OTHER


def restored_in_place(context: Context, saved: Saved) -> SeqId:
    wander(context)
    restore(context, SLOT, saved)
    return SLOT


def restored_after_keeping_kv(context: Context, saved: Saved) -> SeqId:
    wander(context)
    context.keep_kv(SLOT, saved.end)
    restore(context, SLOT, saved)
    return SLOT


def half_kept_half_spliced(context: Context, saved: Saved) -> SeqId:
    wander(context)
    context.keep_kv(SLOT, saved.segments[0].stop)
    for segment in saved.segments[1:]:
        splice(context, SLOT, segment)
    restore(context, SLOT, saved)
    return SLOT


def shared(context: Context, saved: Saved) -> SeqId:
    wander(context)
    context.share_kv(SLOT, OTHER, saved.end)
    context.drop(SLOT)
    restore(context, OTHER, saved)
    return OTHER


_PARKING = (unparked, unparked_elsewhere)
_LOADING = (reloaded, reloaded_elsewhere)
_KEEPING = (restored_in_place, restored_after_keeping_kv, half_kept_half_spliced)

WAYS: dict[MemoryKind, tuple[Way, ...]] = {
    MemoryKind.HYBRID: (*_PARKING, *_LOADING, *_KEEPING, shared),
    MemoryKind.ATTENTION: (*_PARKING, *_LOADING, *_KEEPING, shared),
    MemoryKind.RECURRENT: (*_PARKING, *_LOADING, restored_in_place),
    MemoryKind.WINDOW: (*_LOADING, *_KEEPING),
}

KINDS = {
    "qwen35": MemoryKind.HYBRID,
    "qwen35moe": MemoryKind.HYBRID,
    "qwen3next": MemoryKind.HYBRID,
    "jamba": MemoryKind.HYBRID,
    "falcon-h1": MemoryKind.HYBRID,
    "granitehybrid": MemoryKind.HYBRID,
    "nemotron_h": MemoryKind.HYBRID,
    "nemotron_h_moe": MemoryKind.HYBRID,
    "lfm2": MemoryKind.HYBRID,
    "mamba2": MemoryKind.RECURRENT,
    "gemma3": MemoryKind.WINDOW,
    "llama": MemoryKind.ATTENTION,
}
WITH_STATE = tuple(arch for arch, kind in KINDS.items() if kind.needs_checkpoints)
WITH_KV = tuple(arch for arch, kind in KINDS.items() if kind.has_attention)
HYBRIDS = tuple(arch for arch, kind in KINDS.items() if kind is MemoryKind.HYBRID)
WITHOUT_TRIM = tuple(arch for arch, kind in KINDS.items() if kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT))
