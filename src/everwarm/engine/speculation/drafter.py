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
    def propose(self, history: Tokens, n: int, namespace: str) -> Proposal | None:
        """At most ``n`` tokens that may follow ``history``, from what this namespace may see; None: nothing is known."""
        ...

    def forget(self) -> None:
        """Texts were erased: nothing of them may be proposed any more."""
        ...
