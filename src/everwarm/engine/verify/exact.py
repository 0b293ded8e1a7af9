"""Is what we keep exactly what a cold reading gives? Replays kept checkpoints in a fresh context and compares bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from everwarm.engine.core import Core
from everwarm.engine.images.image_cache import Gallery
from everwarm.engine.verify.cold_replay import cold_state, is_same_state
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
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
    different = n_controls = controls_equal = 0
    options = replace(core.settings.context(0), n_seq_max=1)
    with Context(core.model, options) as context:
        for node, checkpoint in clean[:most]:
            different += not _is_reproduced(context, node, checkpoint, core.gallery)
            tokens = np.flatnonzero(node.path.codes[: node.n_items] >= 0)
            if len(tokens):
                change = int(tokens[len(tokens) // 2])
                n_controls += 1
                controls_equal += _is_reproduced(context, node, checkpoint, core.gallery, change)
    return ExactReport(len(clean[:most]), different, n_controls, controls_equal)


def _is_reproduced(
    context: Context, node: Node, checkpoint: Checkpoint, gallery: Gallery | None, change: int | None = None
) -> bool:
    codes = node.path.codes[: node.n_items].copy()
    if change is not None:
        codes[change] = (codes[change] + 1) % context.model.vocab.n_tokens
    assert checkpoint.state is not None
    prompt = Prompt(codes, node.path.first(node.n_items).media)
    try:
        cold = cold_state(context, SeqId(0), prompt, checkpoint.chunks, gallery=gallery)
        return is_same_state(cold, checkpoint.state)
    finally:
        context.drop(SeqId(0))
