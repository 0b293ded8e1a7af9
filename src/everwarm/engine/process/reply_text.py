"""Tokens as text: a reply's as soon as it is certain (whole characters, and nothing that may begin a stop string), the
items around a difference, and the first and last words of a conversation for people to know it by."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everwarm.engine.request import Probs, Request
from everwarm.llama.vocab import Vocab
from everwarm.prompt.prompt import Prompt

FIRST_TOKENS, LAST_TOKENS = 64, 32
LEAST_LOG = -1e4  # the log-probability of a token that has none
IMAGE = b"[image]"


class ReplyText:
    """Fed with pieces in order. Holds back at most one character's bytes and the longest stop string's length. ``stop``:
    the stop string that was met; nothing follows it."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stop: str | None = None

    def feed(self, piece: bytes) -> str:
        """What can be sent now."""
        text = self._decoder.decode(piece)
        if not self._stops:
            return text
        self._held += text
        met = self._first_stop()
        if met is not None:
            at, self.stop = met
            text, self._held = self._held[:at], ""
            return text
        n_certain = len(self._held) - self._n_doubtful()
        text = self._held[:n_certain]
        self._held = self._held[n_certain:]
        return text

    def finish(self) -> str:
        """What was held back, when the reply ends otherwise."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text

    def _first_stop(self) -> tuple[int, str] | None:
        found = [(self._held.find(stop), stop) for stop in self._stops]
        return min((pair for pair in found if pair[0] >= 0), default=None)

    def _n_doubtful(self) -> int:
        """The longest end of the text that some stop string begins with."""
        longest = max(len(stop) for stop in self._stops) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-n:]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0


def items_text(vocab: Vocab, items: Prompt) -> str:
    """The text of some items. An incomplete character at an end is replaced."""
    pieces = (IMAGE if code < 0 else vocab.piece(code) for code in items.codes.tolist())
    return b"".join(pieces).decode("utf-8", "replace")


def words_of(vocab: Vocab, prompt: Prompt) -> str:
    """How a text begins and ends, on one line."""
    codes = [code for code in prompt.codes.tolist() if code >= 0]

    def shown(tokens: list[int]) -> str:
        return " ".join(vocab.detokenize(tokens).decode("utf-8", "replace").split())

    if len(codes) <= FIRST_TOKENS + LAST_TOKENS:
        return shown(codes)
    return f"{shown(codes[:FIRST_TOKENS])} … {shown(codes[-LAST_TOKENS:])}"


def probabilities_of(request: Request, logits: NDArray[np.float32], token: int | None) -> Probs | None:
    """The log-probabilities of a token that a request has picked, as it wants them."""
    if request.ask.post_sampling:
        return left_probabilities(token, request.sampler.candidates)
    return probabilities(logits, token, request.ask.n_probs)


def left_probabilities(token: int | None, candidates: Sequence[tuple[int, float]]) -> Probs | None:
    """Log-probabilities among what the samplers left: of the one that was picked, which comes first, and of others."""
    if token is None or not candidates:
        return None
    (_, own), *others = candidates
    top = tuple((id, math.log(share)) for id, share in others if share > 0.0)
    return Probs(math.log(own) if own > 0.0 else LEAST_LOG, top)


def probabilities(logits: NDArray[np.float32], token: int | None, n_top: int | None) -> Probs | None:
    """Log-probabilities of the model's own distribution, before sampling parameters change it. None: there is no token,
    or none is wanted."""
    if token is None or n_top is None:
        return None
    row = logits.astype(np.float64)
    highest = row.max()
    log_total = highest + np.log(np.exp(row - highest).sum())
    n = min(n_top, len(row))
    top = np.argpartition(row, -n)[-n:] if n else np.empty(0, np.intp)
    top = top[np.argsort(-row[top], kind="stable")]
    return Probs(float(row[token] - log_total), tuple((int(t), float(row[t] - log_total)) for t in top))
