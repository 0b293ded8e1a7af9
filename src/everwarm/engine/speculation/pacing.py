"""When drafts are looked for, and how many of their tokens are verified, from what this engine has measured.

Speculation must never cost: looking takes at most a fifth of a percent of the time, and a draft that does not promise to
pay is passed over. Once in a while one is verified all the same, because texts and machines change.
"""

from __future__ import annotations

from everwarm.engine.speculation.draft_length import MARGIN, NO_MARGIN, Record, StepShape, best_length, rate_of
from everwarm.engine.speculation.drafter import ComputingDrafter, Proposal
from everwarm.engine.speculation.step_cost import StepCost

LOOK_SHARE = 0.002  # of a step's time, for looking for drafts
TRY_AFTER = 128  # drafts of a request that were passed over: then one is verified, to see whether it pays now
COMPUTE_AFTER = 512  # the same for drafts that have to be computed
N_TRIED = 2
N_PLAIN = 6  # steps without drafts at first
PLAIN_EVERY = 64  # later one of so many has none: all others are compared to them
N_LEARN = 6  # drafts that are computed at first, and whenever they are tried again, where steps should be alike
SLEEP_AFTER = 256  # decisions in a row against computing a draft: then the drafter is left alone, and reads nothing
SLEEP_AFTER_EVEN = 64  # the same where steps should be alike
SLEEP_AGAIN = 16  # the same where it was asked again
FIRST_SLEEP = 256  # decisions, after which it is asked again; twice as many each time that it is in vain
WAKE_AFTER = 32_768  # at most so many
WAKE_AFTER_EVEN = 1024  # the same where steps should be alike: there drafts bring most
_FADED = 0.1  # what was learned before a sleep counts so much after it
N_PLAIN_EVEN, PLAIN_EVERY_EVEN = 3, 256  # where steps should be alike: several in a row, and seldom
_MEMORY = 0.9
_SPIKE = 3.0  # a look that takes so many times longer than expected was disturbed


