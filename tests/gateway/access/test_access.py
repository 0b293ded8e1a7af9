"""Many keys on one server: every route has a role, and nobody sees, changes or counts what is another's."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from everwarm.errors import BadRequest
from everwarm.gateway.access.auth import ROLES, Access, Key, Role, check_keys, read_key_file, role_of, with_roles
from everwarm.gateway.access.middleware import Guard
from everwarm.gateway.app import build_gateway
from everwarm.gateway.settings import ServerSettings
from support.server import GUARD, Reply, Server, run_cli, serving, until, words

Json = dict[str, Any]

KEYS = {name: f"{name}-has-a-key-of-some-length" for name in ("alice", "anna", "bob", "root", "carol")}
USERS = """
[keys.alice]
key = "alice-has-a-key-of-some-length"
namespace = "team-a"
[keys.anna]
sha256 = "%s"
namespace = "team-a"
[keys.bob]
key = "bob-has-a-key-of-some-length"
role = "user"
[keys.root]
key = "root-has-a-key-of-some-length"
role = "admin"
"""
SECRET = ("zanzibar", "quetzal", "marzipan")


def file_text() -> str:
    return USERS % hashlib.sha256(KEYS["anna"].encode()).hexdigest()


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


# the table


def application_routes() -> list[tuple[str, str]]:
    guard = build_gateway(None, ServerSettings()).app  # type: ignore[arg-type]
    assert isinstance(guard, Guard)
    routes = guard.app.routes  # type: ignore[attr-defined]
    assert all(isinstance(route, Route) for route in routes)
    return [(method, route.path) for route in routes for method in sorted(route.methods)]


def test_every_route_has_a_role_and_every_role_a_route():
    found = application_routes()
    assert len(found) > 50
    for method, path in found:
        role_of(method, path)
    assert {f"{method} {path}" for method, path in found} >= ROLES.keys()


def test_a_route_without_a_role_is_refused():
    async def answer(_request: Any) -> Any:
        raise AssertionError

    with pytest.raises(KeyError, match=r"(GET|HEAD) /cache/secrets has no role"):
        with_roles([Route("/cache/secrets", answer, methods=["GET"])])
    with pytest.raises(KeyError, match="PUT /cache/tree"):
        with_roles([Route("/cache/tree", answer, methods=["PUT"])])


def test_the_cluster_answers_no_route_of_its_own_that_a_server_does_not_have():
    """Whatever the ingress does not answer itself a replica checks again, with the same guard and table."""
    ray = Path(__file__).parents[3] / "src" / "everwarm" / "ray"
    own = {path for name in ("ingress.py", "fan_out.py") for path in re.findall(r'"(/[a-z0-9/]*)"', _text(ray / name))}
    known = {path for _, path in application_routes()}
    assert own >= {"/health", "/v1/models", "/metrics"}
    assert own - {"/v1/models/", "/v1/responses/"} <= known
    assert {role_of("GET", path) for path in ("/health", "/v1/health", "/ready")} == {Role.PUBLIC}


def _text(path: Path) -> str:
    return path.read_text()


# keys


def test_namespaces_of_a_single_key_are_what_they_always_were():
    """They are on people's disks."""

    def namespace(settings: ServerSettings, key: str, salt: str | None) -> str:
        found = settings.access().identify([key.encode()])
        assert found is not None
        return found.namespace(salt)

    def was(key: str, salt: str) -> str:
        return hashlib.sha256(f"{len(key)}:{key}:{salt}".encode()).hexdigest()[:32]

    assert namespace(ServerSettings(), "", None) == was("", "") == "d0609c4cf79f05d84dc5065a0f8001d1"
    assert namespace(ServerSettings(), "anything", "salt") == was("", "salt")
    assert namespace(ServerSettings(api_key="k"), "k", None) == was("k", "")
    with_admin = ServerSettings(api_key="k", admin_key="a")
    assert namespace(with_admin, "k", "salt") == was("k", "salt") and namespace(with_admin, "a", None) == was("a", "")


