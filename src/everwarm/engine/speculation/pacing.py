"""When drafts are looked for, and how many of their tokens are verified, from what this engine has measured.

Speculation must never cost: looking takes at most a fifth of a percent of the time, and a draft that does not promise to
pay is passed over. Once in a while one is verified all the same, because texts and machines change.
"""

from __future__ import annotations

from everwarm.engine.speculation.draft_length import Record, StepShape, best_length, rate_of
from everwarm.engine.speculation.drafter import ComputingDrafter, Proposal
from everwarm.engine.speculation.step_cost import StepCost

LOOK_SHARE = 0.002  # of a step's time, for looking for drafts
TRY_AFTER = 128  # drafts of a request that were passed over: then one is verified, to see whether it pays now
COMPUTE_AFTER = 512  # the same for drafts that have to be computed
N_TRIED = 2
N_PLAIN = 6  # steps without drafts at first
PLAIN_EVERY = 64  # later one of so many has none: all others are compared to them
SLEEP_AFTER = 256  # decisions in a row against computing a draft: then the drafter is left alone, and reads nothing
WAKE_AFTER = 32_768  # decisions, after which it is asked again
_MEMORY = 0.9
_SPIKE = 3.0  # a look that takes so many times longer than expected was disturbed


class Pacing:
    def __init__(self) -> None:
        self.cost = StepCost()
        self.record = Record()  # of all requests
        self.overhead_s = 1e-4  # of verifying anything: parking, restoring, picking
        self._look_s = 2e-5
        self._draft_s: float | None = None  # for each token of a draft that is computed
        self._n_unused = 0  # decisions in a row against computing
        self._n_steps = 0  # that could have had drafts
        self._n_skipped = 0  # steps since drafts were last looked for
        self._is_paying = False  # the last draft was right, at least in part

    def is_plain(self) -> bool:
        """Whether the next step has no drafts, so that it is known what such a step costs."""
        self._n_steps += 1
        return self._n_steps <= N_PLAIN or self._n_steps % PLAIN_EVERY == 0

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
        record.above = self.record
        if not self.is_computing:
            self._n_unused = 0 if self._n_unused >= WAKE_AFTER else self._n_unused + 1
            return 0
        n_most = min(n_most, drafter.n_most)
        n = best_length(n_most, self._chance(drafter, record), shape, self.cost.seconds, self._draft_s or 0.0)
        self._n_unused = 0 if n else self._n_unused + 1
        if n == 0:
            record.n_not_computed += 1
            n = min(N_TRIED, n_most) if record.n_not_computed >= COMPUTE_AFTER else 0
        return n

    @property
    def is_computing(self) -> bool:
        """Whether a drafter that computes is of use here: what replies and prompts it reads costs time as well."""
        return self._n_unused < SLEEP_AFTER

    def has_computed(self, seconds: float, n_tokens: int) -> None:
        """Learns from a draft that took so long. ``n_tokens``: of the longest one that was computed with others."""
        known, new = self._draft_s, seconds / max(1, n_tokens)
        self._draft_s = new if known is None else _MEMORY * known + (1 - _MEMORY) * min(new, _SPIKE * known)

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
