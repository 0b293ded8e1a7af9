"""Which models are in memory, and which waiting request is served next. Pure: events in, effects out; time comes with the
events.

It knows no process, file or clock: ``router.pool`` feeds it what happened and carries out the effects. The rules:

- A request borrows a model: a lease. A model without leases is idle. A process counts against the limits from ``Load``
  until ``Stopped`` or ``LoadFailed`` tells that its memory is free.
- A request for a model that is asleep waits. All requests that wait for it share one load and are served together when
  it is ready. Models that are waited for take turns, the one waited for longest first. A younger one passes an older one
  only into room that the older one does not need.
- Room is made by stopping idle models, least recently used first, and only those that help; and none before everything
  that must go is idle, so that no model is unloaded for a turn that cannot come yet. A leased model is never stopped, a
  pinned one only on request. Where room can never be made, waiting requests are refused with the reason.
- A loaded model serves new requests at once, until a request has waited ``patience_s`` for its place. Then it drains: its
  leases go on, new requests wait, and it is stopped when it is idle. Their turn comes after the other's, in the same way.
  So two busy models alternate in batches and no request starves.
- Draining is called off when the place is not needed any more or an idle model can give it. Only ``Unload`` is final.
- A failed load is tried again with the next request, or when the pool asks for it and there is room.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

_MIB = 1 << 20
RefusalCode: TypeAlias = Literal["model_not_found", "model_too_large", "no_room", "load_failed"]


class Phase(enum.Enum):
    ASLEEP = "asleep"  # no process; a ``reason`` tells why the last load failed
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # its leases continue, new requests wait
    STOPPING = "stopping"  # its memory is not free yet


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What planning needs to know of a configured model."""

    id: str
    n_bytes: int
    pinned: bool = False
    ttl_s: float = 0.0  # idle for so long: put to sleep; 0: never


@dataclass(frozen=True, slots=True)
class PoolLimits:
    models_max: int = 1  # 0: any number
    memory_bytes: int = 0  # 0: no limit
    patience_s: float = 5.0

    def allow(self, n_models: int, n_bytes: int) -> bool:
        return not 0 < self.models_max < n_models and not 0 < self.memory_bytes < n_bytes


class ModelStatus(NamedTuple):
    phase: Phase
    n_leased: int
    n_waiting: int
    last_used: float
    reason: str | None


@dataclass(frozen=True)
class Wanted:
    """A request needs a lease. It gets one ``GrantLease`` or one ``Refuse``, unless it leaves before."""

    request_id: int
    model: str
    at: float


@dataclass(frozen=True)
class Gone:
    """A request is over, whether it waited or held a lease. A refused one is not known any more."""

    request_id: int
    at: float


@dataclass(frozen=True)
class _ModelEvent:
    model: str
    at: float


class LoadRequested(_ModelEvent):
    """Load it without a lease, again if it is on its way out. If there can be no room, its status has the reason."""


class RetryRequested(_ModelEvent):
    """Load it again after it failed, if there is free room that no waiting request needs."""


class UnloadRequested(_ModelEvent):
    """Stop it when its leases have ended. Requests that still wait for it then have it loaded again."""


class Removed(_ModelEvent):
    """It is no longer configured: it is not lent any more, and stops when its leases have ended."""


class Loaded(_ModelEvent):
    """Its engine is ready."""


class Stopped(_ModelEvent):
    """After ``Unload``: the process has ended and its memory is free."""


@dataclass(frozen=True)
class LoadFailed:
    """Its engine did not start or was given up later, and its process ended. After ``Unload`` only ``Stopped`` counts."""

    model: str
    reason: str
    at: float


@dataclass(frozen=True)
class Added:
    """A model appeared or is configured otherwise. A process counts with the size it was loaded with."""

    plan: ModelPlan
    at: float


@dataclass(frozen=True)
class Tick:
    at: float  # once a second is enough


@dataclass(frozen=True)
class _ModelEffect:
    model: str


