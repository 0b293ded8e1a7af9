"""Takes back what a step decoded in vain.

Attention is cut anywhere. A recurrent state is not: either the context keeps snapshots of the last tokens of every
sequence, and a short draft is cut back to one of them; or, before a draft is verified, a spare sequence holds on to the
state, which copies nothing. After a rejection the state is put back then, and the accepted tokens are decoded again in the
next step. A sliding window can neither share cells nor be cut with its place in the ring kept, so such models do not
speculate. What is held does not outlive a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.types import Mark, Position, SeqId, TokenCount


class Rollback:
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
