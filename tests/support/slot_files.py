"""Contents of slot files that no model wrote."""

from __future__ import annotations

import numpy as np

from everwarm.engine.slotfile import slot_io
from everwarm.prompt.prompt import Prompt
from everwarm.state.store.slot_file import Claim

MINE = Claim("model", "mine")


def conversation(n: int = 40, seed: int = 3) -> slot_io.Saved:
    """What a slot file holds, without a model that it could be of."""
    rng = np.random.default_rng(seed)
    return slot_io.Saved(Prompt.of_tokens(rng.integers(0, 250, n)), rng.integers(0, 256, 5000).astype(np.uint8))