class Load(_ModelEffect):
    """Start an engine; ends in ``Loaded`` or ``LoadFailed``."""


class Unload(_ModelEffect):
    """Stop its engine, which is idle; ends in ``Stopped``."""


@dataclass(frozen=True)
class GrantLease:
    request_id: int
    model: str


@dataclass(frozen=True)
class Refuse:
    request_id: int
    code: RefusalCode
    message: str


Order: TypeAlias = LoadRequested | RetryRequested | UnloadRequested | Removed
Event: TypeAlias = Wanted | Gone | Order | Loaded | Stopped | LoadFailed | Added | Tick
Effect: TypeAlias = Load | Unload | GrantLease | Refuse


@dataclass(slots=True, eq=False)
class _Model:
    plan: ModelPlan
    phase: Phase = Phase.ASLEEP
    held_bytes: int = 0  # what its process counts for
    leases: set[int] = field(default_factory=set)
    waiting: dict[int, float] = field(default_factory=dict)  # request ids, since when
    load_requested_at: float | None = None
    must_go: bool = False  # stopped as soon as it is idle, whether or not its place is needed
    is_removed: bool = False
    last_used: float = 0.0
    reason: str | None = None

    @property
    def wanted_since(self) -> float | None:
        return min((at for at in (*self.waiting.values(), self.load_requested_at) if at is not None), default=None)

    @property
    def is_idle(self) -> bool:
        return self.phase in (Phase.READY, Phase.DRAINING) and not self.leases

    @property
    def stays(self) -> bool:
        return self.phase not in (Phase.ASLEEP, Phase.STOPPING) and not self.must_go

    @property
    def eviction_order(self) -> tuple[int, float, str]:
        """Idle before draining (so that what was begun is finished) before busy before loading; then by last use."""
        rank = 0 if self.is_idle else (Phase.DRAINING, Phase.READY, Phase.LOADING).index(self.phase) + 1
        return rank, self.last_used, self.plan.id


