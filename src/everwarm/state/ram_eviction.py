"""Eviction from RAM: what every state and segment in the prefix tree is worth. Pure: reads the tree, changes nothing.

What saves the fewest seconds of reading per byte and expected return is evicted first. ``weigh`` fills in an ``Entry``
for each state and segment, in one pass up the tree, or a part of it, and one pass down; ``Returns.expected`` says what
comes back. ``policy.choose`` then picks the least valuable, and ``engine.cache.ram_budget`` drops them. For eviction
from disk see ``store.disk_eviction``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from everwarm.state.policy import PROVISIONAL, CutKind, Entry, choose, score
from everwarm.state.tree import Checkpoint, Node, Segment, Tree

MAX_WEIGHED = 384  # nodes at once; a larger tree is swept in parts
MAX_BRANCH = 64  # nodes that are weighed together at least
PART_SHARE = 0.125  # of the bytes of a part, at most, that one sweep evicts from it
N_LEAST = 64  # of the least valuable nodes that the next sweep weighs again
LEAST_SHARE = 0.5  # of a part: its nodes that the last sweep found least valuable; the others are next in the round
COPIED = 1 / 256  # of the returns: those to a copy of what the device still holds, which helps only if the engine dies
MAX_ROUNDS = 16  # namespaces whose rounds are remembered


@dataclass(frozen=True, slots=True)
class WeighingFacts:
    """What weighing depends on besides the tree."""

    now: float
    seconds_per_token: float
    needs_checkpoints: bool
    needs_kv: bool
    resident: frozenset[int]  # nodes whose KV is on the device, by their Python ids
    expected: Mapping[int, float]  # returns to nodes, by their ids: see ``Returns.expected``
    unvisited: Callable[[int, float], float]  # returns to what no request is known to have ended at: hits, age
    awaited: frozenset[int] = frozenset()  # ids of nodes that suspended requests will continue from
    load_s: Callable[[Node, int], float | None] = lambda _node, _n_bytes: None  # from the disk; None: it is not there


def weigh(nodes: Sequence[Node], facts: WeighingFacts) -> list[Entry]:
    """Entries for all states and segments that may be evicted. Keys are 2·index for a state, 2·index + 1 for a segment.

    ``nodes`` are all nodes of a tree, or whole branches of it; parents come first.
    """
    index = {id(node): i for i, node in enumerate(nodes)}
    parents = [-1 if node.parent is None else index.get(id(node.parent), -1) for node in nodes]
    below = _from_below(nodes, parents, facts)
    is_needed = below.wanted if facts.needs_checkpoints else below.covered
    above: list[_Above] = []
    entries = []
    for i, (node, p) in enumerate(zip(nodes, parents, strict=True)):
        found = _above_branch(node, facts) if p < 0 else _next_above(p, node, above[p], below.n_wanted[p], facts)
        above.append(found)
        if node.pins:
            continue
        if node.checkpoint is not None and node.checkpoint.size_bytes:
            entries.append(_state_entry(i, node, node.checkpoint, facts, found, is_newest=not below.followed[i]))
        if node.segment is None:
            continue
        if not is_needed[i] and (_is_first(node) or (p >= 0 and is_needed[p])):
            entries.append(_segment_entry(i, node, node.segment, facts))
        elif facts.needs_checkpoints and _is_first(node) and below.is_resident[id(node.segment)]:
            entries.append(_copy_entry(i, node, node.segment, facts, below.returns[i]))
    return entries


def is_worth_copying(turn: Entry, entries: Iterable[Entry], n_bytes: int) -> bool:
    """Whether a turn that the device holds should be in RAM as well, although ``n_bytes`` of others would be evicted for
    that: only if all of those are worth less than a copy."""
    worth = COPIED * score(turn)
    weighed = {entry.key: entry for entry in entries}
    choice = choose(weighed.values(), n_bytes, 0)
    n_freed = sum(weighed[key].size_bytes + weighed[key].kv_bytes for key in choice.keys)
    return n_freed >= n_bytes and all(each < worth for each in choice.worths)


def least_parked(
    parked: Iterable[Node], part: Part, facts: WeighingFacts, state_bytes: int, free_bytes: int
) -> Node | None:
    """The parked state that gives way to a new one: the one that would be missed least, if what RAM had to evict for a
    state would be missed more. None: RAM has room, or something that is worth less. ``part``: what is weighed, with
    ``facts`` for it; parked states outside of it stay, because nothing is known of their returns."""
    n_bytes = state_bytes - free_bytes
    if n_bytes <= 0:
        return None
    choice = choose(weigh(part.nodes, facts), n_bytes, 0)
    most = choice.missed_s if choice.freed_bytes >= n_bytes else math.inf
    among = part.among
    known = (node for node in parked if among is None or node in among)
    missed = [(_missed_s(node, facts, state_bytes), i, node) for i, node in enumerate(known) if _may_go(node, facts)]
    least = min(missed, default=None)
    return None if least is None or least[0] >= most else least[2]


def _may_go(node: Node, facts: WeighingFacts) -> bool:
    """Whether a parked state may be lost: a suspended request goes on from its own, and what is pinned was asked for."""
    is_suspended = node.checkpoint is None or node.checkpoint.kind is CutKind.CANCEL or node.id in facts.awaited
    return not (is_suspended or node.pins or node.n_pinned)


def _missed_s(node: Node, facts: WeighingFacts, state_bytes: int) -> float:
    """Seconds per unit of time that a parked state saves: its returns would go on from the checkpoint above it."""
    checkpoint, above = node.checkpoint, node.parent
    assert checkpoint is not None
    while above is not None and above.checkpoint is None:
        above = above.parent
    is_newest = not any(n.checkpoint is not None for n in node.below() if n is not node)
    seconds = (node.n_items - (0 if above is None else above.n_items)) * facts.seconds_per_token
    load_s = facts.load_s(node, state_bytes)
    return _returns_to(node, checkpoint, facts, is_newest=is_newest) * min(
        seconds, math.inf if load_s is None else load_s
    )


class _Above(NamedTuple):
    """What a node has above it."""

    n_items: int  # where the nearest checkpoint ends
    has_kv: bool  # whether its KV lineage is whole, its own included
    key: int | None  # the entry of the nearest checkpoint
    kv_bytes: int  # of KV from there to its end that is kept for it alone


def _next_above(p: int, node: Node, above: _Above, n_wanted: int, facts: WeighingFacts) -> _Above:
    """``p``: the index of its parent; ``above`` and ``n_wanted``: of the parent."""
    parent = node.parent
    assert parent is not None
    n_items, has_kv, key, n_bytes = above
    if parent.checkpoint is not None:
        n_items = parent.n_items
    if parent.checkpoint is not None and parent.checkpoint.state is not None:
        key, n_bytes = 2 * p, 0
    elif n_wanted > 1:
        n_bytes = 0
    return _Above(n_items, has_kv and _has_kv(node, facts), key, n_bytes + _kv_bytes(node, facts))


def _above_branch(top: Node, facts: WeighingFacts) -> _Above:
    """The same for the first node of a branch: what is above it is not weighed."""
    kept, n_bytes, is_alone = top.parent, _kv_bytes(top, facts), True
    while kept is not None and kept.checkpoint is None:
        is_alone = is_alone and not kept.is_junction
        n_bytes += _kv_bytes(kept, facts) if is_alone else 0
        kept = kept.parent
    has_kv = all(_has_kv(node, facts) for node in top.lineage())
    return _Above(0 if kept is None else kept.n_items, has_kv, None, n_bytes)


def _has_kv(node: Node, facts: WeighingFacts) -> bool:
    return not facts.needs_kv or node.segment is not None or id(node) in facts.resident


def _kv_bytes(node: Node, facts: WeighingFacts) -> int:
    """What RAM would not keep without a state that needs it; what the device holds, too, goes by itself."""
    is_kept = node.segment is not None and _is_first(node) and id(node) not in facts.resident
    return node.segment.blob.nbytes if node.segment is not None and is_kept else 0


class _Below(NamedTuple):
    """For each node, what is at or below it."""

    wanted: list[bool]  # a RAM state at or below it
    followed: list[bool]  # a checkpoint below it
    covered: list[bool]  # a segment that begins below it
    n_wanted: list[int]  # children of which the first is true
    returns: list[float]  # expected
    is_resident: dict[int, bool]  # by segment: the device holds all of it, too


def _from_below(nodes: Sequence[Node], parents: Sequence[int], facts: WeighingFacts) -> _Below:
    wanted, followed, covered = ([False] * len(nodes) for _ in range(3))
    n_wanted = [0] * len(nodes)
    returns = [facts.expected.get(node.id, 0.0) for node in nodes]
    is_resident: dict[int, bool] = {}
    for i in range(len(nodes) - 1, -1, -1):
        node, p = nodes[i], parents[i]
        is_resident[id(node.segment)] = id(node) in facts.resident and is_resident.get(id(node.segment), True)
        checkpoint = node.checkpoint
        wanted[i] |= checkpoint is not None and checkpoint.state is not None
        if p >= 0:
            wanted[p] |= wanted[i]
            n_wanted[p] += wanted[i]
            followed[p] |= followed[i] or checkpoint is not None
            covered[p] |= covered[i] or (node.segment is not None and _is_first(node))
            returns[p] += returns[i]
    return _Below(wanted, followed, covered, n_wanted, returns, is_resident)


def _is_first(node: Node) -> bool:
    """Whether no earlier node uses its segment: the segment's bytes count at the first one."""
    return node.parent is None or node.parent.segment is not node.segment


