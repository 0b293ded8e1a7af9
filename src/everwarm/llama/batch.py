"""What one decode gets: the tokens to append to each sequence, and the arrays in which libllama reads them; and what is
to be guessed after them."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everwarm.llama import abi
from everwarm.types import Mark, SeqId

Tokens = NDArray[np.int32]


class Feed(NamedTuple):
    """Tokens to append to one sequence; ``start`` is where the caller believes the sequence ends. The last ``n_draft`` of
    them are guesses: there are logits after each of them and after the token before, and some may be taken back."""

    seq: SeqId
    tokens: Tokens
    start: Mark
    wants_logits: bool
    n_draft: int = 0
    is_for_head: bool = True  # the model's head reads them, too, and can guess what follows

    @property
    def n_rows(self) -> int:
        """Rows of logits."""
        return self.n_draft + 1 if self.wants_logits else 0


class DraftRequest(NamedTuple):
    """``n`` tokens are to be guessed after a history, of which the model has not read the last ``n_due`` yet; the last of
    them was just picked."""

    seq: SeqId
    history: Tokens
    n_due: int
    n: int

    @property
    def due(self) -> Tokens:
        return self.history[len(self.history) - self.n_due :]


class BatchArrays:
    """One batch's arrays, allocated once: filling them makes no per-token Python objects."""

    def __init__(self, n_batch: int, hidden: NDArray[np.float32] | None = None) -> None:
        """``hidden``: a row for each token, which an MTP head reads with it."""
        self._token = np.zeros(n_batch, np.int32)
        self._pos = np.zeros(n_batch, np.int32)
        self._seq = np.zeros(n_batch, np.int32)
        self._wants = np.zeros(n_batch, np.int8)
        self._ones = np.ones(n_batch, np.int32)
        self._steps = np.arange(n_batch, dtype=np.int32)
        self._seq_pointers = self._seq.ctypes.data + 4 * np.arange(n_batch, dtype=np.uint64)
        self._struct = abi.Batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(abi.i32p),
            embd=None if hidden is None else hidden.ctypes.data_as(abi.f32p),
            pos=self._pos.ctypes.data_as(abi.i32p),
            n_seq_id=self._ones.ctypes.data_as(abi.i32p),
            seq_id=self._seq_pointers.ctypes.data_as(ctypes.POINTER(abi.i32p)),
            logits=self._wants.ctypes.data_as(abi.i8p),
        )

    def put(self, at: int, feed: Feed) -> None:
        if len(feed.tokens) == 1:
            return self._put_one(at, feed)
        stop = self.place(at, feed.seq, feed.start.pos, feed.tokens)
        self._wants[stop - 1 - feed.n_draft : stop] = feed.wants_logits

    def place(self, at: int, seq: SeqId, pos: int, tokens: Tokens) -> int:
        """Tokens of a sequence without outputs; returns where the next ones go."""
        stop = at + len(tokens)
        self._token[at:stop] = tokens
        np.add(self._steps[: stop - at], pos, out=self._pos[at:stop])
        self._seq[at:stop] = seq
        self._wants[at:stop] = 0
        return stop

    def _put_one(self, at: int, feed: Feed) -> None:
        """One token of a reply: plain stores, because slices would cost more than the rest of the step."""
        self._token[at] = feed.tokens[0]
        self._pos[at] = feed.start.pos
        self._seq[at] = feed.seq
        self._wants[at] = feed.wants_logits

    def want(self, at: int) -> None:
        """An output for this token."""
        self._wants[at] = 1

    def want_all(self, n: int) -> None:
        """Outputs for every one of the first tokens."""
        self._wants[:n] = 1

    def struct(self, n: int) -> abi.Batch:
        self._struct.n_tokens = n
        return self._struct
