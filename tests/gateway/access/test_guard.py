"""Who may call, by what name and with what body; and that every refusal looks the same and gives nothing away."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from everwarm.gateway.app import build_gateway
from everwarm.gateway.settings import ServerSettings
from support.server import GUARD, Reply, Server, raw, run_cli, serving, words

KEY = "a-key-of-some-length"
GETS = ("/v1/models", "/models", "/props", "/slots", "/metrics")
POSTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1},
    "/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/completion": {"prompt": "Hello", "n_predict": 1},
    "/completions": {"prompt": "Hello", "n_predict": 1},
    "/tokenize": {"content": "Hello"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": [{"role": "user", "content": "Hello!"}]},
}
OPEN = ("/", "/health", "/v1/health", "/ready")
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--allowed-host", "models.example") as server:
        yield server


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    with serving("--api-key", KEY) as server:
        yield server


def assert_refused(reply: Reply, status: int, code: str | None = None) -> str:
    """The shape every error has; returns its sentence."""
    assert reply.status == status, reply.data
    assert reply.headers["content-type"] == "application/json"
    error = reply.json["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["request_id"] == reply.headers["x-request-id"] and error["request_id"].startswith("req_")
    assert code is None or error.get("reason", error["code"]) == code
    assert not re.search(r"/work|site-packages|\.py\b|Traceback|0x[0-9a-f]{6}", reply.data.decode())
    return str(error["message"])


# keys


@pytest.mark.parametrize("path", GETS)
@pytest.mark.parametrize("key", [None, "wrong", KEY[:-1], KEY + "x", KEY.upper(), ""])
def test_reading_needs_the_key(locked, path, key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    assert_refused(locked.get(path, **headers), 401, "invalid_api_key")


@pytest.mark.parametrize("path", POSTS)
def test_asking_needs_the_key(locked, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"X_Api_Key": "wrong"}, {"Authorization": "Basic YTpi"}):
        assert_refused(locked.post(path, POSTS[path], **headers), 401, "invalid_api_key")


def test_the_key_comes_before_everything_but_the_name(locked):
    assert_refused(locked.post("/v1/chat/completions", b"{", Content_Type="text/plain"), 401)
    assert_refused(locked.get("/nowhere"), 401)


@pytest.mark.parametrize("path", OPEN)
def test_whether_it_is_alive_may_be_asked_by_anyone(locked, path):
    assert locked.get(path).status == 200


@pytest.mark.parametrize("path", POSTS)
def test_with_the_key_every_route_answers(locked, path):
    assert locked.post(path, POSTS[path], Authorization=f"Bearer {KEY}").status == 200
    assert locked.post(path, POSTS[path], X_Api_Key=KEY).status == 200


def test_the_key_is_never_said(locked):
    assert locked.get("/props", Authorization=f"Bearer {KEY}").status == 200
    assert KEY not in locked.log
    shown = run_cli("config", "--api-key", KEY)
    assert shown.returncode == 0 and KEY not in shown.stdout


# names


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.0.0.1:1", "LOCALHOST:99", "[::1]:80", "models.example"]
)
def test_it_answers_to_its_own_names(server, host):
    assert server.get("/health", Host=host).status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "127.0.0.1.nip.io", "[::1", "0.0.0.0"])
def test_it_does_not_answer_to_others(server, host):
    assert_refused(server.get("/v1/models", Host=host), 403, "forbidden")
    assert_refused(server.post("/v1/chat/completions", POSTS["/v1/chat/completions"], Host=host), 403)


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "https://models.example"])
def test_pages_from_here_may_ask(server, origin):
    assert server.get("/v1/models", Origin=origin).status == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "file://", "x"])
def test_pages_from_elsewhere_may_not(server, origin):
    assert_refused(server.get("/v1/models", Origin=origin), 403, "forbidden")


FOREIGN = [
    {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "image"},
    {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "script"},  # another port
    {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"},
    {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"},
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "something-new", "Sec_Fetch_Mode": "cors"},
]
LINK = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_browsers_say_when_another_site_asks_and_are_believed(server, headers):
    for path in (*GETS, *OPEN, "/cache/requests", "/page/main.js", "/nowhere"):
        assert_refused(server.get(path, **headers), 403, "forbidden")
    assert server.call("HEAD", "/props", **headers).status == 403
    assert_refused(server.call("DELETE", "/cache", **headers), 403, "forbidden")
    for path, body in POSTS.items():
        assert_refused(server.post(path, body, **headers), 403, "forbidden")
        assert_refused(server.post(path, body, Content_Type="text/plain", **headers), 403)
        assert_refused(server.post(path, body, Origin="https://evil.example", **headers), 403)
        assert_refused(server.post(path, body, Origin="null", **headers), 403)


def test_a_link_leads_to_the_page_and_to_nothing_else(server):
    assert server.get("/", Accept="text/html", **LINK).status == 200
    for path in (*GETS, "/health", "/page/main.js"):
        assert_refused(server.get(path, **LINK), 403, "forbidden")
    assert_refused(server.post("/", {}, **LINK), 403, "forbidden")


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_the_page_itself_and_people_may_ask(server, site):
    for path in (*GETS, *OPEN):
        assert server.get(path, Sec_Fetch_Site=site).status == 200
    assert server.post("/tokenize", {"content": "x"}, Sec_Fetch_Site=site, Origin=server.url).status == 200


def test_an_allowed_origin_may_ask_from_its_own_site(server):
    headers = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}
    assert server.get("/v1/models", Origin="https://models.example", **headers).status == 200
    assert server.post("/tokenize", {"content": "x"}, Origin="https://models.example", **headers).status == 200


def test_a_request_without_a_name_is_refused(server):
    assert raw(server.port, b"GET /v1/models HTTP/1.0\r\n\r\n").split(b"\r\n")[0].split()[1] in (b"400", b"403")


# bodies


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_read(server, path, kind):
    assert_refused(server.post(path, POSTS[path], Content_Type=kind), 415, "unsupported_media_type")


def test_a_charset_may_be_named(server):
    kind = "Application/JSON; charset=utf-8"
    assert server.post("/tokenize", {"content": "x"}, Content_Type=kind).status == 200


def test_a_body_said_to_be_too_large_is_not_read(server):
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    answer = raw(server.port, head + b"Content-Length: 33554433\r\n\r\n{", timeout_s=5)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in answer


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_a_body_that_turns_out_too_large_is_not_read_to_its_end(server, path):
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % path.encode()
    chunk = b"%x\r\n%s\r\n" % (MIB, b" " * MIB)
    answer = raw(server.port, head + b"Transfer-Encoding: chunked\r\n\r\n" + 33 * chunk, timeout_s=2)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in answer
    assert server.get("/health").status == 200


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b'"text"', b"{}x", b"\xff\xfe", b'{"a": \xc3\x28}', b"{'a': 1}", b"NaN"]
)
def test_what_is_not_a_json_object_is_refused(server, path, body):
    assert_refused(server.post(path, body), 400, "invalid_request_error")


@pytest.mark.parametrize("depth", [2000, 100_000, 1_000_000])
def test_deep_nesting_is_refused(server, depth):
    body = b'{"messages": [{"role": "user", "content": %s}]}' % (b"[" * depth + b"]" * depth)
    assert_refused(server.post("/v1/chat/completions", body), 400)


@pytest.mark.parametrize("depth", [700, 900])
def test_nesting_just_under_the_parsers_own_limit_is_no_accident_either(server, depth):
    body = b'{"max_tokens": 1, "messages": [{"role": "user", "content": %s}]}' % (b"[" * depth + b"]" * depth)
    assert server.post("/v1/chat/completions", body).status in (200, 400)


HUGE = [1e308, -1e308, 1 << 63, 1 << 64, -(1 << 63), 10**400]


@pytest.mark.parametrize("value", HUGE, ids=lambda value: f"{float(min(value, 1 << 1000)):.0e}")
@pytest.mark.parametrize("name", ["temperature", "max_tokens", "seed", "top_k", "n", "id_slot", "frequency_penalty"])
def test_huge_numbers_are_refused(server, name, value):
    body = POSTS["/v1/chat/completions"] | {name: value}
    assert_refused(server.post("/v1/chat/completions", json.dumps(body).encode()), 400)


@pytest.mark.parametrize("body", [b'{"temperature": 1e999}', b'{"seed": %s}' % (b"9" * 10_000), b'{"top_p": NaN}'])
def test_numbers_that_are_none_are_refused(server, body):
    assert_refused(server.post("/v1/chat/completions", body[:-1] + b', "messages": [{"role": "user"}]}'), 400)


def test_unknown_fields_are_ignored(server):
    for path, body in POSTS.items():
        assert server.post(path, body | {"future_field": {"deep": [1, None]}, "": 0}).status == 200


# routes


def test_an_unknown_route_is_not_found(server):
    for path in ("/nowhere", "/v1", "/v1/chat", "/admin", "/%2e%2e/etc/passwd"):
        assert_refused(server.get(path), 404, "not_found")


def test_a_wrong_method_is_not_allowed(server):
    for path in POSTS:
        if path != "/v1/chat/completions":  # GET lists what was stored
            assert_refused(server.get(path), 405)
        assert_refused(server.call("DELETE", path), 405)
    for path in {*GETS, *OPEN} - {"/props"}:  # which llama-server takes, too
        assert_refused(server.post(path, {}), 405)


def test_every_answer_has_a_request_id_of_its_own(server):
    ids = {server.get(path).headers["x-request-id"] for path in (*OPEN, *GETS, "/nowhere")}
    assert len(ids) == len(OPEN) + len(GETS) + 1


class Broken:
    """A pool with a bug."""

    def look(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("/a/path of ours")


def test_even_an_accident_has_the_shape_of_an_error():
    app = build_gateway(Broken(), ServerSettings()).app

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/slots")

    reply = asyncio.run(ask())
    assert reply.status_code == 500 and reply.json()["error"]["message"] == "internal error"
    assert reply.json()["error"]["request_id"] == reply.headers["x-request-id"]
    assert "/a/path" not in reply.text


# who sees whose prompts


def n_read(server: Server, **more: Any) -> int:
    body = {"messages": [{"role": "user", "content": words(120, 77)}], "max_tokens": 1} | more
    return int(server.ask("/v1/chat/completions", body)["timings"]["prompt_n"])


def test_a_salt_hides_what_was_read_under_another(server):
    whole = n_read(server)
    assert whole > 100 and n_read(server) <= GUARD
    assert n_read(server, cache_salt="one") == whole and n_read(server, cache_salt="one") <= GUARD
    assert n_read(server, cache_salt="two") == whole
    assert n_read(server, cache_salt="") <= GUARD


def test_a_session_or_cache_key_hides_nothing(server):
    n_read(server)
    assert n_read(server, prompt_cache_key="someone") <= GUARD


def test_a_key_and_a_salt_cannot_be_confused():
    def namespace(key: str | None, salt: str | None) -> str:
        caller = ServerSettings(api_key=key).access().identify([(key or "").encode()])
        assert caller is not None
        return caller.namespace(salt)

    pairs = [(None, None), ("a", None), ("a", "b"), ("ab", None), ("a:b", None), ("a", ":b"), (None, "a"), ("b", "a")]
    assert len({namespace(*pair) for pair in pairs}) == len(pairs)


# starting


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com"])
def test_a_server_that_others_can_reach_needs_a_key(host):
    refused = run_cli("serve", "--demo", "--port", "0", "--host", host)
    message = f"{host} can be reached from other machines: give --api-key, or bind to 127.0.0.1"
    assert refused.returncode == 1 and refused.stderr.strip() == f"everwarm: {message}"


def test_with_a_key_it_may_listen_everywhere():
    with serving("--host", "0.0.0.0", "--api-key", KEY) as server:
        assert server.get("/health").status == 200
        assert_refused(server.get("/v1/models"), 401)


def test_the_engine_lived_through_all_this(server):
    assert server.get("/ready").json["restarts"] == 0
