"""Health, readiness and metrics of the server.

``/health`` is open to callers without a key, so it names no file, no folder and no single model of many.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.errors import EngineStopped, NotSupported
from everwarm.gateway.admin.metrics import CONTENT_TYPE, LoopLag, Metrics
from everwarm.gateway.http.sse import json_response
from everwarm.router.pool import Pool, Served
from everwarm.router.supervise.restart_policy import CAUSES
from everwarm.router.supervise.supervisor import State
from everwarm.types import Json

# llama-server's names of what the engine counts
_DRAFTS = {
    "llamacpp:spec_decode_num_draft_tokens": "n_drafted",
    "llamacpp:spec_decode_num_accepted_tokens": "n_draft_accepted",
    "llamacpp:spec_decode_num_drafts": "n_verified",
}


class Status:
    def __init__(self, pool: Pool, metrics: Metrics, lag: LoopLag, *, shows_metrics: bool = True) -> None:
        self._pool = pool
        self._metrics = metrics
        self._shows_metrics = shows_metrics
        self._started_at = time.time()
        self._lag = lag

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/v1/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def health(self, _request: Request) -> Response:
        """Always 200: the gateway is alive. The body has the state of each component; ``/ready`` says whether to send
        requests."""
        return json_response({"status": "ok", "components": components(self._pool.all_served())})

    async def ready(self, _request: Request) -> Response:
        """With one model: whether it can be used now. With several the server is ready, because it loads them on demand."""
        all_served = self._pool.all_served()
        is_ready = True
        wait_s = None
        about = {"status": "ready", "models": len(all_served)}
        if len(all_served) == 1:
            (one,) = all_served
            sleeps = one.status.phase == "asleep" and one.status.reason is None  # it is loaded on demand
            is_ready = one.supervisor.is_ready or (sleeps and not self._pool.is_stopping)
            wait_s = one.retry_in_s or one.supervisor.back_in_s
            about = _condition(one)
        headers = {} if is_ready else {"retry-after": str(math.ceil(wait_s or 0.0) or 1)}
        return json_response(about, 200 if is_ready else 503, headers)

    async def metrics(self, request: Request) -> Response:
        """The gateway's metrics, and the engine's metrics of one model: the only one, or the named one."""
        if not self._shows_metrics:
            raise NotSupported("this server does not show its metrics; start it without --no-metrics")
        pool = self._pool
        name = request.query_params.get("model")
        all_served = pool.all_served()
        gauges = {
            "everwarm_models": ("Models that requests can name", float(len(all_served))),
            "everwarm_loop_lag_most_seconds": (
                "The longest lag of the gateway's event loop since the last scrape",
                self._lag.most_s,
            ),
            "everwarm_loop_lag_most_busy_seconds": (
                "The part of that lag in which the gateway was computing, not waiting for a processor",
                self._lag.most_busy_s,
            ),
            "everwarm_models_loaded": ("Models in memory", float(sum(s.supervisor.is_running for s in all_served))),
        }
        self._lag.forget_most()
        engine: dict[str, Any] = {}
        counters: dict[str, tuple[str, float | dict[str, float]]] = {}
        if name is not None or pool.catalog.find(None) is not None:
            served = pool.look(name)
            supervisor = served.supervisor
            with contextlib.suppress(EngineStopped):  # it may be unloaded at this moment
                engine = await supervisor.ask(m.Inspect, what="counts") if supervisor.is_ready else {}
            gauges |= _engine_gauges(served, engine)
            counters["everwarm_engine_restarts"] = ("Times the engine was started again", supervisor.n_restarts)
            by_cause: dict[str, float] = {cause: float(supervisor.died_of[cause]) for cause in CAUSES}
            counters["everwarm_engine_deaths"] = ("Times the engine died, by cause", by_cause)
        for name, key in _DRAFTS.items():
            counters[name] = ("Under llama-server's name", float(engine.get(key, 0)))
        headers = {"process-start-time-unix": str(int(self._started_at))}
        return Response(self._metrics.render(engine, gauges, counters), headers=headers, media_type=CONTENT_TYPE)


def _condition(one: Served) -> dict[str, Any]:
    supervisor = one.supervisor
    state = "stalled" if supervisor.state == "ready" else supervisor.state
    return {
        "status": "ready" if supervisor.is_ready else state,
        "loaded": supervisor.loaded,
        "restarts": supervisor.n_restarts,
        "reason": one.reason,
        "last_restart": supervisor.last_restart,
        "attempts": supervisor.deaths.n_given_up,
        "retry_in_s": None if one.retry_in_s is None else round(one.retry_in_s, 1),
    }


def _engine_gauges(served: Served, counts: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """``counts``: the engine's, as of now. Where they lack a number, it is from the last heartbeat."""
    supervisor = served.supervisor
    load = served.supervisor.load
    n_running = counts.get("n_running", load.n_running if load else 0)
    n_queued = counts.get("n_queued", load.n_queued if load else 0)
    waits_s = served.retry_in_s or 0.0
    return {
        "llamacpp:requests_processing": ("Requests being read or written", float(n_running)),
        "llamacpp:requests_deferred": ("Requests waiting for a slot", float(n_queued)),
        "everwarm_engine_ready": ("1 if the engine is ready", float(supervisor.is_ready)),
        "everwarm_engine_failed_tries": (
            "Failed attempts in a row to start the engine again",
            float(supervisor.deaths.n_given_up),
        ),
        "everwarm_engine_retry_seconds": ("Seconds until the next attempt to start it; 0: none is planned", waits_s),
    }


