"""What comes back, how soon, and where it resumes: learned from the requests, so that eviction needs no tuning.

Time is counted in requests. A request that ends leaves a ``Visit`` at the end of its lineage. A later prompt *returns* to
the visit whose lineage it shares, and leaves that lineage at some point: where the reply ended, at the end of an earlier
turn, or so many items before the end of the prompt. Prompts that leave at a node where others have parted before return to
that *junction*. From past returns two things are learned:

``ReturnTimes``   the hit density of a visit of some age: returns per request of waiting. It is the best ratio of the
                  chance to come back within a time to the expected time until then, over all such times, so what comes
                  back in turn is worth most shortly before its turn, and what comes back in bursts right after its use.
``ResumePoints``  how far before the end of a prompt a return resumes.

``Returns.expected`` spreads the density of every visit over the kept checkpoints that its return would resume from.
Evicting a checkpoint sends its share to the next one above, which is what ``policy.victims`` does.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from everwarm.state.policy import GUARD, Spacing
from everwarm.state.tree import Match, Node, Tree

MAX_VISITS = 256  # and as many junctions
MAX_ITEMS = 1 << 22  # of the lineages of all visits together: four bytes each
MAX_SEARCHED = 300  # nodes, when looking for the visit that a prompt returns to
N_AGES = 26  # half octaves of requests
N_KEPT = 128  # resume points
MAX_STEPS = 12  # turns back
MAX_PLACES = 3  # learned cuts of one prompt
MIN_GAIN = 32  # items that a learned cut must save per return
MAX_HABIT = 4  # of the last returns of one conversation
REPLY_SHARE = 0.03  # of returns: below it the end of a reply is not worth a checkpoint

_Numbers = NDArray[np.float64]
_LOWER = 2 ** (np.arange(N_AGES + 1) / 2)  # the age at which each half octave begins
_FOLLOWS = np.triu(np.ones((N_AGES, N_AGES), bool))  # rows: where waiting starts
_WIDTHS = np.diff(_LOWER) * np.where(np.eye(N_AGES, dtype=bool), 0.5, 1.0)  # it starts in the middle of its half octave
_LEAST = 1e-12
_SURE = 0.98  # no return is certain
_FEW = 4  # cases that say nothing by themselves
_GRID = [int(2 ** (k / 2)) for k in range(9, 28)]  # distances to place cuts at
_HITS = (1, 3, 10)  # classes of visits: never came back, one or two times, up to nine, more often
_LEFT = len(_HITS) + 1  # the class of a visit whose conversation went on elsewhere
# Classes of junctions: only a conversation's own turns part there, one arrival, up to three, up to nine, more.
_ARRIVALS = (1, 2, 4, 10)
_VISIT_PRIORS = (0.2, 0.25, 0.3, 0.35, 0.01)  # chance to come back in a half octave, before anything is known
_JUNCTION_PRIORS = (0.01, 0.12, 0.2, 0.3, 0.35)
_PRIOR_WEIGHT = 2.0
_APART = np.abs(np.subtract.outer(np.arange(N_AGES), np.arange(N_AGES)))
_AROUND = np.where(
    _APART <= 4, 0.5**_APART, 0.0
)  # half octaves around one that its chance is taken from, and their weights
_ALL = 0.9999  # of the returns
_IN_REPLY = -1  # the distance of a return that resumes after the whole reply
_FAR = tuple((2**k, 0.12) for k in range(5, 15))
_FAR_SHARE = sum(share for _, share in _FAR)
_DISTANCE_PRIORS = ((_IN_REPLY, 1.0), (4, 1.5), *_FAR)
_SURPRISE = 0.04  # of returns: so many may always resume anywhere, whatever the last ones did


class ReturnTimes:
    """How soon things of several classes come back: for every class a chance to return in each half octave of ages."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._priors = np.array(priors)[:, None]
        self._returned = np.zeros((len(priors), N_AGES))
        self._exposed = np.zeros((len(priors), N_AGES))  # how many were still waiting at that age
        self._densities: list[list[float]] = []
        self._refreshed_at = 0

    def note(self, kind: int, age: int, *, returned: bool) -> None:
        """Something came back at this age, or is not waited for any longer."""
        last = _age_class(age)
        self._exposed[kind, : last + 1] += 1
        self._returned[kind, last] += returned

    def refresh(self, n_requests: int, waiting: Iterable[tuple[int, int]]) -> None:
        """Computes all densities anew, once per request; ``waiting``: class and age of what has not come back."""
        if self._densities and self._refreshed_at == n_requests:
            return
        self._refreshed_at = n_requests
        exposed = self._exposed.copy()
        for kind, age in waiting:
            exposed[kind, : _age_class(age)] += 1
        chances = _chances(self._returned, exposed, self._priors)
        self._densities = [_best_densities(row).tolist() for row in chances]

    def density(self, kind: int, age: float) -> float:
        return self._densities[kind][_age_class(age)]


