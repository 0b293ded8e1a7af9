"""Reads a lineage cold, in the same chunks as it was read before: the measure of exactness (E2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from everwarm.engine.core import Core
from everwarm.engine.images import ImageCache
from everwarm.llama.batch import Feed
from everwarm.llama.blobs import trunk
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import SEATED, Chunks
from everwarm.state.tree import Checkpoint, Node
from everwarm.types import Blob, SeqId


def replay(
    context: Context,
    seq: SeqId,
    prompt: Prompt,
    chunks: Chunks,
    tick: Callable[[int], None] = lambda _: None,
    images: ImageCache | None = None,
) -> None:
    """Decode ``prompt`` into an empty sequence exactly as recorded, with logits; ``tick`` is called for every chunk."""
    assert context.end(seq).n_tokens == 0, "a replay starts from an empty sequence"
    at = 0
    for size, times in chunks:
        for _ in range(times):
            if size == SEATED:
                context.touch(seq)
                continue
            if (item := prompt.media.get(at)) is not None:
                assert size == 1 and images is not None, "an image is read by itself, by a model that can see"
                embedding = images.embedding(item, {})
                context.see(seq, images.media, embedding, prompt.mark(at + 1), wants_logits=True)
            else:
                context.decode([Feed(seq, prompt.codes[at : at + size], context.end(seq), wants_logits=True)])
            at += size
            tick(size)
    assert at == len(prompt), f"the chunks cover {at} of {len(prompt)} items"


def cold_state(
    context: Context,
    seq: SeqId,
    prompt: Prompt,
    chunks: Chunks,
    tick: Callable[[int], None] = lambda _: None,
    images: ImageCache | None = None,
) -> Blob:
    """The state after reading ``prompt`` in these chunks; the sequence is kept."""
    while chunks and chunks[-1][0] == SEATED:  # the capture below seats it
        chunks = chunks[:-1]
    replay(context, seq, prompt, chunks, tick, images)
    return context.capture(seq)


def is_same_state(a: Blob, b: Blob) -> bool:
    """Bytes after the header, which names the sequence a state was taken from, without the part of an MTP head. Zeroes
    may differ in sign: libllama empties a used cell by multiplying it with 0, and a prompt of one to three tokens leaves
    some of that in place."""
    return bool(np.array_equal(_unsigned_zeroes(trunk(a)), _unsigned_zeroes(trunk(b))))


def _unsigned_zeroes(blob: Blob) -> Blob:
    words = blob[8 : 8 + (len(blob) - 8) // 4 * 4].view(np.uint32).copy()
    words[words == 0x80000000] = 0
    return words.view(np.uint8)


@dataclass(frozen=True, slots=True)
class ExactReport:
    n_compared: int
    n_different: int
    n_controls: int
    n_controls_equal: int

    @property
    def is_exact(self) -> bool:
        return self.n_compared > 0 and self.n_different == 0 and self.n_controls_equal == 0


def compare_with_cold(core: Core, most: int = 4) -> ExactReport:
    """Replay up to ``most`` clean checkpoints cold with their recorded chunks. For each there is a control: the same
    replay with one item changed, which must not give the same bytes."""
    kept = ((node, node.checkpoint) for node in core.cache.tree.nodes())
    clean = [(node, point) for node, point in kept if point and point.clean and point.state is not None]
    clean.sort(key=lambda pair: -pair[0].n_items)
    different = n_controls = controls_equal = 0
    options = replace(core.settings.context(0), n_seq_max=1)
    with Context(core.model, options) as context:
        for node, checkpoint in clean[:most]:
            different += not _is_reproduced(context, node, checkpoint, core.images)
            tokens = np.flatnonzero(node.path.codes[: node.n_items] >= 0)
            if len(tokens):
                change = int(tokens[len(tokens) // 2])
                n_controls += 1
                controls_equal += _is_reproduced(context, node, checkpoint, core.images, change)
    return ExactReport(len(clean[:most]), different, n_controls, controls_equal)


def _is_reproduced(
    context: Context, node: Node, checkpoint: Checkpoint, images: ImageCache | None, change: int | None = None
) -> bool:
    codes = node.path.codes[: node.n_items].copy()
    if change is not None:
        codes[change] = (codes[change] + 1) % context.model.vocab.n_tokens
    assert checkpoint.state is not None
    prompt = Prompt(codes, node.path.first(node.n_items).media)
    try:
        cold = cold_state(context, SeqId(0), prompt, checkpoint.chunks, images=images)
        return is_same_state(cold, checkpoint.state)
    finally:
        context.drop(SeqId(0))
