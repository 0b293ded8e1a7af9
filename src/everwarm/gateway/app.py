"""The HTTP application: routes, guard, and the life of the engine behind it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from everwarm import __version__
from everwarm.engine import messages as m
from everwarm.errors import EngineStopped, EverwarmError, Forbidden
from everwarm.gateway.cache import Cache
from everwarm.gateway.guard import Guard, error_response
from everwarm.gateway.limits import Limits
from everwarm.gateway.llamaserver import LlamaServer
from everwarm.gateway.metrics import CONTENT_TYPE, Metrics
from everwarm.gateway.models import Models
from everwarm.gateway.openai import OpenAI
from everwarm.gateway.pictures import PictureLimits, Pictures
from everwarm.gateway.remote import RemotePolicy
from everwarm.gateway.replies import Hangup, json_response
from everwarm.gateway.service import Service
from everwarm.gateway.settings import ServerSettings
from everwarm.router.plan import Phase
from everwarm.router.pool import Pool
from everwarm.router.supervisor import State, Supervisor

PICTURES = PictureLimits(max_pixels_per_request=64_000_000)  # they travel to the engine in one frame


@dataclass(frozen=True, slots=True)
class Gateway:
    """The application, and how to let go of it: admit nothing new, let what runs finish, stop the engine."""

    app: ASGIApp
    drain: Callable[[], Awaitable[None]]


def build_gateway(pool: Pool, settings: ServerSettings) -> Gateway:
    service = Service(pool, settings, Limits(settings), Metrics(), pictures=Pictures(PICTURES, _remote(settings)))
    cache = Cache(service)
    openai, llama, models, state = OpenAI(service), LlamaServer(service), Models(service), Status(service)
    routes = [
        Route("/", state.home, methods=["GET"]),
        Route("/health", state.health, methods=["GET"]),
        Route("/v1/health", state.health, methods=["GET"]),
        Route("/ready", state.ready, methods=["GET"]),
        Route("/metrics", state.metrics, methods=["GET"]),
        Route("/v1/chat/completions", openai.chat, methods=["POST"]),
        Route("/chat/completions", openai.chat, methods=["POST"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/models", models.list, methods=["GET"]),
        Route("/models/load", models.load, methods=["POST"]),
        Route("/models/unload", models.unload, methods=["POST"]),
        Route("/completion", llama.completion, methods=["POST"]),
        Route("/completions", llama.completion, methods=["POST"]),
        Route("/tokenize", llama.tokenize, methods=["POST"]),
        Route("/detokenize", llama.detokenize, methods=["POST"]),
        Route("/apply-template", llama.apply_template, methods=["POST"]),
        Route("/props", llama.props, methods=["GET"]),
        Route("/slots", llama.slots, methods=["GET"]),
        Route("/slots/{id}", llama.slot_action, methods=["POST"]),
        *_cache_routes(cache),
    ]

    async def drain() -> None:
        service.limits.is_draining = True
        cache.hub.close()
        await pool.stop(settings.grace_s)
        await service.pictures.close()

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        pool.start()
        yield
        await drain()

    handlers = {
        EverwarmError: _on_error,
        HTTPException: _on_http_error,
        Hangup: _on_hangup,
        Exception: _on_accident,
    }
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)  # type: ignore[arg-type]
    return Gateway(Guard(app, settings), drain)


def _cache_routes(cache: Cache) -> list[Route]:
    return [
        Route("/cache", cache.overview, methods=["GET"]),
        Route("/cache", cache.drop_all, methods=["DELETE"]),
        Route("/cache/tree", cache.tree, methods=["GET"]),
        Route("/cache/requests", cache.requests, methods=["GET"]),
        Route("/cache/events", cache.events, methods=["GET"]),
        Route("/cache/nodes/{id}", cache.drop, methods=["DELETE"]),
        Route("/cache/nodes/{id}/pin", cache.pin, methods=["POST"]),
        Route("/cache/nodes/{id}/unpin", cache.unpin, methods=["POST"]),
    ]


def _remote(settings: ServerSettings) -> RemotePolicy | None:
    return RemotePolicy(settings.picture_hosts) if settings.picture_hosts else None


class Status:
    """Whether the server is alive and ready, and its numbers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def home(self, _request: Request) -> Response:
        return json_response({"name": "everwarm", "version": __version__, "docs": "/v1/models, /v1/chat/completions"})

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
        standings = pool.standings()
        gauges = {
            "everwarm_models": ("Models that can be asked for", float(len(standings))),
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


async def _on_error(request: Request, error: EverwarmError) -> Response:
    return error_response(error, request.state.request_id)


async def _on_accident(request: Request, _error: Exception) -> Response:
    return error_response(EverwarmError("internal error"), request.state.request_id)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    message = {404: f"there is no {request.url.path} here", 405: "that method is not allowed here"}
    wire = Forbidden(error.status_code, "not_found" if error.status_code == 404 else "invalid_request_error", "")
    wire.args = (message.get(error.status_code, str(error.detail)),)
    return error_response(wire, request.state.request_id)


async def _on_hangup(_request: Request, _error: Hangup) -> Response:
    return Response(status_code=499)  # nobody will read it
