"""The entry of a cluster: checks access, finds the model and the prefixes of a request, and relays it to a replica.

Knows no template, no token and no engine. If a replica dies before it has answered anything, another one is tried, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everwarm.errors import EngineStopped, NotFound
from everwarm.gateway.access.middleware import Guard, error_response
from everwarm.gateway.chat.prefix_keys import NOTHING, Prefixes, prefixes_of, response_key
from everwarm.gateway.http.sse import json_response
from everwarm.logs import log_to_stderr
from everwarm.ray.fan_out import merged
from everwarm.ray.ray_api import Died
from everwarm.ray.replica_messages import REPLICA_HEADER, ProxiedHead, ProxiedRequest, end, kept_response, note
from everwarm.ray.settings import ClusterSettings

log = logging.getLogger("everwarm.ray")

MODELS = "/v1/models/"
RESPONSES = "/v1/responses/"
BY_VALUE = {"stream": True, "_by_reference": False}  # straight to the replica, not through Ray's object store
REQUEST_ID = b"x-request-id"
_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")


class Ingress:
    def __init__(self, settings: ClusterSettings, handles: dict[str, Any]) -> None:
        log_to_stderr()
        self._settings = settings
        self._handles = {id: handle.options(**BY_VALUE, method_name="forward") for id, handle in handles.items()}

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return named_by_serve(Guard(self._app, self._settings.server))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        path = scope["path"]
        method = scope["method"]
        if path in ("/health", "/v1/health"):
            return await json_response({"status": "ok"})(scope, receive, send)
        request, model = await self._read_request(scope, receive)
        if method == "GET" and not model:
            answer = await merged(request, list(self._handles), self._answer)
            if answer is not None:
                return await answer(scope, receive, send)
        await self._relay(request, self._find(model), scope, send)

    async def _read_request(self, scope: Scope, receive: Receive) -> tuple[ProxiedRequest, str | None]:
        """The request as a value, and the model that it names in its body, query or path."""
        raw = await _whole(receive)
        path = scope["path"]
        query = scope["query_string"]
        body = _decoded(raw)
        named = body.get("model") if isinstance(body, dict) else None
        named = named or next(iter(parse_qs(query.decode("latin-1")).get("model", [])), None)
        if path.startswith(MODELS):
            named = unquote(path.removeprefix(MODELS))
        # with the namespace in its keys, the choice of a replica tells nothing about other namespaces
        own = scope["state"]["principal"].namespace(None)
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        picked = next((value.decode("latin-1") for name, value in headers if name == REPLICA_HEADER), "")
        request = ProxiedRequest(
            scope["state"]["request_id"], scope["method"], path, query, headers, raw, _prefixes(path, body, own), picked
        )
        return request, named if isinstance(named, str) else None

    def _find(self, name: str | None) -> str:
        found = self._settings.find(name)
        if found is None:
            known = ", ".join(sorted(self._handles))
            problem = "no model was named" if not name else f"there is no model {name[:100]!r}"
            raise NotFound(f"{problem}; there are: {known}", "model_not_found")
        return found.id

    async def _relay(self, request: ProxiedRequest, model: str, scope: Scope, send: Send) -> None:
        is_stream = began = False
        replica = ""
        try:
            async with contextlib.aclosing(self._parts(request, model)) as parts:
                async for part in parts:
                    if isinstance(part, ProxiedHead):
                        began = True
                        is_stream = _is_event_stream(part)
                        replica = _replica(part)
                        await send(
                            {"type": "http.response.start", "status": part.status, "headers": list(part.headers)}
                        )
                    else:
                        if (key := kept_response(request, part)) is not None:
                            note(model, replica, key)
                        await send({"type": "http.response.body", "body": part, "more_body": True})
        except Died as error:
            log.warning(
                "a replica of %s died while it answered %s: %s", model, request.request_id, type(error).__name__
            )
            died = EngineStopped("the replica died while it answered; try again, what was read before is kept")
            if not began:
                raise died from None
            if is_stream:
                data = bytes(error_response(died, request.request_id, scope["path"]).body)
                await send({"type": "http.response.body", "body": b"event: error\ndata: " + data + b"\n\n"})
                return
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self, request: ProxiedRequest, model: str) -> AsyncGenerator[ProxiedHead | bytes, None]:
        """The parts of an answer, from one replica or, if that died before the first part, from another."""
        for is_last in (False, True):
            began = False
            answer = self._handles[model].remote(request)
            try:
                async for part in answer:
                    began = True
                    yield part
                return
            except Died:
                if began or is_last:
                    raise
                log.warning("a replica of %s is gone; %s goes to another one", model, request.request_id)
            finally:
                answer.cancel()  # has no effect after its end
                end(model, request.request_id)

    async def _answer(self, request: ProxiedRequest, model: str) -> Response:
        """A whole answer, for ``fan_out``."""
        status = 500
        body = b""
        async with contextlib.aclosing(self._parts(request, model)) as parts:
            async for part in parts:
                if isinstance(part, ProxiedHead):
                    status = part.status
                else:
                    body += part
        return Response(body, status)


def _prefixes(path: str, body: Any, namespace: str) -> Prefixes:
    if path.startswith(RESPONSES):
        return Prefixes(bound=response_key(unquote(path.removeprefix(RESPONSES)).partition("/")[0]))
    return NOTHING if body is None else prefixes_of(body, namespace)


def _decoded(raw: bytes) -> Any:
    """None if it is not JSON: the replica then answers with the error."""
    try:
        return msgspec.json.decode(raw) if raw else None
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


async def _whole(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _is_event_stream(head: ProxiedHead) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in head.headers
    )


def _replica(head: ProxiedHead) -> str:
    return next((value.decode() for name, value in head.headers if name == REPLICA_HEADER), "")


def named_by_serve(app: ASGIApp) -> ASGIApp:
    """Use the request id that Serve has given and sends to the client, and send no second one."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        given = next((v.decode("latin-1") for k, v in scope.get("headers", ()) if k == REQUEST_ID), "")
        if _ID.fullmatch(given):
            scope.setdefault("state", {})["request_id"] = given

        async def silent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [(k, v) for k, v in message["headers"] if k.lower() != REQUEST_ID]
            await send(message)

        await app(scope, receive, silent)

    return named


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
