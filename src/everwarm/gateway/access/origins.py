"""Which web pages may call this server, and which names it answers to. Pure.

A page is known by its ``Origin``. Pages of this machine (any port) and of the server's own names may call it; others only
if they were named, or if ``*`` was written out: then any page may use what only answers requests, never what shows or
changes the state of the server. No page gets credentials: there are no cookies.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from everwarm.config import require

ANY = "*"
LOCAL = "localhost"  # llama-server's word for pages of this machine, which may call anyway
METHODS = "GET, POST, DELETE, OPTIONS"
MAX_ORIGIN = 512
# What ``*`` never opens: state and settings of the server, by the beginning of the path.
GUARDED = (
    "/cache",
    "/slots",
    "/models",
    "/props",
    "/lora-adapters",
    "/api/pull",
    "/api/push",
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/api/blobs",
)
# What is stored there is a conversation; without more behind them these paths only answer requests.
STORED = ("/v1/chat/completions", "/v1/responses")
COUNTS = "/input_tokens"
_EXPOSED = b"x-request-id, x-everwarm-ignored, retry-after"
_PORTS = {"http": 80, "https": 443}

Headers = Mapping[bytes, str]
RawHeaders = list[tuple[bytes, bytes]]


def check_origin(text: str) -> None:
    require(
        text in (ANY, LOCAL) or (_normal(text) is not None and len(text) <= MAX_ORIGIN),
        f"{text!r} is not an origin; give one like https://chat.example.org, or * for any page",
    )


def may_call(origin: str, method: str, path: str, names: Collection[str], allowed: Collection[str]) -> bool:
    """``names``: of this server and this machine; ``allowed``: the origins of ``--cors-origins``."""
    found = _normal(origin)
    if found is not None and (host_of(origin) in names or found in map(_normal, allowed)):
        return True
    return ANY in allowed and method != "DELETE" and not _is_guarded(path) and not _is_stored(method, path)


def _is_guarded(path: str) -> bool:
    return any(path == start or path.startswith(f"{start}/") for start in GUARDED)


def _is_stored(method: str, path: str) -> bool:
    """Whether it shows or changes stored conversations."""
    start = next((start for start in STORED if path == start or path.startswith(f"{start}/")), None)
    if start is None or path.endswith(COUNTS):
        return False
    return method == "GET" or path != start


def is_preflight(method: str, headers: Headers) -> bool:
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def preflight_headers(headers: Headers) -> RawHeaders:
    """What a page may send; it has been allowed to call."""
    wanted = headers.get(b"access-control-request-headers", "")
    answer = [(b"access-control-allow-methods", METHODS.encode()), (b"access-control-max-age", b"600")]
    if wanted and len(wanted) <= MAX_ORIGIN and wanted.isascii() and wanted.isprintable():
        answer.append((b"access-control-allow-headers", wanted.encode()))
    if headers.get(b"access-control-request-private-network") == "true":
        answer.append((b"access-control-allow-private-network", b"true"))
    return answer


def answer_headers(origin: str) -> RawHeaders:
    """The headers with which a browser lets a page that may call read the answer."""
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"origin"),
    ]


def host_of(url: str) -> str:
    """The host in an address, in lower case; empty if there is none."""
    try:
        parts = urlsplit(url)
        return "" if "@" in parts.netloc else (parts.hostname or "").lower()
    except ValueError:
        return ""


def is_address(host: str) -> bool:
    """Whether it is a number, not a name: no name server can turn another site's name into it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _normal(origin: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; None: it is not the address of a site."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc:
        return None
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        return None
    return parts.scheme, parts.hostname.lower(), port or _PORTS[parts.scheme]
