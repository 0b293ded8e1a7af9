"""Takes back what a step decoded in vain.

Attention is cut anywhere. A recurrent state is not, so before a draft is verified the sequence gets a second name, which
copies nothing; after a rejection the sequence is put back to it, and the accepted tokens are decoded again in the next
step. A sliding window can neither share cells nor be cut with its place in the ring kept, so such models do not speculate.
Nothing of this outlives a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from everwarm.llama.context import Context, Feed
from everwarm.types import Mark, Position, SeqId, TokenCount


class Rollback:
    def __init__(self, context: Context, seqs: Sequence[SeqId]) -> None:
        """``seqs``: for second names; a model with attention alone needs none."""
        self._context = context
        self._free = list(seqs)
        self._names: dict[SeqId, SeqId] = {}  # the second name of a sequence
        self.is_cut = not context.kind.needs_checkpoints
        self.is_possible = self.is_cut or (context.kind.can_share_cells and bool(seqs))

    @property
    def n_free(self) -> int | None:
        """How many more sequences may verify drafts in this step; None: any number."""
        return None if self.is_cut else len(self._free)

    def begin(self, seq: SeqId) -> None:
        """The next decode may have to be taken back from this sequence."""
        if not self.is_cut:
            name = self._free.pop()
            self._context.name_again(seq, name)
            self._names[seq] = name

    def cut(self, feed: Feed, n_kept: int) -> int:
        """Takes back all but the first ``n_kept`` tokens of what was decoded last. Returns how many are kept: none where
        the state cannot be cut."""
        if not self.is_cut:
            self._context.name_again(self._names[feed.seq], feed.seq)
            self._context.take_back_draft(feed.seq, feed.start.pos + n_kept)  # an MTP head keeps what was accepted
            return 0
        start = feed.start
        self._context.trim(feed.seq, Mark(TokenCount(start.n_tokens + n_kept), Position(start.pos + n_kept)))
        return n_kept

    def end(self) -> None:
        """The step is over: nothing can be taken back any more."""
        for name in self._names.values():
            self._context.drop(name)
            self._free.append(name)
        self._names.clear()