def _segment_entry(i: int, node: Node, segment: Segment, facts: WeighingFacts) -> Entry:
    """The entry of a segment from this node on, with all nodes below that use it."""
    size = segment.blob.nbytes if _is_first(node) else 0
    seconds = (segment.n_stop - node.start) * facts.seconds_per_token
    returns = facts.expected.get(node.id, 0.0)
    return Entry(2 * i + 1, size, seconds, returns, stranded=facts.needs_checkpoints, pinned=node.n_pinned > 0)


def _copy_entry(i: int, node: Node, segment: Segment, facts: WeighingFacts, returns: float) -> Entry:
    """The entry of a segment that states need, but have on the device as well."""
    seconds = (segment.n_stop - node.start) * facts.seconds_per_token
    return Entry(2 * i + 1, segment.blob.nbytes, seconds, COPIED * returns, pinned=node.n_pinned > 0)


def _state_entry(
    i: int, node: Node, checkpoint: Checkpoint, facts: WeighingFacts, above: _Above, *, is_newest: bool
) -> Entry:
    returns = _returns_to(node, checkpoint, facts, is_newest=is_newest)
    if checkpoint.parked is not None:
        returns *= COPIED
    load_s = facts.load_s(node, checkpoint.size_bytes + above.kv_bytes)
    return Entry(
        2 * i,
        checkpoint.size_bytes,
        (node.n_items - above.n_items) * facts.seconds_per_token,
        returns,
        facts.now - checkpoint.used_at,
        stranded=not above.has_kv,
        is_ahead=checkpoint.kind in PROVISIONAL and not node.children,
        pinned=node.n_pinned > 0 or node.id in facts.awaited,
        above=above.key,
        kv_bytes=above.kv_bytes,
        load_s=math.inf if load_s is None else load_s,
    )