def test_no_salt_leads_out_of_a_namespace():
    keys = [Key("x", b"x" * 32, "team-a"), Key("y", b"y" * 32, "team-a:"), Key("z", b"z" * 32, "b")]
    callers = [key.principal for key in keys]
    callers += [Access(("k",), None).identify([b"k"]), Access((), None).identify([])]  # type: ignore[list-item]
    salts = ["", "b", ":b", "team-a", "team-a:", "1:k", "namespace:6:team-a", ":", "6:team-a:"]
    found = [caller.namespace(salt) for caller in callers for salt in salts]
    assert len(set(found)) == len(found)
    assert Key("w", b"w" * 32, "b").principal.namespace("s") == keys[2].principal.namespace("s"), "keys may share one"


@pytest.mark.parametrize(
    ("api_key", "admin_key", "has_file", "roles"),
    [
        (None, None, False, {None: Role.ADMIN, "k": Role.ADMIN}),
        ("k", None, False, {None: None, "k": Role.ADMIN, "x": None}),
        (None, "a", False, {None: Role.USER, "k": Role.USER, "a": Role.ADMIN}),
        ("k", "a", False, {None: None, "k": Role.USER, "a": Role.ADMIN}),
        ("k", None, True, {None: None, "k": Role.USER, "f": Role.USER, "fa": Role.ADMIN}),
        (None, None, True, {None: None, "k": None, "f": Role.USER, "fa": Role.ADMIN}),
        (None, "a", True, {None: None, "f": Role.USER, "a": Role.ADMIN, "fa": Role.ADMIN}),
    ],
)
def test_who_is_what(api_key, admin_key, has_file, roles):
    named = [("f", Role.USER), ("fa", Role.ADMIN)] if has_file else []
    keys = tuple(Key(name, hashlib.sha256(name.encode()).digest(), "n", role) for name, role in named)
    access = ServerSettings(api_key=api_key, admin_key=admin_key, keys=keys).access()
    for key, role in roles.items():
        found = access.identify([b"", (key or "").encode()])
        assert (None if found is None else found.role) == role, key


def test_nobody_shows_a_key():
    keys = (Key("f", b"f" * 32, "n"),)
    found = Access(("the-api-key",), "the-admin-key", keys).identify([b"the-admin-key"])
    assert "key" not in repr(found) and "ffff" not in repr(keys)


def test_the_key_file_is_read(tmp_path):
    keys = read_key_file(str(key_file(tmp_path, file_text())))
    assert [(key.name, key.namespace, key.role) for key in keys] == [
        ("alice", "team-a", Role.USER),
        ("anna", "team-a", Role.USER),
        ("bob", "bob", Role.USER),
        ("root", "root", Role.ADMIN),
    ]
    assert all(key.digest == hashlib.sha256(KEYS[key.name].encode()).digest() for key in keys)


LONG = "x" * 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 keys"),
        ("[keys", "is not valid TOML"),
        (f'[keys.a]\nkey = "{LONG}"\nroel = "admin"', "[keys.a] Object contains unknown field `roel`"),
        (f'[users.a]\nkey = "{LONG}"', "unknown field `users`"),
        (f'[keys.a]\nkey = "{LONG}"\nrole = "owner"', "Invalid enum value 'owner'"),
        ('[keys.a]\nkey = "hunter2"', "length >= 16"),
        ("[keys.a]\nkey = 12345678901234567", "got `int`"),
        ('[keys.a]\nsha256 = "abc"', "matching regex"),
        ('[keys.a]\nnamespace = "b"', "needs key, or sha256"),
        (f'[keys.a]\nkey = "{LONG}"\nsha256 = "{"0" * 64}"', "and not both"),
        (f'[keys.a]\nkey = "{LONG}"\nnamespace = ""', "has an invalid namespace"),
        (f'[keys."a b"]\nkey = "{LONG}"', "is not a valid name"),
        (f'[keys.a]\nkey = "{LONG}"\n[keys.b]\nkey = "{LONG}"', "'a' and 'b' have the same key"),
        (f'[keys.a]\nkey = "{LONG}"\n' + "#" * (1 << 20), "more than 1048576 bytes"),
    ],
)
def test_whatever_is_wrong_with_the_file_is_said_without_a_key(tmp_path, text, message):
    with pytest.raises(BadRequest, match=re.escape(message)) as refused:
        read_key_file(str(key_file(tmp_path, text)))
    for secret in (LONG, "hunter2", "12345678901234567"):
        assert secret not in str(refused.value)


