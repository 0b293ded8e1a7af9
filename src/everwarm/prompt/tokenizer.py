"""Text to tokens, exactly as libllama would do it for the whole text, but paying only for what is new.

Control tokens split a text into fragments that are tokenized independently of each other. Fragments are remembered, and so
is how whole texts began: a long history with one new message costs the new message. Knows the vocabulary through a small
protocol only, so it needs no libllama.
"""

from __future__ import annotations

import bisect
import copy
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from everwarm.lru import NamespacedLru
from everwarm.prompt.prompt import Prompt

Tokens = NDArray[np.int32]

_MAX_WORD = 80  # characters; in longer runs without white space anything may be a word
_MAX_AGAIN = 4
_FREE_CHARS = 256 << 10
_LAST_WORD = re.compile(r"\s+\S*\Z")
_STRIPS_NEIGHBOURS = (1 << 7) | (1 << 8)  # attributes: eats white space on its left or right


class Vocabulary(Protocol):
    bos: int | None
    eos: int | None
    adds_bos: bool
    adds_eos: bool

    @property
    def splits_independently(self) -> bool: ...
    @property
    def special(self) -> Mapping[int, tuple[str, int]]: ...
    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens: ...


@dataclass(frozen=True, slots=True)
class _Beginning:
    """A text known to end right behind a control token, its tokens, and where its control tokens end in both."""

    text: str
    tokens: Tokens
    ends: tuple[tuple[int, int], ...]  # (characters, tokens), ascending


_EMPTY = _Beginning("", np.empty(0, np.int32), ((0, 0),))


class Tokenizer:
    """Thread-safe. ``memory_bytes`` bounds what is remembered, in all namespaces together."""

    def __init__(self, vocab: Vocabulary, memory_bytes: int = 64 << 20, n_beginnings: int = 32) -> None:
        self._vocab = vocab
        self._splitter = _splitter(vocab)
        self._namespace = ""
        self._lock = threading.Lock()
        self._fragments: NamespacedLru[Tokens] = NamespacedLru(memory_bytes)
        self._beginnings: NamespacedLru[_Beginning] = NamespacedLru(memory_bytes, n_beginnings)

    def within(self, namespace: str) -> Tokenizer:
        """The same memory, of which only what this namespace had tokenized is found: otherwise timing would tell what
        others have sent."""
        view = copy.copy(self)
        view._namespace = namespace
        return view

    def tokenize(self, text: str, *, add_special: bool = False) -> Prompt:
        """The tokens of ``text``; control tokens written out in it are parsed."""
        if self._splitter is None:
            return Prompt(self._vocab.tokenize(text, add_special=add_special, parse_special=True))
        known = self._beginning(text, self._splitter)
        tokens = known.tokens
        if len(known.text) < len(text):
            tokens = np.concatenate([tokens, self._fragment(text[len(known.text) :])])
        return Prompt(self._with_special(tokens) if add_special else tokens)

    def count_at(self, text: str, offsets: Sequence[int], *, add_special: bool = False) -> list[int]:
        """For each character offset, how many tokens of ``text`` surely lie before it: cut hints from text.

        Exact at the ends of words and control tokens; inside a word it may be less than it could be. Offsets that are no
        ends of control tokens cost the text since the last one again; when all of them together have cost the text
        ``_MAX_AGAIN`` times, the others are taken to lie at that last control token. The last offsets come first.
        """
        whole = self.tokenize(text, add_special=add_special)
        shift = int(add_special and self._vocab.adds_bos)
        ends = _EMPTY.ends if self._splitter is None else self._beginning(text, self._splitter).ends
        left = _MAX_AGAIN * len(text) + _FREE_CHARS
        counts = dict[int, int]()
        for offset in sorted({max(0, offset) for offset in offsets}, reverse=True):
            n_chars, n_tokens = ends[bisect.bisect_right(ends, (offset, len(whole))) - 1]
            left -= offset - n_chars
            counts[offset] = self._count_after(text, whole, n_chars, n_tokens + shift, offset if left >= 0 else n_chars)
        return [counts[max(0, offset)] for offset in offsets]

    def safe_count_at(self, text: str, offset: int, *, add_special: bool = False) -> int:
        """How many tokens end at the last control token before ``offset``: no text that follows can change these."""
        if self._splitter is None:
            return 0
        ends = self._beginning(text, self._splitter).ends
        n_tokens = ends[bisect.bisect_right(ends, (offset, len(text) + 1)) - 1][1]
        return n_tokens + int(add_special and self._vocab.adds_bos)

    def sure_count_at(self, text: str, offset: int, *, add_special: bool = False) -> int:
        """How many tokens lie before the word that ``offset`` touches: the same after other text behind the offset, where
        words are tokenized by themselves."""
        return self.sure_counts_at(text, (offset,), add_special=add_special)[0]

    def sure_counts_at(self, text: str, offsets: Sequence[int], *, add_special: bool = False) -> list[int]:
        """The same for many offsets. The text between two of them is tokenized once, and remembered. Where that gives
        other tokens than the whole text has, the text since the last control token is tokenized, up to a bound as in
        ``count_at``; beyond it the count is lower than it could be."""
        whole = self.tokenize(text, add_special=add_special)
        shift = int(add_special and self._vocab.adds_bos)
        ends = _EMPTY.ends if self._splitter is None else self._beginning(text, self._splitter).ends
        left = _MAX_AGAIN * len(text) + _FREE_CHARS
        counts = dict[int, int]()
        known = (0, shift)  # a place where a token ends: characters and tokens before it
        for offset in sorted(set(offsets)):
            end = max(0, min(offset, len(text)))
            word = _LAST_WORD.search(text, max(0, end - _MAX_WORD), end)
            at = end if word is None else word.start()
            start = _control_before(ends, at, shift)
            known = max(known, start) if known[0] <= at else start
            if (safe := _last_word_end(text, known[0], at)) is not None:
                piece = self._fragment(text[known[0] : safe])
                n_tokens = known[1] + len(piece)
                if whole.codes[known[1] : n_tokens].tobytes() == piece.tobytes():
                    known = (safe, n_tokens)
                else:
                    left -= at - start[0]
                    known = start
            count = self._count_after(text, whole, *known, at) if left >= 0 else known[1]
            counts[offset] = max(_control_before(ends, end, shift)[1], count - (word is None and count > 0))
        return [counts[offset] for offset in offsets]

    def _count_after(self, text: str, whole: Prompt, n_chars: int, n_tokens: int, offset: int) -> int:
        """``n_tokens`` end at the character ``n_chars``, where a control token ends."""
        if n_chars == offset:
            return n_tokens
        after = Prompt(self._fragment(text[n_chars:offset]))  # the next turn of a conversation has the same pieces
        return n_tokens + int(Prompt(whole.codes[n_tokens : n_tokens + len(after)]).common_prefix(after))

    def _beginning(self, text: str, splitter: re.Pattern[str]) -> _Beginning:
        """The part of ``text`` up to its last control token."""
        known = self._longest_beginning(text)
        parts = [known.tokens]
        ends = []
        n_chars = len(known.text)
        n_tokens = len(known.tokens)
        for match in splitter.finditer(text, n_chars):
            parts.append(self._fragment(text[n_chars : match.end()]))
            n_chars = match.end()
            n_tokens = n_tokens + len(parts[-1])
            ends.append((n_chars, n_tokens))
        if not ends:
            return known
        return self._remember(_Beginning(text[:n_chars], np.concatenate(parts), (*known.ends, *ends)))

    def _fragment(self, text: str) -> Tokens:
        """A fragment runs up to and including a control token: text that no neighbour can change."""
        with self._lock:
            tokens = self._fragments.get(self._namespace, text)
        if tokens is None:
            tokens = self._vocab.tokenize(text, add_special=False, parse_special=True)
            with self._lock:
                self._fragments.put(self._namespace, text, tokens, _cost(text, tokens))
        return tokens

    def _longest_beginning(self, text: str) -> _Beginning:
        best = _EMPTY
        with self._lock:
            for known in self._beginnings.values(self._namespace):
                if len(known.text) > len(best.text) and text.startswith(known.text):
                    best = known
        return best

    def _remember(self, beginning: _Beginning) -> _Beginning:
        with self._lock:
            shorter = [k.text for k in self._beginnings.values(self._namespace) if beginning.text.startswith(k.text)]
            for text in shorter[:-1]:  # the oldest may stay: the history others branch from
                self._beginnings.remove(self._namespace, text)
            n_bytes = _cost(beginning.text, beginning.tokens)
            self._beginnings.put(self._namespace, beginning.text, beginning, n_bytes)
        return beginning

    def _with_special(self, tokens: Tokens) -> Tokens:
        vocab = self._vocab
        first = [vocab.bos] if vocab.adds_bos else []
        last = [vocab.eos] if vocab.adds_eos else []
        return np.concatenate([np.array(first, np.int32), tokens, np.array(last, np.int32)])


