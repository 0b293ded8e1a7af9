"""What every drafter is: tokens that may follow, with the chance of each.

Looking tokens up costs next to nothing, so a proposal comes first and its length is decided then. A drafter that computes
costs time for every token, so it is told how many are worth it, for all sequences at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from everwarm.types import SeqId

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


class Wanted(NamedTuple):
    """``n`` tokens after a history, of which the model has not read the last ``n_due`` yet."""

    seq: SeqId
    history: Tokens
    n_due: int
    n: int


class ComputingDrafter(Protocol):
    """``confidence``: as of a ``Proposal``, before anything was verified."""

    source: str
    confidence: float
    n_most: int  # tokens of a draft: those further ahead are seldom right

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Reads what it has not read yet; that is no part of what a draft costs."""
        ...

    def draft(self, wanted: Sequence[Wanted]) -> dict[SeqId, list[int]]:
        """Tokens for each sequence that something is known of."""
        ...

    def forget(self) -> None:
        """As a ``Drafter`` does."""
        ...

    def close(self) -> None: ...
