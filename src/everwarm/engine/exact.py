"""Is what we keep exactly what a cold reading gives? Replays kept checkpoints in a fresh context and compares bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from everwarm.engine.core import Core
from everwarm.engine.replay import replay
from everwarm.llama.context import Blob, Context
from everwarm.prompt.prompt import Prompt
from everwarm.state.history import SEATED
from everwarm.state.tree import Checkpoint, Node
from everwarm.types import SeqId


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
    kept = ((node, node.checkpoint) for node in core.tree.nodes())
    clean = [(node, point) for node, point in kept if point and point.clean and point.state is not None]
    clean.sort(key=lambda pair: -pair[0].n_items)
    different = controls_equal = 0
    options = replace(core.settings.context(0), n_seq_max=1)
    with Context(core.model, options) as context:
        for node, checkpoint in clean[:most]:
            different += not _equal(_cold_state(context, node, checkpoint), checkpoint)
            controls_equal += _equal(_cold_state(context, node, checkpoint, change=node.n_items // 2), checkpoint)
    n = len(clean[:most])
    return ExactReport(n, different, n, controls_equal)


def _cold_state(context: Context, node: Node, checkpoint: Checkpoint, change: int | None = None) -> Blob:
    codes = node.path.codes[: node.n_items].copy()
    if change is not None:
        codes[change] = (codes[change] + 1) % context.model.vocab.n_tokens
    chunks = checkpoint.chunks
    while chunks and chunks[-1][0] == SEATED:  # the capture below seats it
        chunks = chunks[:-1]
    replay(context, SeqId(0), Prompt(codes), chunks)
    try:
        return context.capture(SeqId(0))
    finally:
        context.drop(SeqId(0))


def _equal(blob: Blob, checkpoint: Checkpoint) -> bool:
    """Bytes after the header, which names the sequence a state was taken from. Zeroes may differ in sign: libllama empties
    a used cell by multiplying it with 0, and a prompt of one to three tokens leaves some of that in place."""
    state = checkpoint.state
    assert state is not None
    return bool(np.array_equal(_unsigned_zeroes(blob), _unsigned_zeroes(state)))


def _unsigned_zeroes(blob: Blob) -> Blob:
    words = blob[8 : 8 + (len(blob) - 8) // 4 * 4].view(np.uint32).copy()
    words[words == 0x80000000] = 0
    return words.view(np.uint8)
