"""Drafts that are looked up: what followed a reply's last tokens when they came before, in its own text, in other
conversations of its namespace in the prefix tree, or on disk.

Of the own text nothing is kept and nothing has to be built: it is searched for its own end, which takes ten to a hundred
microseconds for tens of thousands of tokens. The longest match wins, of equals the latest.

How sure a drafted token is depends on how many tokens before it match, and on the other places where the text was like
this: whether all of them go on with the same token, or some with another one.

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
MAX_MATCH = 256
# The search is bounded, also in a text that repeats itself.
MOST_PLACES = 256  # where the last two tokens came before: the last so many places are compared
NEAR = 32  # tokens before each of these that are compared
MOST_FAR = 16  # of the places where all of these match, the last so many are compared up to ``MAX_MATCH``
MOST_OTHERS = 64  # of the other places, the last so many are compared with the draft

# Tokens of a draft are of one kind if as many tokens before them match, in these buckets, and if the other places agree on
# them alike. Buckets begin at these lengths.
_BUCKETS = np.array((2, 3, 4, 5, 6, 7, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192))
_NO_OTHER, _ALL_AGREE, _SOME_DIFFER = range(3)
_N_AGREEMENTS = 3
_MIN_OTHER = 4  # tokens before another place that match, for it to count
# The chance that a token is wrong, where all before it are right: a factor for the agreement, over the length of the match.
# It is where learning begins: the records of what was accepted correct it.
_MISS_FACTORS = np.array((1.5, 1.0, 3.0))
_MAX_MISS = 0.6  # of a short match

MOST_TOKENS = 1 << 15
MOST_NODES = 1 << 11  # that are looked at
MOST_NAMESPACES = 16
GATHER_EVERY = 16
RENEW_S = 60.0  # between two readings of what is on disk; after something was erased, before the next
GAP = np.array([-1], np.int32)  # between texts: no token is equal to it
MIN_TREE_MATCH = 4  # other conversations say less of this one than its own text does


class SuffixLookup:
    """In the reply's own text."""

    def propose(self, history: Tokens, n: int, namespace: str) -> Proposal | None:  # noqa: ARG002 - its own text is its own
        text = history[-WINDOW:]
        found = longest_match(text, text)
        return None if found is None or n < 1 else _proposal(text, found, _continued(text, found.at, n), "lookup")

    def forget(self) -> None:
        """Nothing is kept."""


class TextMatch(NamedTuple):
    """A place in a text that the history's end matches. ``others``: the last other places that match as well, by
    ``_MIN_OTHER`` tokens, or by ``n_same`` where that is less."""

    at: int  # where the text goes on
    n_same: int  # tokens before that match
    others: NDArray[np.intp]


def longest_match(text: Tokens, history: Tokens) -> TextMatch | None:
    """The longest match of the history's end that the text goes on after; of equals the last one."""
    if len(history) < MIN_MATCH:
        return None
    places = _places(text, history)
    if not len(places):
        return None
    lengths = _match_lengths(text, history, places, NEAR)
    n_same, longest = int(lengths.max()), places[lengths == lengths.max()]
    if n_same == NEAR:
        longest = longest[-MOST_FAR:]
        far = _match_lengths(text, history, longest, MAX_MATCH)
        n_same, longest = int(far.max()), longest[far == far.max()]
    at = int(longest[-1])
    others = places[(lengths >= min(_MIN_OTHER, n_same)) & (places != at)]
    return TextMatch(at, n_same, others[-MOST_OTHERS:])


def _places(text: Tokens, history: Tokens) -> NDArray[np.intp]:
    """Where a text goes on after the history's last two tokens: the last such places."""
    is_pair = (text[1:-1] == history[-1]) & (text[:-2] == history[-2])
    places = np.flatnonzero(is_pair)[-MOST_PLACES:] + MIN_MATCH
    return places[text[places] >= 0]  # a text that ends there, or an image, is no continuation


def _match_lengths(text: Tokens, history: Tokens, places: NDArray[np.intp], n_most: int) -> NDArray[np.intp]:
    """How many tokens before each place, of at most ``n_most``, are as the history's last ones."""
    back = np.arange(1, min(n_most, len(history)) + 1)
    before = places[:, None] - back
    return _n_equal((text.take(before, mode="clip") == history[-back]) & (before >= 0))


def _n_equal(is_equal: NDArray[np.bool_]) -> NDArray[np.intp]:
    """How many values are true at the beginning of each row."""
    n_equal: NDArray[np.intp] = np.where(is_equal.all(axis=1), is_equal.shape[1], is_equal.argmin(axis=1))
    return n_equal


def _continued(tokens: Tokens, at: int, n: int) -> Tokens:
    """The ``n`` tokens from ``at`` on; where they reach the end, they go on as they began: the text repeats itself."""
    following = tokens[at : at + n]
    return following if len(following) == n else np.resize(following, n)


def _proposal(text: Tokens, match: TextMatch, following: Tokens, source: str) -> Proposal:
    """A draft of what follows a match, up to the end of its text or an image. Each right token makes the match longer."""
    no_token = np.flatnonzero(following < 0)
    tokens = following[: no_token[0]] if len(no_token) else following
    buckets = np.searchsorted(_BUCKETS, match.n_same + np.arange(len(tokens)), side="right") - 1
    agreements = _agreements(text, match.others, tokens)
    misses = np.minimum(_MISS_FACTORS[agreements] / _BUCKETS[buckets], _MAX_MISS)
    return Proposal(tokens, 1.0 - misses, buckets * _N_AGREEMENTS + agreements, source)


def _agreements(text: Tokens, others: NDArray[np.intp], tokens: Tokens) -> NDArray[np.intp]:
    """For each token of a draft whether the other places go on with it: those that went on with all tokens before it."""
    found = np.full(len(tokens), _NO_OTHER)
    if not len(others):
        return found
    at = others[:, None] + np.arange(len(tokens))
    n_agreed = _n_equal((text.take(at, mode="clip") == tokens) & (at < len(text)))
    found[: n_agreed.max()] = _ALL_AGREE
    ends = others + n_agreed
    differs = (n_agreed < len(tokens)) & (ends < len(text)) & (text.take(ends, mode="clip") >= 0)
    found[n_agreed[differs]] = _SOME_DIFFER
    return found


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
    if found is None or found.n_same < MIN_TREE_MATCH or n < 1:
        return None
    return _proposal(texts, found, texts[found.at : found.at + n], source)


def gathered(root: Node) -> Tokens:
    """The newest texts below a root, the newest last. A text is an edge of the tree with the few tokens before it."""
    nodes = sorted(islice(root.below(), MOST_NODES), key=lambda node: -node.id)
    parts: list[Tokens] = []
    n_tokens = 0
    for node in nodes:
        start = max(0, node.start - MIN_TREE_MATCH)
        part = node.path.codes[start : node.n_items][-(MOST_TOKENS - n_tokens) :]
        parts += [part, GAP]
        n_tokens += len(part) + 1
        if n_tokens >= MOST_TOKENS:
            break
    return np.concatenate(parts[::-1])
