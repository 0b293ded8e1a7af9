"""Drafts by a second, smaller model of the same vocabulary, in a context of its own.

It reads a reply's text when it is asked to continue it, and remembers what it has read for each sequence. Attention is cut
where texts part; a recurrent state is not, so such a model drafts from a second name of its sequence, and reads a text anew
that has been changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from everwarm.config import ContextOptions
from everwarm.engine.speculation.drafter import Tokens, Wanted
from everwarm.errors import MemoryFault, ModelFileError
from everwarm.llama.context import Context, Feed
from everwarm.llama.lib import Closing
from everwarm.llama.model import Model
from everwarm.llama.vocab import Vocab
from everwarm.types import Mark, Position, SeqId, TokenCount

MOST_MORE = 128  # tokens that only one of two vocabularies has, at its end: padding


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
        self._read: dict[SeqId, Tokens] = {}

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Brings its sequences up to the token before the last one."""
        for each in wanted:
            try:
                self._read_one(each)
            except MemoryFault:
                self.forget()  # idle texts may fill the context

    def _read_one(self, wanted: Wanted) -> None:
        seq, text = wanted.seq, wanted.history[:-1]
        if not self._can_read(wanted):
            return self._drop(seq)
        known = self._read.get(seq)
        n = 0 if known is None else _n_common(known, text)
        if known is not None and n < len(known):
            n = self._cut(seq, n)
        while n < len(text):
            tokens = text[n : n + self._context.options.n_ubatch]
            self._context.decode([Feed(seq, tokens, self._context.end(seq), wants_logits=False)])
            n += len(tokens)
        self._read[seq] = text.copy()
        return None

    def _can_read(self, wanted: Wanted) -> bool:
        text = wanted.history
        is_known = bool((text >= 0).all()) and int(text.max(initial=0)) < self._n_vocab  # an image is no token
        return is_known and len(text) + wanted.n < self._context.n_ctx

    def _cut(self, seq: SeqId, n: int) -> int:
        if self._is_cut and n:
            self._context.trim(seq, Mark(TokenCount(n), Position(n)))
            return n
        self._drop(seq)
        return 0

    def _drop(self, seq: SeqId) -> None:
        self._context.drop(seq)
        self._read.pop(seq, None)

    def draft(self, wanted: Sequence[Wanted]) -> dict[SeqId, list[int]]:
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
            for seq in list(found):
                self._drop(seq)
        for seq, place in seqs.items():
            self._take_back(seq, place)
        return {seq: tokens for seq, tokens in found.items() if tokens}

    def _is_ready(self, wanted: Wanted) -> bool:
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

    def close(self) -> None:
        self._context.close()
        self._model.close()


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
