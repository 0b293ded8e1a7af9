"""Picking the next token from a row of logits, reproducibly per seed.

The chain is libllama's own, in llama-server's order: bias, penalties, top-k, top-p, min-p, temperature, draw. Knows
logits and tokens; knows no requests.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everwarm.config import Sampling
from everwarm.errors import BadRequest, DecodeFailed
from everwarm.llama import abi
from everwarm.llama.constraints.matcher import Matcher
from everwarm.llama.context import Context, Logits
from everwarm.llama.lib import Closing
from everwarm.llama.model import Model

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_MIN_KEEP = 1
_RANDOM_SEED = 0xFFFFFFFF  # libllama's word for "pick one yourself": never passed on


class Sampler(Closing):
    """One request's sampler. ``history`` is what the penalties look back on: the end of the prompt. With a ``matcher`` only
    what it allows is picked, and nothing where it is complete or cannot be followed."""

    def __init__(
        self,
        model: Model,
        sampling: Sampling,
        history: Sequence[int] | NDArray[np.int32] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self.matcher = matcher
        self._lib = model.lib
        self._n_vocab = model.vocab.n_tokens
        self.seed = secrets.randbelow(_RANDOM_SEED) if sampling.seed is None else min(sampling.seed, _RANDOM_SEED - 1)
        for token in sampling.logit_bias:
            if not 0 <= token < self._n_vocab:
                raise BadRequest(f"logit_bias names token {token}; this model has tokens 0 to {self._n_vocab - 1}")
        self._plain_greedy = sampling.is_greedy and not sampling.logit_bias and not sampling.has_penalties
        self._chain = None if self._plain_greedy else self._build(sampling)
        if sampling.has_penalties:
            for token in list(history)[-sampling.penalty_last_n :]:
                self._lib.sampler_accept(self._chain, int(token))

    def _build(self, sampling: Sampling) -> int:
        lib = self._lib
        chain: int = lib.sampler_chain_init(lib.sampler_chain_default_params())
        for part in self._parts(sampling):
            lib.sampler_chain_add(chain, part)
        return chain

    def _parts(self, sampling: Sampling) -> list[int]:
        lib = self._lib
        parts = []
        if sampling.logit_bias:
            pairs = [abi.LogitBias(token, bias) for token, bias in sampling.logit_bias.items()]
            array = (abi.LogitBias * len(pairs))(*pairs)
            parts.append(lib.sampler_init_logit_bias(self._n_vocab, len(pairs), array))
        if sampling.has_penalties:
            penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
            parts.append(lib.sampler_init_penalties(self._n_vocab, sampling.penalty_last_n, *penalties))
        if sampling.is_greedy:
            return [*parts, lib.sampler_init_greedy()]
        return [
            *parts,
            lib.sampler_init_top_k(sampling.top_k),
            lib.sampler_init_top_p(sampling.top_p, _MIN_KEEP),
            lib.sampler_init_min_p(sampling.min_p, _MIN_KEEP),
            lib.sampler_init_temp(sampling.temperature),
            lib.sampler_init_dist(self.seed),
        ]

    def pick(self, context: Context, row: int) -> int | None:
        """The next token after the last decode's ``row``, or ``DecodeFailed`` if the row is not numbers."""
        logits = context.logits(row)
        if self.matcher is not None:
            return self._pick_allowed(self.matcher, logits)
        if self._plain_greedy:
            token = int(logits.argmax())
        else:
            token = int(self._lib.sampler_sample(self._chain, context.native, context.batch_index(row)))
        if logits[token] != logits[token]:  # NaN, and only NaN, differs from itself
            raise DecodeFailed("the model's numbers overflowed (NaN)")
        return token

    def pick_from(self, logits: Logits) -> int | None:
        """The same pick from a kept copy of a row, when nothing had to be decoded."""
        if self.matcher is not None:
            return self._pick_allowed(self.matcher, logits)
        if self._plain_greedy:
            return int(logits.argmax())
        return self._apply(np.arange(self._n_vocab), logits)

    def _pick_allowed(self, matcher: Matcher, logits: Logits) -> int | None:
        if not matcher.look():
            return None
        token = int(logits.argmax()) if self._plain_greedy else None
        if token is None or not matcher.allows(token):
            ids = matcher.allowed()
            token = int(ids[logits[ids].argmax()]) if self._plain_greedy else self._apply(ids, logits[ids])
        if logits[token] != logits[token]:
            raise DecodeFailed("the model's numbers overflowed (NaN)")
        matcher.accept(token)
        return token

    def _apply(self, ids: NDArray[np.intp], logits: Logits) -> int:
        """The chain's pick among these tokens."""
        data = np.empty(len(ids), _TOKEN_DATA)
        data["id"], data["logit"], data["p"] = ids, logits, 0.0
        pointer = data.ctypes.data_as(ctypes.POINTER(abi.TokenData))
        array = abi.TokenDataArray(pointer, len(ids), -1, False)
        self._lib.sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        self._lib.sampler_accept(self._chain, token)
        return token

    def close(self) -> None:
        if self._chain:
            self._lib.sampler_free(self._chain)
            self._chain = None
