"""Log-probabilities of tokens from a row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from everwarm.engine.request import Probs


def probabilities(logits: NDArray[np.float32], token: int | None, n_top: int | None) -> Probs | None:
    """Of the model's own distribution, before any sampling parameter bends it. None for no token, or if nobody asks."""
    if token is None or n_top is None:
        return None
    row = logits.astype(np.float64)
    highest = row.max()
    log_total = highest + np.log(np.exp(row - highest).sum())
    n = min(n_top, len(row))
    top = np.argpartition(row, -n)[-n:] if n else np.empty(0, np.intp)
    top = top[np.argsort(-row[top], kind="stable")]
    return Probs(float(row[token] - log_total), tuple((int(t), float(row[t] - log_total)) for t in top))
