"""Speculation in a step of the core: which requests verify which drafts, and what is learned from it.

    plan → ``draft`` → decode → the core picks row by row → ``judge`` → ``end``

A draft is only ever a guess at what the core picks next: each token comes from the request's own sampler and constraint, in
order, with the logits of its own row. So a reply has the tokens, or for a sampled one the distribution, of plain decoding
with those logits; a draft decides only how many rows of a step are of use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from everwarm.engine.request import Request
from everwarm.engine.scheduling.scheduler import Grant
from everwarm.engine.slots import Slot
from everwarm.engine.speculation.draft_length import StepShape
from everwarm.engine.speculation.drafter import Drafter, Proposal, Tokens
from everwarm.engine.speculation.pacing import Pacing
from everwarm.engine.speculation.rollback import Rollback

MAX_AGAIN = 16  # accepted tokens that are decoded again; then a step without a draft catches up


class Draft(NamedTuple):
    tokens: Tokens
    proposal: Proposal


@dataclass(slots=True)
class DraftCounts:
    """Since the start."""

    n_drafted: int = 0
    n_draft_accepted: int = 0
    n_verified: int = 0  # drafts


@dataclass(slots=True)
class Speculator:
    rollback: Rollback
    drafters: Sequence[Drafter]
    eog: frozenset[int]
    max_draft: int  # tokens of a reply in one step
    pacing: Pacing = field(default_factory=Pacing)
    counts: DraftCounts = field(default_factory=DraftCounts)
    n_rejected: int = 0  # tokens of the last step

    @property
    def is_on(self) -> bool:
        return bool(self.drafters) and self.rollback.is_possible

    def draft(self, grants: Sequence[Grant], slots: Sequence[Slot], n_rows_left: int) -> dict[int, Draft]:
        """Drafts by slot, of at most ``n_rows_left`` tokens in all. What is drafted can be taken back until ``end``."""
        self.n_rejected = 0
        n_rows = sum(grant.n_tokens for grant in grants)
        if not self.is_on or n_rows_left < 1 or not self.pacing.may_look(n_rows):
            return {}
        began = time.thread_time()
        shape = StepShape(n_rows, max(1, _n_replies(grants, slots)), self.rollback.is_cut, self.pacing.overhead_s)
        found: dict[int, Draft] = {}
        for grant in grants:
            draft = self._draft_of(slots[grant.slot], grant, shape, n_rows_left)
            if draft is not None:
                found[grant.slot] = draft
                n_rows_left -= len(draft.tokens)
            if n_rows_left < 1 or len(found) == self.rollback.n_free:
                break
        self.pacing.has_looked(time.thread_time() - began, has_found=bool(found))
        for i in found:
            self.rollback.begin(slots[i].seq)
        return found

    def _draft_of(self, slot: Slot, grant: Grant, shape: StepShape, n_rows_left: int) -> Draft | None:
        request = slot.request
        if request is None or not _may_draft(slot, request, grant):
            return None
        n_most = min(self.max_draft, request.n_most_drafted, n_rows_left, request.n_left - 1)
        if n_most < 1:
            return None
        proposal = self._proposed(request, n_most)
        if proposal is None:
            return None
        n = self.pacing.length(proposal, request.draft_record, shape)
        return Draft(proposal.tokens[:n], proposal) if n else None

    def _proposed(self, request: Request, n: int) -> Proposal | None:
        """The proposal that promises most, as far as the reply may be so."""
        history = request.tokens(0, request.n_items)
        found = (drafter.propose(history, n, request.ask.namespace) for drafter in self.drafters)
        best = max((p for p in found if p is not None), key=_promise, default=None)
        if best is None:
            return None
        tokens = best.tokens[: n_valid(best.tokens, self.eog)]
        matcher = request.sampler.matcher
        if matcher is not None and len(tokens):
            tokens = tokens[: matcher.n_allowed(tokens.tolist())]
        return best._replace(tokens=tokens) if len(tokens) else None

    def judge(self, request: Request, draft: Draft, n_accepted: int) -> None:
        """Records what became of a draft."""
        n = len(draft.tokens)
        self.counts.n_verified += 1
        self.counts.n_drafted += n
        self.counts.n_draft_accepted += n_accepted
        self.n_rejected += n - n_accepted
        request.n_drafted += n
        request.n_draft_accepted += n_accepted
        self.pacing.judge(draft.proposal, request.draft_record, n, n_accepted)

    def forget(self) -> None:
        """Texts were erased: no draft may come from them."""
        for drafter in self.drafters:
            drafter.forget()

    def end(self) -> None:
        """The step is over, however it went."""
        self.rollback.end()


def _may_draft(slot: Slot, request: Request, grant: Grant) -> bool:
    """Only a reply that this step brings up to date. Bits of a deterministic one must not depend on drafts; what is decoded
    again is bounded."""
    if request.ask.deterministic or request.ask.ahead or slot.n_fed < request.n_prompt:
        return False
    return slot.n_fed + grant.n_tokens == request.n_items and grant.n_tokens <= MAX_AGAIN


def _n_replies(grants: Sequence[Grant], slots: Sequence[Slot]) -> int:
    return sum((r := slots[g.slot].request) is not None and slots[g.slot].n_fed >= r.n_prompt for g in grants)


def _promise(proposal: Proposal) -> float:
    """Tokens that are expected of it."""
    c = proposal.confidence
    return c * (1 - c ** len(proposal.tokens)) / (1 - c) if c < 1.0 else float(len(proposal.tokens))


def n_valid(tokens: Tokens, eog: frozenset[int]) -> int:
    """How many come before an image, which is no token, or an end of generation, after which nothing is decoded."""
    return next((i for i, token in enumerate(tokens.tolist()) if token < 0 or token in eog), len(tokens))
