"""Who may decode how many tokens in the next step. Pure: lanes in, grants out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Lane(NamedTuple):
    """A running request, as far as scheduling cares."""

    slot: int
    n_wanted: int  # tokens up to its next stop: a cut or the end of what it has
    is_writing: bool  # its prompt is read: it needs one token per step, and somebody watches it


class Grant(NamedTuple):
    slot: int
    n_tokens: int


class Budget(NamedTuple):
    """``n_step`` tokens in a step; only ``n_beside`` of them for prompts while replies are being written."""

    n_step: int
    n_beside: int


def plan(lanes: Sequence[Lane], budget: Budget) -> list[Grant]:
    """Every reply gets its token; prompts share what is left, evenly, so that nobody waits for the longest one."""
    writing = [lane for lane in lanes if lane.is_writing][: budget.n_step]
    grants = [Grant(lane.slot, 1) for lane in writing]
    if len(grants) == len(lanes):
        return grants
    room = budget.n_step - len(grants)
    if grants:
        room = min(room, budget.n_beside)
    reading = sorted((lane for lane in lanes if not lane.is_writing), key=lambda lane: lane.n_wanted)
    for i, lane in enumerate(reading):  # the smallest wish first: what it leaves over goes to the others
        share = min(lane.n_wanted, -(-room // (len(reading) - i)))
        if share > 0:
            grants.append(Grant(lane.slot, share))
            room -= share
    return grants