def _age_class(age: float) -> int:
    return min(N_AGES - 1, int(2 * math.log2(max(1.0, age))))


def _chances(returned: _Numbers, exposed: _Numbers, priors: _Numbers) -> _Numbers:
    """The chance to return in each half octave. Where few were seen it is taken from the ages around it, and is no better
    than at the age before: what did not come back yet is not expected to begin with it."""
    around = (returned @ _AROUND + _PRIOR_WEIGHT * priors) / (exposed @ _AROUND + _PRIOR_WEIGHT)
    for i in range(1, N_AGES):
        seldom = exposed[:, i] < _FEW
        around[seldom, i] = np.minimum(around[seldom, i - 1], around[seldom, i])
    found: _Numbers = (returned + _PRIOR_WEIGHT * around) / (exposed + _PRIOR_WEIGHT)
    return found.clip(max=_SURE)


def _best_densities(chances: _Numbers) -> _Numbers:
    """For a start in each half octave: the best ratio of the chance to return to the expected wait, if waiting ends after
    one of those that follow."""
    missed = np.where(_FOLLOWS, 1 - chances, 1.0)
    waiting = np.cumprod(missed, axis=1) / missed * _FOLLOWS  # the share that still waits at the beginning of each
    hits = waiting * chances
    waited = np.cumsum((waiting - hits / 2) * _WIDTHS, axis=1)
    best: _Numbers = np.max(np.cumsum(hits, axis=1) / np.maximum(waited, _LEAST), axis=1)
    return best


class ResumePoints:
    """How far before the end of a prompt returns resume, in items: the last ones, and what is ``assumed`` beside them."""

    def __init__(self, assumed: Sequence[tuple[int, float]] = ()) -> None:
        self._assumed = assumed
        self._last: deque[int] = deque(maxlen=N_KEPT)
        self._points: list[int] = []  # distances in ascending order
        self._shares: list[float] = []  # of returns that resume no farther

    def note(self, distance: int) -> None:
        self._last.append(distance)
        self._points = []

    def within(self, distance: int) -> float:
        """The share of returns that resume at most so far before the end."""
        if not self._points and (self._last or self._assumed):
            self._sum_up()
        at = bisect.bisect_right(self._points, distance)
        return self._shares[at - 1] if at else 0.0

    def _sum_up(self) -> None:
        weight = max(_SURPRISE * len(self._last) / _FAR_SHARE, 1 - len(self._last) / 64)
        assumed = [(at, weight * share) for at, share in self._assumed]
        weighed = sorted([*((at, 1.0) for at in self._last), *assumed])
        total = sum(share for _, share in weighed)
        self._points = [at for at, _ in weighed]
        self._shares = [share / total for share in itertools.accumulate(share for _, share in weighed)]

    def places(self, n_items: int, every: int) -> list[int]:
        """Distances before the end of a prompt where a checkpoint saves the most reading, the best first; ``every``:
        the spacing of those that are taken anyway."""
        shares = {at: self.within(at) for at in (GUARD, *_GRID)}
        chosen: list[int] = []
        while len(chosen) < MAX_PLACES:
            gains = {
                at: _gain(at, chosen, shares, n_items, every) for at in _GRID if at < n_items - 1 and at not in chosen
            }
            best = max(gains, key=lambda at: gains[at], default=0)
            if gains.get(best, 0.0) < MIN_GAIN:
                break
            chosen.append(best)
        return chosen