def test_a_file_that_others_can_use_is_refused(tmp_path, caplog):
    plain, hashed = f'[keys.a]\nkey = "{LONG}"', f'[keys.a]\nsha256 = "{"0" * 64}"'
    for text, mode in ((plain, 0o604), (plain, 0o644), (plain, 0o602), (hashed, 0o602)):
        with pytest.raises(BadRequest, match="able by all users"):
            read_key_file(str(key_file(tmp_path, text, mode)))
    assert read_key_file(str(key_file(tmp_path, hashed, 0o644))) and not caplog.records
    assert read_key_file(str(key_file(tmp_path, plain, 0o640))) and "chmod 600" in caplog.text
    with pytest.raises(BadRequest, match="cannot be read"):
        read_key_file(str(tmp_path / "none"))


def test_no_key_means_two_things():
    twice = (Key("a", hashlib.sha256(b"k").digest(), "n"),)
    for given in ((["k"], "k", ()), ([""], None, ()), ([], "", ()), (["k"], None, twice), ([], "k", twice)):
        with pytest.raises(BadRequest):
            check_keys(*given)


def test_settings_are_shown_without_keys(tmp_path):
    shown = run_cli("config", "--admin-key", "an-admin-key", "--key-file", str(key_file(tmp_path, file_text())))
    assert shown.returncode == 0, shown.stderr
    assert "admin-key is set, and not shown" in shown.stdout and "key-file = " in shown.stdout
    assert not any(key in shown.stdout for key in ("an-admin-key", *KEYS.values()))


# a server for a team


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("team")
    return path


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    path = key_file(folder, file_text())
    kept = ("--disk-cache", "256MiB", "--state-dir", str(folder / "states"), "--pin-quota", "0.0001")
    (folder / "slots").mkdir()
    with serving("--key-file", str(path), "--cache-text", *kept, "--slot-save-path", str(folder / "slots")) as server:
        yield server
        assert not any(key in server.log for key in KEYS.values())


def bearer(name: str | None) -> dict[str, str]:
    return {} if name is None else {"Authorization": f"Bearer {KEYS[name]}"}


def call(server: Server, name: str | None, method: str, path: str, body: Any = None) -> Reply:
    return server.call(method, path, body, **bearer(name))


def get(server: Server, name: str, path: str) -> Any:
    reply = call(server, name, "GET", path)
    assert reply.status == 200, reply.data
    return reply.json


