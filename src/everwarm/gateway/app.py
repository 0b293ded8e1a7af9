"""The HTTP application: routes, guard, and the life of the engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from everwarm.errors import EverwarmError, Forbidden
from everwarm.gateway.access.auth import with_roles
from everwarm.gateway.access.limits import AdmissionLimits
from everwarm.gateway.access.middleware import Guard, error_response
from everwarm.gateway.admin.cache_api import Cache, cache_routes
from everwarm.gateway.admin.metrics import Metrics
from everwarm.gateway.admin.models import models_routes
from everwarm.gateway.admin.request_log import log_request
from everwarm.gateway.admin.status import status_routes
from everwarm.gateway.admin.traces import traces_to
from everwarm.gateway.admin.web_ui import page_routes
from everwarm.gateway.anthropic.routes import anthropic_routes
from everwarm.gateway.http.sse import DisconnectWatch
from everwarm.gateway.images.image_download import RemotePolicy
from everwarm.gateway.images.image_loader import ImageLimits, ImageLoader
from everwarm.gateway.llamaserver.routes import llama_routes
from everwarm.gateway.ollama.routes import ollama_routes
from everwarm.gateway.openai.routes import openai_routes
from everwarm.gateway.responses.response_store import ResponseStore
from everwarm.gateway.responses.routes import Responses
from everwarm.gateway.service import Service
from everwarm.gateway.settings import ServerSettings
from everwarm.router.pool import Pool
from everwarm.state.store.slot_names import sweep_all

PICTURES = ImageLimits(max_pixels_per_request=64_000_000)  # they travel to the engine in one frame


@dataclass(frozen=True, slots=True)
class Gateway:
    """The application, and how to let go of it: admit nothing new, let what runs finish, stop the engine."""

    app: ASGIApp
    drain: Callable[[], Awaitable[None]]
    service: Service
    reload_keys: Callable[[], None]


def build_gateway(pool: Pool, settings: ServerSettings) -> Gateway:
    service = Service(
        pool, settings, AdmissionLimits(settings), Metrics(), pictures=ImageLoader(PICTURES, _remote(settings))
    )
    service.limits.backlogs = lambda: pool.backlogs()  # asked only when somebody is refused
    access = settings.access()
    traces = traces_to(settings.otel_endpoint) if settings.otel_endpoint else None
    service.recent.ended = [log_request, *([] if traces is None else [traces.ended])]
    kept = ResponseStore(settings.state_dir)
    responses, cache = Responses(service, kept), Cache(service, kept)
    routes = [
        *page_routes(),
        *status_routes(service),
        *openai_routes(service),
        *responses.routes(),
        *models_routes(service),
        *llama_routes(service),
        *ollama_routes(service),
        *anthropic_routes(service),
        *cache_routes(cache),
    ]

    def reload_keys() -> None:
        if access.reload():
            cache.hub.let_everybody_go()  # they come back with the keys that they have

    async def drain() -> None:
        service.limits.is_draining = True
        cache.hub.close()
        await pool.stop(settings.grace_s)
        await service.pictures.close()
        service.bodies.close()
        responses.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        if settings.slot_save_path is not None:
            await asyncio.to_thread(sweep_all, Path(settings.slot_save_path))
        pool.start()
        async with service.lag.watched():
            yield
        await drain()

    app = Starlette(routes=with_roles(routes), lifespan=lifespan, exception_handlers=_handlers())
    return Gateway(Guard(app, settings, access), drain, service, reload_keys)


def _handlers() -> dict[type[Exception], Callable[..., Awaitable[Response]]]:
    return {
        EverwarmError: _on_error,
        HTTPException: _on_http_error,
        DisconnectWatch: _on_hangup,
        Exception: _on_accident,
    }


def _remote(settings: ServerSettings) -> RemotePolicy | None:
    return RemotePolicy(settings.picture_hosts) if settings.picture_hosts else None


async def _on_error(request: Request, error: EverwarmError) -> Response:
    return error_response(error, request.state.request_id, request.url.path)


async def _on_accident(request: Request, _error: Exception) -> Response:
    return error_response(EverwarmError("internal error"), request.state.request_id, request.url.path)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    message = {404: f"there is no {request.url.path} here", 405: "that method is not allowed here"}
    wire = Forbidden(error.status_code, "not_found" if error.status_code == 404 else "invalid_request_error", "")
    wire.args = (message.get(error.status_code, str(error.detail)),)
    return error_response(wire, request.state.request_id, request.url.path)


async def _on_hangup(_request: Request, _error: DisconnectWatch) -> Response:
    return Response(status_code=499)  # nobody will read it
