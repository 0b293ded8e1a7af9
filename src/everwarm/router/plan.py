"""Which models are in memory, and which waiting request is served next. Pure: ``router.pool`` tells it what
happened and when, and carries out the effects that it returns.

It knows no process, file or clock. The rules:

- A request borrows a model: a lease. A model without leases is idle. A process counts against the limits from ``Load``
  until ``stopped`` or ``load_failed`` tells that its memory is free.
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

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from everwarm.router.catalog.catalog import ModelSpec

_MIB = 1 << 20
RefusalCode: TypeAlias = Literal["model_not_found", "model_too_large", "no_room", "load_failed"]
Phase: TypeAlias = Literal[
    "asleep",  # no process; a ``reason`` tells why the last load failed
    "loading",
    "ready",
    "draining",  # its leases continue, new requests wait
    "stopping",  # its memory is not free yet
]


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


@dataclass(frozen=True, slots=True)
class Load:
    """Start an engine; ends in ``loaded`` or ``load_failed``."""

    model: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Stop its engine, which is idle; ends in ``stopped``."""

    model: str


@dataclass(frozen=True, slots=True)
class GrantLease:
    request_id: int
    model: str


@dataclass(frozen=True, slots=True)
class Refuse:
    request_id: int
    code: RefusalCode
    message: str


Effect: TypeAlias = Load | Unload | GrantLease | Refuse


@dataclass(slots=True, eq=False)
class _Model:
    spec: ModelSpec
    phase: Phase = "asleep"
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
        return self.phase in ("ready", "draining") and not self.leases

    @property
    def stays(self) -> bool:
        return self.phase not in ("asleep", "stopping") and not self.must_go

    @property
    def eviction_order(self) -> tuple[int, float, str]:
        """Idle before draining (so that what was begun is finished) before busy before loading; then by last use."""
        rank = 0 if self.is_idle else ("draining", "ready", "loading").index(self.phase) + 1
        return rank, self.last_used, self.spec.id


