"""Which web pages may call and read the answers: those of this machine, those that were named, and never a stranger's."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from everwarm.errors import BadRequest
from everwarm.gateway.access.auth import ROLES
from everwarm.gateway.access.middleware import Guard
from everwarm.gateway.access.origins import GUARDED, may_call
from everwarm.gateway.settings import ServerSettings

HERE = (
    "http://localhost",
    "http://localhost:3000",
    "https://127.0.0.1:8443",
    "http://[::1]:5173",
    "HTTP://LOCALHOST:1",
)
STRANGERS = (
    "https://evil.example",
    "http://localhost.evil.example",
    "http://127.0.0.1.nip.io",
    "http://evil.example:80@localhost",
    "null",
    "file://",
    "localhost",
    "chrome-extension://abc",
    "",
)
NAMED = "https://chat.example.org"
ALLOW = "access-control-allow-origin"


async def answered(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def ask(method: str, path: str, headers: dict[str, str], content: bytes = b"", **settings: Any) -> httpx.Response:
    guard = Guard(answered, ServerSettings(**settings))
    host = headers.pop("Host", "localhost:8080")

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.request(method, path, headers=headers, content=content)

    return asyncio.run(run())


def preflight(origin: str, path: str = "/v1/chat/completions", **settings: Any) -> httpx.Response:
    wanted = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-stainless-os",
    }
    return ask("OPTIONS", path, {"Origin": origin, **wanted}, **settings)


@pytest.mark.parametrize("origin", HERE)
def test_a_page_of_this_machine_may_call_and_read(origin: str) -> None:
    first = preflight(origin, api_key="k")  # a browser sends no key before it was told that it may
    assert first.status_code == 200 and first.headers[ALLOW] == origin
    assert "authorization" in first.headers["access-control-allow-headers"]
    assert "POST" in first.headers["access-control-allow-methods"]
    then = ask("GET", "/v1/models", {"Origin": origin})
    assert then.status_code == 200 and then.headers[ALLOW] == origin and then.headers["vary"] == "origin"


@pytest.mark.parametrize("origin", STRANGERS)
@pytest.mark.parametrize("settings", [{}, {"cors_origins": (NAMED,)}, {"cors_origins": ("localhost",)}], ids=str)
def test_a_strangers_page_is_refused_and_told_nothing(origin: str, settings: dict[str, Any]) -> None:
    for answer in (preflight(origin, **settings), ask("GET", "/v1/models", {"Origin": origin}, **settings)):
        assert answer.status_code == 403 and ALLOW not in answer.headers


def test_a_page_that_was_named_may_call_everything() -> None:
    for path in ("/v1/chat/completions", "/cache", "/slots/0"):
        assert preflight(NAMED, path, cors_origins=(NAMED,)).headers[ALLOW] == NAMED
    assert ask("GET", "/v1/models", {"Origin": f"{NAMED}:443"}, cors_origins=(NAMED,)).status_code == 200
    for other in ("http://chat.example.org", f"{NAMED}:444", "https://chat.example.org.evil.example"):
        assert ask("GET", "/v1/models", {"Origin": other}, cors_origins=(NAMED,)).status_code == 403


@pytest.mark.parametrize("origin", STRANGERS[:5])
def test_any_page_may_use_what_answers_requests_where_a_star_was_written(origin: str) -> None:
    assert preflight(origin, cors_origins=("*",)).headers[ALLOW] == origin
    for path in GUARDED:
        for shown in (path, f"{path}/x"):
            assert preflight(origin, shown, cors_origins=("*",)).status_code == 403
            assert ask("GET", shown, {"Origin": origin}, cors_origins=("*",)).status_code == 403
    assert ask("DELETE", "/v1/responses/x", {"Origin": origin}, cors_origins=("*",)).status_code == 403


def test_a_star_opens_no_route_that_belongs_to_admins_or_shows_the_cache() -> None:
    """Of all routes that there are: a new one of admins must be named among those that are guarded."""
    for route in ROLES:
        method, path = route.split(" ", 1)
        opened = may_call("https://evil.example", method, path, (), ("*",))
        assert not (opened and (ROLES[route] == 2 or path.startswith(("/cache", "/slots", "/models", "/props")))), route


def test_no_page_gets_credentials() -> None:
    for origin, settings in (
        (HERE[0], {}),
        (NAMED, {"cors_origins": (NAMED,)}),
        ("https://a.example", {"cors_origins": ("*",)}),
    ):
        for answer in (preflight(origin, **settings), ask("GET", "/v1/models", {"Origin": origin}, **settings)):
            assert "access-control-allow-credentials" not in answer.headers


def test_an_error_can_be_read_by_a_page_that_may_call() -> None:
    answer = ask("GET", "/v1/models", {"Origin": HERE[1]}, api_key="k")
    assert answer.status_code == 401 and answer.headers[ALLOW] == HERE[1]


def test_a_program_without_an_origin_gets_no_such_headers() -> None:
    assert ALLOW not in ask("GET", "/v1/models", {}).headers


@pytest.mark.parametrize(
    "text", ["", "chat.example.org", "https://", "https://a/b", "ftp://a", "https://a@b", "https://a?x"]
)
def test_an_origin_is_an_address_without_a_path(text: str) -> None:
    with pytest.raises(BadRequest, match="is not an origin"):
        ServerSettings(cors_origins=(text,))


# names


def test_one_that_is_open_to_others_answers_to_its_addresses() -> None:
    for host in ("192.168.1.5:8080", "[fe80::1]:8080"):
        assert ask("GET", "/health", {"Host": host}, host="0.0.0.0", api_key="k").status_code == 200
        assert ask("GET", "/health", {"Host": host}).status_code == 403
    assert ask("GET", "/health", {"Host": "evil.example"}, host="0.0.0.0", api_key="k").status_code == 403


def test_a_page_from_its_own_address_may_call() -> None:
    headers = {"Host": "192.168.1.5:8080", "Origin": "http://192.168.1.5:8080", "x-api-key": "k"}
    assert ask("GET", "/v1/models", dict(headers), host="0.0.0.0", api_key="k").status_code == 200
    headers["Origin"] = "http://192.168.1.6:8080"
    assert ask("GET", "/v1/models", headers, host="0.0.0.0", api_key="k").status_code == 403


# bodies without a type


def test_a_program_may_leave_the_type_of_its_body_out() -> None:
    assert ask("POST", "/completion", {}, b"{}").status_code == 200
    assert ask("POST", "/slots/0", {}).status_code == 200  # there is none


@pytest.mark.parametrize("headers", [{"Origin": HERE[0]}, {"Sec-Fetch-Site": "same-origin"}])
def test_a_browser_may_not(headers: dict[str, str]) -> None:
    """A page can send a body without a type, or of a simple one, without asking first."""
    assert ask("POST", "/completion", dict(headers), b"{}").status_code == 415
    assert ask("POST", "/slots/0", dict(headers)).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_another_type_is_never_read(kind: str) -> None:
    assert ask("POST", "/completion", {"Content-Type": kind}, b"{}").status_code == 415


@pytest.mark.parametrize(
    ("method", "path", "may"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/v1/chat/completions/input_tokens", True),
        ("GET", "/v1/chat/completions", False),
        ("GET", "/v1/chat/completions/chatcmpl-1", False),
        ("GET", "/v1/chat/completions/chatcmpl-1/messages", False),
        ("POST", "/v1/chat/completions/chatcmpl-1", False),
        ("POST", "/v1/responses", True),
        ("GET", "/v1/responses/resp_1", False),
    ],
)
def test_a_star_opens_no_stored_conversation(method: str, path: str, may: bool) -> None:
    assert may_call("https://evil.example", method, path, (), ("*",)) == may
    assert may_call("http://localhost:3000", method, path, ("localhost",), ())  # the control: a page of this machine
