"""Sees a stop string in a reply as its reader will, so that nothing is verified beyond it."""

from __future__ import annotations

from collections.abc import Sequence

from everwarm.engine.process.reply_text import ReplyText
from everwarm.llama.vocab import Vocab


class StopWatch:
    def __init__(self, vocab: Vocab, stops: Sequence[str]) -> None:
        self._vocab = vocab
        self._text = ReplyText(stops)

    def __call__(self, token: int) -> bool:
        """Whether the text holds a stop string after this token."""
        return self._text.feed(self._vocab.piece(token)).stop is not None
