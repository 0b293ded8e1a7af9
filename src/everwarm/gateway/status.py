"""Whether the server is alive and ready, and its numbers."""

from __future__ import annotations

import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine import messages as m
from everwarm.errors import EngineStopped
from everwarm.gateway.metrics import CONTENT_TYPE
from everwarm.gateway.replies import json_response
from everwarm.gateway.service import Service
from everwarm.router.plan import Phase
from everwarm.router.supervisor import State, Supervisor


def status_routes(service: Service) -> list[Route]:
    status = Status(service)
    return [
        Route("/health", status.health, methods=["GET"]),
        Route("/v1/health", status.health, methods=["GET"]),
        Route("/ready", status.ready, methods=["GET"]),
        Route("/metrics", status.metrics, methods=["GET"]),
    ]


class Status:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _request: Request) -> Response:
        """The gateway is alive; whether the engine is, ``/ready`` says."""
        return json_response({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """Of one model: whether it can be used now. With several, whoever is needed is loaded: the server is ready."""
        standings = self._service.pool.standings()
        is_ready, about = True, {"status": "ready", "models": len(standings)}
        if len(standings) == 1:
            (one,) = standings
            sleeps = one.status.phase is Phase.ASLEEP and one.status.reason is None  # it wakes when it is asked for
            is_ready = one.supervisor.is_ready or (sleeps and not self._service.pool.is_stopping)
            about = _condition(one.supervisor)
        return json_response(about, 200 if is_ready else 503, {} if is_ready else {"retry-after": "1"})

    async def metrics(self, request: Request) -> Response:
        """The gateway's own, and the engine's of one model: the only one, or the one that is named."""
        pool, name = self._service.pool, request.query_params.get("model")
        standings, lag = pool.standings(), self._service.lag.take_most()
        gauges = {
            "everwarm_models": ("Models that can be asked for", float(len(standings))),
            "everwarm_loop_lag_most_seconds": (
                "The longest lag of the gateway's event loop since this was asked last",
                lag.wall_s,
            ),
            "everwarm_loop_lag_most_busy_seconds": (
                "The same, as much of it as the gateway was computing and not waiting for a processor",
                lag.busy_s,
            ),
            "everwarm_models_loaded": ("Models in memory", float(sum(s.supervisor.is_running for s in standings))),
        }
        engine: dict[str, Any] = {}
        counters: dict[str, tuple[str, float]] = {}
        if name is not None or pool.catalog.find(None) is not None:
            supervisor = pool.find(name).supervisor
            with contextlib.suppress(EngineStopped):  # it may be put to sleep just now
                engine = await supervisor.ask(m.AskStats) if supervisor.is_ready else {}
            gauges |= _engine_gauges(supervisor)
            counters["everwarm_engine_restarts"] = ("Times the engine was started again", supervisor.n_restarts)
        return Response(self._service.metrics.render(engine, gauges, counters), media_type=CONTENT_TYPE)


def _condition(supervisor: Supervisor) -> dict[str, Any]:
    state = "stalled" if supervisor.state is State.READY else supervisor.state.value
    return {
        "status": "ready" if supervisor.is_ready else state,
        "loaded": supervisor.loaded,
        "restarts": supervisor.n_restarts,
        "reason": supervisor.reason,
    }


def _engine_gauges(supervisor: Supervisor) -> dict[str, tuple[str, float]]:
    load = supervisor.load
    return {
        "llamacpp:requests_processing": ("Requests being read or written", float(load.n_running if load else 0)),
        "llamacpp:requests_deferred": ("Requests waiting for a slot", float(load.n_queued if load else 0)),
        "everwarm_engine_ready": ("1 if the engine is ready", float(supervisor.is_ready)),
    }
