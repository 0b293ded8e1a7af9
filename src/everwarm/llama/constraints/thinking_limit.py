"""How long a reply may think: after so many tokens the end of the thinking is written for the model.

Follows one reply token by token. Knows tags and bytes; knows no logits and no requests.
"""

from __future__ import annotations

import codecs
from collections import deque

from everwarm.config import ThinkingBudget
from everwarm.llama.vocab import Vocab


class ThinkingLimit:
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
