"""What comes back, how soon, and where it resumes: learned from the requests, so that eviction needs no tuning. And before
which words prompts part: so another prompt with the same words is cut behind them before it ever changed.

Time is counted in requests. A request that ends leaves a ``Visit`` at the end of its lineage. A later prompt *returns*
to the visit whose lineage it shares, and leaves that lineage at some point: where the reply ended, at the end of an
earlier turn, or so many items before the end of the prompt. Prompts that leave at a node where others have parted
before return to that *junction*. From past returns two things are learned:

``ReturnTimes``   the hit density of a visit of some age: returns per request of waiting. It is the best ratio of the
                  chance to come back within a time to the expected time until then, over all such times, so what comes
                  back in turn is worth most shortly before its turn, and what comes back in bursts right after its use.
``ResumePoints``  how far before the end of a prompt a return resumes.

``Returns.expected`` spreads the density of every visit over the kept checkpoints that its return would resume from.
Evicting a checkpoint sends its share to the next one above, which is what ``policy.victims`` does.

``Partings`` learns words for each namespace. A system prompt tells the time, or its client's mood. The first prompt
that parts there reads it again, and the branch point serves all that follow; but the next project has another system
prompt with the same line in it. So the few tokens before a parting are remembered: right before it, and a little
earlier, where the value that changed begins alike.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from everwarm.lru import NamespacedLru
from everwarm.prompt.prompt import Codes, Prompt
from everwarm.state.policy import GUARD, CutKind, Spacing
from everwarm.state.tree import Match, Node, Tree

MAX_VISITS = 256  # and as many junctions; the namespace that has most of them forgets first
MAX_ITEMS = 1 << 22  # of the lineages of all visits together: four bytes each
MAX_SEARCHED = 300  # nodes, when looking for the visit that a prompt returns to
N_KEPT = 128  # resume points
MAX_STEPS = 12  # turns back
MAX_PLACES = 3  # learned cuts of one prompt: by returns, and by partings
MIN_GAIN = 32  # items that a learned cut must save per return
MAX_HABIT = 4  # of the last returns of one conversation

N_CONTEXT = 4  # tokens before a parting that are remembered
EARLIER = 12  # tokens before a parting, at most the guard: the value may begin with the same digits
MAX_HEAD = 16_384  # items of a prompt in which partings are learned and searched
MAX_CONTEXTS = 16  # of one namespace
MAX_ALL = 1024
MAX_TIMES = 2  # words that a prompt repeats say nothing

REPLY_SHARE = 0.05  # of returns: below it the end of a reply is not worth a checkpoint

_Numbers = NDArray[np.float64]
_AGES = sorted({math.ceil(2 ** (k / 2)) for k in range(26)})  # half octaves of requests begin at 1, 2, 3, 4, 6, 8, 12 …
N_AGES = len(_AGES)
_FOLLOWS = np.triu(np.ones((N_AGES, N_AGES), bool))  # rows: where waiting starts
_IS_START = np.eye(N_AGES, dtype=bool)
_WIDTHS = np.diff([*_AGES, math.ceil(2**13)]).astype(float)  # requests of each
_LEFT_OVER = (_WIDTHS + 1) / 2  # of the half octave in which waiting starts: it starts at any of its ages
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
    return bisect.bisect_right(_AGES, max(1.0, age)) - 1


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
    """For a start in each half octave: the best ratio of the chance to return to the expected wait in requests, if
    waiting ends after one of those that follow. What returns in a half octave may do so at any of its ages."""
    at_start = 1 - (1 - chances) ** (_LEFT_OVER / _WIDTHS)
    chance = np.where(_FOLLOWS, np.where(_IS_START, at_start, chances), 0.0)
    width = np.where(_IS_START, _LEFT_OVER, _WIDTHS)
    missed = 1 - chance
    waiting = np.cumprod(missed, axis=1) / missed * _FOLLOWS  # the share that still waits at the beginning of each
    waited = np.cumsum(waiting * (missed * width + chance * (width + 1) / 2), axis=1)
    hits = np.cumsum(waiting * chance, axis=1)
    best: _Numbers = np.max(hits / np.where(_FOLLOWS, waited, 1.0), axis=1)
    return best


class ReturnOutcome(enum.Enum):
    """Where a return leaves the lineage of its visit."""

    REPLY = "after the whole reply"
    STEP = "at the end of an earlier turn"
    ELSEWHERE = "at any other point"


_OUTCOMES = {
    ReturnOutcome.REPLY: 1.0,
    ReturnOutcome.STEP: 0.5,
    ReturnOutcome.ELSEWHERE: 1.5,
}  # how often, assumed beside the last ones
ASSUMED_STEPS = _OUTCOMES[ReturnOutcome.STEP] / sum(_OUTCOMES.values())  # of returns, before anything is known


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
        self._sum_up()
        at = bisect.bisect_right(self._points, distance)
        return self._shares[at - 1] if at else 0.0

    def shares_within(self, distances: NDArray[np.int64]) -> _Numbers:
        """``within`` for many distances."""
        self._sum_up()
        found: _Numbers = np.array([0.0, *self._shares])[np.searchsorted(self._points, distances, "right")]
        return found

    @property
    def farthest(self) -> int:
        """No return is known or assumed to resume farther back."""
        self._sum_up()
        return self._points[-1] if self._points else _IN_REPLY

    def _sum_up(self) -> None:
        if self._points or not (self._last or self._assumed):
            return
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


def _class_of(hits: int) -> int:
    return bisect.bisect_right(_HITS, hits)


Habit = tuple[int, ...]  # how far before the end of its prompt a conversation was continued, the last times


@dataclass(slots=True, eq=False)
class Visit:
    """The end of one request, or of one that is still read or written."""

    node: Node
    root: Node  # of its namespace
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


@dataclass(slots=True)
class _Junction:
    root: Node  # of its namespace
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
    _steps: deque[int] = field(default_factory=lambda: deque(maxlen=N_KEPT // 2))  # how many turns back
    outcomes: deque[ReturnOutcome] = field(default_factory=lambda: deque(maxlen=N_KEPT))  # of the last returns
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
        visit, n_left = self._visit_below(node), match.n_shared
        if visit is None and _is_read_ahead(node) and node.parent is not None:
            visit, n_left = self._visit_below(node.parent), node.start
        return self._return_to(visit, n_left, match.n_shared)

    def _return_to(self, visit: Visit | None, n_left: int, n_shared: int) -> Continuation:
        """``n_left``: where the prompt leaves the visit's lineage; more of it may have been read ahead."""
        if visit is None:
            return Continuation(n_shared)
        self._visit_times.note(visit.kind, self.n_requests - visit.at, returned=True)
        distance = self._note_resumed(visit, n_left)
        return Continuation(n_shared, visit.hits + 1, (*visit.habit, distance)[-MAX_HABIT:])

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
        n_prompt, root = min(n_prompt, node.n_items), node.root()
        self.visits[node] = Visit(node, root, n_prompt, self.n_requests, continuation.hits, continuation.habit, n_own)
        self.n_items += n_own
        parted = next((n for n in node.lineage() if n.n_items == continuation.n_shared and n.is_junction), None)
        if parted is not None:
            known = self._junctions.pop(parted, None)
            n_arrivals = 0 if known is None else known.n_arrivals
            self._junctions[parted] = _Junction(root, self.n_requests, n_arrivals + (continuation.hits == 0))
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
            self.outcomes.append(ReturnOutcome.REPLY)
            self.resumed.note(_IN_REPLY)
            self._unserved.note(_IN_REPLY)
            return _IN_REPLY
        visit.is_left = True
        distance = max(0, visit.n_prompt - n_shared)
        n_turns = self._n_turns_back(visit, n_shared)
        if n_turns:
            self.outcomes.append(ReturnOutcome.STEP)
            self._steps.append(n_turns)
            self._unserved.note(_IN_REPLY)
        else:
            self.outcomes.append(ReturnOutcome.ELSEWHERE)
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
        """Many requests of one namespace do not make the few of another forgotten."""
        while len(self.visits) > MAX_VISITS:
            self._give_up(_most(Counter(visit.root for visit in self.visits.values())))
        while self.n_items > MAX_ITEMS:
            n_items = Counter[Node]()
            for visit in self.visits.values():
                n_items[visit.root] += visit.n_own
            self._give_up(_most(n_items))
        self.forget_pruned()
        while len(self._junctions) > MAX_VISITS:
            root = _most(Counter(junction.root for junction in self._junctions.values()))
            self._give_up_junction(next(node for node, junction in self._junctions.items() if junction.root is root))

    def _give_up(self, root: Node) -> None:
        """Forgets the oldest visit of a namespace; one whose conversation went on from its end first."""
        own = (visit for visit in self.visits.values() if visit.root is root)
        visit = min(own, key=lambda visit: (not visit.is_extended, visit.at))
        if not visit.is_extended:
            self._visit_times.note(visit.kind, self.n_requests - visit.at, returned=False)
        self._drop(visit)

    def _give_up_junction(self, node: Node) -> None:
        junction = self._junctions.pop(node)
        self._junction_times.note(junction.kind, self.n_requests - junction.at, returned=False)

    def forget_pruned(self) -> None:
        """Gives up junctions that are not in the tree any more."""
        for node in [node for node in self._junctions if not self.tree.has(node)]:
            self._give_up_junction(node)

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

    def share(self, outcome: ReturnOutcome) -> float:
        """Of returns, the share that ends so."""
        return (self.outcomes.count(outcome) + _OUTCOMES[outcome]) / (len(self.outcomes) + sum(_OUTCOMES.values()))

    def _step_shares(self) -> list[float]:
        """Of the returns to the end of an earlier turn, the share that goes 0, 1, 2 … turns back."""
        counts = [0.0, *(2 * 0.5**n for n in range(1, MAX_STEPS))]
        for n_turns in self._steps:
            if n_turns < MAX_STEPS:
                counts[n_turns] += 1
        return [count / (len(self._steps) + 2) for count in counts]

    @property
    def keeps_replies(self) -> bool:
        """Whether the end of a reply is worth a checkpoint: some returns resume from one, of this turn or an earlier."""
        return self.share(ReturnOutcome.REPLY) + self.share(ReturnOutcome.STEP) > REPLY_SHARE

    @property
    def continues_replies(self) -> bool:
        """Whether a next turn is likely to continue from a reply's end. Without evidence it is not: the stable point
        before it serves both, and only the reply is read again."""
        return self.outcomes.count(ReturnOutcome.REPLY) > self.outcomes.count(ReturnOutcome.ELSEWHERE)

    def places(self, n_items: int, spacing: Spacing) -> list[int]:
        """Points of a prompt where returns are likely to leave it, learned from earlier ones."""
        return [n_items - distance for distance in self._unserved.places(n_items, spacing.every_n_tokens)]

    def running_visit(self, node: Node, n_prompt: int, continuation: Continuation) -> Visit:
        """The visit that a request will leave, if it ended now."""
        return Visit(node, node.root(), n_prompt, self.n_requests, continuation.hits, continuation.habit)

    def expected(
        self, running: Iterable[Visit], *, anywhere: bool, among: Collection[Node] | None = None
    ) -> dict[int, float]:
        """Returns per request that would resume from each node, by its id: from kept checkpoints, or ``anywhere`` on a
        lineage. ``running``: see ``running_visit``. ``among``: whole branches of the tree; only their nodes are asked for.
        None: all are."""
        self._refresh()
        sources = self._sources(running, among)
        junctions = [
            (node, self._junction_times.density(junction.kind, self._age(junction.at)))
            for node, junction in self._junctions.items()
            if among is None or node in among
        ]
        return self._expected_anywhere(sources, junctions) if anywhere else self._expected_at_kept(sources, junctions)

    def _expected_at_kept(self, sources: _Sources, junctions: _Densities) -> dict[int, float]:
        """Of every lineage: the returns that resume no farther back than a checkpoint, less those that resume from one
        below it; and of those that step back the ones that do so to turns that ended between the two."""
        lineages = _KeptLineages(self.visits)
        stepping, steps = self.share(ReturnOutcome.STEP), self._step_shares()
        resumed = lineages.resumed_at(sources, self.resumed) * (1 - stepping)
        extra: dict[int, float] = defaultdict(float)
        for visit, density in sources:
            for n_turns, kept in enumerate(lineages.turns_above(visit.node, MAX_STEPS - 1), 1):
                if kept is not None:
                    extra[kept.id] += stepping * steps[n_turns] * density
        for node, density in junctions:
            if (kept := lineages.kept_from(node)) is not None:
                extra[kept.id] += density
        for node, returns in zip(lineages.nodes, resumed.tolist(), strict=True):
            extra[node.id] += returns
        return extra

    def _expected_anywhere(self, sources: _Sources, junctions: _Densities) -> dict[int, float]:
        """The returns that get beyond the beginning of each node. Far enough up that is all of them: those are added up
        once for all lineages."""
        found: dict[int, float] = defaultdict(float)
        whole: dict[Node, float] = defaultdict(float)
        for visit, density in sources:
            node: Node | None = visit.node
            while node is not None and node.parent is not None:
                distance = max(_IN_REPLY, visit.n_prompt - node.start - 1)
                if distance >= self.resumed.farthest:
                    whole[node] += density
                    break
                found[node.id] += density * self.resumed.within(distance)
                node = node.parent
        for node, density in _summed_up(whole).items():
            found[node.id] += density
        for node, density in junctions:
            found[node.id] += density
        return found

    def _sources(self, running: Iterable[Visit], among: Collection[Node] | None = None) -> _Sources:
        visits = (visit for visit in itertools.chain(self.visits.values(), running) if not visit.is_extended)
        return [
            (visit, self._visit_times.density(visit.kind, self._age(visit.at)))
            for visit in visits
            if among is None or visit.node in among
        ]

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


