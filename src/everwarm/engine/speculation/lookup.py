"""Drafts that are looked up: what followed a reply's last tokens when they came before, in its own text, in other
conversations of its namespace in the prefix tree, or on disk.

Of the own text nothing is kept and nothing has to be built: it is searched for its own end, which takes some ten
microseconds for tens of thousands of tokens. The longest match wins, of equals the latest.

How sure a drafted token is depends on how much of the text before it is the same in both places, and on the other places
where the text was like this: whether they all went on with this token, or parted here.

The newest texts of a namespace, up to ``MOST_TOKENS``, are searched in the same way. They are gathered from the tree
when it has changed, at most once in ``GATHER_EVERY`` looks, so they follow what is kept and what is evicted, and cost
4 bytes per token. Namespaces share nothing. What is only on disk is searched where the tree has nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everwarm.engine.speculation.draft_length import Proposal
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.llama.batch import Tokens
from everwarm.state.lineage import is_volatile, root_key, short_key
from everwarm.state.tree import Node, Tree

WINDOW = 1 << 16  # tokens that are searched: the last ones
MIN_MATCH = 2  # a single token says too little
NEAR = 32  # tokens before every place that are compared
MAX_MATCH = 256  # before those places where all of these are the same,
MOST_LONG = 16  # of which the last ones
MOST_PLACES = 256  # that are compared: the last ones too
# Kinds of drafted tokens: how many tokens before it are the same, in these steps, and what the other places say.
_LENGTHS = np.array((2, 3, 4, 5, 6, 7, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192))
_N_SAYINGS = 3
_ALONE, _AGREED, _PARTED = range(_N_SAYINGS)  # no other place; all others go on so; some go on with another token
_RISKS = np.array((1.5, 1.0, 3.0))  # by what they say, over the length: that the next token is another one
_MOST_RISK = 0.6
MOST_TOKENS = 1 << 15
MOST_NODES = 1 << 11  # that are looked at
MOST_NAMESPACES = 16
GATHER_EVERY = 16
RENEW_S = 60.0  # between two readings of what is on disk; after something was erased, before the next
GAP = np.array([-1], np.int32)  # between texts: no token is equal to it
MIN_OTHERS = 4  # other conversations say less of this one than its own text does


class SuffixLookup:
    """In the reply's own text."""

    def propose(self, history: Tokens, n: int, namespace: str) -> Proposal | None:  # noqa: ARG002 - its own text is its own
        tokens = history[-WINDOW:]
        found = longest_match(tokens[:-1], tokens)
        if found is None or n < 1:
            return None
        return _proposal(tokens, found, _continued(tokens, found.at, n), "lookup")

    def forget(self) -> None:
        """Nothing is kept."""


class TextMatch(NamedTuple):
    """Where a text was as the history is at its end."""

    at: int  # where it goes on
    n_same: int  # tokens before that
    others: NDArray[np.intp]  # where else at least ``MIN_OTHERS`` tokens are the same


def longest_match(text: Tokens, history: Tokens) -> TextMatch | None:
    """Of equals the last one."""
    last = len(history) - 1
    if min(last, len(text) - 1) < MIN_MATCH - 1:
        return None
    pairs = (text[1:] == history[last]) & (text[:-1] == history[last - 1])
    places = np.flatnonzero(pairs)[-MOST_PLACES:] + 2
    if not len(places):
        return None
    lengths = _n_same(text, history, places, NEAR)
    n_same, candidates = int(lengths.max()), places[lengths == lengths.max()]
    if n_same == NEAR:
        candidates = candidates[-MOST_LONG:]
        further = _n_same(text, history, candidates, MAX_MATCH)
        n_same, candidates = int(further.max()), candidates[further == further.max()]
    at = int(candidates[-1])
    return TextMatch(at, n_same, places[(lengths >= min(MIN_OTHERS, n_same)) & (places != at)])


def _n_same(text: Tokens, history: Tokens, places: NDArray[np.intp], n_most: int) -> NDArray[np.intp]:
    """How many tokens before each place are as the history's last ones."""
    back = np.arange(1, min(n_most, len(history)) + 1)
    before = places[:, None] - back
    is_same = (text[np.maximum(before, 0)] == history[len(history) - back]) & (before >= 0)
    return np.where(is_same.all(axis=1), len(back), is_same.argmin(axis=1))


def _continued(tokens: Tokens, at: int, n: int) -> Tokens:
    """The ``n`` tokens from ``at`` on; where they reach the end, they go on as they began: the text repeats itself."""
    following = tokens[at : at + n]
    return following if len(following) == n else np.resize(following, n)


def _proposal(text: Tokens, match: TextMatch, tokens: Tokens, source: str) -> Proposal:
    lengths = np.minimum(match.n_same + np.arange(len(tokens)), MAX_MATCH)
    steps = np.searchsorted(_LENGTHS, lengths, side="right") - 1
    sayings = _sayings(text, match.others, tokens)
    confidences = 1.0 - np.minimum(_RISKS[sayings] / _LENGTHS[steps], _MOST_RISK)
    return Proposal(tokens, confidences, steps * _N_SAYINGS + sayings, source)