class Planner:
    def __init__(self, limits: PoolLimits, models: Sequence[ModelPlan]) -> None:
        self._limits = limits
        self._models = {plan.id: _Model(plan) for plan in models}
        self._requests: dict[int, _Model] = {}  # the model that a request waits for or borrows
        self._now = 0.0
        self._effects: list[Effect] = []

    def on(self, event: Event) -> list[Effect]:
        """Applies an event; returns the effects, in order."""
        self._now = event.at
        self._effects = []
        match event:
            case Wanted(request_id, id):
                self._want(request_id, id)
            case Gone(request_id):
                self._leave(request_id)
            case Tick():
                self._put_to_sleep()
            case Added(plan):
                model = self._models.setdefault(plan.id, _Model(plan))
                model.plan, model.is_removed = plan, False  # a removed one still goes: it runs with the old settings
            case LoadRequested(id) | RetryRequested(id) | UnloadRequested(id) | Removed(id):
                if (known := self._known(id)) is not None:
                    self._on_order(event, known)
            case Loaded(id) | LoadFailed(id) | Stopped(id):
                self._on_process(event, self._models[id])
        self._settle()
        return self._effects

    def status(self, model: str) -> ModelStatus | None:
        if (m := self._known(model)) is None:
            return None
        return ModelStatus(m.phase, len(m.leases), len(m.waiting), m.last_used, m.reason)

    def check(self) -> None:
        """Checks the invariants that hold between two events."""
        models = self._models.values()
        held = self._held()
        assert self._fit(held, []), "more is in memory than allowed"
        for m in models:
            is_there = m.phase in (Phase.READY, Phase.DRAINING)
            name = m.plan.id
            assert is_there or not m.leases, f"{name} is {m.phase.value} and leased"
            assert m.phase is not Phase.READY or not m.waiting, f"{name} is ready and a request waits for it"
            assert m in held or not (m.must_go or m.held_bytes or m.is_removed), f"{name} sleeps and counts"
            assert not (m.must_go and m.is_idle), f"{name} should have been stopped"
            assert m.phase is not Phase.DRAINING or m.must_go or not m.plan.pinned, f"{name} is pinned and drains"
        pairs = [(request_id, m) for m in models for request_id in (*m.leases, *m.waiting)]
        assert len(pairs) == len(self._requests) and dict(pairs) == self._requests, "a request is lost"
        moves = any(m.leases or m.phase in (Phase.LOADING, Phase.STOPPING) for m in models)
        assert moves or all(m.wanted_since is None for m in models), "a request waits and nothing moves"

    # what happened

    def _known(self, id: str) -> _Model | None:
        model = self._models.get(id)
        return None if model is None or model.is_removed else model

    def _want(self, request_id: int, id: str) -> None:
        assert request_id not in self._requests, f"request {request_id} has its place already"
        if (model := self._known(id)) is None:
            names = ", ".join(m.plan.id for m in self._models.values() if not m.is_removed) or "none"
            self._effects.append(Refuse(request_id, "model_not_found", f"there is no model {id!r}; there are: {names}"))
        else:
            self._requests[request_id] = model
            model.waiting[request_id] = self._now

    def _leave(self, request_id: int) -> None:
        model = self._requests.pop(request_id, None)
        if model is not None and model.waiting.pop(request_id, None) is None:
            model.leases.remove(request_id)
            model.last_used = self._now

    def _put_to_sleep(self) -> None:
        for model in self._models.values():
            ttl_s = 0.0 if model.plan.pinned or model.waiting else model.plan.ttl_s
            if model.is_idle and 0.0 < ttl_s <= self._now - model.last_used:
                self._stop(model)

    def _on_order(self, order: Order, model: _Model) -> None:
        if isinstance(order, LoadRequested | RetryRequested):
            may = isinstance(order, LoadRequested) or self._has_room_for(model)
            if may and not model.stays and model.load_requested_at is None:
                model.load_requested_at = self._now
            return
        model.must_go = model.phase is not Phase.ASLEEP
        model.load_requested_at = None
        if isinstance(order, Removed):
            model.is_removed = True
            self._refuse(model, "model_not_found", f"the model {model.plan.id!r} was removed")

    def _on_process(self, event: Loaded | LoadFailed | Stopped, model: _Model) -> None:
        match event:
            case Loaded():
                assert model.phase is Phase.LOADING, f"{event}, but it is {model.phase.value}"
                model.phase, model.last_used = Phase.READY, self._now
                self._grant(model)  # first, before others take its place: this is the turn that was waited for
            case Stopped():
                assert model.phase is Phase.STOPPING, f"{event}, but it is {model.phase.value}"
                self._end(model)
            case LoadFailed(reason=reason) if model.phase is not Phase.STOPPING:
                assert model.phase is not Phase.ASLEEP, f"{event}, but it is asleep"
                self._refuse(model, "load_failed", f"the model {model.plan.id!r} cannot be used: {reason}")
                for request_id in model.leases:
                    del self._requests[request_id]
                model.leases.clear()
                self._end(model)

    # what to do about it

    def _settle(self) -> None:
        """Grants turns and leases as far as possible now."""
        draining = self._take_turns()
        for model in self._models.values():
            if model.phase in (Phase.READY, Phase.DRAINING):
                model.phase = Phase.DRAINING if model.must_go or model in draining else Phase.READY
            if model.phase is Phase.READY:
                self._grant(model)
            elif model.must_go and model.is_idle:
                self._stop(model)
        self._models = {id: m for id, m in self._models.items() if not (m.is_removed and m.phase is Phase.ASLEEP)}

    def _take_turns(self) -> set[_Model]:
        """Loads, or makes room for, models with waiting requests; returns the models that must drain for it."""
        wishes = [(m.wanted_since, m) for m in self._models.values() if m.phase is Phase.ASLEEP]
        coming: list[_Model] = []
        going: set[_Model] = set()
        draining: set[_Model] = set()
        for since, model in sorted(((at, m) for at, m in wishes if at is not None), key=lambda wish: wish[0]):
            if self._refuse_if_hopeless(model):
                continue
            victims = self._victims([*coming, model], going)
            if victims == [] and self._fit(self._held(), [model]):
                model.phase, model.held_bytes = Phase.LOADING, model.plan.n_bytes
                model.load_requested_at = model.reason = None
                self._effects.append(Load(model.plan.id))
                continue
            coming.append(model)
            if victims is None:
                continue  # it needs room that older ones need
            going.update(victims)
            if all(victim.is_idle for victim in victims):
                for victim in victims:
                    self._stop(victim)
            elif self._now - since >= self._limits.patience_s:
                draining.update(victims)
        return draining

    def _victims(self, coming: Sequence[_Model], going: Collection[_Model]) -> list[_Model] | None:
        """The least recently used models to stop, besides ``going``, so that all of ``coming`` fits; none too many."""
        staying = [m for m in self._held() if m.stays and m not in going]

        def fits_without(victims: Collection[_Model]) -> bool:
            return self._fit([m for m in staying if m not in victims], coming)

        chosen: list[_Model] = []
        for model in sorted((m for m in staying if not m.plan.pinned), key=lambda m: m.eviction_order):
            if not fits_without(chosen):
                chosen.append(model)
        if not fits_without(chosen):
            return None
        for model in chosen[::-1]:
            if fits_without([m for m in chosen if m is not model]):
                chosen.remove(model)
        return chosen

    def _refuse_if_hopeless(self, model: _Model) -> bool:
        """Refuses what waits for a model that has no room even if everything stoppable is stopped; returns whether it
        did."""
        name = model.plan.id
        pinned = [m for m in self._held() if m.stays and m.plan.pinned]
        if self._fit(pinned, [model]):
            return False
        if self._fit([], [model]):
            names = ", ".join(m.plan.id for m in pinned)
            self._refuse(model, "no_room", f"there is no room for the model {name!r} beside the pinned ones ({names})")
        else:
            needed, allowed = (f"{n / _MIB:,.1f} MiB" for n in (model.plan.n_bytes, self._limits.memory_bytes))
            self._refuse(
                model, "model_too_large", f"the model {name!r} needs {needed}; all together may take {allowed}"
            )
        return True

    def _has_room_for(self, model: _Model) -> bool:
        others_wait = any(m.wanted_since is not None for m in self._models.values() if m is not model)
        return model.phase is Phase.ASLEEP and not others_wait and self._fit(self._held(), [model])

    def _held(self) -> list[_Model]:
        return [m for m in self._models.values() if m.phase is not Phase.ASLEEP]

    def _fit(self, held: Sequence[_Model], coming: Sequence[_Model]) -> bool:
        sizes = [m.held_bytes for m in held] + [m.plan.n_bytes for m in coming]
        return self._limits.allow(len(sizes), sum(sizes))

    def _grant(self, model: _Model) -> None:
        if model.waiting:
            self._effects += [GrantLease(request_id, model.plan.id) for request_id in model.waiting]
            model.leases.update(model.waiting)
            model.waiting.clear()
            model.last_used = self._now

    def _refuse(self, model: _Model, code: RefusalCode, message: str) -> None:
        """Refuse all that wait for it; the reason stays until it is loaded again."""
        for request_id in model.waiting:
            del self._requests[request_id]
            self._effects.append(Refuse(request_id, code, message))
        model.waiting.clear()
        model.load_requested_at = None
        model.reason = message

    def _stop(self, model: _Model) -> None:
        model.phase = Phase.STOPPING
        self._effects.append(Unload(model.plan.id))

    def _end(self, model: _Model) -> None:
        model.phase = Phase.ASLEEP
        model.held_bytes = 0
        model.must_go = False
