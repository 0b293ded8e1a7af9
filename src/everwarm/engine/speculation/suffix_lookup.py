"""Drafts from a reply's own history: what followed its last tokens when they came before. Pure.

Nothing is kept and nothing has to be built: the history is searched for its own end, which takes some ten microseconds for
tens of thousands of tokens. The longest match wins, of equals the latest.
"""

from __future__ import annotations

import numpy as np

from everwarm.engine.speculation.draft_length import Proposal, Tokens

WINDOW = 1 << 16  # tokens that are searched: the last ones
MIN_MATCH = 2  # a single token says too little
MAX_MATCH = 32
MOST_PLACES = 256  # that are compared: the last ones
_CONFIDENCE = {2: 0.4, 3: 0.55, 4: 0.65}  # by the length of the match; the record of what was accepted corrects it
_SURE = ((24, 0.98), (16, 0.96), (12, 0.93), (8, 0.88), (5, 0.8))


class SuffixLookup:
    def propose(self, history: Tokens, n: int, namespace: str) -> Proposal | None:  # noqa: ARG002 - its own text is its own
        tokens = history[-WINDOW:]
        found = longest_match(tokens[:-1], tokens)
        if found is None or n < 1:
            return None
        at, n_match = found
        return Proposal(_continued(tokens, at, n), confidence_of(n_match), "lookup")

    def forget(self) -> None:
        """Nothing is kept."""


def longest_match(text: Tokens, history: Tokens) -> tuple[int, int] | None:
    """Where the longest match of the history's end in a text is over, and its length; of equals the last one."""
    last = len(history) - 1
    if min(last, len(text) - 1) < MIN_MATCH - 1:
        return None
    pairs = (text[1:] == history[last]) & (text[:-1] == history[last - 1])
    ends = np.flatnonzero(pairs)[-MOST_PLACES:] + 1
    if not len(ends):
        return None
    back = np.arange(min(MAX_MATCH, last + 1))
    before = ends[:, None] - back
    is_same = (text[np.maximum(before, 0)] == history[last - back]) & (before >= 0)
    lengths = np.where(is_same.all(axis=1), len(back), is_same.argmin(axis=1))
    n_match = int(lengths.max())
    return int(ends[lengths == n_match][-1]) + 1, n_match


def _continued(tokens: Tokens, at: int, n: int) -> Tokens:
    """The ``n`` tokens from ``at`` on; where they reach the end, they go on as they began: the text repeats itself."""
    following = tokens[at : at + n]
    return following if len(following) == n else np.resize(following, n)


def confidence_of(n_match: int) -> float:
    found = next((confidence for least, confidence in _SURE if n_match >= least), None)
    return _CONFIDENCE[n_match] if found is None else found
