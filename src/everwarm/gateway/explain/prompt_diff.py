"""Compares two prompts: what they share, what a server would keep of the first, and what it reads of the second.

Pure: tokens and cut hints in, facts out. The reasons are the engine's own codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everwarm.engine.process.messages import CutHints, Reason
from everwarm.prompt.prompt import Prompt
from everwarm.state import policy
from everwarm.state.policy import GUARD, Cut, Spacing, is_new_conversation

N_UBATCH = 512


@dataclass(frozen=True, slots=True)
class Side:
    """One prompt with its cut hints, in tokens."""

    prompt: Prompt
    hints: CutHints = field(default_factory=CutHints)


@dataclass(frozen=True, slots=True)
class Difference:
    """``resume``: the cut at which the second prompt resumes; None: it is read from the start."""

    n_first: int
    n_second: int
    n_common: int
    kept: tuple[Cut, ...]
    resume: Cut | None
    n_resume: int
    reason: Reason
    again: Reason | None

    @property
    def n_read(self) -> int:
        return self.n_second - self.n_resume

    @property
    def n_known_read(self) -> int:
        return self.n_common - self.n_resume


def compare(
    first: Side, second: Side, spacing: Spacing | None, *, same_namespace: bool = True, use_cache: bool = True
) -> Difference:
    """What a server that has read only the first prompt reuses and reads of the second. ``spacing``: that of its
    checkpoints; None: its model needs none and resumes anywhere."""
    n_common = int(first.prompt.common_prefix(second.prompt)) if same_namespace else 0
    kept = () if spacing is None else _kept(first, spacing)
    most = min(n_common, len(second.prompt) - 1) if use_cache else 0
    resume = max((cut for cut in kept if cut.at <= most), key=lambda cut: cut.at, default=None)
    n_resume = most
    if spacing is not None:
        n_resume = 0 if resume is None else resume.at
    if kept and use_cache and n_common == len(first.prompt) == len(second.prompt):
        resume, n_resume = None, n_common  # the end is kept, too, with its logits
    again = None
    if n_common - n_resume > GUARD:
        off = spacing is not None and spacing.max_checkpoints == 0
        again = Reason.CHECKPOINTS_OFF if off else Reason.NO_CHECKPOINT
    sizes = len(first.prompt), len(second.prompt), n_common
    first_message = policy.first_message(second.hints.opening, second.hints.boundaries)
    reason = _reason(sizes, n_resume, again, first_message) if use_cache else Reason.CACHE_OFF
    return Difference(*sizes, kept, resume, n_resume, reason, again if use_cache else Reason.CACHE_OFF)


def _kept(side: Side, spacing: Spacing) -> tuple[Cut, ...]:
    hints = side.hints
    return policy.cuts(
        len(side.prompt),
        spacing,
        n_ubatch=N_UBATCH,
        boundaries=hints.boundaries,
        stable=hints.stable,
        stables=hints.stables,
        breakpoints=hints.breakpoints,
        volatile=hints.volatile,
        joints=hints.joints,
    )


def _reason(sizes: tuple[int, int, int], n_resume: int, again: Reason | None, first: range | None) -> Reason:
    n_first, n_second, n_common = sizes
    if again is not None and n_common - n_resume >= n_second - n_common:
        return again
    if n_common == n_second:
        return Reason.HIT
    if is_new_conversation(n_common, n_second, first, parts=n_common < n_first):
        return Reason.NEW
    return Reason.EXTENDED if n_common == n_first else Reason.EDITED
