"""What every drafter is: tokens that may follow, with the chance of each. Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class Proposal(NamedTuple):
    """``confidence``: the chance that a token is accepted if all before it were, as the drafter believes."""

    tokens: Tokens
    confidence: float
    source: str


class Drafter(Protocol):
    def propose(self, history: Tokens, n: int) -> Proposal | None:
        """At most ``n`` tokens that may follow ``history``; None: nothing is known."""
        ...
