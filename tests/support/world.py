"""A small world around a planner: loads and stops take time and may fail, requests come, stay and leave.

Every effect is judged by what the world itself knows, never by what the planner says of itself.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Literal

from everwarm.engine.settings import EngineSettings
from everwarm.router.catalog.catalog import ModelSpec
from everwarm.router.plan import Effect, GrantLease, Load, Phase, Planner, PoolLimits, Refuse, Unload

_SETTINGS = EngineSettings()


def planned(id: str, n_bytes: int, pinned: bool = False, ttl_s: float = 0.0) -> ModelSpec:
    """A model with what the planner looks at."""
    path = Path(f"{id}.gguf")
    return ModelSpec(id=id, path=path, settings=_SETTINGS, n_bytes=n_bytes, source="file", pinned=pinned, ttl_s=ttl_s)


class Wrong(AssertionError):
    """A rule that the planner broke."""


def rule(holds: bool, sentence: str) -> None:
    if not holds:
        raise Wrong(sentence)


@dataclass(frozen=True)
class Visit:
    """A request: how long it keeps its lease, and how long it waits for one before its client leaves."""

    at: float
    model: str
    hold_s: float = 1.0
    leaves_after_s: float | None = None


@dataclass(frozen=True)
class Order:
    at: float
    what: Literal["load", "unload", "remove", "add", "crash"]
    spec: ModelSpec


@dataclass(frozen=True)
class Event:
    """What the planner is told: the name of its method, and what of the rest that method takes."""

    what: Literal[
        "want",
        "leave",
        "tick",
        "request_load",
        "request_unload",
        "add",
        "remove",
        "loaded",
        "load_failed",
        "stopped",
    ]
    model: str = ""
    request_id: int = 0
    spec: ModelSpec | None = None

    def tell(self, planner: Planner, at: float) -> list[Effect]:
        match self.what:
            case "tick":
                return planner.tick(at)
            case "want":
                return planner.want(self.request_id, self.model, at)
            case "leave":
                return planner.leave(self.request_id, at)
            case "load_failed":
                return planner.load_failed(self.model, "it died", at)
            case "add":
                assert self.spec is not None
                return planner.add(self.spec, at)
            case what:
                effects: list[Effect] = getattr(planner, what)(self.model, at)
                return effects


@dataclass(frozen=True)
class Fate:
    """What becomes of one engine."""

    load_s: float = 1.0
    stop_s: float = 1.0
    fails: bool = False


@dataclass(frozen=True)
class History:
    limits: PoolLimits
    models: tuple[ModelSpec, ...]
    visits: tuple[Visit, ...]
    orders: tuple[Order, ...] = ()
    fates: tuple[Fate, ...] = (Fate(),)

    @property
    def longest_wait_s(self) -> float:
        """Everybody else's turn, and one's own; a turn is patience, leases, a stop, and a load that had begun before."""
        hold_s = max((visit.hold_s for visit in self.visits), default=0.0)
        load_s, stop_s = max(f.load_s for f in self.fates), max(f.stop_s for f in self.fates)
        return (len(self.models) + 1) * (self.limits.patience_s + TICK_S + hold_s + 2 * load_s + stop_s)


TICK_S = 1.0


@dataclass(eq=False)
class Truth:
    """What is true of one model."""

    spec: ModelSpec
    phase: Phase = "asleep"  # ready also while it drains: whether it does is the planner's decision
    fate: Fate = field(default_factory=Fate)
    held_bytes: int = 0
    leases: set[int] = field(default_factory=set)
    waiting: dict[int, float] = field(default_factory=dict)
    load_asked_at: float | None = None
    must_go: bool = False
    is_removed: bool = False
    last_used: float = 0.0

    @property
    def wanted_since(self) -> float | None:
        return min((at for at in (*self.waiting.values(), self.load_asked_at) if at is not None), default=None)

    @property
    def is_unused(self) -> bool:
        return self.phase == "ready" and not self.leases and not self.waiting

    @property
    def is_expired(self) -> bool:
        return self.is_unused and not self.spec.pinned and self.spec.ttl_s > 0


class World:
    def __init__(self, history: History, planner: type[Planner] = Planner) -> None:
        self.history = history
        self.planner = planner(history.limits, history.models)
        self.models = {spec.id: Truth(spec) for spec in history.models}
        self.seen: Counter[str] = Counter()
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._ids, self._order = count(1), count()
        self._visits: dict[int, Visit] = {}
        self._fates = cycle(history.fates)
        self._phases: dict[str, Phase] = {}

    # time

    def run(self) -> Counter[str]:
        """Until nothing is left to happen and nobody waits; who waits for too long is a broken rule."""
        for visit in self.history.visits:
            self._later(visit.at, lambda visit=visit: self._arrive(visit))
        for order in self.history.orders:
            self._later(order.at, lambda order=order: self._carry_out(order))
        next_tick = TICK_S
        while self._agenda or any(truth.wanted_since is not None for truth in self.models.values()):
            if not self._agenda or next_tick <= self._agenda[0][0]:
                self.now, next_tick = next_tick, next_tick + TICK_S
                self._feed(Event("tick"))
                rule(self.planner.tick(self.now) == [], "deciding twice decides the same")
            else:
                self.now, _, happen = heapq.heappop(self._agenda)
                happen()
        return self.seen

    def _later(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at, next(self._order), what))

    # what happens

    def _arrive(self, visit: Visit) -> None:
        id = next(self._ids)
        self._visits[id] = visit
        self._feed(Event("want", visit.model, id))
        if visit.leaves_after_s is not None:
            self._later(self.now + visit.leaves_after_s, lambda: self._feed(Event("leave", request_id=id)))

    def _carry_out(self, order: Order) -> None:
        id = order.spec.id
        match order.what:
            case "load":
                self._feed(Event("request_load", id))
            case "unload":
                self._feed(Event("request_unload", id))
            case "remove":
                self._feed(Event("remove", id))
            case "add":
                self._feed(Event("add", id, spec=order.spec))
            case "crash" if id in self.models and self.models[id].phase in ("ready", "stopping"):
                self._feed(Event("load_failed", id))

    def _feed(self, event: Event) -> None:
        self._note(event)
        before = [(truth, truth.wanted_since) for truth in self.models.values() if truth.phase == "asleep"]
        wishes = {truth.spec.id: since for truth, since in before if since is not None}
        could_go = self._could_go()
        effects = event.tell(self.planner, self.now)
        evicted = [truth for effect in effects if (truth := self._judge(effect, event, wishes)) is not None]
        if evicted and len(wishes) == 1:
            self._judge_choice(evicted, could_go, self.models[next(iter(wishes))].spec.n_bytes)
        self._judge_answers(event, effects, wishes)
        self._forget_removed()
        self.planner.check()
        self._compare()

    def _end_of_load(self, truth: Truth) -> Event:
        id = truth.spec.id
        return Event("load_failed" if truth.fate.fails else "loaded", id)

    def _note(self, event: Event) -> None:
        """What the event itself makes true."""
        if event.spec is not None:
            truth = self.models.setdefault(event.spec.id, Truth(event.spec))
            truth.spec, truth.is_removed = event.spec, False
        if event.what == "leave":
            for truth in self.models.values():
                truth.waiting.pop(event.request_id, None)
                if event.request_id in truth.leases:
                    truth.leases.remove(event.request_id)
                    truth.last_used = self.now
        if event.what in ("tick", "add", "leave") or event.model not in self.models:
            return
        truth = self.models[event.model]
        match event.what:
            case "want" if not truth.is_removed:
                truth.waiting[event.request_id] = self.now
            case "request_load" if not truth.is_removed:
                if not self._stays(truth) and truth.load_asked_at is None:
                    truth.load_asked_at = self.now
            case "request_unload" | "remove" if not truth.is_removed:
                truth.must_go, truth.load_asked_at = truth.phase != "asleep", None
                truth.is_removed = event.what == "remove"
            case "loaded":
                truth.phase, truth.last_used = "ready", self.now
            case "load_failed" if truth.phase != "stopping":
                self.seen["failed loads" if truth.phase == "loading" else "deaths"] += 1
                truth.load_asked_at = None
                self._end(truth)
            case "stopped":
                self._end(truth)

    def _end(self, truth: Truth) -> None:
        truth.phase, truth.held_bytes, truth.must_go = "asleep", 0, False
        truth.leases.clear()

    def _forget_removed(self) -> None:
        self.models = {id: t for id, t in self.models.items() if not (t.is_removed and t.phase == "asleep")}

    # the rules

    def _judge(self, effect: Effect, event: Event, wishes: dict[str, float]) -> Truth | None:
        """Whether one effect was right, and what it makes true; returns a model that had to go for another."""
        match effect:
            case Load(id):
                self._judge_load(self.models[id])
            case Unload(id):
                return self._judge_stop(self.models[id], event, wishes)
            case GrantLease(request_id, id):
                self._judge_grant(request_id, self.models[id])
            case Refuse():
                self._judge_refusal(effect, event)
        return None

    def _judge_load(self, truth: Truth) -> None:
        rule(truth.phase == "asleep", "only what is asleep is loaded")
        rule(truth.wanted_since is not None and not truth.is_removed, "only what somebody wants is loaded")
        truth.phase, truth.held_bytes, truth.load_asked_at = "loading", truth.spec.n_bytes, None
        truth.fate = next(self._fates)
        held = [other.held_bytes for other in self.models.values() if other.phase != "asleep"]
        limits = self.history.limits
        rule(not limits.models_max or len(held) <= limits.models_max, "never more models than allowed")
        rule(not limits.memory_bytes or sum(held) <= limits.memory_bytes, "never more memory than allowed")
        self._later(self.now + truth.fate.load_s, lambda: self._feed(self._end_of_load(truth)))

    def _judge_stop(self, truth: Truth, event: Event, wishes: dict[str, float]) -> Truth | None:
        rule(truth.phase == "ready", "only what is ready is stopped")
        rule(not truth.leases, "nothing is stopped while it is leased")
        expired = event.what == "tick" and truth.is_expired and self.now - truth.last_used >= truth.spec.ttl_s
        rule(truth.must_go or not truth.spec.pinned, "a pinned model is only stopped when asked to")
        rule(truth.must_go or expired or bool(wishes), "nothing is stopped without need")
        truth.phase = "stopping"
        self._later(self.now + truth.fate.stop_s, lambda: self._feed(Event("stopped", truth.spec.id)))
        why = "unloaded" if truth.must_go else "expired" if expired else "evicted"
        self.seen[why] += 1
        return truth if why == "evicted" else None

    def _judge_grant(self, request_id: int, truth: Truth) -> None:
        rule(request_id in truth.waiting, "only who waits is served, once")
        rule(truth.phase == "ready", "only what is ready is leased")
        self.seen["served at once" if truth.waiting.pop(request_id) == self.now else "served later"] += 1
        truth.leases.add(request_id)
        truth.last_used = self.now
        self._later(
            self.now + self._visits[request_id].hold_s, lambda: self._feed(Event("leave", request_id=request_id))
        )

    def _judge_refusal(self, refusal: Refuse, event: Event) -> None:
        self.seen[refusal.code] += 1
        truth = self.models.get(self._visits[refusal.request_id].model)
        if truth is not None:
            was_waiting = truth.waiting.pop(refusal.request_id, None) is not None
            rule(was_waiting or truth.is_removed, "only who waits is refused, once")
        match refusal.code:
            case "model_not_found":
                rule(truth is None or truth.is_removed, "a model that is there is found")
            case "load_failed":
                rule(event.what == "load_failed", "only a failed load is called one")
            case "model_too_large" | "no_room":
                assert truth is not None
                truth.load_asked_at = None
                rule(self._is_hopeless(truth), "nobody is refused who will fit")
                rule((refusal.code == "no_room") == self._fit([], truth.spec.n_bytes), "a refusal says what is wrong")

    def _judge_choice(self, evicted: list[Truth], could_go: list[Truth], n_bytes: int) -> None:
        """As little as possible, and what was used longest ago."""
        staying = [truth for truth in self.models.values() if self._stays(truth)]

        def enough(gone: Iterable[Truth]) -> bool:
            gone = set(gone)
            return self._fit([t for t in {*staying, *evicted} if t not in gone], n_bytes)

        self.seen["chosen"] += len(could_go) > len(evicted)
        age = {truth: (truth.last_used, truth.spec.id) for truth in could_go}
        rule(enough(evicted), "what goes is enough")
        for truth in evicted:
            others = [t for t in evicted if t is not truth]
            rule(not enough(others), "nothing goes that does not help")
            for older in (t for t in could_go if t not in evicted and age[t] < age.get(truth, (0.0, ""))):
                rule(not enough([*others, older]), "what was used longest ago goes first")

    def _judge_answers(self, event: Event, effects: list[Effect], wishes: dict[str, float]) -> None:
        """What must not be put off."""
        patience_s = self.history.limits.patience_s
        if event.what == "want" and (truth := self.models.get(event.model)) is not None:
            nobody_is_tired = all(self.now - since < patience_s for since in wishes.values())
            if truth.phase == "ready" and not truth.must_go and nobody_is_tired:
                rule(GrantLease(event.request_id, event.model) in effects, "what is ready is leased at once")
        if event.what in ("loaded", "load_failed") and (truth := self.models.get(event.model)) is not None:
            rule(not truth.waiting or truth.phase == "stopping", "a load answers all who waited for it")
        if event.what == "remove" and event.model in self.models:
            rule(not self.models[event.model].waiting, "nobody waits for what was removed")
        if event.what == "tick":
            late = [t for t in self.models.values() if t.is_expired and self.now - t.last_used >= t.spec.ttl_s]
            rule(not late, "what is unused for too long is put to sleep")
        for truth in self.models.values():
            if truth.phase == "asleep" and truth.wanted_since is not None and self._is_hopeless(truth):
                rule(not truth.waiting, "nobody waits for what can never be")
                status = self.planner.status(truth.spec.id)
                rule(status is not None and status.reason is not None, "a load that cannot be has a reason")
                truth.load_asked_at = None
            since = truth.wanted_since
            rule(since is None or self.now - since <= self.history.longest_wait_s, "nobody waits for ever")

    def _stays(self, truth: Truth) -> bool:
        return truth.phase in ("loading", "ready") and not truth.must_go

    def _is_hopeless(self, truth: Truth) -> bool:
        pinned = [t for t in self.models.values() if self._stays(t) and t.spec.pinned]
        return not self._fit(pinned, truth.spec.n_bytes)

    def _could_go(self) -> list[Truth]:
        return [t for t in self.models.values() if t.is_unused and not t.must_go and not t.spec.pinned]

    def _fit(self, held: list[Truth], n_bytes: int) -> bool:
        limits, total = self.history.limits, sum(truth.held_bytes for truth in held) + n_bytes
        return len(held) + 1 <= (limits.models_max or 99) and total <= (limits.memory_bytes or 1 << 60)

    def _compare(self) -> None:
        """What the planner says of itself is true."""
        for id, truth in self.models.items():
            status = self.planner.status(id)
            rule((status is None) == truth.is_removed, "the planner knows what there is")
            if status is None:
                continue
            was, self._phases[id] = self._phases.get(id), status.phase
            self.seen["drained"] += status.phase == "draining" and was != "draining"
            self.seen["called off"] += status.phase == "ready" and was == "draining"
            phase = "ready" if status.phase == "draining" else status.phase
            told = (phase, status.n_leased, status.n_waiting, status.last_used)
            is_so = (truth.phase, len(truth.leases), len(truth.waiting), truth.last_used)
            rule(told == is_so, f"the planner says of {id} what is true: {told} is {is_so}")


def stream(model: str, at: float, period_s: float, hold_s: float, n: int) -> Iterator[Visit]:
    """One request after another, overlapping if they hold longer than the period."""
    return (Visit(at + i * period_s, model, hold_s) for i in range(n))
