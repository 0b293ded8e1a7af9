"""Reading a lineage cold, with the very chunks it was read with: the measure of exactness (E2)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from everwarm.engine.images.image_cache import Gallery
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state.history import SEATED, Chunks
from everwarm.types import Blob, SeqId


def replay(
    context: Context,
    seq: SeqId,
    prompt: Prompt,
    chunks: Chunks,
    tick: Callable[[int], None] = lambda _: None,
    gallery: Gallery | None = None,
) -> None:
    """Decode ``prompt`` into an empty sequence exactly as recorded, with logits; ``tick`` hears of every chunk."""
    assert context.end(seq).n_tokens == 0, "a replay starts from an empty sequence"
    at = 0
    for size, times in chunks:
        for _ in range(times):
            if size == SEATED:
                context.touch(seq)
                continue
            if (item := prompt.media.get(at)) is not None:
                assert size == 1 and gallery is not None, "a picture is read by itself, by somebody who can see"
                embedding = gallery.embedding(item, {})
                context.see(seq, gallery.media, embedding, prompt.mark(at + 1), wants_logits=True)
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
    gallery: Gallery | None = None,
) -> Blob:
    """The state after reading ``prompt`` so; the sequence stays where it is."""
    while chunks and chunks[-1][0] == SEATED:  # the capture below seats it
        chunks = chunks[:-1]
    replay(context, seq, prompt, chunks, tick, gallery)
    return context.capture(seq)


def is_same_state(a: Blob, b: Blob) -> bool:
    """Bytes after the header, which names the sequence a state was taken from. Zeroes may differ in sign: libllama empties
    a used cell by multiplying it with 0, and a prompt of one to three tokens leaves some of that in place."""
    return bool(np.array_equal(_unsigned_zeroes(a), _unsigned_zeroes(b)))


def _unsigned_zeroes(blob: Blob) -> Blob:
    words = blob[8 : 8 + (len(blob) - 8) // 4 * 4].view(np.uint32).copy()
    words[words == 0x80000000] = 0
    return words.view(np.uint8)