class Planner:
    """Each method that takes a time tells the planner what happened then, and returns the effects, in order."""

    def __init__(self, limits: PoolLimits, specs: Iterable[ModelSpec]) -> None:
        self._limits = limits
        self._models = {spec.id: _Model(spec) for spec in specs}
        self._requests: dict[int, _Model] = {}  # the model that a request waits for or borrows
        self._now = 0.0
        self._effects: list[Effect] = []

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
            is_there = m.phase in ("ready", "draining")
            name = m.spec.id
            assert is_there or not m.leases, f"{name} is {m.phase} and leased"
            assert m.phase != "ready" or not m.waiting, f"{name} is ready and a request waits for it"
            assert m in held or not (m.must_go or m.held_bytes or m.is_removed), f"{name} sleeps and counts"
            assert not (m.must_go and m.is_idle), f"{name} should have been stopped"
            assert m.phase != "draining" or m.must_go or not m.spec.pinned, f"{name} is pinned and drains"
        pairs = [(request_id, m) for m in models for request_id in (*m.leases, *m.waiting)]
        assert len(pairs) == len(self._requests) and dict(pairs) == self._requests, "a request is lost"
        moves = any(m.leases or m.phase in ("loading", "stopping") for m in models)
        assert moves or all(m.wanted_since is None for m in models), "a request waits and nothing moves"

    # requests

    def want(self, request_id: int, id: str, at: float) -> list[Effect]:
        """A request needs a lease. It gets one ``GrantLease`` or one ``Refuse``, unless it leaves before."""
        assert request_id not in self._requests, f"request {request_id} has its place already"
        self._now = at
        if (model := self._known(id)) is None:
            names = ", ".join(m.spec.id for m in self._models.values() if not m.is_removed) or "none"
            self._effects.append(Refuse(request_id, "model_not_found", f"there is no model {id!r}; there are: {names}"))
        else:
            self._requests[request_id] = model
            model.waiting[request_id] = at
        return self._settled()

    def leave(self, request_id: int, at: float) -> list[Effect]:
        """A request is over, whether it waited or held a lease. A refused one is not known any more."""
        self._now = at
        model = self._requests.pop(request_id, None)
        if model is not None and model.waiting.pop(request_id, None) is None:
            model.leases.remove(request_id)
            model.last_used = at
        return self._settled()

    def tick(self, at: float) -> list[Effect]:
        """Time has passed; once a second is enough."""
        self._now = at
        for model in self._models.values():
            ttl_s = 0.0 if model.spec.pinned or model.waiting else model.spec.ttl_s
            if model.is_idle and 0.0 < ttl_s <= at - model.last_used:
                self._stop(model)
        return self._settled()

    # orders

    def request_load(self, id: str, at: float) -> list[Effect]:
        """Load it without a lease, again if it is on its way out. If there can be no room, its status has the reason."""
        self._now = at
        if (model := self._known(id)) is not None:
            self._want_loaded(model)
        return self._settled()

    def retry_load(self, id: str, at: float) -> list[Effect]:
        """Load it again after it failed, if there is free room that no waiting request needs."""
        self._now = at
        if (model := self._known(id)) is not None and self._has_room_for(model):
            self._want_loaded(model)
        return self._settled()

    def request_unload(self, id: str, at: float) -> list[Effect]:
        """Stop it when its leases have ended. Requests that still wait for it then have it loaded again."""
        self._now = at
        if (model := self._known(id)) is not None:
            self._send_away(model)
        return self._settled()

    def add(self, spec: ModelSpec, at: float) -> list[Effect]:
        """A model appeared or is configured otherwise. A process counts with the size it was loaded with."""
        self._now = at
        model = self._models.setdefault(spec.id, _Model(spec))
        model.spec, model.is_removed = spec, False  # a removed one still goes: it runs with the old settings
        return self._settled()

    def remove(self, id: str, at: float) -> list[Effect]:
        """It is no longer configured: it is not lent any more, and stops when its leases have ended."""
        self._now = at
        if (model := self._known(id)) is not None:
            self._send_away(model)
            model.is_removed = True
            self._refuse(model, "model_not_found", f"the model {id!r} was removed")
        return self._settled()

    # engine processes

    def loaded(self, id: str, at: float) -> list[Effect]:
        """Its engine is ready."""
        self._now = at
        model = self._models[id]
        assert model.phase == "loading", f"{id} was loaded, but it is {model.phase}"
        model.phase, model.last_used = "ready", at
        self._grant(model)  # first, before others take its place: this is the turn that was waited for
        return self._settled()

    def load_failed(self, id: str, reason: str, at: float) -> list[Effect]:
        """Its engine did not start or was given up later, and its process ended. After ``Unload`` only ``stopped``
        counts."""
        self._now = at
        model = self._models[id]
        assert model.phase != "asleep", f"{id} failed, but it is asleep"
        if model.phase != "stopping":
            self._refuse(model, "load_failed", f"the model {id!r} cannot be used: {reason}")
            for request_id in model.leases:
                del self._requests[request_id]
            model.leases.clear()
            self._end(model)
        return self._settled()

    def stopped(self, id: str, at: float) -> list[Effect]:
        """After ``Unload``: the process has ended and its memory is free."""
        self._now = at
        model = self._models[id]
        assert model.phase == "stopping", f"{id} has stopped, but it is {model.phase}"
        self._end(model)
        return self._settled()

    def _known(self, id: str) -> _Model | None:
        model = self._models.get(id)
        return None if model is None or model.is_removed else model

    def _want_loaded(self, model: _Model) -> None:
        if not model.stays and model.load_requested_at is None:
            model.load_requested_at = self._now

    def _send_away(self, model: _Model) -> None:
        model.must_go = model.phase != "asleep"
        model.load_requested_at = None

    # what to do about it

    def _settled(self) -> list[Effect]:
        """The effects of what happened, with the turns and leases that it makes possible."""
        self._settle()
        effects, self._effects = self._effects, []
        return effects

    def _settle(self) -> None:
        """Grants turns and leases as far as possible now."""
        draining = self._take_turns()
        for model in self._models.values():
            if model.phase in ("ready", "draining"):
                model.phase = "draining" if model.must_go or model in draining else "ready"
            if model.phase == "ready":
                self._grant(model)
            elif model.must_go and model.is_idle:
                self._stop(model)
        self._models = {id: m for id, m in self._models.items() if not (m.is_removed and m.phase == "asleep")}

    def _take_turns(self) -> set[_Model]:
        """Loads, or makes room for, models with waiting requests; returns the models that must drain for it."""
        wishes = [(m.wanted_since, m) for m in self._models.values() if m.phase == "asleep"]
        coming: list[_Model] = []
        going: set[_Model] = set()
        draining: set[_Model] = set()
        for since, model in sorted(((at, m) for at, m in wishes if at is not None), key=lambda wish: wish[0]):
            if self._refuse_if_hopeless(model):
                continue
            victims = self._victims([*coming, model], going)
            if victims == [] and self._fit(self._held(), [model]):
                model.phase = "loading"
                model.held_bytes = model.spec.n_bytes
                model.load_requested_at = model.reason = None
                self._effects.append(Load(model.spec.id))
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
        for model in sorted((m for m in staying if not m.spec.pinned), key=lambda m: m.eviction_order):
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
        name = model.spec.id
        pinned = [m for m in self._held() if m.stays and m.spec.pinned]
        if self._fit(pinned, [model]):
            return False
        if self._fit([], [model]):
            names = ", ".join(m.spec.id for m in pinned)
            self._refuse(model, "no_room", f"there is no room for the model {name!r} beside the pinned ones ({names})")
        else:
            needed, allowed = (f"{n / _MIB:,.1f} MiB" for n in (model.spec.n_bytes, self._limits.memory_bytes))
            self._refuse(
                model, "model_too_large", f"the model {name!r} needs {needed}; all together may take {allowed}"
            )
        return True

    def _has_room_for(self, model: _Model) -> bool:
        others_wait = any(m.wanted_since is not None for m in self._models.values() if m is not model)
        return model.phase == "asleep" and not others_wait and self._fit(self._held(), [model])

    def _held(self) -> list[_Model]:
        return [m for m in self._models.values() if m.phase != "asleep"]

    def _fit(self, held: Sequence[_Model], coming: Sequence[_Model]) -> bool:
        sizes = [m.held_bytes for m in held] + [m.spec.n_bytes for m in coming]
        return self._limits.allow(len(sizes), sum(sizes))

    def _grant(self, model: _Model) -> None:
        if model.waiting:
            self._effects += [GrantLease(request_id, model.spec.id) for request_id in model.waiting]
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
        model.phase = "stopping"
        self._effects.append(Unload(model.spec.id))

    def _end(self, model: _Model) -> None:
        model.phase = "asleep"
        model.held_bytes = 0
        model.must_go = False
