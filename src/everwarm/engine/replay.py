"""Reading a lineage cold, with the very chunks it was read with: the measure of exactness (E2)."""

from __future__ import annotations

from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state.history import SEATED, Chunks
from everwarm.types import SeqId


def replay(context: Context, seq: SeqId, prompt: Prompt, chunks: Chunks) -> None:
    """Decode ``prompt`` into an empty sequence exactly as recorded, with logits."""
    assert context.end(seq).n_tokens == 0, "a replay starts from an empty sequence"
    at = 0
    for size, times in chunks:
        for _ in range(times):
            if size == SEATED:
                context.touch(seq)
                continue
            context.decode([Feed(seq, prompt.codes[at : at + size], context.end(seq), wants_logits=True)])
            at += size
    assert at == len(prompt), f"the chunks cover {at} of {len(prompt)} items"
