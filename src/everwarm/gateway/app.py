"""The HTTP application: all its parts are built and connected here, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from everwarm.errors import BadRequest, EverwarmError, HttpError, NotFound
from everwarm.gateway.access.auth import with_roles
from everwarm.gateway.access.limits import AdmissionLimits
from everwarm.gateway.access.middleware import Guard, error_response
from everwarm.gateway.admin.cache_api import CacheApi
from everwarm.gateway.admin.cache_plan import CachePlanner
from everwarm.gateway.admin.metrics import LoopLag, Metrics
from everwarm.gateway.admin.models import Models, Pulls
from everwarm.gateway.admin.request_log import RequestLog, log_request
from everwarm.gateway.admin.status import Status
from everwarm.gateway.admin.traces import send_traces
from everwarm.gateway.admin.web_ui import web_ui_routes
from everwarm.gateway.anthropic.routes import Anthropic
from everwarm.gateway.embeddings import Embeddings
from everwarm.gateway.http.request_body import BodyReader
from everwarm.gateway.http.sse import ClientGone
from everwarm.gateway.images.image_download import ImageDownloader
from everwarm.gateway.images.image_loader import ImageLimits, ImageLoader
from everwarm.gateway.llamaserver.routes import LlamaServer
from everwarm.gateway.ollama.models import DerivedModels
from everwarm.gateway.ollama.routes import Ollama
from everwarm.gateway.openai.routes import OpenAI
from everwarm.gateway.responses.background_responses import BackgroundResponses
from everwarm.gateway.responses.routes import Responses
from everwarm.gateway.rewrite.volatile_lines import VolatileLines
from everwarm.gateway.serving.prewarm import NextTurnPrewarmer
from everwarm.gateway.serving.replies import Replies
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.gateway.serving.request_preparer import RequestPreparer
from everwarm.gateway.settings import ServerSettings
from everwarm.gateway.stores import ReplyStore, ResponseStore
from everwarm.router.pool import Pool
from everwarm.state.store.slot_names import sweep_all

IMAGES = ImageLimits(max_pixels_per_request=64_000_000)  # they are sent to the engine in one frame
BODIES_AT_ONCE = 4  # of the largest size


@dataclass(frozen=True, slots=True)
class Gateway:
    """The application. ``drain`` admits no new requests, lets running ones finish and stops the engines."""

    app: ASGIApp
    drain: Callable[[], Awaitable[None]]
    request_log: RequestLog
    reload_keys: Callable[[], None]


def build_gateway(pool: Pool, settings: ServerSettings) -> Gateway:
    metrics, request_log = Metrics(), RequestLog()
    lag = LoopLag(metrics.lagged)
    limits = AdmissionLimits(settings, lambda: pool.backlogs())
    bodies = BodyReader(BODIES_AT_ONCE * settings.max_body_bytes)
    images = ImageLoader(IMAGES, ImageDownloader(settings.picture_hosts) if settings.picture_hosts else None)
    store, remembered = ResponseStore(settings.state_dir), ReplyStore(settings.state_dir)
    prewarmer = NextTurnPrewarmer(limits, is_on=settings.prewarm)
    gate = RequestGate(pool, limits, bodies, settings.request_timeout_s or None, settings.strict)
    volatile = VolatileLines()
    preparer = RequestPreparer(settings, images, bodies, metrics, remembered, volatile)
    replies = Replies(pool, gate, preparer, request_log, metrics, prewarmer)
    background = BackgroundResponses()
    cache = CacheApi(pool, gate, request_log, prewarmer, store, remembered, volatile, settings, background.discard)
    pulls = Pulls(pool, allowed=settings.allow_pull)
    access = settings.access()
    request_log.ended.append(log_request)
    end_traces = send_traces(settings.otel_endpoint, request_log) if settings.otel_endpoint else None
    routes = [
        *(web_ui_routes(gate) if settings.web_ui else ()),
        *Status(pool, metrics, lag, shows_metrics=settings.shows_metrics).routes(),
        *(openai := OpenAI(pool, gate, replies, store)).routes(),
        *Responses(pool, gate, replies, preparer, store, background).routes(),
        *Models(pool, gate, pulls).routes(),
        *(llama_server := LlamaServer(pool, gate, replies, preparer, settings)).routes(),
        *Embeddings(pool, gate, settings.embd_normalize, metrics).routes(),
        *openai.stored_routes(),
        *Ollama(pool, gate, replies, pulls, llama_server.fill_in, DerivedModels(pool, settings.state_dir)).routes(),
        *Anthropic(pool, gate, replies, preparer).routes(),
        *cache.routes(),
        *CachePlanner(pool, gate, preparer, replies, settings.pin_quota).routes(),
    ]

    def reload_keys() -> None:
        if access.reload():
            cache.hub.disconnect_all()  # they reconnect, and their keys are checked again

    async def drain() -> None:
        limits.is_draining = True
        cache.hub.close()
        await pool.stop(settings.grace_s)
        await asyncio.gather(background.close(), images.close())
        for each in (bodies, store, remembered, pulls):
            each.close()
        if end_traces is not None:
            await asyncio.to_thread(end_traces)

    lifespan = _lifespan(pool, settings, lag, drain)
    app = Starlette(routes=with_roles(routes), lifespan=lifespan, exception_handlers=_handlers())
    return Gateway(Guard(app, settings, access), drain, request_log, reload_keys)


def _lifespan(
    pool: Pool, settings: ServerSettings, lag: LoopLag, drain: Callable[[], Awaitable[None]]
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        if settings.slot_save_path is not None:
            await asyncio.to_thread(sweep_all, Path(settings.slot_save_path))
        pool.start()
        async with lag.watched():
            yield
        await drain()

    return lifespan


def _handlers() -> dict[type[Exception], Callable[..., Awaitable[Response]]]:
    return {
        EverwarmError: _on_error,
        HTTPException: _on_http_error,
        ClientGone: _on_client_gone,
        Exception: _on_accident,
    }


async def _on_error(request: Request, error: EverwarmError) -> Response:
    return error_response(error, request.state.request_id, request.url.path)


async def _on_accident(request: Request, _error: Exception) -> Response:
    return await _on_error(request, EverwarmError("internal error"))


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own errors: an unknown path or method."""
    match error.status_code:
        case 404:
            return await _on_error(request, NotFound(f"this server has no route {request.url.path}"))
        case 405:
            message = "this route does not allow that method"
            return await _on_error(request, HttpError(405, "invalid_request_error", message))
    return await _on_error(request, BadRequest(str(error.detail)))


async def _on_client_gone(_request: Request, _error: ClientGone) -> Response:
    return Response(status_code=499)  # never sent: the client has disconnected