def _gain(at: int, chosen: Sequence[int], shares: dict[int, float], n_items: int, every: int) -> float:
    """Items that one more checkpoint saves per return: those that resume between it and the next nearer one need not
    go back to the next farther one."""
    nearer = max((c for c in chosen if c < at), default=GUARD)
    farther = min((c for c in chosen if c > at), default=min(n_items, at + max(1, every) // 2))
    return (shares[at] - shares[nearer]) * (farther - at)


class StepsBack:
    """How many turns back returns resume that resume at the end of an earlier turn."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=N_KEPT // 2)

    def note(self, n_turns: int) -> None:
        self._last.append(n_turns)

    def shares(self) -> list[float]:
        """For 0, 1, 2 … turns."""
        counts = [0.0, *(2 * 0.5**n for n in range(1, MAX_STEPS))]
        for n_turns in self._last:
            if n_turns < MAX_STEPS:
                counts[n_turns] += 1
        return [count / (len(self._last) + 2) for count in counts]


def _class_of(hits: int) -> int:
    return bisect.bisect_right(_HITS, hits)


Habit = tuple[int, ...]  # how far before the end of its prompt a conversation was continued, the last times


@dataclass(slots=True, eq=False)
class Visit:
    """The end of one request."""

    node: Node
    n_prompt: int
    at: int  # when: the number of the request
    hits: int  # how often its conversation came back before
    habit: Habit = ()
    n_own: int = 0  # items beyond the visit above it: so much more memory its lineage takes
    is_left: bool = False  # its conversation went on from an earlier point
    is_extended: bool = False  # its conversation went on from its end

    @property
    def kind(self) -> int:
        return _LEFT if self.is_left else _class_of(self.hits)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A request that has begun to read its prompt."""

    n_shared: int = 0
    hits: int = 0
    habit: Habit = ()


@dataclass(frozen=True, slots=True)
class RunningVisit:
    """A request that is being read or written: it will leave a visit."""

    node: Node
    n_prompt: int
    continuation: Continuation


@dataclass(slots=True)
class _Junction:
    at: int
    n_arrivals: int

    @property
    def kind(self) -> int:
        return bisect.bisect_right(_ARRIVALS, self.n_arrivals)


@dataclass(slots=True)
class Returns:
    tree: Tree
    n_requests: int = 0
    visits: dict[Node, Visit] = field(default_factory=dict)
    _junctions: dict[Node, _Junction] = field(default_factory=dict)
    n_items: int = 0  # of all visits
    _visit_times: ReturnTimes = field(default_factory=lambda: ReturnTimes(_VISIT_PRIORS))
    _junction_times: ReturnTimes = field(default_factory=lambda: ReturnTimes(_JUNCTION_PRIORS))
    resumed: ResumePoints = field(default_factory=lambda: ResumePoints(_DISTANCE_PRIORS))
    _unserved: ResumePoints = field(default_factory=ResumePoints)  # where no earlier turn ended
    _steps: StepsBack = field(default_factory=StepsBack)
    _n_stepped: float = 0.5  # returns to the end of an earlier turn
    _n_elsewhere: float = 1.5  # other returns that left their visit
    _seconds: float = 0.0  # between two requests, smoothed
    _last_at: float | None = None

    # learning

    def arrive(self, match: Match, now: float) -> Continuation:
        """A request begins: what does it return to?"""
        self.n_requests += 1
        self._note_time(now)
        node = match.path[-1] if match.path else None
        if node is None or match.n_shared == 0:
            return Continuation()
        if match.n_shared == node.n_items and (node.is_junction or node in self._junctions):
            junction = self._junctions.get(node)
            if junction is not None:
                self._junction_times.note(junction.kind, self.n_requests - junction.at, returned=True)
            return Continuation(match.n_shared)
        visit = self._visit_below(node)
        if visit is None:
            return Continuation(match.n_shared)
        self._visit_times.note(visit.kind, self.n_requests - visit.at, returned=True)
        distance = self._note_resumed(visit, match.n_shared)
        return Continuation(match.n_shared, visit.hits + 1, (*visit.habit, distance)[-MAX_HABIT:])

    def leave(self, node: Node, n_prompt: int, continuation: Continuation) -> None:
        """A request has ended at this node."""
        if node.parent is None:
            return
        if node in self.visits:
            self._drop(self.visits[node])
        self.tree.hold(node)
        self.tree.shorten_path(node)
        n_above = max((n.n_items for n in node.lineage() if n in self.visits), default=0)
        n_own = node.n_items - n_above
        n_prompt = min(n_prompt, node.n_items)
        self.visits[node] = Visit(node, n_prompt, self.n_requests, continuation.hits, continuation.habit, n_own)
        self.n_items += n_own
        parted = next((n for n in node.lineage() if n.n_items == continuation.n_shared and n.is_junction), None)
        if parted is not None:
            known = self._junctions.pop(parted, None)
            n_arrivals = 0 if known is None else known.n_arrivals
            self._junctions[parted] = _Junction(self.n_requests, n_arrivals + (continuation.hits == 0))
        self._forget_oldest()

    def forget(self, nodes: Iterable[Node]) -> None:
        """Forgets the requests that ended at these nodes, and what parted there: they are to be dropped."""
        for node in nodes:
            self._junctions.pop(node, None)
            if node in self.visits:
                self._drop(self.visits[node])
        self.forget_pruned()

    def forget_empty(self, lineage: Sequence[Node]) -> None:
        """Forgets the requests that ended on branches of this lineage of which nothing is kept."""
        for node in lineage:
            for child in list(node.children.values()):
                branch = list(child.below())
                if all(map(self._is_only_remembered, branch)):
                    self.forget(branch)

    def _is_only_remembered(self, node: Node) -> bool:
        is_kept = node.checkpoint is not None or node.segment is not None or node.is_pinned or node.pins > 0
        return not is_kept and node.holders == (node in self.visits)

    def _note_time(self, now: float) -> None:
        if self._last_at is not None:
            passed = max(0.0, now - self._last_at)
            self._seconds = passed if self._seconds == 0.0 else self._seconds + 0.05 * (passed - self._seconds)
        self._last_at = now

    def _visit_below(self, node: Node) -> Visit | None:
        """The newest visit at or below a node; one whose conversation went on elsewhere only if there is no other."""
        found = [self.visits[n] for n in _some_below(node) if n in self.visits]
        waiting = [visit for visit in found if not visit.is_extended]
        return max(waiting, key=lambda visit: (not visit.is_left, visit.at), default=None)

    def _note_resumed(self, visit: Visit, n_shared: int) -> int:
        if n_shared >= visit.node.n_items:
            visit.is_extended = True
            self.resumed.note(_IN_REPLY)
            self._unserved.note(_IN_REPLY)
            return _IN_REPLY
        visit.is_left = True
        distance = max(0, visit.n_prompt - n_shared)
        n_turns = self._n_turns_back(visit, n_shared)
        if n_turns:
            self._n_stepped += 1
            self._steps.note(n_turns)
            self._unserved.note(_IN_REPLY)
        else:
            self._n_elsewhere += 1
            self.resumed.note(distance)
            self._unserved.note(distance)
        return distance

    def _n_turns_back(self, visit: Visit, n_shared: int) -> int:
        """How many turns before this visit one ended right where a return has left its lineage; 0: none did."""
        n_turns, node = 0, visit.node.parent
        while node is not None and node.n_items + GUARD >= n_shared:
            if node in self.visits:
                n_turns += 1
                if node.n_items <= n_shared:
                    return n_turns
            node = node.parent
        return 0

    def _forget_oldest(self) -> None:
        while len(self.visits) > MAX_VISITS or self.n_items > MAX_ITEMS:
            visit = min(self.visits.values(), key=lambda visit: (not visit.is_extended, visit.at))
            if not visit.is_extended:
                self._visit_times.note(visit.kind, self.n_requests - visit.at, returned=False)
            self._drop(visit)
        self.forget_pruned()
        while len(self._junctions) > MAX_VISITS:
            del self._junctions[next(iter(self._junctions))]

    def forget_pruned(self) -> None:
        """Forgets junctions that are not in the tree any more."""
        for node in [node for node in self._junctions if not self.tree.has(node)]:
            del self._junctions[node]

    def _drop(self, visit: Visit) -> None:
        del self.visits[visit.node]
        self.n_items -= visit.n_own
        self.tree.release(visit.node)

    # asking

    def worth(self, node: Node, age_s: float) -> float:
        """Returns per request to what ends at this node. Where no request has ended (it was read ahead, or comes from a
        file), its age tells."""
        visit = self.visits.get(node)
        if visit is None or visit.is_extended:
            return self.worth_unvisited(1, age_s)
        self._refresh()
        return self._visit_times.density(visit.kind, self._age(visit.at))

    def worth_unvisited(self, hits: int, age_s: float) -> float:
        """Returns per request to a checkpoint of which only its last use is known."""
        self._refresh()
        age = age_s / self._seconds if self._seconds else 1.0
        return self._visit_times.density(_class_of(hits), age)

    def keeps_replies(self) -> bool:
        """Whether the end of a reply is worth a checkpoint: some returns resume there."""
        return self.resumed.within(_IN_REPLY) > REPLY_SHARE

    def places(self, n_items: int, spacing: Spacing) -> list[int]:
        """Points of a prompt where returns are likely to leave it, learned from earlier ones."""
        return [n_items - distance for distance in self._unserved.places(n_items, spacing.every_n_tokens)]

    def expected(self, running: Iterable[RunningVisit], *, anywhere: bool) -> dict[int, float]:
        """Returns per request that would resume from each node, by its id: from kept checkpoints, or ``anywhere`` on a
        lineage."""
        self._refresh()
        found: dict[int, float] = {}
        steps = self._steps.shares()
        for node, n_prompt, habit, density in self._sources(running):
            shares = self._through(node, n_prompt) if anywhere else self._resuming(node, n_prompt, habit, steps)
            for at, share in shares:
                found[at.id] = found.get(at.id, 0.0) + density * share
        for node, junction in self._junctions.items():
            kept = node if anywhere else _kept_above(node)
            if kept is not None:
                density = self._junction_times.density(junction.kind, self._age(junction.at))
                found[kept.id] = found.get(kept.id, 0.0) + density
        return found

    def _sources(self, running: Iterable[RunningVisit]) -> Iterator[tuple[Node, int, Habit, float]]:
        """Where returns come from: the end of a lineage, the items of its prompt, the habit, and the density."""
        for visit in self.visits.values():
            if not visit.is_extended:
                density = self._visit_times.density(visit.kind, self._age(visit.at))
                yield visit.node, visit.n_prompt, visit.habit, density
        for each in running:
            density = self._visit_times.density(_class_of(each.continuation.hits), 1)
            yield each.node, each.n_prompt, each.continuation.habit, density

    def _resuming(self, end: Node, n_prompt: int, habit: Habit, steps: Sequence[float]) -> Iterator[tuple[Node, float]]:
        """The kept checkpoints of a lineage, each with the share of returns that resume from it."""
        within = self.resumed.within
        stepping = (1 - within(_IN_REPLY)) * self._n_stepped / (self._n_stepped + self._n_elsewhere)
        own = len(habit) / (len(habit) + 2)  # what its own habit counts beside that of all
        n_turns, stepped, served = 0, 0.0, 0.0
        node: Node | None = end
        while node is not None and (served < _ALL or n_turns < MAX_STEPS):
            if node is not end and node in self.visits:
                n_turns += 1
                stepped += steps[n_turns] if n_turns < MAX_STEPS else 0.0
            if node.checkpoint is not None:
                distance = max(_IN_REPLY, n_prompt - node.n_items)
                reached = (1 - own) * within(distance)
                if habit:
                    reached += sum(d <= distance for d in habit) * own / len(habit)
                yield node, stepping * stepped + (1 - stepping) * max(0.0, reached - served)
                stepped, served = 0.0, max(served, reached)
            node = node.parent

    def _through(self, end: Node, n_prompt: int) -> Iterator[tuple[Node, float]]:
        """The nodes of a lineage, each with the share of returns that get beyond its beginning."""
        for node in end.lineage():
            yield node, self.resumed.within(max(_IN_REPLY, n_prompt - node.start - 1))

    def _age(self, at: int) -> int:
        return self.n_requests - at + 1

    def _refresh(self) -> None:
        waiting = (visit for visit in self.visits.values() if not visit.is_extended)
        self._visit_times.refresh(self.n_requests, ((visit.kind, self._age(visit.at)) for visit in waiting))
        self._junction_times.refresh(self.n_requests, ((j.kind, self._age(j.at)) for j in self._junctions.values()))


def _some_below(node: Node) -> Iterator[Node]:
    for n, found in enumerate(node.below()):
        if n == MAX_SEARCHED:
            return
        yield found


def _kept_above(node: Node) -> Node | None:
    """The deepest node with a checkpoint at or above this one."""
    above: Node | None = node
    while above is not None and above.checkpoint is None:
        above = above.parent
    return above
