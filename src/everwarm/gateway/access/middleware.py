"""The checks before every handler: the API key, the host name, the content type and the size of the body.

Pure ASGI. Turns every ``EverwarmError`` into the error shape of the path's dialect (OpenAI's by default) with a request id,
and every other exception into a plain 500: never a traceback, a path or an address.
"""

from __future__ import annotations

import logging
import re
import secrets

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everwarm.errors import EverwarmError, Forbidden, HttpError, Refused
from everwarm.gateway.access.auth import ANONYMOUS, OPEN_PATHS, PAGE, Access, Principal
from everwarm.gateway.access.origins import (
    RawHeaders,
    answer_headers,
    host_of,
    is_address,
    is_preflight,
    may_call,
    preflight_headers,
)
from everwarm.gateway.http.error_body import error_body
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.settings import ServerSettings

log = logging.getLogger("everwarm.gateway")

MAX_NAMES, MAX_NAME = 32, 64  # of fields in a header


class Guard:
    def __init__(self, app: ASGIApp, settings: ServerSettings, access: Access | None = None) -> None:
        self.app = app
        self._settings = settings
        self._access = access or settings.access()
        self._names = settings.host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})  # an ingress may have given the request an id already
        request_id = state.setdefault("request_id", f"req_{secrets.token_hex(12)}")
        began = False

        cors: RawHeaders = []

        async def tagged(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                headers = message.setdefault("headers", [])
                headers += [(b"x-request-id", request_id.encode()), *cors]
                if state.get("ignored"):
                    headers.append((b"x-everwarm-ignored", _listed(state["ignored"])))
            await send(message)

        try:
            headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
            cors += self._check_names(scope["method"], scope["path"], headers)
            if is_preflight(scope["method"], headers):
                return await _preflight(headers)(scope, receive, tagged)
            self._check(scope, headers)
            await self.app(scope, self._bounded(receive), tagged)
        except EverwarmError as error:
            if not began:
                await error_response(error, request_id, scope["path"])(scope, receive, tagged)
        except ClientDisconnect:
            log.debug("request %s: the client disconnected before its body was complete", request_id)
        except Exception:
            log.exception("request %s failed", request_id)
            if not began:
                internal = EverwarmError("internal error")
                await error_response(internal, request_id, scope["path"])(scope, receive, tagged)

    def _check(self, scope: Scope, headers: dict[bytes, str]) -> None:
        if is_foreign(scope["method"], scope["path"], headers):
            raise Forbidden("pages of other sites may not use this server; start with --cors-origins ORIGIN")
        scope["state"]["principal"] = self._identify(scope["path"], headers)
        if scope["method"] in ("POST", "PUT", "PATCH"):
            if not _may_be_json(headers):
                raise HttpError(415, "unsupported_media_type", "send JSON with Content-Type: application/json")
            self._check_length(headers.get(b"content-length"))

    def _check_names(self, method: str, path: str, headers: dict[bytes, str]) -> RawHeaders:
        """Checks Host and Origin: another site's page must not reach a local server through a browser (DNS rebinding).
        Returns the headers with which a browser lets a page that may call read the answer."""
        settings = self._settings
        host = host_of(f"//{headers.get(b'host', '')}")
        if host not in self._names and not (settings.is_open_to_others and is_address(host)):
            raise Forbidden("the Host header is not a name of this server; start it with --allowed-host NAME")
        origin = headers.get(b"origin")
        if origin is None:
            return []
        names = self._names | ({host} if is_address(host) else set())
        if not may_call(origin, method, path, names, settings.cors_origins):
            raise Forbidden("pages of that origin may not call this; start with --cors-origins ORIGIN")
        return answer_headers(origin)

    def _identify(self, path: str, headers: dict[bytes, str]) -> Principal:
        given = (headers.get(b"authorization", "").removeprefix("Bearer "), headers.get(b"x-api-key", ""))
        found = self._access.identify(each.encode("latin-1") for each in given)
        if found is None and not (path in OPEN_PATHS or path.startswith(PAGE)):
            message = "a valid API key is required: Authorization: Bearer KEY or x-api-key"
            raise HttpError(401, "invalid_api_key", message)
        return found or ANONYMOUS

    def _check_length(self, length: str | None) -> None:
        if length is not None and (not length.isdigit() or int(length) > self._settings.max_body_bytes):
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        left = self._settings.max_body_bytes

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
                if left < 0:
                    raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> HttpError:
        limit = self._settings.max_body_bytes
        return HttpError(413, "request_too_large", f"the body is larger than {limit} bytes")


def is_foreign(method: str, path: str, headers: dict[bytes, str]) -> bool:
    """Whether a browser reports that a page of another site (another port counts as another site) sends this request. A
    request with an Origin header passes, because that was checked before. Links to ``/`` may be followed from anywhere."""
    if headers.get(b"sec-fetch-site", "none") in ("none", "same-origin") or b"origin" in headers:
        return False
    how = (method, path, headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
    return how != ("GET", "/", "navigate", "document")


def error_response(error: EverwarmError, request_id: str, path: str) -> Response:
    """The error in the shape of the path's dialect. Requests that an engine refused are logged elsewhere."""
    if (error.status == 429 or error.status >= 500) and not isinstance(error, Refused):
        log.warning("%.100r refused with %d %s; %s", path, error.status, error.code, request_id)
    headers = {}
    retry_after = getattr(error, "retry_after_s", None)
    if retry_after is not None or error.status == 503:
        headers["retry-after"] = str(retry_after or 2)
    if error.status in (408, 413):  # do not wait for the rest of the body
        headers["connection"] = "close"
    return json_response(error_body(error, request_id, path), error.status, headers)


def _listed(names: list[str]) -> bytes:
    """Names that a client chose, as a header: few, short and printable."""
    shown = [re.sub(r"[^!-~]|,", "?", name[:MAX_NAME]) for name in names[:MAX_NAMES]]
    return ", ".join([*shown, *(["..."] if len(names) > MAX_NAMES else [])]).encode()


def _may_be_json(headers: dict[bytes, str]) -> bool:
    """A page of another site can send other types than JSON without asking first, so they are refused. A missing type is
    accepted from programs, which send no Origin, and where there is no body."""
    kind = headers.get(b"content-type")
    if kind is not None:
        return kind.split(";")[0].strip().lower() == "application/json"
    has_body = b"transfer-encoding" in headers or headers.get(b"content-length", "0") != "0"
    return not has_body or (b"origin" not in headers and b"sec-fetch-site" not in headers)


def _preflight(headers: dict[bytes, str]) -> Response:
    response = Response(status_code=200)
    response.raw_headers += preflight_headers(headers)
    return response
