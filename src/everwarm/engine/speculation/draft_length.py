"""How many tokens of a draft are worth verifying, and when drafts are looked for, from what this engine has measured. Pure.

A draft costs rows of a step, and rows of the next one where it is rejected: a recurrent state cannot be cut, so what was
accepted is decoded again. It brings as many tokens as are accepted. Both are known here: the cost is measured, and the
chance is the drafter's own, corrected by how often such drafts were right before.

Speculation must never cost: looking takes at most a fifth of a percent of the time, and a draft that does not promise to
pay is passed over. Once in a while one is verified all the same, because texts and machines change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everwarm.engine.speculation.model_drafter import ComputingDrafter
from everwarm.engine.speculation.step_cost import RepeatedStepCost, StepCost
from everwarm.llama.batch import Tokens

MARGIN = 1.05  # a draft must promise so much more speed: estimates are only estimates
NO_MARGIN = 1.0  # where the step before had one
PRIOR_WEIGHT = 4.0  # tokens that a drafter's own confidence counts for
_STEADY_PRIOR = 1.0  # the same of a head where a change costs time: its tokens are of one kind, so a few show enough
_ENGINE_WEIGHT = 12.0  # tokens that all earlier requests together count for
_FORGET = 0.9  # a request's record, for each draft
_STEADY_WEIGHT, _STEADY_FORGET = 24.0, 0.97  # the same where changing one's mind costs time
_MOST_KNOWN = 400.0  # tokens, of the engine's record
N_CAUTIOUS = 16  # tokens of a request's first draft: chances are those of other texts
N_SHORT = 4  # of a draft after many that were wrong
N_FIRST = 2  # tokens that are tried before any step was measured

LOOK_SHARE = 0.002  # of a step's time, for looking for drafts
TRY_AFTER = 128  # drafts of a request that were passed over: then one is verified, to see whether it pays now
COMPUTE_AFTER = 512  # the same for drafts that have to be computed
N_TRIED = 2
N_LEARN = 6  # drafts after which it is known how long one takes
CHANGE_AFTER = 3.0  # steps that another length of all drafts would have saved: a change takes as long as one or two
SLEEP_AGAIN = 16  # steps in a row without a computed draft, where the drafter was asked again
_FADED = 0.1  # what was learned before a sleep counts so much after it
_MEMORY = 0.9
_GAIN_MEMORY = 0.95
_SPIKE = 3.0  # a look that takes so many times longer than expected was disturbed

ONE_KIND = -1  # of all tokens that are computed; those that are looked up are of many kinds


class Proposal(NamedTuple):
    """A draft as it is proposed. ``confidences``: for each token the chance that it is accepted if all before it were, as
    the drafter believes. ``kinds``: tokens of one kind have the same confidence, and share a record of how often they
    were right."""

    tokens: Tokens
    confidences: NDArray[np.float64]
    kinds: NDArray[np.intp]
    source: str
    is_computed: bool = False  # else it was found

    def first(self, n: int) -> Proposal:
        """Its first ``n`` tokens."""
        return self._replace(tokens=self.tokens[:n], confidences=self.confidences[:n], kinds=self.kinds[:n])


def computed_proposal(tokens: Tokens, confidence: float, source: str) -> Proposal:
    """A draft of a head or a draft model."""
    n = len(tokens)
    return Proposal(tokens, np.full(n, confidence), np.full(n, ONE_KIND), source, is_computed=True)


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


class _PassedOver(NamedTuple):
    """The first token of a draft that was not verified. The rest of the draft is not kept: its text may be erased."""

    source: str
    kind: int
    token: int
    at: int  # its place in the history


@dataclass(slots=True)
class Record:
    """What was accepted of drafted tokens, by their kind. ``above``: the record of all requests, for one of them."""

    above: Record | None = None
    is_steady: bool = False
    n_most: int = N_CAUTIOUS  # tokens of a draft that was found: twice as many after one that was right, half otherwise
    n_passed: int = 0  # drafts in a row that were not worth it
    n_not_computed: int = 0  # the same of those that would have had to be computed
    _tallies: dict[tuple[str, int], Tally] = field(default_factory=dict)
    _passed: _PassedOver | None = None  # since the last look

    def chance(self, source: str, kind: int, confidence: float) -> float:
        """That a token of this kind is accepted if all before it were."""
        weight, expected = _STEADY_PRIOR if self.is_steady and kind == ONE_KIND else PRIOR_WEIGHT, confidence
        if self.above is not None:
            weight = _STEADY_WEIGHT if self.is_steady else _ENGINE_WEIGHT
            expected = self.above.chance(source, kind, confidence)
        tally = self._tallies.get((source, kind))
        if tally is None:
            return expected
        return (tally.n_accepted + weight * expected) / (tally.n + weight)

    def chances(self, proposal: Proposal, n: int) -> list[float]:
        """The same for each of the first ``n`` tokens of a proposal."""
        kinds, confidences = proposal.kinds[:n].tolist(), proposal.confidences[:n].tolist()
        believed = dict(zip(kinds, confidences, strict=True))
        known = {kind: self.chance(proposal.source, kind, confidence) for kind, confidence in believed.items()}
        return [known[kind] for kind in kinds]

    def pass_over(self, proposal: Proposal, n_before: int) -> None:
        """Remembers a draft that is not verified after so many tokens: the reply will show whether it began right."""
        self._passed = _PassedOver(proposal.source, int(proposal.kinds[0]), int(proposal.tokens[0]), n_before)

    def learn_from_passed(self, history: Tokens) -> None:
        """Learns from the draft that was passed over in the last look, if the reply is longer since: not where its context
        was shifted. Only the first token is compared: later ones were guessed for the case that it is right."""
        passed, self._passed = self._passed, None
        if passed is not None and len(history) > passed.at:
            self._note(passed.source, [passed.kind], int(history[passed.at] == passed.token))

    def note(self, source: str, kinds: Sequence[int], n_accepted: int) -> None:
        """Learns from a draft that was verified. ``kinds``: of the tokens that were compared: those accepted, and the first
        that was not."""
        self.n_passed = self.n_not_computed = 0
        self._note(source, kinds, n_accepted)

    def _note(self, source: str, kinds: Sequence[int], n_accepted: int) -> None:
        for kind in set(kinds):
            n, n_right = kinds.count(kind), kinds[:n_accepted].count(kind)
            tally = self._tallies.setdefault((source, kind), Tally())
            if self.above is not None:
                tally.scale(_STEADY_FORGET if self.is_steady else _FORGET)
            elif tally.n > _MOST_KNOWN:
                tally.scale(0.5)
            tally.add(n, n_right)
        if self.above is not None:
            self.above._note(source, kinds, n_accepted)

    def grow(self, n_drafted: int, n_accepted: int) -> None:
        """Sets how long the next draft may be, by what became of this one."""
        if n_accepted < n_drafted:
            self.n_most = max(N_SHORT, self.n_most // 2)
        elif n_drafted >= self.n_most:
            self.n_most *= 2

    def fade(self, by: float) -> None:
        """What was noted until now counts less."""
        for tally in self._tallies.values():
            tally.scale(by)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step as it is without this draft: its rows, and how many replies it continues."""

    n_rows: int
    n_replies: int
    n_cut: float  # after a rejection drafts up to this length are cut; of longer ones the accepted tokens are decoded again
    overhead_s: float  # of verifying anything


