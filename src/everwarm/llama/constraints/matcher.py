"""Constraints on a reply while it is generated: llguidance compiles each once, and one matcher per request follows it.

Compiling is for any thread but the loop's. Knows tokens and masks; knows no requests and no logits. llguidance is loaded
with the first constraint, because most engines never see one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from everwarm.config import Constraint
from everwarm.errors import BadRequest
from everwarm.llama import abi
from everwarm.llama.constraints.trial import STACK_BYTES, NamedTokens, Trial
from everwarm.llama.lib import Closing
from everwarm.llama.vocab import Vocab
from everwarm.lru import NamespacedLru

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_KNOWN = 32
_STARTING = threading.Lock()
_SPECIAL = b"\xff"  # llguidance's mark of a token that no text matches


class Matcher:
    """Follows one reply through its constraint."""

    def __init__(self, native: LLMatcher, n_tokens: int, banned: NDArray[np.int32]) -> None:
        self._native = native
        self._n_tokens = n_tokens
        self._banned = banned
        self._mask = np.zeros((n_tokens + 31) // 32 * 4, np.uint8)
        self.is_complete = False
        self.error: BadRequest | None = None

    def look(self) -> bool:
        """Computes what may come next. False: nothing, because the constraint is complete or cannot be followed."""
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

    def n_allowed(self, tokens: list[int]) -> int:
        """How many of these tokens may follow one after the other. Changes nothing."""
        banned = self._banned.tolist()
        n_free = next((i for i, token in enumerate(tokens) if token in banned), len(tokens))
        return 0 if self._native.is_error() else int(self._native.validate_tokens(tokens[:n_free]))

    def accept(self, token: int) -> None:
        self._native.consume_token(token)
        self.is_complete = not self._failed() and self._native.is_stopped()

    def _failed(self) -> bool:
        if self._native.is_error():
            self.error = BadRequest(
                f"the reply can no longer be kept to its schema or grammar: {self._native.get_error()[:300]}"
            )
        return self.error is not None


@dataclass(frozen=True, slots=True)
class CompiledConstraint:
    """A constraint that is ready for any number of replies."""

    _native: LLMatcher
    _vocab: Vocab

    def matcher(self, *, ignore_eos: bool = False) -> Matcher:
        banned = np.array(sorted(self._vocab.eog) if ignore_eos else [], np.int32)
        return Matcher(self._native.deep_copy(), self._vocab.n_tokens, banned)


class ConstraintCompiler(Closing):
    """Compiles constraints for a vocabulary and keeps the last ones. The first one costs a look at every token.

    For any number of threads: each that compiles has a trial of its own, and a request for a known constraint waits for
    none of them."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._known: NamespacedLru[CompiledConstraint | str] = NamespacedLru(_MAX_KNOWN)  # or why it was refused
        self._lock = threading.Lock()
        self._idle: list[Trial] = []
        self._trials: list[Trial] = []

    def is_settled(self, constraint: Constraint, namespace: str = "") -> bool:
        """Whether ``compile`` answers at once."""
        with self._lock:
            return self._known.get(namespace, constraint) is not None

    def compile(self, constraint: Constraint, namespace: str = "") -> CompiledConstraint:
        """Raises BadRequest with llguidance's message. What was refused is refused again without another trial. Each
        namespace has constraints of its own: otherwise the time taken would tell what others use."""
        with self._lock:
            known = self._known.get(namespace, constraint)
        if known is None:
            known = self._compile_or_error(constraint)
            with self._lock:
                self._known.put(namespace, constraint, known, 1)
        if isinstance(known, str):
            raise BadRequest(known)
        return known

    def _compile_or_error(self, constraint: Constraint) -> CompiledConstraint | str:
        with self._lock:
            trial = self._idle.pop() if self._idle else self._new_trial()
        try:
            return self._compile(constraint, trial)
        except BadRequest as error:
            return str(error)
        finally:
            with self._lock:
                self._idle.append(trial)

    def _new_trial(self) -> Trial:
        self._trials.append(Trial(self._named_tokens))
        return self._trials[-1]

    def _compile(self, constraint: Constraint, trial: Trial) -> CompiledConstraint:
        from llguidance import LLMatcher

        from everwarm.llama.constraints.trial_worker import LIMITS

        grammar = trial.grammar(constraint)
        native = _with_stack(lambda: LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS))
        native.compute_bitmask()
        if native.is_error():
            raise BadRequest(f"the schema or grammar cannot be used: {native.get_error()[:300]}")
        return CompiledConstraint(native, self._vocab)

    @functools.cached_property
    def _named_tokens(self) -> NamedTokens:
        special = self._vocab.special.items()
        control = {text: token for token, (text, kind) in special if kind & abi.ATTR_CONTROL}
        defined = {text: token for token, (text, kind) in special if kind & abi.ATTR_USER_DEFINED}
        return NamedTokens(self._vocab.n_tokens, control, defined, self._eog)

    @property
    def _eog(self) -> list[int]:
        main = self._vocab.eos if self._vocab.eos is not None else min(self._vocab.eog, default=0)
        return [main, *sorted(self._vocab.eog - {main})]

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokens = [self._vocab.written(token) for token in range(self._vocab.n_tokens)]
        for token in self._named_tokens.control.values():
            tokens[token] = _SPECIAL + self._vocab.piece(token)
        vocab, function = self._vocab.native
        build: Callable[..., LLTokenizer] = LLTokenizer.from_llamacpp  # type: ignore[attr-defined]
        return build(tokens=tokens, vocab_ptr=vocab, tokenize_fptr=function, eos_token=self._eog)

    def close(self) -> None:
        with self._lock:
            for trial in self._trials:
                trial.close()


def _with_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    """On a thread with more stack than the trial had, so that what passed there passes here."""
    made: list[LLMatcher] = []
    thread = threading.Thread(target=lambda: made.append(make()), name="everwarm-constraint")
    with _STARTING:  # the size holds for the next thread that is started
        before = threading.stack_size(2 * STACK_BYTES)
        thread.start()
        threading.stack_size(before)
    thread.join()
    return made[0]
