"""Before which words prompts part inside a message, learned for each namespace: another prompt with the same words is cut
behind them before it ever changed.

A system prompt tells the time, or its client's mood. The first prompt that parts there reads it again, and the branch point
serves all that follow; but the next project has another system prompt with the same line in it. So the few tokens before a
parting are remembered: right before it, and a little earlier, where the value that changed begins alike. Knows tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from everwarm.lru import NamespacedLru
from everwarm.prompt.prompt import Codes, Prompt
from everwarm.state.policy import GUARD

N_CONTEXT = 4  # tokens
EARLIER = 12  # tokens before a parting, at most the guard: the value may begin with the same digits
MAX_HEAD = 16_384  # items of a prompt in which partings are learned and searched
MAX_CONTEXTS = 16  # of one namespace
MAX_ALL = 1024
MAX_PLACES = 3  # of one prompt
MAX_TIMES = 2  # words that a prompt repeats say nothing

Context = tuple[int, ...]


@dataclass(slots=True)
class Partings:
    _contexts: NamespacedLru[Context] = field(default_factory=lambda: NamespacedLru(MAX_ALL * N_CONTEXT, MAX_ALL))

    def note(self, namespace: str, prompt: Prompt, at: int) -> None:
        """A prompt has left what was known there, deeper than any checkpoint."""
        if not GUARD < at <= MAX_HEAD:
            return
        for end in (at - EARLIER, at):
            context = tuple(int(code) for code in prompt.codes[end - N_CONTEXT : end])
            if len(context) == N_CONTEXT and min(context) >= 0:
                self._contexts.put(namespace, context, context, N_CONTEXT)
        for old in list(self._contexts.values(namespace))[MAX_CONTEXTS:]:
            self._contexts.remove(namespace, old)

    def places(self, namespace: str, prompt: Prompt, start: int) -> list[int]:
        """Behind which items of a prompt such words end, from ``start`` on."""
        codes = prompt.codes[max(0, start - N_CONTEXT) : MAX_HEAD]
        offset = max(0, start - N_CONTEXT) + N_CONTEXT
        found: list[int] = []
        for context in self._contexts.values(namespace):
            ends = list(_occurrences(codes, context))
            found += [offset + end for end in ends if len(ends) <= MAX_TIMES]
        return _apart(sorted(found))[:MAX_PLACES]

    def forget(self, namespace: str) -> None:
        """All that was learned in namespaces with this prefix."""
        for name in [name for name in self._contexts.namespaces() if name.startswith(namespace)]:
            for context in list(self._contexts.values(name)):
                self._contexts.remove(name, context)


def _apart(places: list[int]) -> list[int]:
    """The first of those that are close together."""
    kept: list[int] = []
    for at in places:
        if not kept or at - kept[-1] > 2 * GUARD:
            kept.append(at)
    return kept


def _occurrences(codes: Codes, context: Context) -> Iterator[int]:
    n = len(codes) - len(context) + 1
    if n > 0:
        agrees = np.logical_and.reduce([codes[i : i + n] == code for i, code in enumerate(context)])
        yield from map(int, np.flatnonzero(agrees))
