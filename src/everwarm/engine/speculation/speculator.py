"""Speculation in a step of the core: which requests verify which drafts, what is learned from it, and how what was
decoded in vain is taken back.

    plan → ``draft`` (look up · compute) → decode → ``pick``, row by row → ``accept`` → ``end``

A draft is only ever a guess at what the core picks next: each token comes from the request's own sampler and
constraint, in order, with the logits of its own row. So a reply has the tokens, or for a sampled one the
distribution, of plain decoding with those logits; a draft decides only how many rows of a step are of use.

Attention is cut anywhere. A recurrent state is not: either the context keeps snapshots of the last tokens of every
sequence, and a short draft is cut back to one of them; or, before a draft is verified, a spare sequence holds on to
the state, which copies nothing. After a rejection the state is put back then, and the accepted tokens are decoded
again in the next step. A sliding window can neither share cells nor be cut with its place in the ring kept, so such
models do not speculate. What is held does not outlive a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from everwarm.engine.process.reply_text import probabilities_of
from everwarm.engine.request import NewToken, Probs, Request
from everwarm.engine.scheduling.scheduler import Grant
from everwarm.engine.slots import Slot
from everwarm.engine.speculation.draft_length import Pacing, Proposal, StepShape, computed_proposal
from everwarm.engine.speculation.lookup import SuffixLookup, TreeLookup
from everwarm.engine.speculation.model_drafter import ComputingDrafter
from everwarm.engine.stats import EngineStats
from everwarm.errors import DecodeFailed
from everwarm.llama.batch import DraftRequest, Feed, Tokens
from everwarm.llama.context import Context
from everwarm.types import Mark, Position, SeqId, TokenCount

MAX_AGAIN = 16  # accepted tokens that are decoded again; then a step without a draft catches up


class Rollback:
    """Takes back what a step decoded in vain."""

    def __init__(self, context: Context, seqs: Sequence[SeqId]) -> None:
        """``seqs``: to hold states; a model with attention alone needs none."""
        self._context = context
        self._free = list(seqs)
        self._holders: dict[SeqId, SeqId] = {}  # of the states of sequences
        self._is_attention = not context.kind.needs_checkpoints
        self.is_possible = self._is_attention or (
            context.kind.can_share_cells and (bool(seqs) or context.n_snapshots > 0)
        )

    @property
    def n_cut(self) -> float:
        """How many tokens are cut after a rejection; of a longer draft what was accepted is decoded again."""
        return math.inf if self._is_attention else self._context.n_snapshots

    def n_most(self, seq: SeqId, n_held: int) -> float:
        """The longest draft that can be taken back from a sequence, beside so many others whose states are held."""
        can_hold = n_held < len(self._free) and self._context.can_be_parked(seq)
        return math.inf if self._is_attention or can_hold else self._context.n_snapshots

    def begin(self, seq: SeqId, n_draft: int, *, is_even: bool) -> bool:
        """The next decode may have to be taken back from this sequence. ``is_even``: all its sequences get as many tokens;
        only then there are snapshots. False: it could not be taken back."""
        if self._is_attention or (is_even and n_draft <= self._context.n_snapshots):
            return True
        if not self._free or not self._context.can_be_parked(seq):
            return False
        holder = self._free.pop()
        self._context.hold_state(seq, holder)
        self._holders[seq] = holder
        return True

    def cut(self, feed: Feed, n_kept: int) -> int:
        """Takes back all but the first ``n_kept`` tokens of what was decoded last. Returns how many are kept: none where
        the state had to be put back."""
        kept = Mark(TokenCount(feed.start.n_tokens + n_kept), Position(feed.start.pos + n_kept))
        if self._is_attention:
            self._context.trim(feed.seq, kept)
        elif feed.seq not in self._holders:
            self._context.take_back(feed.seq, kept)
        else:
            self._context.put_state_back(self._holders[feed.seq], feed.seq, feed.start)
            self._context.take_back_draft(feed.seq, kept.pos)  # an MTP head keeps what was accepted
            return 0
        return n_kept

    def end(self) -> None:
        """The step is over: nothing can be taken back any more."""
        for holder in self._holders.values():
            self._context.drop(holder)
            self._free.append(holder)
        self._holders.clear()


class Picked(NamedTuple):
    token: int | None
    probs: Probs | None


class _Choice(NamedTuple):
    """``n`` tokens for a reply: of a proposal, or None: they are to be computed."""

    slot: Slot
    request: Request
    grant: Grant
    n: int
    proposal: Proposal | None


@dataclass(slots=True)
class Speculator:
    rollback: Rollback
    drafters: Sequence[SuffixLookup | TreeLookup]
    eog: frozenset[int]
    max_draft: int  # tokens of a reply in one step
    counts: EngineStats
    computing: ComputingDrafter | None = None
    clock: Callable[[], float] = time.monotonic  # for what steps and drafts cost
    pacing: Pacing = field(default_factory=Pacing)
    n_rejected: int = 0  # tokens of the last step

    @property
    def is_on(self) -> bool:
        return bool(self.drafters or self.computing) and self.rollback.is_possible

    def draft(self, grants: Sequence[Grant], slots: Sequence[Slot], n_rows_left: int) -> dict[int, Proposal]:
        """Drafts by slot, of at most ``n_rows_left`` tokens in all. What is drafted can be taken back until ``end``."""
        self.n_rejected = 0
        if not self.is_on or n_rows_left < 1:
            return {}
        n_rows = sum(grant.n_tokens for grant in grants)
        if _n_replies(grants, slots) == 0:
            return {}
        self.pacing.begin_step()
        if self.pacing.is_plain():
            return {}
        may_look = bool(self.drafters) and self.pacing.may_look(n_rows)
        if not may_look and self.computing is None:
            return {}
        shape = StepShape(n_rows, max(1, _n_replies(grants, slots)), self.rollback.n_cut, self.pacing.overhead_s)
        chosen = self._chosen(grants, slots, shape, n_rows_left, may_look=may_look)
        computed = self._compute([choice for choice in chosen if choice.proposal is None])
        found: dict[int, Proposal] = {}
        for choice in chosen:
            proposal = choice.proposal or computed.get(choice.slot.seq)
            if proposal is not None:
                found[choice.grant.slot] = proposal.first(choice.n)
        is_even = len({grant.n_tokens + _n_drafted(found, grant) for grant in grants}) == 1
        return {
            i: draft
            for i, draft in found.items()
            if self.rollback.begin(slots[i].seq, len(draft.tokens), is_even=is_even)
        }

    def _chosen(
        self, grants: Sequence[Grant], slots: Sequence[Slot], shape: StepShape, n_rows_left: int, *, may_look: bool
    ) -> list[_Choice]:
        began = time.thread_time()
        chosen: list[_Choice] = []
        for grant in grants:
            n_held = sum(choice.n > self.rollback.n_cut for choice in chosen)
            n_most = int(min(n_rows_left, self.rollback.n_most(slots[grant.slot].seq, n_held)))
            choice = self._choice(slots[grant.slot], grant, shape, n_most, may_look=may_look)
            if choice is not None:
                chosen.append(choice)
                n_rows_left -= choice.n
            if n_rows_left < 1:
                break
        if may_look:
            has_found = any(choice.proposal is not None for choice in chosen)
            self.pacing.has_looked(time.thread_time() - began, has_found=has_found)
        return chosen

    def _choice(self, slot: Slot, grant: Grant, shape: StepShape, n_most: int, *, may_look: bool) -> _Choice | None:
        """What a reply may go on with: what was found, or what a drafter would compute if that promises more."""
        request = slot.request
        if request is None or not _may_draft(slot, request, grant):
            return None
        n_most = min(self.max_draft, request.n_most_drafted, n_most, request.n_left - 1)
        if n_most < 1:
            return None
        record, pacing = request.draft_record, self.pacing
        proposal = self._proposed(request, n_most) if may_look else None
        n = 0 if proposal is None else pacing.length(proposal, record, shape)
        if proposal is not None and n == 0:
            record.pass_over(proposal, request.n_items)
        found = None if proposal is None or n == 0 else _Choice(slot, request, grant, n, proposal)
        if self.computing is None:
            return found
        n_computed = pacing.computed_length(self.computing, n_most, record, shape)
        computed = _Choice(slot, request, grant, n_computed, None) if n_computed else None
        if computed is None or found is None or proposal is None:
            return computed or found
        is_better = pacing.prefers_computing(proposal, n, self.computing, n_computed, record, shape)
        return computed if is_better else found

    def _compute(self, choices: Sequence[_Choice]) -> dict[int, Proposal]:
        """Proposals by sequence."""
        computing = self.computing
        if computing is None or not choices:
            return {}
        wanted = [
            DraftRequest(c.slot.seq, c.request.tokens(0, c.request.n_items), c.grant.n_tokens, c.n) for c in choices
        ]
        computing.read(wanted)
        began = self.clock()
        drafted = computing.draft(wanted)
        if drafted:
            self.pacing.has_computed(self.clock() - began, max(map(len, drafted.values())))
        found: dict[int, Proposal] = {}
        for choice in choices:
            tokens = self._allowed(choice.request, np.array(drafted.get(choice.slot.seq, []), np.int32))
            if len(tokens):
                found[choice.slot.seq] = computed_proposal(tokens, computing.confidence, computing.source)
        return found

    def _proposed(self, request: Request, n: int) -> Proposal | None:
        """What was found that promises most."""
        history = request.tokens(0, request.n_items)
        request.draft_record.learn_from_passed(history)
        found = (drafter.propose(history, n, request.ask.namespace) for drafter in self.drafters)
        best = max((p for p in found if p is not None), key=_promise, default=None)
        if best is None:
            return None
        n_allowed = len(self._allowed(request, best.tokens))
        return best.first(n_allowed) if n_allowed else None

    def _allowed(self, request: Request, tokens: Tokens) -> Tokens:
        """The beginning of a draft, as far as the reply may be so."""
        tokens = tokens[: n_valid(tokens, self.eog)]
        matcher = request.sampler.matcher
        if matcher is not None and len(tokens):
            tokens = tokens[: matcher.n_allowed(tokens.tolist())]
        return tokens

    def accept(
        self, slot: Slot, request: Request, feed: Feed, draft: Proposal, picked: Sequence[Picked]
    ) -> list[NewToken]:
        """Keeps in the context what was picked as drafted, and takes the rest of the draft out. ``picked``: after each
        token of the draft, as far as they agree. The reply goes on with the tokens that were as drafted; the last one that
        was picked is yet to be appended."""
        n_accepted = len(picked) - 1
        self.judge(request, draft, n_accepted)
        n_kept = len(feed.tokens) - feed.n_draft + n_accepted
        if n_accepted < feed.n_draft:
            n_kept = self.rollback.cut(feed, n_kept)
        if n_kept:
            slot.advance(n_kept)
        return written(request, picked[:-1])

    def judge(self, request: Request, draft: Proposal, n_accepted: int) -> None:
        """Records what became of a draft."""
        n = len(draft.tokens)
        self.counts.n_verified += 1
        self.counts.n_drafted += n
        self.counts.n_draft_accepted += n_accepted
        self.n_rejected += n - n_accepted
        request.n_drafted += n
        request.n_draft_accepted += n_accepted
        self.pacing.judge(draft, request.draft_record, n, n_accepted)

    def forget(self) -> None:
        """Texts were erased: no draft may come from them."""
        for drafter in self.drafters:
            drafter.forget()
        if self.computing is not None:
            self.computing.forget()

    def end(self) -> None:
        """The step is over, however it went."""
        self.rollback.end()

    def close(self) -> None:
        if self.computing is not None:
            self.computing.close()


# what the request's own sampler picks decides, token by token


def pick(context: Context, request: Request, draft: Proposal, row: int) -> tuple[list[Picked], DecodeFailed | None]:
    """The next tokens, one after each row from ``row`` on, until one is not as drafted or ends the reply, or until the
    numbers were lost: then all of them are as drafted."""
    picked: list[Picked] = []
    for i, drafted in enumerate([*draft.tokens.tolist(), None]):
        try:
            token = request.sampler.pick(context, row + i)
        except DecodeFailed as error:
            return picked, error
        picked.append(with_probs(context, request, row + i, token))
        if _is_end(context, request, token) or token != drafted:
            break
    return picked, None


def written(request: Request, picked: Sequence[Picked]) -> list[NewToken]:
    """The reply has these tokens more, and does not end with them."""
    events = []
    for token, probs in picked:
        assert token is not None
        request.append(token)
        events.append(NewToken(request.id, token, probs))
    return events


def with_probs(context: Context, request: Request, row: int, token: int | None) -> Picked:
    """A token that was picked from this row, with what the request wants to know of it."""
    is_wanted = request.ask.n_probs is not None
    return Picked(token, probabilities_of(request, context.logits(row), token) if is_wanted else None)


def _is_end(context: Context, request: Request, token: int | None) -> bool:
    """Whether the reply ends with this token, or at it: nothing may be decoded after it."""
    if token is None or (token in context.model.vocab.eog and not request.ask.ignore_eos):
        return True
    matcher = request.sampler.matcher
    return request.watch_for_stop(token) or (matcher is not None and matcher.is_complete)


# what may be drafted


def _may_draft(slot: Slot, request: Request, grant: Grant) -> bool:
    """Only a reply that this step brings up to date; what is decoded again is bounded."""
    if not request.may_draft or request.ask.ahead or slot.n_fed < request.n_prompt:
        return False
    return slot.n_fed + grant.n_tokens == request.n_items and grant.n_tokens <= MAX_AGAIN


def _n_drafted(drafts: dict[int, Proposal], grant: Grant) -> int:
    draft = drafts.get(grant.slot)
    return 0 if draft is None else len(draft.tokens)


def _n_replies(grants: Sequence[Grant], slots: Sequence[Slot]) -> int:
    return sum((r := slots[g.slot].request) is not None and slots[g.slot].n_fed >= r.n_prompt for g in grants)


def _promise(proposal: Proposal) -> float:
    """Tokens that are expected of it."""
    return float(np.cumprod(proposal.confidences).sum())


def n_valid(tokens: Tokens, eog: frozenset[int]) -> int:
    """How many come before an image, which is no token, or an end of generation, after which nothing is decoded."""
    return next((i for i, token in enumerate(tokens.tolist()) if token < 0 or token in eog), len(tokens))