def best_length(
    chances: Sequence[float],
    shape: StepShape,
    seconds: Callable[[float], float | None],
    draft_s: float = 0.0,
) -> int:
    """How many tokens of a draft to verify; 0: none, it would cost more time than it saves. ``chances``: of each token, if
    all before it are right; ``seconds``: of a step with so many rows; ``draft_s``: what each token costs before it is
    verified."""
    plain_s = seconds(shape.n_rows)
    if plain_s is None or plain_s <= 0.0:
        return min(len(chances), N_FIRST)
    best, best_rate = 0, MARGIN * shape.n_replies / plain_s
    for n, rate in enumerate(rates(chances, shape, seconds, draft_s), start=1):
        if rate > best_rate:
            best, best_rate = n, rate
    return best


def rates(
    chances: Sequence[float], shape: StepShape, seconds: Callable[[float], float | None], draft_s: float = 0.0
) -> Iterator[float]:
    """Tokens per second that a draft of one token promises, one of two, and so on; without measured steps, tokens per
    step."""
    plain_s = seconds(shape.n_rows)
    survives, expected = 1.0, 0.0
    for n, chance in enumerate(chances, start=1):
        survives *= chance
        expected += survives
        step_s = seconds(shape.n_rows + n)
        if plain_s is None or step_s is None:
            yield shape.n_replies + expected
            continue
        again_s = 0.0 if n <= shape.n_cut else (1 - survives) * _again(seconds, shape.n_rows, plain_s, expected + 1)
        yield (shape.n_replies + expected) / (step_s + again_s + shape.overhead_s + n * draft_s)


def _again(seconds: Callable[[float], float | None], n_rows: int, plain_s: float, n_again: float) -> float:
    return max(0.0, (seconds(n_rows + n_again) or plain_s) - plain_s)


# when drafts are looked for, and what steps cost


class Rhythm(NamedTuple):
    """How often steps are plain, and when a drafter that computes is tried and left alone. Counted in steps, however many
    replies they have."""

    n_plain_first: int  # steps without drafts at first: all others are compared to them
    n_plain: int  # later so many in a row
    plain_every: int  # of so many
    n_forced: int  # drafts that are computed at first, whatever they promise
    n_forced_again: int  # the same when the drafter is asked again
    sleep_after: int  # decisions in a row against computing: then the drafter is left alone, and reads nothing
    first_sleep: int  # after so many it is asked again, and after twice as many each time that it was in vain
    longest_sleep: int