class Pacing:
    def __init__(self, n_even: int = 0) -> None:
        """``n_even``: all drafts that are computed have so many tokens; 0: any number. A GPU repeats the step before,
        ready-made, where it has as many rows, and takes half as long again for another one."""
        self._n_even = n_even
        self._n_rows_before = 0  # of the step before
        self.cost = StepCost()
        self.record = Record()  # of all requests
        self.overhead_s = 1e-4  # of verifying anything: parking, restoring, picking
        self._look_s = 2e-5
        self._draft_s: float | None = None  # for each token of a draft that is computed
        self._n_computed = 0  # drafts, since the drafter was last asked again
        self._has_drafted = False  # for the decision before this one
        self._n_unused = 0  # decisions in a row against computing
        self._n_asleep = 0  # decisions since the drafter was left alone
        self._n_sleep: int | None = None  # how many the next sleep takes; None: it has never slept
        self._n_steps = 0  # that could have had drafts
        self._n_skipped = 0  # steps since drafts were last looked for
        self._is_paying = False  # the last draft was right, at least in part

    def is_plain(self) -> bool:
        """Whether the next step has no drafts, so that it is known what such a step costs."""
        self._n_steps += 1
        if self._n_even:
            return self._n_steps <= N_PLAIN or self._n_steps % PLAIN_EVERY_EVEN < N_PLAIN_EVEN
        return self._n_steps <= N_PLAIN or self._n_steps % PLAIN_EVERY == 0

    def has_stepped(self, n_rows: int, seconds: float) -> None:
        """Learns what a step that only writes replies costs."""
        is_like_before = n_rows == self._n_rows_before
        self._n_rows_before = n_rows
        if is_like_before or not self._n_even:
            self.cost.learn(n_rows, seconds)

    def may_look(self, n_rows: int) -> bool:
        """Whether a step of so many rows may look for drafts. Where steps are very short, not every one does."""
        self._n_skipped += 1
        if not self._is_paying:
            step_s = self.cost.seconds(n_rows)
            if step_s is not None and self._look_s > LOOK_SHARE * step_s * self._n_skipped:
                return False
        self._n_skipped = 0
        return True

    def has_looked(self, seconds: float, *, has_found: bool) -> None:
        self._look_s = _MEMORY * self._look_s + (1 - _MEMORY) * min(seconds, _SPIKE * self._look_s)
        self._is_paying = self._is_paying and has_found

    def judge(self, proposal: Proposal, record: Record, n_drafted: int, n_accepted: int) -> None:
        """Learns from a draft that was verified: of so many tokens so many were accepted."""
        self._is_paying = n_accepted > 0
        record.note(proposal.source, proposal.confidence, min(n_drafted, n_accepted + 1), n_accepted)

    def length(self, proposal: Proposal, record: Record, shape: StepShape) -> int:
        """How many tokens of a proposal are verified. ``record``: of its request."""
        record.above = self.record
        chance = record.chance(proposal.source, proposal.confidence)
        n = best_length(len(proposal.tokens), chance, shape, self.cost.seconds)
        if n == 0:
            record.n_passed += 1
            n = min(N_TRIED, len(proposal.tokens)) if record.n_passed >= TRY_AFTER else 0
        return n

    def computed_length(self, drafter: ComputingDrafter, n_most: int, record: Record, shape: StepShape) -> int:
        """How many tokens are to be computed for a request."""
        record.above, record.is_steady = self.record, self._n_even > 0
        if not self.is_computing:
            self._sleep()
            return 0
        n_most = min(n_most, self._n_even or drafter.n_most)
        n_least = n_most if self._n_even else 1
        chance = self._chance(drafter, record)
        margin = NO_MARGIN if self._n_even and self._has_drafted else MARGIN
        n = best_length(n_most, chance, shape, self.cost.seconds, self._draft_s or 0.0, n_least, margin)
        self._has_drafted = n > 0
        self._n_unused = 0 if n else self._n_unused + 1
        if n == 0:
            record.n_not_computed += 1
            is_tried = record.n_not_computed >= COMPUTE_AFTER or (self._n_even > 0 and self._n_computed < N_LEARN)
            n = max(n_least, min(N_TRIED, n_most)) if is_tried else 0
        elif self._n_computed > N_LEARN:
            self._n_sleep = None  # it pays again
        return n

    @property
    def is_computing(self) -> bool:
        """Whether a drafter that computes is of use here: what replies and prompts it reads costs time as well."""
        most = SLEEP_AFTER_EVEN if self._n_even else SLEEP_AFTER
        return self._n_unused < (most if self._n_sleep is None else SLEEP_AGAIN)

    def _sleep(self) -> None:
        """One decision more without the drafter."""
        if self._n_asleep == 0:
            most = WAKE_AFTER_EVEN if self._n_even else WAKE_AFTER
            self._n_sleep = min(FIRST_SLEEP if self._n_sleep is None else 2 * self._n_sleep, most)
        self._n_asleep += 1
        if self._n_sleep is not None and self._n_asleep >= self._n_sleep:
            self._n_asleep = self._n_unused = self._n_computed = 0
            self.record.fade(_FADED)

    def has_computed(self, seconds: float, n_tokens: int) -> None:
        """Learns from a draft that took so long. ``n_tokens``: of the longest one that was computed with others."""
        known, new = self._draft_s, seconds / max(1, n_tokens)
        self._n_computed += 1
        if known is None or self._n_computed <= N_LEARN:
            self._draft_s = new if known is None else min(known, new)  # the first ones take longer: a GPU warms up
        else:
            self._draft_s = _MEMORY * known + (1 - _MEMORY) * min(new, _SPIKE * known)

    def prefers_computing(
        self, proposal: Proposal, n: int, drafter: ComputingDrafter, n_computed: int, record: Record, shape: StepShape
    ) -> bool:
        """Whether ``n_computed`` tokens that have to be computed promise more than ``n`` that were found."""
        found = rate_of(n, record.chance(proposal.source, proposal.confidence), shape, self.cost.seconds)
        chance, draft_s = self._chance(drafter, record), self._draft_s or 0.0
        return rate_of(n_computed, chance, shape, self.cost.seconds, draft_s) > found

    @staticmethod
    def _chance(drafter: ComputingDrafter, record: Record) -> float:
        return record.chance(drafter.source, drafter.confidence)
