"""Forms that bind a reply while it is written: compiled once by llguidance, followed by one matcher per request.

Compiling is for any thread but the loop's. Knows tokens and masks; knows no requests and no logits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from everwarm.config import Constraint
from everwarm.errors import BadRequest, ConstraintFailed
from everwarm.llama import abi
from everwarm.llama.constraints.grammar import Words
from everwarm.llama.constraints.trial import LIMITS, STACK_BYTES, Trial
from everwarm.llama.lib import Closing
from everwarm.llama.vocab import Vocab
from everwarm.lru import NamespacedLru

_MAX_KNOWN = 32
_STARTING = threading.Lock()
_SPECIAL = b"\xff"  # llguidance's mark of a token that no text matches


class Matcher:
    """One reply's way through a form."""

    def __init__(self, native: LLMatcher, n_tokens: int, banned: NDArray[np.int32]) -> None:
        self._native = native
        self._n_tokens = n_tokens
        self._banned = banned
        self._mask = np.zeros((n_tokens + 31) // 32 * 4, np.uint8)
        self.is_complete = False
        self.error: ConstraintFailed | None = None

    def look(self) -> bool:
        """Finds out what may come next. False: nothing, because the form is complete or cannot be followed."""
        self._native.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._failed():
            return False
        for token in self._banned.tolist():
            self._mask[token >> 3] &= ~np.uint8(1 << (token & 7))
        self.is_complete = not self._mask.any()
        return not self.is_complete

    def allows(self, token: int) -> bool:
        return bool(self._mask[token >> 3] >> (token & 7) & 1)

    def allowed(self) -> NDArray[np.intp]:
        """The tokens that may come next, at least one."""
        bits = np.unpackbits(self._mask, bitorder="little", count=self._n_tokens)
        return np.flatnonzero(bits.view(np.bool_))

    def accept(self, token: int) -> None:
        self._native.consume_token(token)
        self.is_complete = not self._failed() and self._native.is_stopped()

    def _failed(self) -> bool:
        if self._native.is_error():
            self.error = ConstraintFailed(
                f"the reply cannot be kept to its form any longer: {self._native.get_error()[:300]}"
            )
        return self.error is not None


@dataclass(frozen=True, slots=True)
class CompiledConstraint:
    """A form that any number of replies can be kept to."""

    _native: LLMatcher
    _vocab: Vocab

    def matcher(self, *, ignore_eos: bool = False) -> Matcher:
        banned = np.array(sorted(self._vocab.eog) if ignore_eos else [], np.int32)
        return Matcher(self._native.deep_copy(), self._vocab.n_tokens, banned)


class ConstraintCompiler(Closing):
    """Everything about a vocabulary's forms. The first one costs a look at every token.

    For any number of threads: each that compiles has a trial of its own, and whoever asks for what is known waits for
    none of them."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._known: NamespacedLru[CompiledConstraint | str] = NamespacedLru(_MAX_KNOWN)  # or why not
        self._lock = threading.Lock()
        self._idle: list[Trial] = []
        self._trials: list[Trial] = []

    def is_settled(self, form: Constraint, namespace: str = "") -> bool:
        """Whether ``compile`` answers at once."""
        with self._lock:
            return self._known.get(namespace, form) is not None

    def compile(self, form: Constraint, namespace: str = "") -> CompiledConstraint:
        """Or BadRequest, in the library's words. What was refused is refused again without another trial. Each namespace
        has its own: else time would tell what others ask for."""
        with self._lock:
            known = self._known.get(namespace, form)
        if known is None:
            known = self._tried(form)
            with self._lock:
                self._known.put(namespace, form, known, 1)
        if isinstance(known, str):
            raise BadRequest(known)
        return known

    def _tried(self, form: Constraint) -> CompiledConstraint | str:
        with self._lock:
            trial = self._idle.pop() if self._idle else self._new_trial()
        try:
            return self._compiled(form, trial)
        except BadRequest as error:
            return str(error)
        finally:
            with self._lock:
                self._idle.append(trial)

    def _new_trial(self) -> Trial:
        self._trials.append(Trial(self._words))
        return self._trials[-1]

    def _compiled(self, form: Constraint, trial: Trial) -> CompiledConstraint:
        grammar = trial.grammar(form)
        native = _with_stack(lambda: LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS))
        native.compute_bitmask()
        if native.is_error():
            raise BadRequest(f"the schema or grammar cannot be used: {native.get_error()[:300]}")
        return CompiledConstraint(native, self._vocab)

    @functools.cached_property
    def _words(self) -> Words:
        special = self._vocab.special.items()
        control = {text: token for token, (text, kind) in special if kind & abi.ATTR_CONTROL}
        defined = {text: token for token, (text, kind) in special if kind & abi.ATTR_USER_DEFINED}
        return Words(self._vocab.n_tokens, control, defined, self._eog)

    @property
    def _eog(self) -> list[int]:
        main = self._vocab.eos if self._vocab.eos is not None else min(self._vocab.eog, default=0)
        return [main, *sorted(self._vocab.eog - {main})]

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokens = [self._vocab.written(token) for token in range(self._vocab.n_tokens)]
        for token in self._words.control.values():
            tokens[token] = _SPECIAL + self._vocab.piece(token)
        vocab, function = self._vocab.native
        build: Callable[..., LLTokenizer] = LLTokenizer.from_llamacpp  # type: ignore[attr-defined]
        return build(tokens=tokens, vocab_ptr=vocab, tokenize_fptr=function, eos_token=self._eog)

    def close(self) -> None:
        with self._lock:
            for trial in self._trials:
                trial.close()


def _with_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    """On a thread with more stack than the trial had."""
    made: list[LLMatcher] = []
    thread = threading.Thread(target=lambda: made.append(make()), name="everwarm-form")
    with _STARTING:  # the size holds for whatever thread is started next
        before = threading.stack_size(2 * STACK_BYTES)
        thread.start()
        threading.stack_size(before)
    thread.join()
    return made[0]