_Densities = Sequence[tuple[Node, float]]
_Sources = Sequence[tuple[Visit, float]]  # where returns come from, and their density


class _KeptLineages:
    """The kept checkpoints and the ends of requests above nodes. Whatever is asked, each edge is walked once."""

    def __init__(self, visits: Container[Node]) -> None:
        self.nodes: list[Node] = []  # the kept ones that were found
        self._visits = visits
        self._kept: dict[Node, Node | None] = {}
        self._ended: dict[Node, Node | None] = {}
        self._lineages: dict[Node, NDArray[np.int64]] = {}

    def kept_from(self, node: Node) -> Node | None:
        """The nearest node with a checkpoint, at or above this one."""
        return _nearest(node, lambda at: at.checkpoint is not None, self._kept)

    def turns_above(self, end: Node, most: int) -> Iterator[Node | None]:
        """For each request that ended above this node, the latest first: the kept node that it would resume from."""
        node = end.parent
        for _ in range(most):
            node = None if node is None else _nearest(node, lambda at: at in self._visits, self._ended)
            if node is None:
                return
            yield self.kept_from(node)
            node = node.parent

    def resumed_at(self, sources: _Sources, resumed: ResumePoints) -> _Numbers:
        """For each of ``nodes``, the kept ones on these lineages: the returns that resume there if none steps back."""
        ends = [self.kept_from(visit.node) for visit, _ in sources]
        lineages = [_NOWHERE if end is None else self._lineage(end) for end in ends]
        if not self.nodes:
            return np.zeros(0)
        at = np.concatenate(lineages)
        source = np.repeat(np.arange(len(sources)), [len(lineage) for lineage in lineages])
        n_prompt = np.array([visit.n_prompt for visit, _ in sources])
        distance = np.maximum(_IN_REPLY, n_prompt[source] - np.array([node.n_items for node in self.nodes])[at])
        habits = np.array([(*visit.habit, *[np.inf] * MAX_HABIT)[:MAX_HABIT] for visit, _ in sources])
        n_own = np.array(
            [len(visit.habit) for visit, _ in sources]
        )  # what its own habit counts, beside 2 for that of all
        n_habits = (habits[source] <= distance[:, None]).sum(axis=1)
        reached = (2 * resumed.shares_within(distance) + n_habits) / (n_own + 2)[source]
        below = np.concatenate([[0.0], reached[:-1]]) * np.concatenate([[False], source[1:] == source[:-1]])
        densities = np.array([density for _, density in sources])
        return np.bincount(at, densities[source] * (reached - below), len(self.nodes)).astype(float)

    def _lineage(self, kept: Node) -> NDArray[np.int64]:
        """The indices of a kept node and of those above it."""
        passed = []
        at: Node | None = kept
        while at is not None and at not in self._lineages:
            passed.append(at)
            at = None if at.parent is None else self.kept_from(at.parent)
        found = _NOWHERE if at is None else self._lineages[at]
        for node in reversed(passed):
            found = self._lineages[node] = np.concatenate([[len(self.nodes)], found])
            self.nodes.append(node)
        return found


