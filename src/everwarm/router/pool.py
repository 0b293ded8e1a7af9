"""Many models behind one address: requests lease them, and they are loaded and unloaded as needed.

Carries out what ``plan`` decides, with one supervisor per model. When an engine is stopped, its supervisor stays and keeps
the RAM tier, so a model that is loaded again still has its conversations cached. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from everwarm.engine.process.messages import Backlog
from everwarm.errors import BadRequest, EngineStopped, EverwarmError, ModelFileError, NotFound
from everwarm.router import plan
from everwarm.router.catalog.catalog import Catalog, ModelSpec
from everwarm.router.plan import ModelStatus, Planner, PoolLimits
from everwarm.router.supervise.restart_policy import RestartLimits
from everwarm.router.supervise.supervisor import Supervisor

log = logging.getLogger("everwarm.router")

TICK_S = 1.0
REFRESH_S = 1.0  # the catalog is not read again sooner
_REMOVED = ModelStatus("asleep", 0, 0, 0.0, None)


@dataclass(frozen=True, slots=True)
class Retry:
    """When a failed model is tried again automatically (None: only on request), and when a request may first try it. Clock
    times are monotonic ones."""

    at: float | None
    not_before: float
    at_time: float | None = None  # the first as a time of day, for people


@dataclass(slots=True, eq=False)
class Served:
    """A model of the catalog and its engine, whether that runs or not."""

    spec: ModelSpec
    supervisor: Supervisor
    _planner: Planner
    n_loads: int = 0
    retry: Retry | None = None

    @property
    def status(self) -> ModelStatus:
        return self._planner.status(self.id) or _REMOVED

    @property
    def retry_in_s(self) -> float | None:
        """Seconds until it is tried again automatically; None: it is not."""
        at = None if self.retry is None else self.retry.at
        return None if at is None else max(0.0, at - time.monotonic())

    @property
    def reason(self) -> str | None:
        """Why its engine does not run, or did not before it was tried again just now; for clients."""
        reason = self.supervisor.reason or self.supervisor.last_failure
        return None if reason is None else _without_paths(reason, self.spec)

    @property
    def id(self) -> str:
        return self.spec.id


@dataclass(slots=True, eq=False)
class Lease:
    """The right to use a model until the lease ends. Wait for ``ready`` first."""

    _pool: Pool
    _id: str
    _granted: asyncio.Future[None]

    @property
    def served(self) -> Served:
        """The model as it is now: it may have been replaced during the wait."""
        return self._pool._served[self._id]

    async def ready(self) -> Served:
        await self._granted
        return self.served

    async def waiting(self, every_s: float) -> AsyncIterator[float]:
        """How much of the model is loaded, every so often until it is ready."""
        while not self._granted.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._granted), every_s)
                break
            yield self.served.supervisor.loaded
        await self._granted


@dataclass(slots=True)
class Pool:
    read_catalog: Callable[[], Catalog]
    limits: PoolLimits
    autoload: bool = True  # False: only POST /models/load loads
    restart_limits: RestartLimits | None = None
    on_loading: Callable[[str, float], None] | None = None
    catalog: Catalog = field(init=False)
    _served: dict[str, Served] = field(init=False, default_factory=dict)
    _leases: dict[int, Lease] = field(init=False, default_factory=dict)
    _ids: Iterator[int] = field(init=False, default_factory=lambda: itertools.count(1))
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _planner: Planner = field(init=False)
    _read_at: float = field(init=False, default=0.0)
    has_started: bool = field(init=False, default=False)
    is_stopping: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.catalog = self.read_catalog()
        self._planner = Planner(self.limits, self.catalog.specs.values())
        self._served = {spec.id: self._new(spec) for spec in self.catalog.specs.values()}

    def _new(self, spec: ModelSpec) -> Served:
        def report(done: float) -> None:
            if self.on_loading is not None:
                self.on_loading(spec.id, done)

        settings = spec.settings
        if settings.mmproj is None and spec.mmproj is not None:
            settings = replace(settings, mmproj=str(spec.mmproj))
        supervisor = Supervisor(str(spec.path), settings, limits=self.restart_limits, on_loading=report)
        return Served(spec, supervisor, self._planner)

    def start(self) -> None:
        self._spawn(self._tick())
        for spec in self.catalog.specs.values():
            if spec.load_on_start:
                self._act(self._planner.request_load(spec.id, time.monotonic()))
        self.has_started = True

    async def stop(self, grace_s: float) -> None:
        """Let running requests finish within ``grace_s``; then every engine saves what is worth keeping and ends."""
        self.is_stopping = True
        for lease in list(self._leases.values()):
            if not lease._granted.done():
                lease._granted.set_exception(EngineStopped("the server is stopping"))
        await asyncio.gather(*(served.supervisor.stop(grace_s) for served in self._served.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for served in self._served.values():
            served.supervisor.forget()

    # borrowing

    @contextlib.contextmanager
    def lease(self, name: str | None) -> Iterator[Lease]:
        """Borrow a model by any of its names; leaving ends the lease, also one that was still waiting."""
        served = self.find(name)
        self._require_tried(served)
        if self.is_stopping:
            raise EngineStopped("the server is stopping")
        if not self.autoload and not self._is_there(served.id):
            raise BadRequest(f"the model {served.id!r} is not loaded; load it with POST /models/load")
        id = next(self._ids)
        lease = Lease(self, served.id, asyncio.get_running_loop().create_future())
        self._leases[id] = lease
        self._act(self._planner.want(id, served.id, time.monotonic()))
        try:
            yield lease
        finally:
            del self._leases[id]
            lease._granted.cancel()
            self._act(self._planner.leave(id, time.monotonic()))

    def _require_tried(self, served: Served) -> None:
        """A request may start a failed model, unless that was tried a moment ago."""
        now = time.monotonic()
        retry = served.retry
        if retry is not None and now < retry.not_before and not served.supervisor.is_running:
            wait_s = math.ceil(min(retry.not_before, retry.at or retry.not_before) - now)
            raise EngineStopped(f"{served.reason}; it is tried again in {max(1, wait_s)} s")

    def _is_there(self, id: str) -> bool:
        """Loaded or being loaded, and not on its way out."""
        status = self._planner.status(id)
        return status is not None and status.phase in ("loading", "ready")

    def find(self, name: str | None) -> Served:
        """The model of that name. An unknown name may be that of a new file, so the catalog is read again."""
        if self.catalog.find(name) is None:
            self.refresh()
        return self.look(name)

    def look(self, name: str | None) -> Served:
        """Finds a model without reading the catalog again."""
        spec = self.catalog.find(name)
        if spec is None:
            names = ", ".join(sorted(self.catalog.specs)) or "none"
            problem = "no model was named" if not name else f"there is no model {name[:100]!r}"
            raise NotFound(f"{problem}; there are: {names}{self._broken(name)}", "model_not_found")
        return self._served[spec.id]

    def _broken(self, name: str | None) -> str:
        broken = self.catalog.find_broken(name)
        return f" ({broken.id}: {broken.reason})" if broken is not None else ""

    # managing

    def all_served(self) -> list[Served]:
        """Every model that requests can name."""
        return [served for served in self._served.values() if self._planner.status(served.id) is not None]

    def backlogs(self) -> list[Backlog]:
        """What a new request would wait for, of every engine that has reported it."""
        loads = (served.supervisor.load for served in self._served.values())
        return [load.backlog for load in loads if load is not None and load.backlog is not None]

    def load(self, name: str) -> None:
        served = self.find(name)
        served.retry = None
        served.supervisor.deaths.forgive()
        self._act(self._planner.request_load(served.id, time.monotonic()))

    def unload(self, name: str) -> None:
        served = self.find(name)
        served.retry = None  # it is not wanted any more
        self._act(self._planner.request_unload(served.id, time.monotonic()))

    def refresh(self, *, now: bool = False) -> bool:
        """Read the catalog again, unless that was done a moment ago: files may come and go."""
        if not now and time.monotonic() - self._read_at < REFRESH_S:
            return False
        self._read_at = time.monotonic()
        try:
            self.catalog, old = self.read_catalog(), self.catalog
        except (BadRequest, ModelFileError, OSError) as error:
            log.warning("the models stay as they were: %s", error)
            return False
        for id in old.specs.keys() - self.catalog.specs.keys():
            self._act(self._planner.remove(id, time.monotonic()))
            if not self._served[id].supervisor.is_running:
                self._renew(id)
        for id, spec in self.catalog.specs.items():
            if old.specs.get(id) != spec:
                self._replace(id, spec)
        return True

    def _replace(self, id: str, spec: ModelSpec) -> None:
        """A model that is new, or whose file or settings changed. The old engine stops when it is idle."""
        before = self._served.get(id)
        if before is None or not before.supervisor.is_running:
            self._renew(id)
        else:
            self._act(self._planner.request_unload(id, time.monotonic()))  # requests that wait for it get the new one
        self._act(self._planner.add(spec, time.monotonic()))

    def _renew(self, id: str) -> None:
        """Replace a stopped model by what the catalog has now; its old RAM tier is useless."""
        before = self._served.pop(id, None)
        spec = self.catalog.specs.get(id)
        if before is not None:
            before.supervisor.forget()
        if spec is not None:
            self._served[id] = self._new(spec)

    # effects

    def _act(self, effects: list[plan.Effect]) -> None:
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: plan.Effect) -> None:
        match effect:
            case plan.Load() | plan.Unload() if self.is_stopping:
                pass
            case plan.Load(model=id):
                self._served[id].supervisor.start()
                self._spawn(self._live(self._served[id]))
            case plan.Unload(model=id):
                self._spawn(self._put_to_sleep(self._served[id]))
            case plan.GrantLease(request_id=id):
                lease = self._leases.get(id)
                if lease is not None and not lease._granted.done():
                    lease._granted.set_result(None)
            case plan.Refuse(request_id=id, code=code, message=message):
                lease = self._leases.get(id)
                if lease is not None and not lease._granted.done():
                    lease._granted.set_exception(_refusal(code, message))
                    lease._granted.exception()  # marks it as retrieved, in case the request is gone

    async def _live(self, served: Served) -> None:
        """Follows one engine from its start until it is stopped or given up. The supervisor handles crashes in
        between."""
        supervisor = served.supervisor
        began = time.monotonic()
        served.n_loads += 1
        life = served.n_loads
        state = await supervisor.until("ready")
        was_ready = state == "ready"
        if was_ready:
            log.info("%s was loaded in %.3f s", served.id, time.monotonic() - began)
            served.retry = None
            self._act(self._planner.loaded(served.id, time.monotonic()))
            state = await supervisor.until()
        if state == "unhealthy":
            await supervisor.ended()
            if supervisor.state != "unhealthy" or served.n_loads != life:
                return  # it was stopped meanwhile, and that is reported elsewhere
            reason = served.reason or "unknown"
            self._renew_if_changed(served)
            self._plan_retry(served, by_itself=was_ready or served.spec.pinned or served.spec.load_on_start)
            self._act(self._planner.load_failed(served.id, reason, time.monotonic()))

    # models that failed

    def _plan_retry(self, failed: Served, *, by_itself: bool) -> None:
        """A model that was in use or is to stay loaded is tried again for ever, after longer and longer waits; any other
        one with the next request."""
        now = time.monotonic()
        deaths = failed.supervisor.deaths
        wait_s = deaths.retry_s(random.random())
        gap_s = min(wait_s, deaths.request_gap_s(gave_reason=failed.supervisor.gave_reason))
        served = self._served.get(failed.id)  # it may have been renewed
        if served is not None:
            served.retry = Retry(None, now + gap_s)
            if by_itself:
                served.retry = Retry(now + wait_s, now + gap_s, time.time() + wait_s)
                self._spawn(self._retry_later(served, served.retry, wait_s))

    async def _retry_later(self, served: Served, retry: Retry, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        status = self._planner.status(served.id)
        id = served.id
        is_current = self._served.get(id) is served and served.retry is retry
        if not is_current or status is None or status.phase != "asleep" or self.is_stopping:
            return
        log.warning("%s is tried again (try %d)", id, served.supervisor.deaths.n_given_up)
        now = time.monotonic()
        ttl_s = served.spec.ttl_s
        if served.spec.pinned:
            self._act(self._planner.request_load(id, now))
        elif ttl_s == 0.0 or now - status.last_used < ttl_s:
            self._act(self._planner.retry_load(id, now))
        if served.retry is retry and not self._is_there(id):
            served.retry = None  # others have its place, or its time to live is over: the next request loads it

    async def _put_to_sleep(self, served: Served) -> None:
        began = time.monotonic()
        await served.supervisor.stop(0.0)
        log.info("%s was put to sleep in %.3f s", served.id, time.monotonic() - began)
        self._renew_if_changed(served)
        self._act(self._planner.stopped(served.id, time.monotonic()))

    def _renew_if_changed(self, served: Served) -> None:
        if served.spec != self.catalog.specs.get(served.id):
            self._renew(served.id)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._act(self._planner.tick(time.monotonic()))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _without_paths(reason: str, spec: ModelSpec) -> str:
    """Clients see the name of a file, not its folder."""
    files = [spec.path, *(Path(name) for name, _ in spec.settings.model.lora), *filter(None, (spec.mmproj,))]
    for path in files:
        reason = reason.replace(str(path), path.name).replace(str(path.absolute()), path.name)
    return reason


def _refusal(code: plan.RefusalCode, message: str) -> EverwarmError:
    if code == "model_not_found":
        return NotFound(message, code)
    has_no_room = code in ("model_too_large", "no_room")
    return EngineStopped(message, code="no_room_for_model") if has_no_room else EngineStopped(message)
