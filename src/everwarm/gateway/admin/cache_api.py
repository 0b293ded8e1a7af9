"""The cache API: what is kept, where, of which conversations; what the last requests cost; and orders to pin or forget.

Looking never loads a model: one that is not running says so. A user sees and changes its own namespace; see ``access``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest, EngineStopped, EverwarmError, ModelNotFound
from everwarm.gateway.access.auth import principal_of, reach_of, sight_of
from everwarm.gateway.access.middleware import error_body
from everwarm.gateway.admin import cache_encode
from everwarm.gateway.admin.events import EventHub, EventWatcher, frame
from everwarm.gateway.admin.request_log import MOST_KEPT
from everwarm.gateway.http.sse import EventStream, json_response
from everwarm.gateway.responses.response_store import ResponseStore
from everwarm.gateway.service import Service
from everwarm.router.pool import Standing
from everwarm.router.supervise.supervisor import State, Supervisor
from everwarm.state.namespace import SHORT_NAMESPACE
from everwarm.types import Json

MAX_PAGE = 1000
_NUMBER = re.compile(r"-?[0-9]{1,16}")  # exact in JavaScript; of what is only on disk it is negative


def cache_routes(cache: Cache) -> list[Route]:
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


class Cache:
    def __init__(self, service: Service, kept: ResponseStore) -> None:
        self._service = service
        self._kept = kept
        self.hub = EventHub(service.pool, service.recent, self._overview_of)

    # looking

    async def overview(self, request: Request) -> Response:
        overview = self._overview_of(self._model(request).spec.id)
        return json_response(await self._service.within_time(request, overview) | _caller(request))

    async def _overview_of(self, model: str) -> Json:
        standings = self._service.pool.standings()
        standing = next((each for each in standings if each.spec.id == model), None)
        if standing is None:
            raise ModelNotFound(f"there is no model {model!r} any more")
        seen = None
        if standing.supervisor.state is State.READY:
            with contextlib.suppress(EngineStopped):  # it may be put to sleep just now
                seen = await standing.supervisor.ask(m.AskCache)
        totals, text = self._service.recent.totals(model), self._service.settings.cache_text
        return cache_encode.overview(standing, standings, totals, seen, text=text)

    async def tree(self, request: Request) -> Response:
        standing, sight = self._model(request), sight_of(request)
        after = request.query_params.get("after")
        if after is not None and _NUMBER.fullmatch(after) is None:
            raise BadRequest("after is not what an earlier answer gave as next; leave it out to start at the beginning")
        fields = {"limit": _limit(request, MAX_PAGE, MAX_PAGE), "after": None if after is None else int(after)}
        words_of = sight.words if self._service.settings.cache_text else None
        whose = {"namespace": sight.shown, "words_of": words_of, "alone": not principal_of(request).is_admin}
        asked = _running(standing).ask(m.AskTree, **fields, **whose)
        seen = msgspec.convert(await self._service.within_time(request, asked), m.TreeSeen)
        return json_response(cache_encode.tree(seen, standing.spec.id, self._service.recent))

    async def requests(self, request: Request) -> Response:
        limit, sight = _limit(request, 100, MOST_KEPT), sight_of(request)
        rows = [(row, row.caller.namespace) for row in self._service.recent.rows(limit, sight.shown)]
        shown = [cache_encode.request(row, with_words=sight.shows_words(namespace)) for row, namespace in rows]
        return json_response({"requests": shown})

    async def events(self, request: Request) -> Response:
        principal = principal_of(request)
        user = "" if principal.is_admin else principal.namespace(None)
        watcher = EventWatcher(self._model(request).spec.id, sight_of(request), _caller(request), user)

        def error_frame(error: EverwarmError) -> bytes:
            return frame("error", error_body(error, request.state.request_id))

        return EventStream(self.hub.frames(watcher), self.hub.watching(watcher), error_frame)

    # orders

    async def pin(self, request: Request) -> Response:
        quota = None if principal_of(request).is_admin else self._service.settings.pin_quota
        return json_response(await self._order(request, "pin", _node(request), pin_quota=quota))

    async def unpin(self, request: Request) -> Response:
        return json_response(await self._order(request, "unpin", _node(request)))

    async def drop(self, request: Request) -> Response:
        return json_response(await self._forget(request, _node(request)))

    async def drop_all(self, request: Request) -> Response:
        """Kept responses are documents with an address of their own: they go only if that is said."""
        if request.query_params.get("model") is None and len(self._service.pool.standings()) > 1:
            raise BadRequest("say whose: give the model as ?model=")
        said = await self._forget(request, None)
        if request.query_params.get("responses", "false") in ("true", "1"):
            said["responses"] = await asyncio.to_thread(self._kept.delete_all, reach_of(request))
        return json_response(said)

    async def _forget(self, request: Request, node: int | None) -> Json:
        """In the engine, and whatever here could quote it."""
        model = self._model(request).spec.id
        self._service.forget_next_turns(reach_of(request))
        said = await self._order(request, "drop", node)
        self._service.recent.forget_words(model, said.pop("namespace"))
        return said

    async def _order(self, request: Request, action: str, node: int | None, **more: Any) -> Json:
        asked = _running(self._model(request)).ask(
            m.CacheOrder, action=action, node=node, namespace=reach_of(request), **more
        )
        said: Json = await self._service.within_time(request, asked)
        return said

    def _model(self, request: Request) -> Standing:
        """The one that is named, or the only one, or the first that is loaded."""
        pool, name = self._service.pool, request.query_params.get("model")
        standings = pool.standings()
        if name is None and pool.catalog.find(None) is None:
            name = next((each.spec.id for each in standings if each.supervisor.is_running), None)
        wanted = pool.look(name).id
        return next(each for each in standings if each.spec.id == wanted)


def _caller(request: Request) -> Json:
    """Who asks, so that a page can say what its key may do."""
    principal = principal_of(request)
    namespace = principal.namespace(request.query_params.get("cache_salt"))
    return {"caller": {"role": principal.role.name.lower(), "namespace": namespace[:SHORT_NAMESPACE]}}


def _running(standing: Standing) -> Supervisor:
    if standing.supervisor.state is not State.READY:
        raise EngineStopped(f"{standing.spec.id} is not loaded, so nothing of what it keeps can be seen or changed now")
    return standing.supervisor


def _limit(request: Request, usual: int, most: int) -> int:
    given = request.query_params.get("limit")
    if given is None:
        return usual
    if not re.fullmatch(r"[0-9]{1,6}", given) or not 1 <= int(given) <= most:
        raise BadRequest(f"limit is {given[:20]!r}; give 1 to {most}")
    return int(given)


def _node(request: Request) -> int:
    given = request.path_params["id"]
    if _NUMBER.fullmatch(given) is None:
        raise BadRequest("the node in the path is not a number; GET /cache/tree lists those there are")
    return int(given)
