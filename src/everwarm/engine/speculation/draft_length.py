"""How many tokens of a draft are worth verifying. Pure.

A draft costs rows of a step, and rows of the next one where it is rejected: a recurrent state cannot be cut, so what was
accepted is decoded again. It brings as many tokens as are accepted. Both are known here: the cost is measured, and the
chance is the drafter's own, corrected by how often such drafts were right before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MARGIN = 1.05  # a draft must promise so much more speed: estimates are only estimates
NO_MARGIN = 1.0  # where the step before had one
PRIOR_WEIGHT = 4.0  # tokens that a drafter's own confidence counts for
_ENGINE_WEIGHT = 12.0  # tokens that all earlier requests together count for
_FORGET = 0.9  # a request's record, for each draft
_STEADY_WEIGHT, _STEADY_FORGET = 24.0, 0.97  # the same where changing one's mind costs time
_MOST_KNOWN = 400.0  # tokens, of the engine's record
N_CAUTIOUS = 8  # tokens of a request's first draft: chances are those of other texts
N_FIRST = 2  # tokens that are tried before any step was measured

Tokens = NDArray[np.int32]
Key = tuple[str, int]


class Proposal(NamedTuple):
    """``confidence``: the chance that a token is accepted if all before it were, as the drafter believes."""

    tokens: Tokens
    confidence: float
    source: str
    is_computed: bool = False  # else it was found


@dataclass(slots=True)
class Tally:
    n: float = 0.0
    n_accepted: float = 0.0

    def add(self, n: int, n_accepted: int) -> None:
        self.n += n
        self.n_accepted += n_accepted

    def scale(self, by: float) -> None:
        self.n *= by
        self.n_accepted *= by


@dataclass(slots=True)
class Record:
    """What was accepted of drafts of one kind of confidence. ``above``: the record of all requests, for one of them."""

    above: Record | None = None
    is_steady: bool = False
    n_most: int = N_CAUTIOUS  # tokens of a draft that was found: twice as many after one that was right, half otherwise
    n_passed: int = 0  # drafts in a row that were not worth it
    n_not_computed: int = 0  # the same of those that would have had to be computed
    _tallies: dict[Key, Tally] = field(default_factory=dict)

    def chance(self, source: str, confidence: float) -> float:
        """That a token of such a draft is accepted if all before it were."""
        weight, expected = PRIOR_WEIGHT, confidence
        if self.above is not None:
            weight = _STEADY_WEIGHT if self.is_steady else _ENGINE_WEIGHT
            expected = self.above.chance(source, confidence)
        tally = self._tallies.get(_key(source, confidence))
        if tally is None:
            return expected
        return (tally.n_accepted + weight * expected) / (tally.n + weight)

    def note(self, source: str, confidence: float, n_tried: int, n_accepted: int) -> None:
        """``n_tried``: tokens that were compared: those accepted, and the first that was not."""
        tally = self._tallies.setdefault(_key(source, confidence), Tally())
        if self.above is not None:
            self.n_passed = self.n_not_computed = 0
            tally.scale(_STEADY_FORGET if self.is_steady else _FORGET)
            self.above.note(source, confidence, n_tried, n_accepted)
        elif tally.n > _MOST_KNOWN:
            tally.scale(0.5)
        tally.add(n_tried, n_accepted)

    def grow(self, n_drafted: int, n_accepted: int) -> None:
        """Sets how long the next draft may be, by what became of this one."""
        if n_accepted < n_drafted:
            self.n_most = max(N_CAUTIOUS // 2, self.n_most // 2)
        elif n_drafted >= self.n_most:
            self.n_most *= 2

    def fade(self, by: float) -> None:
        """What was noted until now counts less."""
        for tally in self._tallies.values():
            tally.scale(by)


def _key(source: str, confidence: float) -> Key:
    return source, round(confidence * 20)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step as it is without this draft: its rows, and how many replies it continues."""

    n_rows: int
    n_replies: int
    n_cut: (
        float  # drafts up to this length are cut after a rejection; of longer ones what was accepted is decoded again
    )
    overhead_s: float  # of verifying anything


def best_length(
    n_most: int,
    chance: float,
    shape: StepShape,
    seconds: Callable[[float], float | None],
    draft_s: float = 0.0,
    n_least: int = 1,
    margin: float = MARGIN,
) -> int:
    """How many tokens of a draft to verify; 0: none, it would cost more time than it saves. ``seconds``: of a step with so
    many rows; ``draft_s``: what each token costs before it is verified."""
    plain_s = seconds(shape.n_rows)
    if plain_s is None or plain_s <= 0.0:
        return max(n_least, min(n_most, N_FIRST))
    best, best_rate = 0, margin * shape.n_replies / plain_s
    for n in range(n_least, n_most + 1):
        rate = rate_of(n, chance, shape, seconds, draft_s)
        if rate > best_rate:
            best, best_rate = n, rate
    return best


def rate_of(
    n: int, chance: float, shape: StepShape, seconds: Callable[[float], float | None], draft_s: float = 0.0
) -> float:
    """Tokens per second that a draft of ``n`` tokens promises; without measured steps, tokens per step."""
    survives = chance**n
    expected = n if chance >= 1.0 else chance * (1 - survives) / (1 - chance)
    plain_s, step_s = seconds(shape.n_rows), seconds(shape.n_rows + n)
    if plain_s is None or step_s is None:
        return shape.n_replies + expected
    again_s = 0.0 if n <= shape.n_cut else (1 - survives) * _again(seconds, shape.n_rows, plain_s, expected + 1)
    return (shape.n_replies + expected) / (step_s + again_s + shape.overhead_s + n * draft_s)


def _again(seconds: Callable[[float], float | None], n_rows: int, plain_s: float, n_again: float) -> float:
    return max(0.0, (seconds(n_rows + n_again) or plain_s) - plain_s)