def _returns_to(node: Node, checkpoint: Checkpoint, facts: WeighingFacts, *, is_newest: bool) -> float:
    returns = facts.expected.get(node.id, 0.0)
    if not returns and (is_newest or node.is_junction or checkpoint.hits):
        return facts.unvisited(checkpoint.hits, facts.now - checkpoint.used_at)
    return returns


# which nodes


@dataclass(frozen=True, slots=True)
class Part:
    """The nodes that one sweep weighs, parents first."""

    nodes: list[Node]
    is_whole: bool  # there are no others

    @property
    def among(self) -> set[Node] | None:
        """None: all nodes."""
        return None if self.is_whole else set(self.nodes)

    def share(self, n_bytes: int, entries: Iterable[Entry]) -> int:
        """How much of these bytes may be evicted from this part alone."""
        if self.is_whole:
            return n_bytes
        return min(n_bytes, 1 + int(PART_SHARE * sum(entry.size_bytes for entry in entries)))


class Hand:
    """Chooses what the next sweep weighs. A small tree is weighed as a whole. Of a large one only some branches are, so
    that a sweep takes as long whatever the size: those of the least valuable nodes of the last sweep, and the next ones
    of a round through all nodes."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._rounds: OrderedDict[Node | None, Iterator[Node]] = OrderedDict()
        self._least: list[Node] = []
        self._large: Node | None = None  # the top of the last large branch
        self._is_large_next = False

    @property
    def n_parts(self) -> int:
        """How many further parts a round has."""
        return len(self._tree.by_id) // MAX_WEIGHED

    def part(self, root: Node | None = None, resident: Iterable[Node] = ()) -> Part:
        """``root``: of the namespace that is swept; None: all of them are. ``resident``: the ends of what the device
        holds, of which copies go first."""
        if sum(each.n_below for each in self._roots(root)) <= MAX_WEIGHED:
            return Part(list(self._all(root)), is_whole=True)
        large, is_next = self._large, self._is_large_next
        if is_next and large is not None and self._is_part(large, root):
            self._is_large_next = False
            found = dict.fromkeys(large.below())
            self._add(found, self._own(self._least, root), len(found) + LEAST_SHARE * MAX_WEIGHED)
            return Part(list(found), is_whole=False)
        found = {}
        starts = chain(self._own(resident, root), self._own(self._least, root))
        self._add(found, starts, LEAST_SHARE * MAX_WEIGHED)
        self._add(found, islice(self._next(root), 4 * MAX_WEIGHED), MAX_WEIGHED)
        return Part(list(found), is_whole=False)

    def _add(self, found: dict[Node, None], starts: Iterable[Node], most: float) -> None:
        """Adds the branches of these nodes, until there are so many nodes. A large branch is a part of its own: the next
        one."""
        for start in starts:
            if len(found) >= most:
                return
            top = top_of_branch(start) if start not in found and self._tree.has(start) else None
            if top is not None and top.n_below <= MAX_BRANCH:
                found.update(dict.fromkeys(top.below()))
            elif top is not None and top is not self._large:
                self._large, self._is_large_next = top, True

    def _own(self, nodes: Iterable[Node], root: Node | None) -> list[Node]:
        """Those of the namespace that is swept."""
        return [node for node in nodes if root is None or node.root() is root]

    def _is_part(self, top: Node, root: Node | None) -> bool:
        return self._tree.has(top) and top.n_below <= MAX_WEIGHED and (root is None or top.root() is root)

    def note_least(self, nodes: Iterable[Node]) -> None:
        """What would have been evicted next."""
        self._least = list(islice(nodes, N_LEAST))

    def _all(self, root: Node | None) -> Iterator[Node]:
        return chain.from_iterable(each.below() for each in self._roots(root))

    def _roots(self, root: Node | None) -> list[Node]:
        return [root] if root else self._tree.roots()

    def _next(self, root: Node | None) -> Iterator[Node]:
        """Goes on where the round was left; once it is over another one begins."""
        going = self._rounds.pop(root, None) or iter(())
        self._rounds[root] = going
        while len(self._rounds) > MAX_ROUNDS:
            self._rounds.popitem(last=False)
        yield from going
        self._large = None  # in the next round it is a part again
        self._rounds[root] = self._all(root)
        yield from self._rounds[root]


def top_of_branch(node: Node) -> Node | None:
    """The top of the largest branch of few nodes that a node is part of, or if it has more below it, of many; None: it
    has too many."""
    most = MAX_BRANCH if node.n_below <= MAX_BRANCH else MAX_WEIGHED
    if node.n_below > most:
        return None
    while node.parent is not None and node.parent.n_below <= most:
        node = node.parent
    return node
