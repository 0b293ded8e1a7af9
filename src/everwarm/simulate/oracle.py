"""The infinite cache: every prefix that was ever read or written is free. What it reads is unavoidable.

A radix tree of plain arrays that shares no code with the real one, so that the two can be compared. Pure.

The optimum is the fewest tokens that any policy must read with so many states, with the future known; small cases
only. KV is free there and states may lie anywhere, so no policy under the same number of states can do better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

from everwarm.config import require
from everwarm.prompt.prompt import Prompt
from everwarm.simulate.trace import TraceTurn

MAX_TURNS = 12
MAX_POINTS = 14


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


def unavoidable_tokens(turns: Iterable[TraceTurn]) -> list[int]:
    """How many tokens each request must read, whatever was kept of those before it."""
    known = Known()
    found = []
    for turn in turns:
        n_shared = min(known.n_shared(turn.prompt), turn.n_stop)
        found.append(turn.prompt.n_tokens(turn.n_stop) - turn.prompt.n_tokens(n_shared))
        known.add(turn.path)
    return found


def fewest_tokens(turns: Sequence[TraceTurn], n_states: int) -> int:
    """The tokens that must be read if at most ``n_states`` states are kept from one request to the next."""
    require(len(turns) <= MAX_TURNS, f"{len(turns)} requests; the optimum is found for at most {MAX_TURNS}")
    names, made, usable, depths = _points(turns)
    require(len(names) <= MAX_POINTS, f"{len(names)} points to choose from; at most {MAX_POINTS} can be")

    @cache
    def fewest(i: int, kept: frozenset[int]) -> int:
        if i == len(turns):
            return 0
        stop = turns[i].prompt.n_tokens(turns[i].n_stop)
        starts = {0, *(depths[p] for p in kept & usable[i])}
        best = None
        for start in starts:  # reading again what is known may be worth it: it passes points anew
            reach = kept | {p for p in made[i] if depths[p] >= start}
            more = min(fewest(i + 1, choice) for choice in _choices(reach, n_states))
            cost = max(0, stop - start) + more
            best = cost if best is None else min(best, cost)
        return best or 0

    return fewest(0, frozenset())


def _choices(points: frozenset[int], most: int) -> list[frozenset[int]]:
    if len(points) <= most:
        return [points]
    return [frozenset(each) for each in combinations(sorted(points), most)]


def _points(
    turns: Sequence[TraceTurn],
) -> tuple[list[bytes], list[frozenset[int]], list[frozenset[int]], list[int]]:
    """Points worth a state, by the items before them: where a later prompt leaves an earlier path.

    With them: which of them each request passes, which it may start from, and how many tokens lie before each.
    """
    names: dict[bytes, int] = {}
    depths: list[int] = []
    ends: list[int] = []
    for j, later in enumerate(turns):
        for earlier in turns[:j]:
            n = min(int(later.prompt.common_prefix(earlier.path)), len(later.prompt) - 1, later.n_stop)
            key = later.prompt.codes[:n].tobytes()
            if n and key not in names:
                names[key] = len(names)
                depths.append(later.prompt.n_tokens(n))
                ends.append(n)
    made = []
    usable = []
    for turn in turns:
        path = turn.path.codes
        prompt = turn.prompt.codes
        made.append(frozenset(p for key, p in names.items() if path[: ends[p]].tobytes() == key))
        usable.append(frozenset(p for p in made[-1] if ends[p] < len(prompt)))
    return list(names), made, usable, depths