def chat(server: Server, name: str, text: str, **more: Any) -> Any:
    messages = [{"role": "system", "content": words(30, 5)}, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 3, "temperature": 0} | more
    reply = call(server, name, "POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.data
    return reply.json


def answered(server: Server, name: str | None, method: str, path: str) -> tuple[int, bytes]:
    """The status; and what was said, if that was a refusal: some answers have no end."""
    connection = server.connect()
    try:
        headers = bearer(name) | {"Content-Type": "application/json"}
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        response = connection.getresponse()
        return response.status, response.read() if response.status in (401, 403) else b""
    finally:
        connection.close()


FILLED = {"{name}": "main.js", "{digest}": "sha256:0", "{id:path}": "none"}


def filled(path: str, **more: str) -> str:
    for mark, value in (FILLED | more).items():
        path = path.replace(mark, value)
    return path.replace("{id}", "0")


@pytest.mark.parametrize("route", sorted(ROLES))
def test_every_route_is_open_to_its_role_and_nobody_less(server, route):
    method, path = route.split(" ")
    for head in {method, "HEAD"} if method == "GET" else {method}:
        for name, own in ((None, Role.PUBLIC), ("bob", Role.USER), ("root", Role.ADMIN)):
            status, message = answered(server, name, head, filled(path))
            if own >= role_of(head, path):
                assert status not in (401, 403), (name, head, path)
            else:
                assert status == (401 if name is None else 403), (name, head, path)
                if head != "HEAD" and name is not None:
                    assert b"needs an admin key" in message


def test_a_user_does_not_unload_by_the_way(server):
    asked = {"model": "everwarm-tiny", "keep_alive": 0}
    refused = call(server, "bob", "POST", "/api/generate", asked)
    assert refused.status == 403 and "admin key" in refused.json["error"]
    message = call(server, "bob", "POST", "/api/generate", asked | {"prompt": "Hi", "stream": False})
    assert message.status == 200 and server.get("/ready").status == 200
    assert get(server, "bob", "/v1/models")["data"][0]["status"]["value"] == "loaded"
    assert call(server, "bob", "GET", "/models?reload=1").status == 403
    assert call(server, "root", "GET", "/models?reload=1").status == 200


def everything(server: Server, name: str, query: str = "", **ids: str) -> bytes:
    """Whatever the GET routes tell somebody."""
    told = b""
    for route in ROLES:
        method, path = route.split(" ")
        if method == "GET" and path != "/cache/events" and not path.startswith("/page"):
            for each in {filled(path), filled(path.replace("{id}", ids.get("response", "0")))}:
                told += call(server, name, "GET", each + query).data
    return told


def tell_the_secret(server: Server, name: str, secret: str, **more: Any) -> str:
    """In every way that leaves words behind; returns the id of a kept response."""
    told = f"{words(20, 80 + SECRET.index(secret))} The word is {secret}, {secret} and {secret}, never forget it."
    chat(server, name, told, **more)
    asked = chat(server, name, told.replace(secret, "nothing", 1), prompt_cache_diagnostics=True, **more)
    assert secret in asked["timings"]["cache"]["diverged"]["known"]
    bad = {"prompt": "x", "n_predict": 1, "grammar": f'root ::= "{secret}" {secret}-rule', **more}
    refused = call(server, name, "POST", "/completion", bad)
    assert refused.status == 400 and secret in refused.json["error"]["message"]
    kept = call(server, name, "POST", "/v1/responses", {"input": told, "max_output_tokens": 2, **more})
    assert kept.status == 200
    return str(kept.json["id"])


def test_words_are_seen_by_their_own_namespace_only(server):
    secret = SECRET[0]
    response = tell_the_secret(server, "alice", secret)
    own = get(server, "alice", "/cache")["caller"]
    assert own["role"] == "user"
    for name in ("alice", "anna"):
        seen = everything(server, name, response=response).decode()
        assert seen.count(secret) > 3
        for path in ("/cache/requests", "/cache/tree"):
            assert secret in json.dumps(get(server, name, path)), path
    assert secret not in everything(server, "bob", response=response).decode()
    assert secret not in everything(server, "alice", "?cache_salt=other", response=response).decode()
    for query in (f"?namespace={own['namespace']}", "?all=true"):
        assert call(server, "bob", "GET", f"/cache/tree{query}").status == 403
        assert call(server, "bob", "GET", f"/cache/requests{query}").status == 403
        assert call(server, "bob", "GET", f"/cache/events{query}").status == 403
        assert secret not in everything(server, "bob", query, response=response).decode()
    assert secret not in everything(server, "root", response=response).decode(), "an admin has to ask for words"
    for query in (f"?namespace={own['namespace']}", "?all=true"):
        assert secret in json.dumps(get(server, "root", f"/cache/tree{query}"))
        assert secret in json.dumps(get(server, "root", f"/cache/requests{query}"))


def test_numbers_of_others_are_for_admins(server):
    chat(server, "alice", words(40, 11))
    chat(server, "bob", words(40, 12))
    mine = {name: get(server, name, "/cache")["caller"]["namespace"] for name in ("alice", "bob")}
    trees = {name: get(server, name, "/cache/tree") for name in ("alice", "bob", "root")}
    for name, own in mine.items():
        assert {node["namespace"] for node in trees[name]["nodes"]} == {own}
        assert trees[name]["n_total"] == len(trees[name]["nodes"]) < trees["root"]["n_total"]
    assert {node["namespace"] for node in trees["root"]["nodes"]} >= set(mine.values())
    rows = {name: {row["id"] for row in get(server, name, "/cache/requests")["requests"]} for name in trees}
    assert rows["alice"] and rows["bob"] and not rows["alice"] & rows["bob"] and rows["root"] > rows["alice"]
    others = next(node["id"] for node in trees["alice"]["nodes"] if node["parent"] is not None)
    for method, path in (("DELETE", ""), ("POST", "/pin"), ("POST", "/unpin")):
        refused = call(server, "bob", method, f"/cache/nodes/{others}{path}", {})
        assert refused.status == 404 and refused.json["error"]["code"] == "node_not_found"
    assert call(server, "bob", "GET", f"/cache/tree?after={others}").status == 409
    slots = get(server, "bob", "/slots")
    assert [slot for slot in slots if slot.get("is_others")] and all(
        slot["n_prompt_tokens"] == 0 and not slot["is_processing"] for slot in slots if slot.get("is_others")
    )
    assert not any(slot.get("is_others") for slot in get(server, "root", "/slots"))


def test_whoever_watches_hears_of_its_own_requests_only(server):
    watching = {name: _watch(server, name) for name in ("alice", "bob", "root")}
    tell_the_secret(server, "alice", SECRET[2])
    heard = {}
    for name, (connection, response) in watching.items():
        last = call(server, name, "POST", "/completion", {"prompt": "The last.", "n_predict": 1})
        heard[name] = _heard(response, last.headers["x-request-id"])
        connection.close()
    assert SECRET[2] in heard["alice"] and SECRET[2] not in heard["bob"] and SECRET[2] not in heard["root"]
    assert heard["root"].count("event: request") > heard["alice"].count("event: request") > 4
    assert heard["bob"].count('"id":') < 20 and heard["bob"].count("/completions") == 0


def _watch(server: Server, name: str) -> tuple[http.client.HTTPConnection, Any]:
    connection = server.connect()
    connection.request("GET", "/cache/events", headers=bearer(name))
    response = connection.getresponse()
    assert response.status == 200 and response.readline() == b"event: hello\n"
    return connection, response


def _heard(response: Any, last: str) -> str:
    """Everything until one's own last request is done: events come in their order."""
    text = ""
    while not (last in text.rpartition("data: ")[2] and '"done"' in text.rpartition("data: ")[2]):
        text += response.readline().decode()
    return text


# forgetting


def nodes(server: Server, namespace: str) -> list[Json]:
    found: list[Json] = get(server, "root", f"/cache/tree?namespace={namespace}")["nodes"]
    return found


def test_what_a_user_drops_is_quoted_nowhere_and_others_keep_theirs(server, folder):
    secret, others = SECRET[1], words(60, 21)
    chat(server, "bob", others)
    response = tell_the_secret(server, "alice", secret)
    own = get(server, "alice", "/cache")["caller"]["namespace"]
    assert secret in everything(server, "root", "?all=true").decode()
    message = call(server, "alice", "DELETE", "/cache?responses=true").json  # at once: what comes next is under way
    assert message["dropped"] > 0 and message["responses"] >= 1 and "namespace" not in message
    assert nodes(server, own) == []
    quoted = {"alice": "", "root": "?all=true"}
    for name, query in quoted.items():
        assert secret not in everything(server, name, query, response=response).decode()
    again = chat(server, "alice", f"{words(20, 81)} The word is §", prompt_cache_diagnostics=True)
    assert again["timings"]["cache"]["diverged"] is None and again["timings"]["cache"]["n_shared"] == 0
    call(server, "alice", "DELETE", "/cache")
    time.sleep(0.3)  # whatever was about to be read ahead
    assert nodes(server, own) == []
    assert chat(server, "bob", others)["timings"]["prompt_n"] <= GUARD
    tell_the_secret(server, "alice", secret)
    call(server, "alice", "DELETE", "/cache?responses=true")
    server.kill_engine()  # with nothing in between: whoever wrote its last turn down may not hold on to it
    until(server.is_ready, "the engine is back")
    assert nodes(server, own) == [], "what outlives the engine is gone as well"
    for name, query in quoted.items():
        assert secret not in everything(server, name, query, response=response).decode()
    assert chat(server, "bob", others)["timings"]["prompt_n"] <= GUARD


def test_a_user_drops_one_salt_and_an_admin_everything(server):
    text = words(60, 31)
    for salt in ("one", "two"):
        chat(server, "bob", text, cache_salt=salt)
    assert call(server, "bob", "DELETE", "/cache?cache_salt=one").status == 200
    assert chat(server, "bob", text, cache_salt="one")["timings"]["cache_n"] == 0
    assert chat(server, "bob", text, cache_salt="two")["timings"]["prompt_n"] <= GUARD
    assert call(server, "bob", "DELETE", "/cache?all=true").status == 403
    assert call(server, "root", "DELETE", "/cache").status == 200
    assert get(server, "root", "/cache/tree")["n_total"] == 0
    assert chat(server, "bob", text, cache_salt="two")["timings"]["cache_n"] == 0


def test_pins_beyond_the_quota_are_for_admins(server):
    chat(server, "bob", words(60, 41))
    end = [node for node in get(server, "bob", "/cache/tree")["nodes"] if node["checkpoint"]][-1]["id"]
    refused = call(server, "bob", "POST", f"/cache/nodes/{end}/pin", {})
    assert refused.status == 403 and refused.json["error"]["code"] == "pin_quota_exceeded"
    assert not any(node["pinned"] for node in get(server, "bob", "/cache/tree")["nodes"])
    assert call(server, "root", "POST", f"/cache/nodes/{end}/pin", {}).json["pinned"] is True
    assert call(server, "bob", "POST", f"/cache/nodes/{end}/unpin", {}).json["pinned"] is False


def test_the_command_line_shows_what_the_key_may_see(server):
    chat(server, "alice", words(40, 51))
    chat(server, "bob", words(40, 52))
    shown = run_cli("cache", "tree", "--url", server.url, "--api-key", KEYS["bob"])
    assert shown.returncode == 0 and shown.stdout.count("namespace ") == 1, shown.stderr
    top = run_cli("top", "--once", "--url", server.url, "--api-key", KEYS["bob"])
    assert top.returncode == 0 and "others" in top.stdout, top.stderr


def test_keys_are_read_again_when_told(server, folder):
    assert call(server, "carol", "GET", "/v1/models").status == 401
    key_file(folder, file_text() + f'[keys.carol]\nkey = "{KEYS["carol"]}"\n')
    os.kill(server.process.pid, signal.SIGHUP)
    until(lambda: call(server, "carol", "GET", "/v1/models").status == 200, "the new key is known")
    key_file(folder, "[keys.carol]\nkee = 1\n")
    os.kill(server.process.pid, signal.SIGHUP)
    until(lambda: "the keys stay as they were" in server.log, "the wrong file is told")
    assert call(server, "carol", "GET", "/v1/models").status == 200
    key_file(folder, file_text())
    os.kill(server.process.pid, signal.SIGHUP)
    until(lambda: call(server, "carol", "GET", "/v1/models").status == 401, "the old key is known no more")
    assert call(server, "bob", "GET", "/v1/models").status == 200
