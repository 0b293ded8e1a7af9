"""The cache API of a real server: what it shows is what happened, and what it is told to keep or forget it does."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from support.server import GUARD, PATIENCE_S, Reply, Server, metric, run_cli, serving, until, words

Json = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def chat(server: Server, messages: list[Json], **more: Any) -> Json:
    body = {"messages": messages, "max_tokens": 6, "temperature": 0} | more
    answer: Json = server.ask("/v1/chat/completions", body)
    return answer


def complete(server: Server, text: str, **more: Any) -> Json:
    answer: Json = server.ask("/completion", {"prompt": text, "n_predict": 4, "temperature": 0} | more)
    return answer


def nodes_of(server: Server, query: str = "") -> list[Json]:
    found: list[Json] = server.get(f"/cache/tree{query}").json["nodes"]
    return found


def message(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def session() -> Iterator[list[Json]]:
    """Two conversations that go on, with a question edited, an answer branched and a retry."""
    system = message("system", words(40, 1))
    for seed in (10, 20):
        messages = [system]
        for turn in range(4):
            messages = [*messages, message("user", words(16, seed + turn))]
            yield messages
            messages = [*messages, message("assistant", words(10, seed + turn))]
        yield [*messages[:3], message("user", words(16, seed + 7))]  # another second question
        yield [*messages[:5], message("user", words(16, seed + 8))]
        yield messages[:-1]  # a retry
    yield [message("system", words(40, 2)), message("user", "hello")]
    for _ in range(3):
        yield [system, message("user", words(16, 10))]


# what it shows


def test_a_session_adds_up_to_what_its_answers_said(server):
    before = server.get("/cache").json
    answers = [chat(server, messages) for messages in session()]
    assert len(answers) == 18
    timings = [answer["timings"] for answer in answers]
    after = server.get("/cache").json
    told = {name: after["tokens"][name] - before["tokens"][name] for name in after["tokens"]}
    assert told["reused"] == sum(each["cache_n"] for each in timings) > 0
    assert told["read"] == sum(each["prompt_n"] for each in timings)
    assert told["prompt"] == sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert told["written"] == sum(each["predicted_n"] for each in timings)
    assert told["avoidable"] == sum(max(0, t["cache"]["n_shared"] - t["cache_n"]) for t in timings)
    assert after["requests"]["total"] - before["requests"]["total"] == len(answers)
    assert after["hit_rate"] == after["tokens"]["reused"] / after["tokens"]["prompt"]
    rows = server.get("/cache/requests?limit=18").json["requests"][::-1]
    for row, each in zip(rows, timings, strict=True):
        assert (row["n_cached"], row["n_read"], row["n_reply"]) == (
            each["cache_n"],
            each["prompt_n"],
            each["predicted_n"],
        )
        assert row["status"] == "done" and row["cache"] == each["cache"] and row["path"] == "/v1/chat/completions"
        spent = {phase["name"]: phase["ms"] for phase in row["phases"]}
        assert list(spent) == ["queue", "restore", "prefill", "decode"]
        assert spent["restore"] + spent["prefill"] == pytest.approx(each["prompt_ms"])
        assert row["ttft_ms"] == pytest.approx(sum(spent.values()) - spent["decode"])
    text = server.get("/metrics").data.decode()
    assert metric(text, "everwarm_prefix_cache_hits_total") == after["tokens"]["reused"]
    assert metric(text, "everwarm_prefix_cache_queries_total") == after["tokens"]["prompt"]


def test_the_tree_shows_conversations_branches_and_tiers(server):
    for messages in session():
        chat(server, messages)
    until(lambda: settled(server), "idle work is done")
    tree = server.get("/cache/tree").json
    nodes, by_id = tree["nodes"], {node["id"]: node for node in tree["nodes"]}
    assert tree["n_total"] == len(nodes) == len(by_id) and tree["next"] is None
    seen: set[int] = set()
    for node in nodes:
        assert node["parent"] is None or node["parent"] in seen, "a child came before its parent"
        seen.add(node["id"])
        assert node["words"] is None and node["running"] is None
        assert node["n_children"] == sum(other["parent"] == node["id"] for other in nodes)
        if node["parent"] is not None:
            assert node["start"] == by_id[node["parent"]]["end"] < node["end"]
    (root,) = [node for node in nodes if node["parent"] is None]
    assert root["start"] == root["end"] == 0 and len(root["namespace"]) == 12
    n_system = max(node["end"] for node in nodes if node["n_children"] > 1 and node["parent"] is not None)
    assert n_system > 40, "conversations with one system prompt part after it"
    kept = [node["checkpoint"] for node in nodes if node["checkpoint"]]
    tiers = server.get("/cache").json["tiers"]
    assert sum("ram" in each["tiers"] for each in kept) == tiers["ram"]["n_states"] > 0
    assert sum("device" in each["tiers"] for each in kept) == tiers["device"]["n_states"]
    resident = [node for node in nodes if "device" in node["kv"]["tiers"]]
    assert resident and max(node["end"] for node in resident) <= tiers["device"]["n_cells"]
    n_bytes = sum(each["bytes"] for each in kept) + sum(node["kv"]["bytes"] for node in nodes)
    assert n_bytes == pytest.approx(tiers["ram"]["bytes"], rel=0.01)
    assert max(node["hits"] for node in nodes) > 0


def settled(server: Server) -> bool:
    """Everything parked has its copy in RAM, but the ends of prompts, which stay on the device."""
    kept = (node["checkpoint"] for node in nodes_of(server) if node["checkpoint"])
    return all("ram" in each["tiers"] for each in kept if each["kind"] != "prompt-end")


def test_pages_together_are_the_whole_tree(server):
    for messages in session():
        chat(server, messages)
    until(lambda: settled(server), "idle work is done")
    whole = [node["id"] for node in nodes_of(server)]
    page = server.get("/cache/tree?limit=7").json
    found = page["nodes"]
    while page["next"] is not None:
        page = server.get(f"/cache/tree?limit=7&after={page['next']}").json
        found += page["nodes"]
    assert [node["id"] for node in found] == whole and len(whole) > 14
    namespace = found[0]["namespace"]
    assert [node["id"] for node in nodes_of(server, f"?namespace={namespace}")] == whole
    assert nodes_of(server, "?namespace=" + ("0" if namespace[0] != "0" else "1") * 12) == []


def test_one_that_runs_is_shown_where_it_is(server):
    with streaming(server, {"prompt": words(60, 5), "n_predict": 2000, "stream": True, "ignore_eos": True}) as response:
        response.readline()
        (row,) = [row for row in server.get("/cache/requests").json["requests"] if row["status"] == "running"]
        assert row["stream"] and row["path"] == "/completion" and row["id"] == response.headers["x-request-id"]
        (node,) = [node for node in nodes_of(server) if node["running"]]
        assert node["running"]["request"] == row["id"] and node["running"]["n_prompt"] == row["n_prompt"]
    until(lambda: status_of(server, row["id"]) == "cancelled", "hanging up cancels it")
    until(lambda: not any(node["running"] for node in nodes_of(server)), "the engine has let go of it")
    refused = server.post("/completion", {"prompt": [5] * 5000})
    assert refused.status == 400 and status_of(server, refused.headers["x-request-id"]) == "failed"


def status_of(server: Server, id: str) -> str:
    (row,) = [row for row in server.get("/cache/requests").json["requests"] if row["id"] == id]
    return str(row["status"])


@contextlib.contextmanager
def streaming(server: Server, body: Json | None, path: str = "/completion") -> Iterator[http.client.HTTPResponse]:
    connection = server.connect()
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


# what it is told


def test_what_is_dropped_is_read_again_and_nothing_else(server):
    first, second = words(60, 31), words(60, 32)
    complete(server, words(60, 30))
    everything = server.call("DELETE", "/cache").json
    assert everything["dropped"] > 0 and server.get("/cache/tree").json["n_total"] == 0
    assert server.get("/cache").json["tiers"]["ram"]["bytes"] == 0
    assert complete(server, first)["timings"]["cache_n"] == 0
    leaf = nodes_of(server)[-1]
    complete(server, second)
    assert complete(server, first)["timings"]["prompt_n"] <= GUARD
    dropped = server.call("DELETE", f"/cache/nodes/{branch_above(server, leaf['id'])}").json
    assert dropped["dropped"] > 0 and dropped["bytes"] > 0
    assert leaf["id"] not in {node["id"] for node in nodes_of(server)}
    assert complete(server, second)["timings"]["prompt_n"] <= GUARD
    assert complete(server, first)["timings"]["cache_n"] <= GUARD


def branch_above(server: Server, leaf: int) -> int:
    """The highest node on the way to a leaf that nobody else passes."""
    nodes = {node["id"]: node for node in nodes_of(server)}
    while nodes[nodes[leaf]["parent"]]["n_children"] == 1:
        leaf = nodes[leaf]["parent"]
    return leaf


def test_a_pin_keeps_what_an_equal_one_loses():
    with serving("--spares", "0", "--cache-ram", "6MiB") as server:
        pinned, *others = (words(60, i) for i in range(1, 6))
        complete(server, pinned)
        leaf = nodes_of(server)[-1]["id"]
        answer = server.post(f"/cache/nodes/{leaf}/pin", {}).json
        assert answer["id"] == leaf and answer["pinned"] is True
        for other in others:
            complete(server, other)
        marked = [node for node in nodes_of(server) if node["pinned"]]
        assert leaf in {node["id"] for node in marked} and all(a["id"] == b["parent"] for a, b in pairwise(marked))
        fill(server, 100)
        assert min(complete(server, other)["timings"]["cache_n"] for other in others) <= GUARD
        assert complete(server, pinned)["timings"]["prompt_n"] <= GUARD
        assert server.post(f"/cache/nodes/{leaf}/unpin", {}).json["pinned"] is False
        assert not any(node["pinned"] for node in nodes_of(server))
        assert server.get("/cache").json["evictions"] > 0
        assert metric(server.get("/metrics").data.decode(), 'everwarm_evictions_total{cause="ram_budget"}') > 0


def fill(server: Server, seed: int) -> None:
    """More than fits into RAM."""
    for i in range(16):
        complete(server, words(60, seed + i))


def test_what_is_dropped_is_gone_from_the_disk_as_well(tmp_path):
    with serving("--disk-cache", "64MiB", "--state-dir", str(tmp_path), "--grace", "60") as server:
        chat(server, [message("user", words(60, 3))])
        until(lambda: server.get("/cache").json["tiers"]["disk"]["n_objects"] > 1, "it is on disk")
        until(lambda: any("disk" in node["kv"]["tiers"] for node in nodes_of(server)), "the tree says so")
        assert any("disk" in node["checkpoint"]["tiers"] for node in nodes_of(server) if node["checkpoint"])
        first = nodes_of(server)[1]["id"]
        assert server.call("DELETE", f"/cache/nodes/{first}").json["dropped"] > 3
        assert server.get("/cache").json["tiers"]["disk"]["n_objects"] == 0
        assert not list(tmp_path.rglob("*.ew"))
        assert chat(server, [message("user", words(60, 3))])["timings"]["cache_n"] == 0
        with streaming(server, None, "/cache/events") as response:  # nobody who watches keeps a server from stopping
            assert next_event(response)[0] == "hello"
            server.process.terminate()
            assert server.process.wait(PATIENCE_S) == 0


def test_after_a_restart_the_tree_shows_what_is_on_disk_and_what_is_loaded_is_shown_once(tmp_path):
    flags = ("--disk-cache", "64MiB", "--state-dir", str(tmp_path), "--restore-policy", "always", "--cache-text")
    talk = [message("system", words(40, 1)), message("user", words(60, 3))]
    with serving(*flags) as server:
        chat(server, talk)
        until(lambda: any("disk" in tiers_of(node) for node in nodes_of(server)), "it is on disk")
        assert all(node["id"] > 0 for node in nodes_of(server))
    with serving(*flags) as server:
        until(lambda: len(nodes_of(server)) > 1, "the disk is open")
        root, first, *more = nodes_of(server)
        kept = [first, *more][-1]
        assert server.get("/cache").json["n_nodes"] == 1 and root["id"] < 0 and first["parent"] == root["id"]
        for node in (first, *more):
            assert node["id"] < 0 and tiers_of(node) == node["kv"]["tiers"] == ["disk"] and node["last_use"] is not None
            assert node["words"]
        page = server.get("/cache/tree?limit=1").json
        assert page["nodes"] == [root] and page["n_total"] == 2 + len(more)
        assert server.get(f"/cache/tree?limit=1&after={page['next']}").json["nodes"] == [first]
        shown = run_cli("cache", "tree", "--url", server.url).stdout
        assert "(disk, " in shown and "kv disk" in shown
        assert chat(server, talk)["timings"]["cache_n"] >= kept["end"]
        nodes = nodes_of(server)
        assert all(node["id"] > 0 for node in nodes) and kept["end"] in {node["end"] for node in nodes}
        server.process.terminate()
        server.process.wait(PATIENCE_S)
    with serving(*flags) as server:
        until(lambda: len(nodes_of(server)) > 1, "the disk is open")
        assert {first["id"], kept["id"]} <= {node["id"] for node in nodes_of(server)}, "the same in every process"
        version = server.get("/cache").json["version"]
        assert server.call("DELETE", f"/cache/nodes/{first['id']}").json["dropped"] > 1
        assert nodes_of(server) == [] and not list(tmp_path.rglob("*.ew"))
        assert server.get("/cache").json["version"] > version, "whoever watches hears of it"
        assert chat(server, talk)["timings"]["cache_n"] == 0


def test_pins_outlive_a_restart_of_the_server(tmp_path):
    flags = ("--disk-cache", "64MiB", "--state-dir", str(tmp_path), "--restore-policy", "always")
    talk = [message("system", words(40, 1)), message("user", words(60, 3))]
    with serving(*flags) as server:
        chat(server, talk)
        until(lambda: any("disk" in tiers_of(node) for node in nodes_of(server)), "it is on disk")
        kept = next(node for node in nodes_of(server) if "disk" in tiers_of(node))
        assert server.post(f"/cache/nodes/{kept['id']}/pin", {}).json["pinned"] is True
        server.process.kill()
        server.process.wait()
    for expected in (True, False):
        with serving(*flags) as server:
            until(lambda: len(nodes_of(server)) > 1, "the disk is open")
            assert (kept["end"] in pinned_ends(server)) is expected
            chat(server, talk)
            assert (kept["end"] in pinned_ends(server)) is expected
            end = next(node["id"] for node in nodes_of(server) if node["end"] == kept["end"])
            server.post(f"/cache/nodes/{end}/unpin", {})
            assert not pinned_ends(server)


def test_pins_outlive_the_engine_without_a_disk():
    with serving() as server:
        complete(server, words(60, 1))
        until(lambda: settled(server), "idle work is done")
        leaf = nodes_of(server)[-1]
        server.post(f"/cache/nodes/{leaf['id']}/pin", {})
        before = pinned_ends(server)
        assert leaf["end"] in before
        until(lambda: metric(server.get("/metrics").data.decode(), "everwarm_ram_waiting") == 0, "it is written down")
        server.kill_engine()
        until(lambda: not server.is_ready(), "the death is noticed")
        until(server.is_ready, "it is back")
        assert leaf["end"] in pinned_ends(server)
        end = next(node["id"] for node in nodes_of(server) if node["end"] == leaf["end"])
        assert end != leaf["id"] and server.post(f"/cache/nodes/{end}/unpin", {}).json["pinned"] is False


def pinned_ends(server: Server) -> set[int]:
    return {node["end"] for node in nodes_of(server) if node["pinned"] and node["parent"] is not None}


def tiers_of(node: Json) -> list[str]:
    return list(node["checkpoint"]["tiers"]) if node["checkpoint"] else []


# watching


def test_whoever_watches_hears_of_requests_and_of_the_tree(server):
    with streaming(server, None, "/cache/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name, hello = next_event(response)
        assert (
            name == "hello" and hello["model"] == "everwarm-tiny" and hello["tiers"]["ram"]["budget_bytes"] == 512 << 20
        )
        complete(server, words(200, 77))
        heard = [next_event(response) for _ in range(3)]
        n_requests = hello["requests"]["total"] + 1  # figures from before it ended may come first
        while n_counted(heard) != n_requests or "tree" not in dict(heard) or heard_status(heard) != "done":
            heard.append(next_event(response))
        rows = [data for name, data in heard if name == "request"]
        assert [row["status"] for row in rows][:2] == ["running", "running"] and len({row["id"] for row in rows}) == 1
        assert rows[-1]["n_read"] + rows[-1]["n_cached"] == rows[-1]["n_prompt"] > 0
        assert all(data.keys() == hello.keys() for name, data in heard if name == "stats")
        assert next(data for name, data in heard if name == "tree")["version"] > hello["version"]


def n_counted(heard: list[tuple[str, Json]]) -> int | None:
    """The requests that the last figures count."""
    stats = [data for name, data in heard if name == "stats"]
    return stats[-1]["requests"]["total"] if stats else None


def heard_status(heard: list[tuple[str, Json]]) -> str | None:
    rows = [data for name, data in heard if name == "request"]
    return rows[-1]["status"] if rows else None


def next_event(response: http.client.HTTPResponse) -> tuple[str, Json]:
    name = ""
    while True:
        line = response.readline().decode()
        assert line, "the stream ended"
        line = line.rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            return name, json.loads(line.removeprefix("data: "))


# who may look, and at what


def test_text_is_shown_only_where_the_server_was_told_to_and_only_to_those_with_the_key():
    with serving("--cache-text", "--api-key", "secret") as server:
        key = {"authorization": "Bearer secret"}
        body = {"prompt": words(60, 1), "n_predict": 2, "temperature": 0}
        assert server.post("/completion", body, **key).status == 200
        shown = server.get("/cache/tree", **key).json["nodes"]
        assert any("Note 1. stone" in node["words"] for node in shown)
        assert all(len(node["words"]) < 400 for node in shown) and server.get("/cache", **key).json["text"] is True
        for method, path in ROUTES:
            assert server.call(method, path).status == 401, path
            assert server.call(method, path, authorization="Bearer wrong").status == 401, path


ROUTES = (
    *(("GET", path) for path in ("/cache", "/cache/tree", "/cache/requests", "/cache/events")),
    *(("DELETE", path) for path in ("/cache", "/cache/nodes/1")),
    *(("POST", path) for path in ("/cache/nodes/1/pin", "/cache/nodes/1/unpin")),
)


@pytest.mark.parametrize("path", ["/cache/tree", "/cache/requests"])
@pytest.mark.parametrize("limit", ["-1", "0", "1001", "9" * 30, "1e3", "ten", "1.5", "%00", ""])
def test_a_limit_that_is_none_is_refused(server, path, limit):
    refused(server.get(f"{path}?limit={limit}"), 400)


@pytest.mark.parametrize(
    "query", ["after=x", "after=--1", "after=" + "9" * 40, "after=%00", "namespace=NO", "namespace=" + "a" * 99]
)
def test_a_place_that_is_none_is_refused(server, query):
    refused(server.get(f"/cache/tree?{query}"), 400)


def test_what_is_not_there_is_said_to_be_so(server):
    refused(server.get("/cache/tree?after=1"), 409)
    refused(server.get("/cache/tree?after=-1"), 409)
    for call in (("DELETE", "/cache/nodes/1"), ("POST", "/cache/nodes/1/pin"), ("POST", "/cache/nodes/1/unpin")):
        refused(server.call(*call), 404)
    refused(server.call("DELETE", "/cache/nodes/-1"), 404)
    for id in ("x", "--1", "1.5", "9" * 40):
        refused(server.call("DELETE", f"/cache/nodes/{id}"), 400)
    refused(server.get("/cache/nodes/1"), 405)
    root = [node["id"] for node in nodes_of(server) if node["parent"] is None] or [
        complete(server, "x") and root_of(server)
    ]
    refused(server.post(f"/cache/nodes/{root[0]}/pin", {}), 400)


def root_of(server: Server) -> int:
    return int(nodes_of(server)[0]["id"])


def refused(reply: Reply, status: int) -> None:
    assert reply.status == status, reply.data
    assert reply.json["error"]["message"]