ANY_LENGTH = Rhythm(6, 1, 64, 0, 0, sleep_after=256, first_sleep=256, longest_sleep=32_768)
# Where steps should be alike, a plain step among others is dear, and drafts bring most.
ONE_LENGTH = Rhythm(4, 4, 1024, 4, 3, sleep_after=16, first_sleep=128, longest_sleep=4096)


class Pacing:
    def __init__(self, n_even: int = 0, cost: StepCost | None = None) -> None:
        """``n_even``: all drafts that are computed are equally long, and have at most so many tokens; 0: any number.
        ``cost``: a ``RepeatedStepCost`` where steps are repeated ready-made, which ``n_even`` is for."""
        self._n_even = n_even
        self._n_now = n_even  # tokens of all such drafts now
        self._steps_saved = [0.0] * n_even  # steps that drafts of another length would have saved, by length
        self._rhythm = ONE_LENGTH if n_even else ANY_LENGTH
        self._n_forced = self._rhythm.n_forced  # drafts that are still to be computed whatever they promise
        self.cost = cost or (RepeatedStepCost() if n_even else StepCost())
        self.record = Record(is_steady=n_even > 0)  # of all requests
        self.overhead_s = 1e-4  # of verifying anything: parking, restoring, picking
        self._look_s = 2e-5
        self._draft_s: float | None = None  # for each token of a draft that is computed
        self._n_computed = 0  # drafts, since the drafter was last asked again
        self._has_drafted = False  # for the decision before this one
        self._n_unused = 0  # steps in a row without a draft that was computed
        self._n_asleep = 0  # steps since the drafter was left alone
        self._n_sleep: int | None = None  # how many the next sleep takes; None: it has never slept
        self._n_steps = 0  # that could have had drafts
        self._has_decided = False  # whether this step asks a drafter that computes
        self._is_left_alone = False  # the drafter, in this step
        self._n_skipped = 0  # steps since drafts were last looked for
        self._gain_s = 0.0  # that a look has saved of late

    def begin_step(self) -> None:
        """A step that may have drafts: everything that is counted in steps counts it once, however many replies it has."""
        self._n_steps += 1
        self._has_decided = False

    def is_plain(self) -> bool:
        """Whether this step has no drafts, so that it is known what such a step costs."""
        rhythm = self._rhythm
        return self._n_steps <= rhythm.n_plain_first or self._n_steps % rhythm.plain_every < rhythm.n_plain

    def may_look(self, n_rows: int) -> bool:
        """Whether a step of so many rows may look for drafts. Where looking has not paid of late, not every one does."""
        self._n_skipped += 1
        if self._gain_s <= self._look_s:
            step_s = self.cost.seconds(n_rows)
            if step_s is not None and self._look_s > LOOK_SHARE * step_s * self._n_skipped:
                return False
        self._n_skipped = 0
        return True

    def has_looked(self, seconds: float, *, has_found: bool) -> None:
        self._look_s = _MEMORY * self._look_s + (1 - _MEMORY) * min(seconds, _SPIKE * self._look_s)
        if not has_found:
            self._has_gained(0.0)

    def _has_gained(self, seconds: float) -> None:
        self._gain_s = _GAIN_MEMORY * self._gain_s + (1 - _GAIN_MEMORY) * seconds

    def judge(self, proposal: Proposal, record: Record, n_drafted: int, n_accepted: int) -> None:
        """Learns from a draft that was verified: of so many tokens so many were accepted."""
        n_compared = min(n_drafted, n_accepted + 1)
        record.note(proposal.source, proposal.kinds[:n_compared].tolist(), n_accepted)
        if proposal.is_computed:
            return
        record.grow(n_drafted, n_accepted)
        plain_s, step_s = self.cost.seconds(1), self.cost.seconds(1 + n_drafted)
        if plain_s is not None and step_s is not None:
            self._has_gained((1 + n_accepted) * plain_s - step_s)

    def length(self, proposal: Proposal, record: Record, shape: StepShape) -> int:
        """How many tokens of a proposal are verified. ``record``: of its request."""
        record.above = self.record
        n = best_length(record.chances(proposal, record.n_most), shape, self._seconds_of_found(shape))
        if n == 0:
            record.n_passed += 1
            n = min(N_TRIED, len(proposal.tokens)) if record.n_passed >= TRY_AFTER else 0
        return n

    def _seconds_of_found(self, shape: StepShape) -> Callable[[float], float | None]:
        """What steps cost with drafts that are looked up. They are of any length, and come now and then: usual are plain
        steps, or those with a head's drafts."""
        usual = shape.n_rows + (self._n_now * shape.n_replies if self._has_drafted else 0)
        return partial(self.cost.seconds_with_change, usual=usual)

    def computed_length(self, drafter: ComputingDrafter, n_most: int, record: Record, shape: StepShape) -> int:
        """How many tokens are to be computed for a request. ``n_most``: at least 1. The drafter is asked for all replies of
        a step or for none, and the step counts once."""
        record.above, record.is_steady = self.record, self._n_even > 0
        is_first, self._has_decided = not self._has_decided, True
        if is_first:
            self._is_left_alone = not self.is_computing
            if self._is_left_alone:
                self._sleep()
        if self._is_left_alone:
            return 0
        n_most = min(n_most, self._n_even or drafter.n_most)
        chances = [self._chance(drafter, record)] * n_most
        if self._n_even:
            n = self._even_length(chances, shape)
        else:
            n = best_length(chances, shape, self.cost.seconds, self._draft_s or 0.0)
        self._has_drafted = n > 0
        self._n_unused = 0 if n else self._n_unused + is_first
        if n == 0:
            record.n_not_computed += 1
            is_tried = record.n_not_computed >= COMPUTE_AFTER or self._n_forced > 0
            n = min(self._n_now or N_TRIED, n_most) if is_tried else 0
        elif self._n_computed > N_LEARN:
            self._n_sleep = None  # it pays again
        return n

    def _even_length(self, chances: Sequence[float], shape: StepShape) -> int:
        """How many tokens all drafts have now; 0: they would not pay at any length. They get another length where that pays
        and the present one does not, or once it would have saved what a change costs."""
        n_now, plain_s = min(self._n_now, len(chances)), self.cost.seconds(shape.n_rows)
        if plain_s is None:
            return n_now
        plain_rate = (NO_MARGIN if self._has_drafted else MARGIN) * shape.n_replies / plain_s
        rate_of = dict(enumerate(rates(chances, shape, self.cost.seconds, self._draft_s or 0.0), start=1))
        best = max(rate_of, key=rate_of.__getitem__)
        if rate_of[best] <= plain_rate:
            return 0
        if len(chances) < self._n_even:  # the end of a reply, or a request that limits its drafts
            return n_now if rate_of[n_now] > plain_rate else best
        self._steps_saved = [
            max(0.0, self._steps_saved[n - 1] + rate / rate_of[n_now] - 1) for n, rate in rate_of.items()
        ]
        if rate_of[n_now] <= plain_rate or self._steps_saved[best - 1] > CHANGE_AFTER:
            self._n_now, self._steps_saved = best, [0.0] * self._n_even
        return self._n_now

    @property
    def is_computing(self) -> bool:
        """Whether a drafter that computes is of use here: what replies and prompts it reads costs time as well."""
        return self._n_unused < (self._rhythm.sleep_after if self._n_sleep is None else SLEEP_AGAIN)

    def _sleep(self) -> None:
        """One step more without the drafter."""
        if self._n_asleep == 0:
            rhythm = self._rhythm
            self._n_sleep = (
                rhythm.first_sleep if self._n_sleep is None else min(2 * self._n_sleep, rhythm.longest_sleep)
            )
        self._n_asleep += 1
        if self._n_sleep is not None and self._n_asleep >= self._n_sleep:
            self._n_asleep = self._n_unused = self._n_computed = 0
            self._n_forced = self._rhythm.n_forced_again
            self.record.fade(_FADED)

    def has_computed(self, seconds: float, n_tokens: int) -> None:
        """Learns from a draft that took so long. ``n_tokens``: of the longest one that was computed with others."""
        known, new = self._draft_s, seconds / max(1, n_tokens)
        self._n_computed += 1
        self._n_forced = max(0, self._n_forced - 1)
        if known is None or self._n_computed <= N_LEARN:
            self._draft_s = new if known is None else min(known, new)  # the first ones take longer: a GPU warms up
        else:
            self._draft_s = _MEMORY * known + (1 - _MEMORY) * min(new, _SPIKE * known)

    def prefers_computing(
        self, proposal: Proposal, n: int, drafter: ComputingDrafter, n_computed: int, record: Record, shape: StepShape
    ) -> bool:
        """Whether ``n_computed`` tokens that have to be computed promise more than ``n`` that were found. Both: at least
        one."""
        *_, found = rates(record.chances(proposal, n), shape, self._seconds_of_found(shape))
        chances, draft_s = [self._chance(drafter, record)] * n_computed, self._draft_s or 0.0
        *_, computed = rates(chances, shape, self.cost.seconds, draft_s)
        return computed > found

    @staticmethod
    def _chance(drafter: ComputingDrafter, record: Record) -> float:
        return record.chance(drafter.source, ONE_KIND, drafter.confidence)
