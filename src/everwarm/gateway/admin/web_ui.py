"""The web page at ``/``, and its files under ``/page/``. Clients that do not accept HTML get JSON from ``/``.

The files hold no data and may be read without a key; the page uses the API like every other client. They are read once,
when the server starts, so no path of a request ever reaches the disk.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm import __version__
from everwarm.gateway.http.sse import json_response

FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated every time, so that a new version is used at once
}


@dataclass(frozen=True, slots=True)
class PageFile:
    data: bytes
    kind: str
    etag: str


def web_ui_routes() -> list[Route]:
    files = page_files(FOLDER)

    async def index(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return _answer(request, files[INDEX], {"vary": "accept"})
        about = {"name": "everwarm", "version": __version__, "docs": "/v1/models, /v1/chat/completions"}
        return json_response(about, headers={"vary": "accept"})

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None or found.kind == _KINDS[".html"]:
            raise HTTPException(404)
        return _answer(request, found, {})

    return [Route("/", index, methods=["GET"]), Route("/page/{name}", file, methods=["GET"])]


def page_files(folder: Path) -> dict[str, PageFile]:
    found = (path for path in sorted(folder.iterdir()) if path.suffix in _KINDS)
    return {path.name: _read(path) for path in found}


def _read(path: Path) -> PageFile:
    data = path.read_bytes()
    digest = hashlib.blake2b(data, digest_size=12).hexdigest()
    return PageFile(data, _KINDS[path.suffix], f'"{digest}"')


def _answer(request: Request, file: PageFile, more: dict[str, str]) -> Response:
    headers = {**_HEADERS, **more, "etag": file.etag}
    known = (each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(","))
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers={**headers, "content-type": file.kind})
