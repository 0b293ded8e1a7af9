"""Drafts that are computed: by a second, smaller model of the same vocabulary, in a context of its own, or by the model's
own MTP head. Both cost time for every token, so they are told how many are worth it, for all sequences at once.

The smaller model reads a reply's text when it is asked to continue it, and remembers what it has read for each sequence.
A step reads one batch at most, so that no reply waits for another's long prompt; a text that does not fit beside the others
rests a while.
Attention is cut where texts part; a recurrent state is not, so such a model drafts from a second name of its sequence, and
reads a text anew that has been changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from everwarm.config import ContextOptions
from everwarm.errors import ContextFull, MemoryFault, ModelFileError
from everwarm.llama.batch import DraftRequest, Feed, Tokens
from everwarm.llama.context import Context
from everwarm.llama.lib import Closing
from everwarm.llama.model import Model
from everwarm.llama.vocab import Vocab
from everwarm.types import Mark, Position, SeqId, TokenCount

MOST_MORE = 128  # tokens that only one of two vocabularies has, at its end: padding
REST = 64  # steps that a text which did not fit is left unread; one that was not asked for so long may be dropped


class HeadDrafter:
    """The model's own MTP head, which has read what the model has read."""

    source = "mtp"
    confidence = 0.75  # as of a ``Proposal``, before anything was verified
    n_most = 8  # tokens of a draft: those further ahead are seldom right

    def __init__(self, context: Context) -> None:
        self._context = context

    def read(self, wanted: Sequence[DraftRequest]) -> None:
        """The head reads with the model."""

    def draft(self, wanted: Sequence[DraftRequest]) -> dict[SeqId, list[int]]:
        """Tokens for each sequence that something is known of."""
        return self._context.draft(wanted)

    def forget(self) -> None:
        """Its cells are dropped with the model's."""

    def close(self) -> None:
        """It is closed with the model's context."""