_NOWHERE = np.zeros(0, np.int64)


def _nearest(node: Node, is_it: Callable[[Node], bool], known: dict[Node, Node | None]) -> Node | None:
    """The nearest node at or above this one of which it is true; ``known`` remembers the answers."""
    passed = []
    at: Node | None = node
    while at is not None and at not in known and not is_it(at):
        passed.append(at)
        at = at.parent
    found = known.get(at, at) if at is not None else None
    for each in passed:
        known[each] = found
    return found


def _summed_up(amounts: Mapping[Node, float]) -> dict[Node, float]:
    """For the nodes and everything above them: the amounts at or below."""
    sums: dict[Node, float] = defaultdict(float, amounts)
    waiting = [(-node.n_items, node.id, node) for node in amounts]
    heapq.heapify(waiting)
    while waiting:
        _, _, node = heapq.heappop(waiting)
        above = node.parent
        if above is not None and above.parent is not None:
            if above not in sums:
                heapq.heappush(waiting, (-above.n_items, above.id, above))
            sums[above] += sums[node]
    return sums


def _most(counts: Counter[Node]) -> Node:
    return counts.most_common(1)[0][0]


def _is_read_ahead(node: Node) -> bool:
    return node.checkpoint is not None and node.checkpoint.kind is CutKind.PREWARM


# before which words prompts part


Context = tuple[int, ...]  # tokens


@dataclass(slots=True)
class Partings:
    """Knows tokens only."""

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