ComponentState = Literal["ok", "asleep", "starting", "restarting", "stalled", "degraded", "down", "stopped"]

_STATES: dict[State, ComponentState] = {
    "starting": "starting",
    "ready": "stalled",  # running, but without a recent heartbeat
    "restarting": "restarting",
    "unhealthy": "down",
    "stopped": "stopped",
}


def components(all_served: Sequence[Served]) -> dict[str, Json]:
    """The engine, and every tier that is degraded."""
    found = {"engine": engine_of(all_served[0]) if len(all_served) == 1 else engines_of(all_served)}
    shrunk = [n for each in all_served if (n := each.supervisor.shrunk_to) is not None]
    if shrunk:
        lack = "an engine died for lack of memory, so the RAM tier keeps less until the server is started again"
        found["ram"] = _component("degraded", lack, budget_bytes=min(shrunk))
    loads = (each.supervisor.load for each in all_served)
    for tier, reason in ((tier, why) for load in loads if load is not None for tier, why in load.degraded.items()):
        found[tier] = _component("degraded", f"{without_paths(reason)} (GET /cache has all of it)")
    return found


def without_paths(text: str) -> str:
    return re.sub(r"\S*/\S*", "…", text)


def engine_of(one: Served) -> Json:
    supervisor = one.supervisor
    if supervisor.is_ready:
        return _component("ok", **_tries(one))
    if one.status.phase == "asleep" and one.status.reason is None:
        return _component("asleep", **_tries(one))
    return _component(_STATES[supervisor.state], one.reason, **_tries(one))


def engines_of(all_served: Sequence[Served]) -> Json:
    states = Counter(engine_of(each)["state"] for each in all_served)
    n_down = sum(each.status.reason is not None for each in all_served)
    if n_down == 0:
        return _component("ok", models=dict(states))
    reason = f"{n_down} of {len(all_served)} models failed; GET /v1/models says why"
    return _component("degraded", reason, models=dict(states))


def _component(state: ComponentState, reason: str | None = None, **more: Any) -> Json:
    """One part of the server. ``more``: what only this part has."""
    return {"state": state, "reason": reason, **more}


def _tries(one: Served) -> Json:
    """``attempts``: failed attempts in a row to start it again; ``retry_in_s``: seconds until the next."""
    wait_s = one.retry_in_s
    return {
        "restarts": one.supervisor.n_restarts,
        "attempts": one.supervisor.deaths.n_given_up,
        "retry_in_s": None if wait_s is None else round(wait_s, 1),
    }
