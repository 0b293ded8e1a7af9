"""The infinite cache: every prefix that was ever read or written is free. What it reads is unavoidable.

A radix tree of plain arrays that shares no code with the real one, so that the two can be compared. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from everwarm.prompt.prompt import Prompt
from everwarm.simulate.trace import TraceTurn


@dataclass(slots=True, eq=False)
class _Edge:
    path: Prompt
    stop: int
    children: dict[int, _Edge] = field(default_factory=dict)


class Known:
    """Every path that was ever read."""

    def __init__(self) -> None:
        self._root = _Edge(Prompt.of_tokens([]), 0)

    def add(self, path: Prompt) -> None:
        edge, at = self._find(path)
        if at == len(path):
            return
        if at < edge.stop:
            edge.children = {int(edge.path.codes[at]): _Edge(edge.path, edge.stop, edge.children)}
            edge.stop = at
        edge.children[int(path.codes[at])] = _Edge(path, len(path))

    def n_shared(self, prompt: Prompt) -> int:
        """How many items of the prompt were read before."""
        return self._find(prompt)[1]

    def _find(self, prompt: Prompt) -> tuple[_Edge, int]:
        edge = self._root
        at = 0
        while at < len(prompt):
            child = edge.children.get(int(prompt.codes[at]))
            if child is None:
                break
            n_agree = min(int(prompt.common_prefix(child.path, at)), child.stop)
            if n_agree == at:
                break  # two images whose codes agree
            edge = child
            at = n_agree
            if at < edge.stop:
                break
        return edge, at


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Tokens that one request reads: avoidable ones, and unavoidable ones."""

    n_avoidable: int
    n_unavoidable: int


def shares(turns: Iterable[TraceTurn]) -> list[SharedPrefix]:
    known = Known()
    found = []
    for turn in turns:
        n_shared = min(known.n_shared(turn.prompt), turn.n_stop)
        n_free = turn.prompt.n_tokens(n_shared)
        found.append(SharedPrefix(n_free, turn.prompt.n_tokens(turn.n_stop) - n_free))
        known.add(turn.path)
    return found
