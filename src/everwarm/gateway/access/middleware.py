"""The checks before every handler: the API key, the host name, the content type and the size of the body.

Pure ASGI. Turns every ``EverwarmError`` into the error shape of the path's dialect (OpenAI's by default) with a request id,
and every other exception into a plain 500: never a traceback, a path or an address.
"""

from __future__ import annotations

import logging
import secrets
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everwarm.errors import EverwarmError, Forbidden, HttpError, Refused
from everwarm.gateway.access.auth import ANONYMOUS, OPEN_PATHS, PAGE, Access, Principal
from everwarm.gateway.http.error_body import error_body
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.settings import ServerSettings

log = logging.getLogger("everwarm.gateway")


class Guard:
    def __init__(self, app: ASGIApp, settings: ServerSettings, access: Access | None = None) -> None:
        self.app = app
        self._settings = settings
        self._access = access or settings.access()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})  # an ingress may have given the request an id already
        request_id = state.setdefault("request_id", f"req_{secrets.token_hex(12)}")
        began = False

        async def tagged(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            await send(message)

        try:
            self._check(scope)
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

    def _check(self, scope: Scope) -> None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._check_names(headers)
        if is_foreign(scope["method"], scope["path"], headers):
            raise Forbidden("pages of other sites may not use this server; start with --allowed-host NAME")
        scope["state"]["principal"] = self._identify(scope["path"], headers)
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get(b"content-type", "").split(";")[0].strip().lower()
            is_unnamed = b"content-type" not in headers and b"origin" not in headers  # litellm; a page has an origin
            if kind != "application/json" and not is_unnamed:
                raise HttpError(415, "unsupported_media_type", "send JSON with Content-Type: application/json")
            self._check_length(headers.get(b"content-length"))

    def _check_names(self, headers: dict[bytes, str]) -> None:
        """Checks Host and Origin: another site's page must not reach a local server through a browser (DNS rebinding)."""
        host = _host_name(f"//{headers.get(b'host', '')}")
        if host not in self._settings.host_names:
            raise Forbidden("the Host header is not a name of this server; start it with --allowed-host NAME")
        origin = headers.get(b"origin")
        if origin is not None and _host_name(origin) not in self._settings.host_names:
            raise Forbidden("requests from that origin are not allowed; start with --allowed-host NAME")

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


def _host_name(url: str) -> str:
    try:
        parts = urlsplit(url)
        return "" if "@" in parts.netloc else (parts.hostname or "").lower()
    except ValueError:
        return ""