def _last_word_end(text: str, start: int, stop: int) -> int | None:
    """Where white space follows a letter or digit, as late as possible: no tokenizer joins these."""
    low = max(start, stop - _MAX_WORD)
    return next((at for at in range(stop, low, -1) if text[at : at + 1].isspace() and text[at - 1].isalnum()), None)


def _control_before(ends: Sequence[tuple[int, int]], offset: int, shift: int) -> tuple[int, int]:
    """Where the last control token before an offset ends; ``shift``: tokens before the text."""
    n_chars, n_tokens = ends[bisect.bisect_right(ends, (offset, sys.maxsize)) - 1]
    return n_chars, n_tokens + shift


def _cost(text: str, tokens: Tokens) -> int:
    return len(text) + tokens.nbytes + 200


def _splitter(vocab: Vocabulary) -> re.Pattern[str] | None:
    """A pattern of the control tokens that can be trusted to split, or None where whole texts must be tokenized."""
    if not vocab.splits_independently:
        return None
    texts = [text for text, _ in vocab.special.values()]
    safe = [
        text
        for text, attributes in vocab.special.values()
        if text
        and text == text.strip()  # a neighbour that strips could eat it
        and not attributes & _STRIPS_NEIGHBOURS
        and not any(_can_break(other, text) for other in texts)
    ]
    return re.compile("|".join(re.escape(text) for text in sorted(safe, key=len, reverse=True))) if safe else None


def _can_break(other: str, text: str) -> bool:
    """Whether an occurrence of ``other`` can take away part of an occurrence of ``text``.

    libllama cuts out the longest specials first, so only one at least as long can come before ``text``.
    """
    if other == text:
        return any(text.startswith(text[i:]) for i in range(1, len(text)))
    if len(other.encode()) < len(text.encode()):
        return False
    return text in other or _overlap(other, text) or _overlap(text, other)


def _overlap(left: str, right: str) -> bool:
    """Whether some end of ``left`` is a beginning of ``right``."""
    return any(right.startswith(left[-n:]) for n in range(1, min(len(left), len(right))))
