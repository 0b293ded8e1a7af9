"""Drafts from everything that a namespace has in the prefix tree: what followed the last tokens in other conversations.

The newest texts of a namespace, up to ``MOST_TOKENS``, are searched as a reply's own text is. They are gathered from the
tree when it has changed, at most once in ``GATHER_EVERY`` looks, so they follow what is kept and what is evicted, and cost
4 bytes per token. Namespaces share nothing. What is only on disk is searched where the tree has nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from everwarm.engine.speculation.draft_length import Proposal, Tokens
from everwarm.engine.speculation.suffix_lookup import confidence_of, longest_match
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.state.lineage import is_volatile, root_key, short_key
from everwarm.state.tree import Node, Tree

MOST_TOKENS = 1 << 15
MOST_NODES = 1 << 11  # that are looked at
MOST_NAMESPACES = 16
GATHER_EVERY = 16
RENEW_S = 60.0  # between two readings of what is on disk; after something was erased, before the next
GAP = np.array([-1], np.int32)  # between texts: no token is equal to it
MIN_MATCH = 4  # other conversations say less of this one than its own text does


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
    if found is None or found[1] < MIN_MATCH:
        return None
    at, n_match = found
    tokens = texts[at : at + n]
    return Proposal(tokens, confidence_of(n_match), source) if len(tokens) else None


def gathered(root: Node) -> Tokens:
    """The newest texts below a root, the newest last. A text is an edge of the tree with the few tokens before it."""
    nodes = sorted(islice(root.below(), MOST_NODES), key=lambda node: -node.id)
    parts: list[Tokens] = []
    n_tokens = 0
    for node in nodes:
        start = max(0, node.start - MIN_MATCH)
        part = node.path.codes[start : node.n_items][-(MOST_TOKENS - n_tokens) :]
        parts += [part, GAP]
        n_tokens += len(part) + 1
        if n_tokens >= MOST_TOKENS:
            break
    return np.concatenate(parts[::-1])
