"""The web page at ``/``, its files under ``/page/``, and ``/render``, which turns Markdown into elements for it.

Clients that ask for JSON, or for nothing in particular, get JSON from ``/``; those that take anything get the page, as from
llama-server.

The files hold no data and may be read without a key; the page uses the API like every other client. They are read once,
when the server starts, so no path of a request ever reaches the disk.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm import __version__
from everwarm.errors import BadRequest
from everwarm.gateway.admin import markdown
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.types import Json

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


MAX_TEXTS, MAX_CHARS = 64, 131_072  # of one request to /render


class RenderBody(msgspec.Struct, frozen=True):
    texts: Annotated[list[str], msgspec.Meta(max_length=MAX_TEXTS)]


def web_ui_routes(gate: RequestGate) -> list[Route]:
    files = page_files(FOLDER)
    one_at_a_time = asyncio.Semaphore(1)

    async def index(request: Request) -> Response:
        accepted = request.headers.get("accept", "")
        if "text/html" in accepted or ("*/*" in accepted and "json" not in accepted):
            return _answer(request, INDEX, files[INDEX], {"vary": "accept"})
        about = {"name": "everwarm", "version": __version__, "docs": "/v1/models, /v1/chat/completions"}
        return json_response(about, headers={"vary": "accept"})

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files or name.endswith(".html"):
            raise HTTPException(404)
        return _answer(request, name, files[name], {})

    async def render(request: Request) -> Response:
        """The trees of texts, each ``null`` if it is too long. What is not surely quick is done beside the event loop."""
        body, _ = await gate.read(request, RenderBody)
        n_chars = sum(map(len, body.texts))
        if n_chars > MAX_CHARS:
            raise BadRequest(f"the texts have {n_chars:,} characters; send at most {MAX_CHARS:,} at once")
        if len(body.texts) == 1 and markdown.is_quick(body.texts[0]):
            return json_response(_rendered(body.texts))
        return json_response(await gate.within_time(request, beside(body.texts)))

    async def beside(texts: list[str]) -> Json:
        async with one_at_a_time:
            return await asyncio.to_thread(_rendered, texts)

    return [
        Route("/", index, methods=["GET"]),
        Route("/page/{name}", file, methods=["GET"]),
        Route("/render", render, methods=["POST"]),
    ]


def _rendered(texts: list[str]) -> Json:
    return {"trees": [markdown.render(text) for text in texts]}


def page_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in _KINDS}


@cache
def _etag(data: bytes) -> str:
    return f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'


def _answer(request: Request, name: str, data: bytes, more: dict[str, str]) -> Response:
    etag = _etag(data)
    headers = {**_HEADERS, **more, "etag": etag}
    known = (each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(","))
    if etag in known:
        return Response(status_code=304, headers=headers)
    return Response(data, headers={**headers, "content-type": _KINDS[Path(name).suffix]})
