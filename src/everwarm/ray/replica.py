"""One replica: a whole gateway with its engine process, in an actor of Ray, without a port of its own.

Requests come as values through Serve and pass the same application as anywhere else, so every dialect, stream and error
is the same. Publishes its prefixes to routers, and what waits to the autoscaler. Before it ends it saves its cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message

from everwarm.engine.process import messages as m
from everwarm.errors import EngineStopped, NotFound
from everwarm.gateway.access.middleware import error_response
from everwarm.gateway.admin.request_log import MOST_KEPT
from everwarm.gateway.app import build_gateway
from everwarm.gateway.settings import ServerSettings
from everwarm.logs import log_to_stderr
from everwarm.ray.ray_api import serve
from everwarm.ray.replica_messages import (
    BYTES_PER_TOKEN,
    METRIC,
    REPLICA_HEADER,
    PrefixSet,
    ProxiedHead,
    ProxiedRequest,
    kept_response,
)
from everwarm.router.catalog.catalog import Catalog, ModelSpec
from everwarm.router.plan import PoolLimits
from everwarm.router.pool import Pool

log = logging.getLogger("everwarm.ray")

HANGUP_S = 5.0  # for a request to notice that its client is gone
LOOKED_AT = 64  # of the last requests, for what reading and replies take


class Replica:
    async def __init__(  # type: ignore[misc]
        self, model: ModelSpec, server: ServerSettings, max_keys: int
    ) -> None:
        log_to_stderr()
        self.name = serve.get_replica_context().replica_id.unique_id
        catalog = Catalog({model.id: model}, default=model.id)
        self._pool = Pool(lambda: catalog, PoolLimits())
        self._gateway = build_gateway(self._pool, server)
        self._prefixes = PrefixSet(max_keys)
        self._unread: dict[str, int] = {}  # bytes of new text, by request id
        self._pool.start()
        self._supervisor = self._pool.find(model.id).supervisor
        if await self._supervisor.until("ready") != "ready":
            raise EngineStopped(f"{model.id} cannot be served: {self._supervisor.reason}")

    async def forward(self, request: ProxiedRequest) -> AsyncIterator[ProxiedHead | bytes]:
        """The parts of an answer as they come. A caller that stops listening has hung up."""
        if request.replica not in ("", self.name):  # it is for a replica that is gone
            gone = NotFound(f"there is no replica {request.replica[:100]!r} any more", "replica_not_found")
            answer = error_response(gone, request.request_id, request.path)
            yield ProxiedHead(answer.status_code, tuple(answer.raw_headers))
            yield bytes(answer.body)
            return
        self._unread[request.request_id] = self._prefixes.n_new(request.prefixes.keys, request.prefixes.ends)
        self._prefixes.use(request.prefixes.keys)
        exchange = Exchange(request)
        running = asyncio.create_task(self._run(exchange))
        try:
            async for part in exchange.parts():
                if isinstance(part, ProxiedHead):
                    head = (*part.headers, (REPLICA_HEADER, self.name.encode()))
                    yield ProxiedHead(part.status, head)
                else:
                    if (key := kept_response(request, part)) is not None:
                        self._prefixes.use([key])
                    yield part
        finally:
            self._unread.pop(request.request_id, None)
            exchange.hang_up()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running, HANGUP_S)

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._gateway.app(exchange.scope(), exchange.receive, exchange.send)
        finally:
            exchange.end()

    # called by Serve

    async def record_routing_stats(self) -> dict[str, Any]:
        info = self._supervisor.info
        sizes = {} if info is None else {"n_slots": info.n_slots}
        return {"keys": self._prefixes.packed(), "unread_bytes": self._n_unread_bytes(), **sizes, **self._measured()}

    def _n_unread_bytes(self) -> int:
        """New text of the requests that have no token yet."""
        written = {row.caller.id for row in self._gateway.request_log.rows(MOST_KEPT) if row.first_at is not None}
        return sum(n for id, n in self._unread.items() if id not in written)

    def _measured(self) -> dict[str, float]:
        rows = [row.done for row in self._gateway.request_log.rows(LOOKED_AT) if row.done is not None]
        n_read = sum(done.n_prompt - done.n_cached for done in rows)
        if not rows or n_read == 0:
            return {}
        per_byte = sum(done.prefill_s for done in rows) / n_read / BYTES_PER_TOKEN
        reply_s = sum(done.prefill_s + done.decode_s for done in rows) / len(rows)
        return {"seconds_per_byte": _rounded(per_byte), "reply_s": _rounded(reply_s)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {METRIC: self._n_unread_bytes() / BYTES_PER_TOKEN}

    async def check_health(self) -> None:
        if not self._supervisor.is_running:
            raise EngineStopped(self._supervisor.reason or "the engine is down")

    async def stats(self) -> dict[str, Any]:
        """The engine's own numbers, for tests and benchmarks."""
        return dict(await self._supervisor.ask(m.Inspect, what="counts"))

    async def __del__(self) -> None:
        """Serve calls it before the actor ends: running requests may finish, then the cache is saved."""
        await self._gateway.drain()
        log.info("replica %s has put away what it kept", self.name)


class Exchange:
    """One request through an ASGI application, as values."""

    def __init__(self, request: ProxiedRequest) -> None:
        self._request = request
        self._outbox: asyncio.Queue[ProxiedHead | bytes | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._has_body_gone = False

    def scope(self) -> dict[str, Any]:
        request = self._request
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": request.method,
            "path": request.path,
            "raw_path": request.path.encode(),
            "root_path": "",
            "query_string": request.query,
            "headers": list(request.headers),
            "state": {"request_id": request.request_id},
        }

    async def receive(self) -> Message:
        if not self._has_body_gone:
            self._has_body_gone = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._outbox.put_nowait(
                ProxiedHead(message["status"], tuple((bytes(k), bytes(v)) for k, v in message["headers"]))
            )
        elif message["type"] == "http.response.body" and message.get("body"):
            self._outbox.put_nowait(bytes(message["body"]))

    def end(self) -> None:
        self._outbox.put_nowait(None)

    def hang_up(self) -> None:
        self._gone.set()

    async def parts(self) -> AsyncIterator[ProxiedHead | bytes]:
        """What was sent, until the end; body parts that are ready are joined."""
        while (part := await self._outbox.get()) is not None:
            if isinstance(part, ProxiedHead):
                yield part
                continue
            pieces = [part]
            is_over = False
            while not self._outbox.empty() and not is_over:
                piece = self._outbox.get_nowait()
                if isinstance(piece, bytes):
                    pieces.append(piece)
                is_over = piece is None
            yield b"".join(pieces)
            if is_over:
                return


def _rounded(value: float) -> float:
    """So that small changes are not published."""
    return float(f"{value:.2g}")