def _sayings(text: Tokens, others: NDArray[np.intp], tokens: Tokens) -> NDArray[np.intp]:
    """For each drafted token what the other places say that agree with all before it."""
    at = others[:, None] + np.arange(len(tokens))
    following = text[np.minimum(at, len(text) - 1)]
    is_text = (at < len(text)) & (following != GAP)
    is_same = is_text & (following == tokens)
    agreed = np.logical_and.accumulate(is_same, axis=1)
    agreed_before = np.hstack([np.ones((len(others), 1), bool), agreed[:, :-1]])
    has_parted = (agreed_before & is_text & ~is_same).any(axis=0)
    return np.where(has_parted, _PARTED, np.where(agreed.any(axis=0), _AGREED, _ALONE))


@dataclass(slots=True)
class _Texts:
    tokens: Tokens
    version: int  # of the tree or the disk when they were gathered
    n_looks: int = 0  # since then
    asked_at: float = 0.0  # of the disk


class DiskTexts:
    """The newest texts of a namespace that are on disk, so that a reply is drafted from them also after a restart. They are
    read on the disk's thread, never waited for, and read again once in a while when the disk has changed."""

    def __init__(self, tiers: LowerTiers) -> None:
        self._tiers = tiers
        self._texts: dict[str, _Texts] = {}  # by namespace, the one that was asked for first at the beginning
        self._n_reading = 0  # readings that the disk's thread has not done yet
        self._lock = threading.Lock()
        self._n_forgotten = 0
        self._not_before = 0.0

    def of(self, namespace: str) -> Tokens:
        """What is known of them now, the newest last."""
        known = self._texts.get(namespace)
        if self._is_due(namespace, known):
            self._ask(namespace, GAP if known is None else known.tokens)
        return GAP if known is None else known.tokens

    def _is_due(self, namespace: str, known: _Texts | None) -> bool:
        now = time.monotonic()
        if now < self._not_before or not self._tiers.disk.is_on or is_volatile(namespace) or self._n_reading:
            return False  # one reading at a time: states are written on the same thread
        return known is None or (known.version != self._tiers.disk.version and now - known.asked_at >= RENEW_S)

    def _ask(self, namespace: str, tokens: Tokens) -> None:
        asked = _Texts(tokens, self._tiers.disk.version, asked_at=time.monotonic())
        with self._lock:
            self._n_reading += 1
            self._texts[namespace] = asked
            while len(self._texts) > MOST_NAMESPACES:
                del self._texts[next(iter(self._texts))]
        self._tiers.after_all(partial(self._read, namespace, asked, self._n_forgotten))

    def _read(self, namespace: str, asked: _Texts, n_forgotten: int) -> None:
        """Runs on the disk's thread."""
        space = short_key(root_key(self._tiers.fingerprint, namespace))
        tokens = GAP
        try:
            parts = [part for text in self._tiers.disk.newest_texts(space, MOST_TOKENS) for part in (GAP, text)]
            tokens = np.concatenate(parts[::-1]) if parts else GAP
        finally:
            self._n_reading -= 1
        with self._lock:
            if n_forgotten == self._n_forgotten and namespace in self._texts:
                self._texts[namespace] = _Texts(tokens, asked.version, asked_at=asked.asked_at)

    def forget(self) -> None:
        """Texts were erased: what is known is forgotten, and what is being read now does not count."""
        with self._lock:
            self._n_forgotten += 1
            self._not_before = time.monotonic() + RENEW_S
            self._texts.clear()


class TreeLookup:
    """In what the prefix tree has of a namespace, or where that has nothing, the disk."""

    def __init__(self, tree: Tree, on_disk: DiskTexts) -> None:
        self._tree = tree
        self._on_disk = on_disk
        self._texts: dict[str, _Texts] = {}  # by namespace, the one that was used last at the end

    def propose(self, history: Tokens, n: int, namespace: str) -> Proposal | None:
        return _proposed(self._texts_of(namespace), history, n, "tree") or _proposed(
            self._on_disk.of(namespace), history, n, "disk"
        )

    def forget(self) -> None:
        """Texts were erased: none of them stays here."""
        self._texts.clear()
        self._on_disk.forget()

    def _texts_of(self, namespace: str) -> Tokens:
        known, version = self._texts.pop(namespace, None), self._tree.version
        if known is None or (known.version != version and known.n_looks >= GATHER_EVERY):
            root = self._tree.namespaces().get(namespace)
            known = _Texts(GAP if root is None else gathered(root), version)
        known.n_looks += 1
        self._texts[namespace] = known
        while len(self._texts) > MOST_NAMESPACES:
            del self._texts[next(iter(self._texts))]
        return known.tokens


def _proposed(texts: Tokens, history: Tokens, n: int, source: str) -> Proposal | None:
    found = longest_match(texts, history)
    if found is None or found.n_same < MIN_OTHERS:
        return None
    tokens = texts[found.at : found.at + n]
    return _proposal(texts, found, tokens, source) if len(tokens) else None


def gathered(root: Node) -> Tokens:
    """The newest texts below a root, the newest last. A text is an edge of the tree with the few tokens before it."""
    nodes = sorted(islice(root.below(), MOST_NODES), key=lambda node: -node.id)
    parts: list[Tokens] = []
    n_tokens = 0
    for node in nodes:
        start = max(0, node.start - MIN_OTHERS)
        part = node.path.codes[start : node.n_items][-(MOST_TOKENS - n_tokens) :]
        parts += [part, GAP]
        n_tokens += len(part) + 1
        if n_tokens >= MOST_TOKENS:
            break
    return np.concatenate(parts[::-1])
