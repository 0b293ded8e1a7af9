"""How many tokens each request decodes in the next step, and which one makes room. Pure: lanes in, grants out.

**The rule that keeps the engine moving.** Of the requests that run together the one that was admitted first gets at least
one token in every step (``plan``, ``fit``), and it is never suspended to make room for a younger one (``next_to_suspend``).
A step either decodes more of its items or, where a draft is rejected, adds one to them. So it ends after at most twice as
many steps as it has items, then the next one is the oldest, and every request ends. Admission
and step shares may be ordered in any other way as long as these three functions keep that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_AGAIN = 64  # tokens of a reply that are decoded again in one step, beside others


class Lane(NamedTuple):
    """A running request, as far as scheduling cares."""

    slot: int
    n_wanted: int  # tokens up to its next stop: a cut or the end of its items
    is_writing: bool  # its prompt is read: it needs one token per step, and a client watches it
    n_again: int = 0  # tokens of a reply that come before that one: they were taken back with a rejected draft


class Grant(NamedTuple):
    slot: int
    n_tokens: int


class Budget(NamedTuple):
    """``n_step`` tokens in a step; only ``n_beside`` of them for prompts while replies are being written."""

    n_step: int
    n_beside: int


def plan(lanes: Sequence[Lane], budget: Budget, oldest: int | None = None) -> list[Grant]:
    """Every reply gets its token; prompts share what is left, evenly, so that none waits for the longest one. ``oldest``
    is the slot of the request that was admitted first: it gets a token even if there are fewer of them than requests."""
    reading = [lane for lane in lanes if not lane.is_writing]
    n_kept = any(lane.slot == oldest for lane in reading)
    writing = sorted((lane for lane in lanes if lane.is_writing), key=lambda lane: lane.slot != oldest)
    grants = _with_tokens_again(writing[: budget.n_step - n_kept], budget.n_step - n_kept)
    room = budget.n_step - sum(grant.n_tokens for grant in grants)
    if grants:
        room = min(room, budget.n_beside)
    is_scarce = room < len(reading)
    reading.sort(key=lambda lane: (is_scarce and lane.slot != oldest, lane.n_wanted))
    for i, lane in enumerate(reading):  # the smallest first: the others share what it leaves over
        share = min(lane.n_wanted, -(-room // (len(reading) - i)))
        if share > 0:
            grants.append(Grant(lane.slot, share))
            room -= share
    return grants


def _with_tokens_again(writing: Sequence[Lane], n_step: int) -> list[Grant]:
    """One token for each reply, and before it those that are decoded again, as far as they fit."""
    room, grants = n_step - len(writing), []
    for lane in writing:
        n_again = min(lane.n_again, MAX_AGAIN, room)
        grants.append(Grant(lane.slot, 1 + n_again))
        room -= n_again
    return grants


def fit(grants: Sequence[Grant], oldest_first: Sequence[int], n_free: int) -> list[Grant]:
    """What of a plan fits into so many cells: one token each, the oldest first, then the rest in the same order. Empty only
    if not one cell is free. ``oldest_first``: the slots of all running requests by admission."""
    wanted = {grant.slot: grant.n_tokens for grant in grants}
    order = [slot for slot in oldest_first if slot in wanted]
    given = dict.fromkeys(order[:n_free], 1)
    n_free -= len(given)
    for slot in given:
        more = min(wanted[slot] - 1, n_free)
        given[slot] += more
        n_free -= more
    return [Grant(grant.slot, given[grant.slot]) for grant in grants if grant.slot in given]


def next_to_suspend(oldest_first: Sequence[int]) -> int | None:
    """The slot that is emptied when running requests fill the context: that of the one admitted last. None: only one runs,
    and that one is never suspended for want of room."""
    return oldest_first[-1] if len(oldest_first) > 1 else None