class ModelDrafter(Closing):
    source = "draft"
    confidence = 0.65
    n_most = 16

    def __init__(self, model: Model, options: ContextOptions, n_slots: int, n_vocab: int) -> None:
        """``n_slots``: sequences of the large model that replies are written in; ``n_vocab``: tokens that it knows."""
        self._model = model
        self._n_slots = n_slots
        self._n_vocab = min(n_vocab, model.vocab.n_tokens)
        self._is_cut = not model.memory_kind.needs_checkpoints
        n_seqs = n_slots if self._is_cut else 2 * n_slots
        self._context = Context(model, replace(options, n_seq_max=n_seqs))
        self._read: dict[SeqId, Tokens] = {}  # the beginning of its text that is in the context
        self._n_reads = 0
        self._wanted_at: dict[SeqId, int] = {}  # the last read that asked for it
        self._rests_until: dict[SeqId, int] = {}  # the first read that may try it again

    def read(self, wanted: Sequence[DraftRequest]) -> None:
        """Brings its sequences towards the token before the last one, by one batch in all: what misses least comes
        first, and nothing is drafted for the others yet. That is no part of what a draft costs."""
        self._n_reads += 1
        self._wanted_at |= {each.seq: self._n_reads for each in wanted}
        n_left, n_drafted = self._context.options.n_ubatch, sum(each.n for each in wanted)
        for each in sorted(filter(self._follow, wanted), key=self._n_missing):
            try:
                n_left -= self._read_on(each, n_left, n_drafted)
            except MemoryFault:
                self._rest(each.seq)

    def _follow(self, wanted: DraftRequest) -> bool:
        """Cuts what was read to what the text begins with; returns whether more of it may be read."""
        seq = wanted.seq
        if not self._can_read(wanted):
            self._drop(seq)
            return False
        known = self._read.get(seq)
        if known is not None:
            n = _n_common(known, wanted.history[:-1])
            if n < len(known):
                self._cut(seq, n)
        return self._n_reads >= self._rests_until.get(seq, 0)

    def _n_missing(self, wanted: DraftRequest) -> int:
        return len(wanted.history) - 1 - len(self._read.get(wanted.seq, ()))

    def _read_on(self, wanted: DraftRequest, n_most: int, n_drafted: int) -> int:
        """Reads at most so many tokens, if the whole text has room beside the drafts of a step; returns how many."""
        seq, n_missing = wanted.seq, self._n_missing(wanted)
        self._make_room(n_missing + n_drafted)
        n = min(n_missing, n_most)
        if n > 0:
            stop = len(wanted.history) - 1 - n_missing + n
            feed = Feed(seq, wanted.history[stop - n : stop], self._context.end(seq), wants_logits=False)
            self._context.decode([feed])
            self._read[seq] = wanted.history[:stop].copy()
        return n

    def _make_room(self, n_cells: int) -> None:
        """Drops texts that were not asked for in a while, if there is no room otherwise."""
        cells = self._context.cells
        if n_cells > cells.free:
            for seq in [seq for seq in self._read if self._wanted_at[seq] <= self._n_reads - REST]:
                self._drop(seq)
        if n_cells > cells.free:
            raise ContextFull(f"a text and its draft need {n_cells} cells but {cells.free} are free")

    def _rest(self, seq: SeqId) -> None:
        """Leaves its room to the others, and the sequence unread for a while: reading it again at once would fail again."""
        self._drop(seq)
        self._rests_until[seq] = self._n_reads + REST

    def _can_read(self, wanted: DraftRequest) -> bool:
        text = wanted.history
        is_known = bool((text >= 0).all()) and int(text.max(initial=0)) < self._n_vocab  # an image is no token
        return is_known and len(text) + wanted.n < self._context.n_ctx

    def _cut(self, seq: SeqId, n: int) -> None:
        if not self._is_cut or not n:
            return self._drop(seq)
        try:
            self._context.trim(seq, Mark(TokenCount(n), Position(n)))
            self._read[seq] = self._read[seq][:n]
        except MemoryFault:
            self._drop(seq)
        return None

    def _drop(self, seq: SeqId) -> None:
        self._context.drop(seq)
        self._read.pop(seq, None)

    def draft(self, wanted: Sequence[DraftRequest]) -> dict[SeqId, list[int]]:
        """Tokens for each sequence that is read."""
        going = [each for each in wanted if self._is_ready(each)]
        seqs = {each.seq: self._place(each.seq) for each in going}
        last = {each.seq: int(each.history[-1]) for each in going}
        found: dict[SeqId, list[int]] = {each.seq: [] for each in going}
        try:
            while going:
                feeds = [self._feed(seqs[each.seq], last[each.seq]) for each in going]
                self._context.decode(feeds)
                for row, each in enumerate(going):
                    last[each.seq] = int(self._context.logits(row)[: self._n_vocab].argmax())
                    found[each.seq].append(last[each.seq])
                going = [each for each in going if len(found[each.seq]) < each.n]
        except MemoryFault:
            for seq in found:
                self._rest(seq)
        for seq, place in seqs.items():
            self._take_back(seq, place)
        return {seq: tokens for seq, tokens in found.items() if tokens}

    def _is_ready(self, wanted: DraftRequest) -> bool:
        known = self._read.get(wanted.seq)
        return known is not None and len(known) == len(wanted.history) - 1

    def _feed(self, seq: SeqId, token: int) -> Feed:
        return Feed(seq, np.array([token], np.int32), self._context.end(seq), wants_logits=True)

    def _place(self, seq: SeqId) -> SeqId:
        """Where a sequence is continued so that it can be taken back."""
        if self._is_cut:
            return seq
        place = SeqId(self._n_slots + seq)
        self._context.park(seq, place)
        return place

    def _take_back(self, seq: SeqId, place: SeqId) -> None:
        if place != seq:
            self._context.drop(place)
        elif seq in self._read:
            n = len(self._read[seq])
            self._context.trim(seq, Mark(TokenCount(n), Position(n)))

    def forget(self) -> None:
        """Texts were erased: nothing of them stays here."""
        for seq in list(self._read):
            self._drop(seq)
        self._rests_until.clear()

    def close(self) -> None:
        self._context.close()
        self._model.close()


ComputingDrafter = HeadDrafter | ModelDrafter


def _n_common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def require_drafts_for(model: Model, draft: Model) -> None:
    """A draft's tokens must mean the same to both, and the small model must be able to take them back."""
    reason = _difference(model.vocab, draft.vocab)
    if not draft.memory_kind.can_share_cells:
        reason = "a sliding window cannot take a draft back"
    if reason:
        raise ModelFileError(
            f"{draft.path.name} cannot draft for {model.path.name}: {reason}; give a smaller model of the same family"
        )


def _difference(a: Vocab, b: Vocab) -> str:
    if abs(a.n_tokens - b.n_tokens) > MOST_MORE:
        return f"its vocabulary has {b.n_tokens} tokens, not {a.n_tokens}"
    if (a.bos, a.eos) != (b.bos, b.eos):
        return "its texts begin or end with other tokens"
    for token in range(min(a.n_tokens, b.n_tokens)):
        if a.piece(token) != b.piece(token):
            return f"token {token} is {b.piece(token)!r} there and {a.piece(token)!r} here"
    return ""
