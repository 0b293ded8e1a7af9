"""Drafts from everything that a namespace has in the prefix tree: what followed the last tokens in other conversations.

The newest texts of a namespace, up to ``MOST_TOKENS``, are searched as a reply's own text is. They are gathered from the
tree when it has changed, at most once in ``GATHER_EVERY`` looks, so they follow what is kept and what is evicted, and cost
4 bytes per token. Namespaces share nothing. What is only on disk is searched where the tree has nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from everwarm.engine.speculation.drafter import Proposal, Tokens
from everwarm.engine.speculation.suffix_lookup import confidence_of, longest_match
from everwarm.engine.tiers.disk_texts import GAP
from everwarm.state.tree import Node, Tree

MOST_TOKENS = 1 << 15
MOST_NODES = 1 << 11  # that are looked at
MOST_NAMESPACES = 16
GATHER_EVERY = 16
MIN_MATCH = 4  # other conversations say less of this one than its own text does


@dataclass(slots=True)
class _Texts:
    tokens: Tokens
    version: int  # of the tree when they were gathered
    n_looks: int = 0  # since then


class Texts(Protocol):
    """Texts of a namespace beside those in the tree."""

    def of(self, namespace: str) -> Tokens: ...

    def forget(self) -> None: ...


class TreeLookup:
    def __init__(self, tree: Tree, on_disk: Texts) -> None:
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
        known, version = self._texts.pop(namespace, None), self._tree.census.version
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
