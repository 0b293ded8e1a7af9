"""Picking the next token from a row of logits, reproducibly per seed; and how long a reply may think.

The chain is libllama's own, made as llama-server makes it: bias first, then the samplers in their order, then the draw.
Samplers that would change nothing are left out. ``ThinkingLimit`` follows a reply token by token, and after so many of them
the end of the thinking is written for the model. ``PickPool`` has several samplers pick at once. Knows logits, tokens and
tags; knows no requests.
"""

from __future__ import annotations

import codecs
import ctypes
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from everwarm.config import Sampling, ThinkingBudget
from everwarm.errors import BadRequest, DecodeFailed
from everwarm.llama import abi
from everwarm.llama.constraints.matcher import Matcher
from everwarm.llama.context import Context, Logits
from everwarm.llama.lib import Closing
from everwarm.llama.model import Model
from everwarm.llama.vocab import Vocab

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_MIROSTAT_M = 100  # tokens from which mirostat estimates
MANY_LOGITS = 1 << 20  # so many take longer to walk over than a thread to wake up
_RANDOM_SEED = 0xFFFFFFFF  # libllama's word for "pick one yourself": never passed on


class ThinkingLimit:
    """How long one reply may think: after so many tokens the end of the thinking is written for the model."""

    def __init__(self, vocab: Vocab, budget: ThinkingBudget) -> None:
        self._vocab = vocab
        self._budget = budget
        self._opening, self._closing = budget.opening.encode(), budget.closing.strip().encode()
        self._is_open = not self._opening
        self._is_over = False
        self._text = b""  # what may still become a tag
        self._n_thought = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._forced: deque[int] = deque()

    @property
    def forced(self) -> int | None:
        """The token that comes next whatever the model says; None: the model is free."""
        if self._forced:
            return self._forced[0]
        is_split = bool(self._characters.getstate()[0])  # a character that is not complete yet
        if self._is_over or not self._is_open or self._n_thought < self._budget.n_tokens or is_split:
            return None
        text = self._budget.message + self._budget.closing
        self._forced.extend(self._vocab.tokenize(text, add_special=False, parse_special=True).tolist())
        self._is_over = True
        return self._forced[0] if self._forced else None

    def note(self, token: int) -> None:
        """This token was written."""
        if self._forced:
            self._forced.popleft()
        if self._is_over:
            return
        piece = self._vocab.piece(token)
        self._characters.decode(piece)
        self._text += piece
        if self._is_open:
            self._n_thought += 1
            self._is_over = self._closing in self._text
            self._text = self._text[-len(self._closing) :]
        else:
            self._look_for_opening()

    def _look_for_opening(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(self._opening):
            self._is_open, self._text = True, begun[len(self._opening) :]
        elif not self._opening.startswith(begun):
            self._is_over = True  # it answers without thinking


class Sampler(Closing):
    """One request's sampler. ``history`` is what the penalties look back on: the end of the prompt. With a ``matcher`` only
    what it allows is picked, and nothing where it is complete or cannot be followed. With ``ignore_eos`` no token is picked
    that ends a reply. A ``limit`` writes the end of thinking that takes too long. With ``n_candidates`` the most likely
    tokens that were left after all samplers are in ``candidates`` after each pick, behind the one that was picked, with
    their probabilities."""

    def __init__(
        self,
        model: Model,
        sampling: Sampling,
        history: Sequence[int] | NDArray[np.int32] = (),
        matcher: Matcher | None = None,
        *,
        ignore_eos: bool = False,
        limit: ThinkingLimit | None = None,
        n_candidates: int | None = None,
    ) -> None:
        self.matcher = matcher
        self._limit = limit
        self._n_candidates = n_candidates
        self.candidates: list[tuple[int, float]] = []
        self._ahead: int | None = None  # the token that the next pick gives; None: nothing was picked ahead
        self._before: int | None = None  # the chain as it was before that
        self._lib = model.lib
        self._vocab = model.vocab
        self._n_vocab = model.vocab.n_tokens
        self.seed = secrets.randbelow(_RANDOM_SEED) if sampling.seed is None else min(sampling.seed, _RANDOM_SEED - 1)
        for token in sampling.logit_bias:
            if not 0 <= token < self._n_vocab:
                raise BadRequest(f"logit_bias names token {token}; this model has tokens 0 to {self._n_vocab - 1}")
        self._banned = model.vocab.eog if ignore_eos else frozenset()
        changes = (sampling.logit_bias, sampling.has_penalties, sampling.has_dry, model.vocab.suppressed)
        self._plain_greedy = sampling.is_greedy and not any(changes)
        self._chain = None if self._plain_greedy else self._build(sampling)
        if sampling.n_remembered:
            for token in history[-sampling.n_remembered :]:
                self._lib.sampler_accept(self._chain, int(token))

    def _build(self, sampling: Sampling) -> int:
        lib = self._lib
        chain: int = lib.sampler_chain_init(lib.sampler_chain_default_params())
        for part in (*self._bias(sampling.logit_bias), *self._parts(sampling)):
            lib.sampler_chain_add(chain, part)
        return chain

    def _bias(self, bias: Mapping[int, float]) -> list[int]:
        pairs = [abi.LogitBias(token, value) for token, value in bias.items()]
        pairs += [abi.LogitBias(token, float("-inf")) for token in (*sorted(self._banned), *self._vocab.suppressed)]
        if not pairs:
            return []
        return [self._lib.sampler_init_logit_bias(self._n_vocab, len(pairs), (abi.LogitBias * len(pairs))(*pairs))]

    def _parts(self, sampling: Sampling) -> list[int]:
        lib = self._lib
        temperature = 0.0 if sampling.is_coldest else sampling.temperature
        if sampling.mirostat:
            return [lib.sampler_init_temp_ext(temperature, 0.0, 1.0), self._mirostat(sampling)]
        makers = self._makers(sampling, temperature)
        if sampling.is_greedy:  # what cuts or scales never changes which one is the largest
            return [*(makers[name]() for name in ("penalties", "dry") if name in makers), lib.sampler_init_greedy()]
        parts = [makers[name]() for name in sampling.samplers if name in makers]
        if "adaptive_p" in sampling.samplers:
            target = sampling.adaptive_target
            decay = sampling.adaptive_decay
            return [*parts, lib.sampler_init_adaptive_p(target, decay, self.seed)]
        return [*parts, lib.sampler_init_dist(self.seed)]

    def _makers(self, sampling: Sampling, temperature: float) -> dict[str, Callable[[], int]]:
        """The samplers that change something."""
        lib, keep = self._lib, sampling.min_keep
        makers: dict[str, Callable[[], int]] = {
            "infill": partial(lib.sampler_init_infill, self._vocab.native[0]),
            "top_k": partial(lib.sampler_init_top_k, sampling.top_k),
            "top_p": partial(lib.sampler_init_top_p, sampling.top_p, keep),
            "min_p": partial(lib.sampler_init_min_p, sampling.min_p, keep),
            "temperature": partial(
                lib.sampler_init_temp_ext, temperature, sampling.dynatemp_range, sampling.dynatemp_exponent
            ),
        }
        if sampling.has_penalties:
            penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
            makers["penalties"] = partial(
                lib.sampler_init_penalties, self._n_vocab, sampling.penalty_last_n, *penalties
            )
        if sampling.has_dry:
            makers["dry"] = partial(self._dry, sampling)
        if sampling.top_n_sigma > 0.0:
            makers["top_n_sigma"] = partial(lib.sampler_init_top_n_sigma, sampling.top_n_sigma)
        if sampling.typical_p < 1.0:
            makers["typ_p"] = partial(lib.sampler_init_typical, sampling.typical_p, keep)
        if sampling.xtc_probability > 0.0:
            chance = sampling.xtc_probability
            threshold = sampling.xtc_threshold
            makers["xtc"] = partial(lib.sampler_init_xtc, chance, threshold, keep, self.seed)
        return makers

    def _dry(self, sampling: Sampling) -> int:
        breakers = [text.encode("utf-8", "replace") for text in sampling.dry_sequence_breakers]
        made: int = self._lib.sampler_init_dry(
            self._vocab.native[0],
            sampling.dry_multiplier,
            sampling.dry_base,
            sampling.dry_allowed_length,
            sampling.dry_penalty_last_n,
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        )
        return made

    def _mirostat(self, sampling: Sampling) -> int:
        tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
        made: int = (
            self._lib.sampler_init_mirostat(self._n_vocab, self.seed, tau, eta, _MIROSTAT_M)
            if sampling.mirostat == 1
            else self._lib.sampler_init_mirostat_v2(self.seed, tau, eta)
        )
        return made

    @property
    def may_pick_ahead(self) -> bool:
        """Whether a pick needs the row alone, and can be taken back."""
        return self.matcher is None and self._limit is None and self._n_candidates is None

    @property
    def takes_largest(self) -> bool:
        """Whether it picks the token with the largest logit, unless that is banned."""
        return self._plain_greedy and self.may_pick_ahead

    def pick_ahead(self, context: Context, row: int, largest: int | None = None) -> None:
        """Picks what the next ``pick`` gives. Any thread may do it, as long as only that one has this sampler. A row that
        is not numbers is left to ``pick``, which refuses it. ``largest``: the token with the largest logit, where it is
        known."""
        if self._chain:
            self._before = self._lib.sampler_clone(self._chain)
        try:
            if largest is None or largest in self._banned:
                self._ahead = self._pick(context, row)
            else:
                self._ahead = _numeric(context.logits(row), largest)
                self.candidates = [(largest, 1.0)] * 2
        except DecodeFailed:
            self.forget_ahead()

    def forget_ahead(self) -> None:
        """As if nothing had been picked ahead: the row that it was picked from is not to be trusted."""
        self._ahead = None
        if self._before is not None:
            self._lib.sampler_free(self._chain)
            self._chain, self._before = self._before, None

    def _take_ahead(self) -> int | None:
        token, self._ahead = self._ahead, None
        if self._before is not None:
            self._lib.sampler_free(self._before)
            self._before = None
        return token

    def pick(self, context: Context, row: int) -> int | None:
        """The next token after the last decode's ``row``, or ``DecodeFailed`` if the row is not numbers."""
        if self._ahead is not None:
            return self._take_ahead()
        return (
            self._pick(context, row)
            if self._limit is None
            else self._limited(self._limit, lambda: self._pick(context, row))
        )

    def pick_from(self, logits: Logits) -> int | None:
        """The same pick from a kept copy of a row, when nothing had to be decoded."""
        return (
            self._pick_from(logits)
            if self._limit is None
            else self._limited(self._limit, lambda: self._pick_from(logits))
        )

    def _limited(self, limit: ThinkingLimit, pick: Callable[[], int | None]) -> int | None:
        """What is picked, unless the limit says what comes next."""
        token = limit.forced
        if token is None:
            token = pick()
        else:
            self.candidates = [(token, 1.0)] * 2
            if self.matcher is not None:
                self.matcher.accept(token)
            if self._chain:
                self._lib.sampler_accept(self._chain, token)
        if token is not None:
            limit.note(token)
        return token

    def _pick(self, context: Context, row: int) -> int | None:
        logits = context.logits(row)
        if self.matcher is not None or self._plain_greedy or self._n_candidates is not None:
            token = self._pick_from(logits)
        else:
            token = int(self._lib.sampler_sample(self._chain, context.native, context.batch_index(row)))
        return None if token is None else _numeric(logits, token)

    def _pick_from(self, logits: Logits) -> int | None:
        if self.matcher is not None:
            return self._pick_allowed(self.matcher, logits)
        return self._largest(logits) if self._plain_greedy else self._apply(np.arange(self._n_vocab), logits)

    def _largest(self, logits: Logits) -> int:
        token = int(logits.argmax())
        if token in self._banned:
            others = logits.copy()
            others[list(self._banned)] = -np.inf
            token = int(others.argmax())
        self.candidates = [(token, 1.0)] * 2
        return token

    def _pick_allowed(self, matcher: Matcher, logits: Logits) -> int | None:
        if not matcher.look():
            return None
        token = int(logits.argmax()) if self._plain_greedy else None
        if token is None or not matcher.allows(token):
            ids = matcher.allowed()
            token = int(ids[logits[ids].argmax()]) if self._plain_greedy else self._apply(ids, logits[ids])
        if self._plain_greedy:
            self.candidates = [(token, 1.0)] * 2
        matcher.accept(_numeric(logits, token))
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
        if self._n_candidates is not None:
            left = np.ctypeslib.as_array(ctypes.cast(array.data, ctypes.POINTER(ctypes.c_uint8)), (array.size * 12,))
            self.candidates = _most_likely(left.view(_TOKEN_DATA), self._n_candidates, token)
        return token

    def close(self) -> None:
        self._take_ahead()
        if self._chain:
            self._lib.sampler_free(self._chain)
            self._chain = None


class PickPool(Closing):
    """Threads on which the samplers of a step pick. A pick walks over a whole row: with a vocabulary of 250,000 tokens it
    takes 0.1 ms if it is greedy, and ten times as long if it is not. The interpreter is not needed meanwhile."""

    def __init__(self, n_threads: int) -> None:
        """``n_threads``: with the one that asks."""
        self._n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads - 1, thread_name_prefix="everwarm-pick")

    def pick_ahead(self, context: Context, wanted: Sequence[tuple[Sampler, int]]) -> None:
        """Samplers and their rows of the last decode, in order. What they pick, ``Sampler.pick`` gives."""
        rows = [(sampler, row) for sampler, row in wanted if sampler.may_pick_ahead]
        n = min(self._n_threads, len(rows), len(rows) * context.model.vocab.n_tokens // MANY_LOGITS)
        if n < 1:
            return
        context.logits(rows[0][1])  # waits for the device: after that libllama only reads
        bounds = [len(rows) * i // n for i in range(n + 1)]
        shares = [rows[start:stop] for start, stop in pairwise(bounds)]
        others = [self._pool.submit(_pick_ahead, context, share) for share in shares[1:]]
        _pick_ahead(context, shares[0])
        for other in others:
            other.result()

    def close(self) -> None:
        self._pool.shutdown()


def _pick_ahead(context: Context, rows: Sequence[tuple[Sampler, int]]) -> None:
    greedy = [(sampler, row) for sampler, row in rows if sampler.takes_largest]
    if greedy:
        for (sampler, row), token in zip(greedy, context.largest([row for _, row in greedy]), strict=True):
            sampler.pick_ahead(context, row, token)
    for sampler, row in rows:
        if not sampler.takes_largest:
            sampler.pick_ahead(context, row)


def _numeric(logits: Logits, token: int) -> int:
    if logits[token] != logits[token]:  # NaN, and only NaN, differs from itself
        raise DecodeFailed("the model's numbers overflowed (NaN)")
    return token


def _most_likely(left: NDArray[np.void], n: int, picked: int) -> list[tuple[int, float]]:
    """The token that was picked, and then so many of those that were left, by their share of the probability."""
    weights = np.exp(left["logit"].astype(np.float64) - left["logit"].max())
    shares = weights / weights.sum()
    order = np.argsort(-shares, kind="stable")
    own = float(shares[left["id"] == picked].sum())
    top = [(int(left["id"][i]), float(shares[i])) for i in order[:n] if shares[i] > 0.0]
    return [(picked, own), *top]
