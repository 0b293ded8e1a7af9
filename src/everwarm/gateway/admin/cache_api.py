"""The cache API: what is cached, in which tier, of which conversations; what the last requests cost; and orders to pin or
drop.

Queries never load a model: they report that it is not running. A user sees and changes its own namespace; see ``access``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest, EngineStopped, EverwarmError, NotFound
from everwarm.gateway.access.auth import principal_of, reach_of, visibility_of
from everwarm.gateway.admin import cache_encode
from everwarm.gateway.admin.cache_plan import MAX_TTL_S
from everwarm.gateway.admin.events import EventHub, EventWatcher
from everwarm.gateway.admin.request_log import MOST_KEPT, RequestLog
from everwarm.gateway.http.error_body import error_body
from everwarm.gateway.http.sse import EventStream, json_response, sse_named
from everwarm.gateway.rewrite.volatile_lines import VolatileLines
from everwarm.gateway.serving.prewarm import NextTurnPrewarmer
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.gateway.settings import ServerSettings
from everwarm.gateway.stores import ReplyStore, ResponseStore
from everwarm.router.pool import Pool, Served
from everwarm.router.supervise.supervisor import Supervisor
from everwarm.types import Json

MAX_PAGE = 1000
_NUMBER = re.compile(r"-?[0-9]{1,16}")  # exact in JavaScript; negative for nodes that are only on disk


class CacheApi:
    def __init__(
        self,
        pool: Pool,
        gate: RequestGate,
        request_log: RequestLog,
        prewarmer: NextTurnPrewarmer,
        store: ResponseStore,
        replies: ReplyStore,
        volatile: VolatileLines,
        settings: ServerSettings,
        end_background: Callable[[str], Awaitable[int]],
    ) -> None:
        """``end_background``: ends the responses in the background of namespaces with a prefix, and stores none of them."""
        self._end_background = end_background
        self._pool = pool
        self._gate = gate
        self._request_log = request_log
        self._prewarmer = prewarmer
        self._store = store
        self._replies = replies
        self._volatile = volatile
        self._settings = settings
        self.hub = EventHub(pool, request_log, self._overview_of)

    def routes(self) -> list[Route]:
        return [
            Route("/cache", self.overview, methods=["GET"]),
            Route("/cache", self.drop_all, methods=["DELETE"]),
            Route("/cache/tree", self.tree, methods=["GET"]),
            Route("/cache/requests", self.requests, methods=["GET"]),
            Route("/cache/events", self.events, methods=["GET"]),
            Route("/cache/volatile", self.volatile, methods=["GET"]),
            Route("/cache/nodes/{id}", self.drop, methods=["DELETE"]),
            Route("/cache/nodes/{id}/pin", self.pin, methods=["POST"]),
            Route("/cache/nodes/{id}/unpin", self.unpin, methods=["POST"]),
        ]

    # queries

    async def overview(self, request: Request) -> Response:
        overview = self._overview_of(self._model(request).spec.id)
        return json_response(await self._gate.within_time(request, overview) | _caller(request))

    async def _overview_of(self, model: str) -> Json:
        all_served = self._pool.all_served()
        served = next((each for each in all_served if each.spec.id == model), None)
        if served is None:
            raise NotFound(f"the model {model!r} does not exist any more", "model_not_found")
        seen = None
        if served.supervisor.state == "ready":
            with contextlib.suppress(EngineStopped):  # it may be unloaded at this moment
                seen = await served.supervisor.ask(m.Inspect, what="cache")
        totals = self._request_log.totals(model)
        text = self._settings.cache_text
        return cache_encode.overview(served, all_served, totals, seen, text=text)

    async def tree(self, request: Request) -> Response:
        served = self._model(request)
        visibility = visibility_of(request)
        after = request.query_params.get("after")
        if after is not None and _NUMBER.fullmatch(after) is None:
            raise BadRequest("after must be the next of an earlier response; leave it out to start at the beginning")
        fields = {"limit": _limit(request, MAX_PAGE, MAX_PAGE), "after": None if after is None else int(after)}
        words_of = visibility.words if self._settings.cache_text else None
        scope = {"namespace": visibility.shown, "words_of": words_of, "alone": not principal_of(request).is_admin}
        query = _running(served).ask(m.AskTree, **fields, **scope)
        seen = msgspec.convert(await self._gate.within_time(request, query), m.TreeSeen)
        return json_response(cache_encode.tree(seen, served.spec.id, self._request_log))

    async def requests(self, request: Request) -> Response:
        limit = _limit(request, 100, MOST_KEPT)
        visibility = visibility_of(request)
        rows = [(row, row.caller.namespace) for row in self._request_log.rows(limit, visibility.shown)]
        shown = [cache_encode.request(row, with_words=visibility.shows_words(namespace)) for row, namespace in rows]
        return json_response({"requests": shown})

    async def volatile(self, request: Request) -> Response:
        """Lines of system text that clients change without need; texts only of namespaces that the caller may read."""
        visibility = visibility_of(request)
        found = self._volatile.shown(visibility.shown)
        rows = [
            cache_encode.volatile_line(line, namespace, with_words=visibility.shows_words(namespace))
            for namespace, line in found[: _limit(request, 100, MAX_PAGE)]
        ]
        return json_response({"lines": rows, "rules": [rule.name for rule in self._settings.rewrite]})

    async def events(self, request: Request) -> Response:
        principal = principal_of(request)
        user = "" if principal.is_admin else principal.namespace(None)
        watcher = EventWatcher(self._model(request).spec.id, visibility_of(request), _caller(request), user)

        def error_frame(error: EverwarmError) -> bytes:
            return sse_named("error", error_body(error, request.state.request_id, request.url.path))

        return EventStream(self.hub.frames(watcher), self.hub.watching(watcher), error_frame)

    # orders

    async def pin(self, request: Request) -> Response:
        quota = None if principal_of(request).is_admin else self._settings.pin_quota
        ttl = request.query_params.get("ttl_s")
        more = {} if ttl is None else {"ttl_s": _ttl_s(ttl)}
        return json_response(await self._order(request, "pin", _node(request), pin_quota=quota, **more))

    async def unpin(self, request: Request) -> Response:
        return json_response(await self._order(request, "unpin", _node(request)))

    async def drop(self, request: Request) -> Response:
        return json_response(await self._forget(request, _node(request)))

    async def drop_all(self, request: Request) -> Response:
        """Stored responses have an address of their own, so they are deleted only with ``?responses=true``."""
        if request.query_params.get("model") is None and len(self._pool.all_served()) > 1:
            raise BadRequest("this server has several models: name one with ?model=")
        answer = await self._forget(request, None)
        if request.query_params.get("responses", "false") in ("true", "1"):
            n_running = await self._end_background(reach_of(request))
            answer["responses"] = n_running + await asyncio.to_thread(self._store.delete_all, reach_of(request))
        return json_response(answer)

    async def _forget(self, request: Request, node: int | None) -> Json:
        """Drops it in the engine, and every text in the gateway that could quote it."""
        model = self._model(request).spec.id
        self._prewarmer.forget(reach_of(request))
        await asyncio.to_thread(self._replies.forget, reach_of(request))
        self._volatile.forget(reach_of(request))
        answer = await self._order(request, "drop", node)
        self._request_log.forget_words(model, answer.pop("namespace"))
        return answer

    async def _order(self, request: Request, action: str, node: int | None, **more: Any) -> Json:
        order = _running(self._model(request)).ask(
            m.CacheOrder, action=action, node=node, namespace=reach_of(request), **more
        )
        answer: Json = await self._gate.within_time(request, order)
        return answer

    def _model(self, request: Request) -> Served:
        """The named model, or the only one, or the first that is loaded."""
        pool = self._pool
        name = request.query_params.get("model")
        all_served = pool.all_served()
        if name is None and pool.catalog.find(None) is None:
            name = next((each.spec.id for each in all_served if each.supervisor.is_running), None)
        wanted = pool.look(name).id
        return next(each for each in all_served if each.spec.id == wanted)


def _caller(request: Request) -> Json:
    """The caller's role and namespace, so that a page can show what its key may do."""
    principal = principal_of(request)
    namespace = principal.namespace(request.query_params.get("cache_salt"))
    return {"caller": {"role": principal.role.name.lower(), "namespace": namespace[: m.SHORT_NAMESPACE]}}


def _running(served: Served) -> Supervisor:
    if served.supervisor.state != "ready":
        raise EngineStopped(f"{served.spec.id} is not loaded, so its cache cannot be read or changed now")
    return served.supervisor


def _limit(request: Request, usual: int, most: int) -> int:
    given = request.query_params.get("limit")
    if given is None:
        return usual
    if not re.fullmatch(r"[0-9]{1,6}", given) or not 1 <= int(given) <= most:
        raise BadRequest(f"limit is {given[:20]!r}; give 1 to {most}")
    return int(given)


def _ttl_s(given: str) -> float:
    if not re.fullmatch(r"[0-9]{1,7}", given) or not 1 <= int(given) <= MAX_TTL_S:
        raise BadRequest(f"ttl_s is {given[:20]!r}; give 1 to {MAX_TTL_S} whole seconds")
    return float(given)


def _node(request: Request) -> int:
    given = request.path_params["id"]
    if _NUMBER.fullmatch(given) is None:
        raise BadRequest("the node in the path is not a number; GET /cache/tree lists the nodes")
    return int(given)
