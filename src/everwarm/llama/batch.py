"""Batches for libllama, filled from NumPy arrays."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everwarm.llama import abi
from everwarm.types import Mark, SeqId

Tokens = NDArray[np.int32]


class Feed(NamedTuple):
    """Tokens to append to one sequence; ``start`` is where the caller believes the sequence ends."""

    seq: SeqId
    tokens: Tokens
    start: Mark
    wants_logits: bool


class BatchArrays:
    """One batch's arrays, allocated once: filling them makes no per-token Python objects."""

    def __init__(self, n_batch: int) -> None:
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
            embd=None,
            pos=self._pos.ctypes.data_as(abi.i32p),
            n_seq_id=self._ones.ctypes.data_as(abi.i32p),
            seq_id=self._seq_pointers.ctypes.data_as(ctypes.POINTER(abi.i32p)),
            logits=self._wants.ctypes.data_as(abi.i8p),
        )

    def put(self, at: int, feed: Feed) -> None:
        if len(feed.tokens) == 1:
            return self._put_one(at, feed)
        stop = at + len(feed.tokens)
        self._token[at:stop] = feed.tokens
        np.add(self._steps[: stop - at], feed.start.pos, out=self._pos[at:stop])
        self._seq[at:stop] = feed.seq
        self._wants[at:stop] = 0
        self._wants[stop - 1] = feed.wants_logits

    def _put_one(self, at: int, feed: Feed) -> None:
        """One token of a reply: plain stores, because slices would cost more than the rest of the step."""
        self._token[at] = feed.tokens[0]
        self._pos[at] = feed.start.pos
        self._seq[at] = feed.seq
        self._wants[at] = feed.wants_logits

    def struct(self, n: int) -> abi.Batch:
        self._struct.n_tokens = n
        return self._struct
