"""Verifies a draft with the logits of its own rows: what the request's own sampler picks decides, token by token."""

from __future__ import annotations

from typing import NamedTuple

from everwarm.engine.process.reply_text import probabilities_of
from everwarm.engine.request import NewToken, Probs, Request
from everwarm.engine.slots import Slot
from everwarm.engine.speculation.speculator import Draft, Speculator
from everwarm.llama.context import Context, Feed


class Picked(NamedTuple):
    token: int | None
    probs: Probs | None


class Verified(NamedTuple):
    """A draft, and what was picked after each of its tokens, as far as they agree."""

    slot: Slot
    request: Request
    feed: Feed
    draft: Draft
    picked: list[Picked]


def pick(context: Context, request: Request, draft: Draft, row: int) -> list[Picked]:
    """The next tokens, one after each row from ``row`` on, until one is not as drafted or ends the reply.
    ``DecodeFailed``: the numbers were lost."""
    picked: list[Picked] = []
    for i, drafted in enumerate([*draft.tokens.tolist(), None]):
        token = request.sampler.pick(context, row + i)
        picked.append(with_probs(context, request, row + i, token))
        if _is_end(context, request, token) or token != drafted:
            break
    return picked


def with_probs(context: Context, request: Request, row: int, token: int | None) -> Picked:
    """A token that was picked from this row, with what the request wants to know of it."""
    is_wanted = request.ask.n_probs is not None
    return Picked(token, probabilities_of(request, context.logits(row), token) if is_wanted else None)


def _is_end(context: Context, request: Request, token: int | None) -> bool:
    """Whether the reply ends with this token, or at it: nothing may be decoded after it."""
    if token is None or (token in context.model.vocab.eog and not request.ask.ignore_eos):
        return True
    matcher = request.sampler.matcher
    return request.ends_text(token) or (matcher is not None and matcher.is_complete)


def accept(speculator: Speculator, verified: Verified) -> list[NewToken]:
    """Keeps in the context what was picked as drafted, and takes the rest of the draft out. The reply goes on with the
    tokens that were as drafted; the last one that was picked is yet to be appended."""
    slot, request, feed, draft, picked = verified
    n_accepted = len(picked) - 1
    speculator.judge(request, draft, n_accepted)
    n_kept = len(feed.tokens) - feed.n_draft + n_accepted
    if n_accepted < feed.n_draft:
        n_kept = speculator.rollback.cut(feed, n_kept)
    if n_kept:
        slot.advance(n_kept)
    events = []
    for token, (_, probs) in zip(draft.tokens[:n_accepted].tolist(), picked, strict=False):
        request.append(token)
        events.append(NewToken(request.id, token, probs))
    return events
