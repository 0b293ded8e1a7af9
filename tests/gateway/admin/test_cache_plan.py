"""What prompts would cost is told before they are read, and reading ahead makes it true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.server import GUARD, Server, serving, until, words

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(n_ctx=8192) as server:
        yield server


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": 4, "temperature": 0, **QUIET, **more}


def plan(server: Server, *candidates: dict[str, Any]) -> Any:
    return server.ask("/cache/plan", {"candidates": list(candidates)})


def test_what_is_planned_is_what_is_read(server):
    """Ways to shorten a conversation: each costs what was said, and nothing was read to say it."""
    question, other = user(words(300, 1)), user(words(300, 2))
    reply = server.ask("/v1/chat/completions", body(question))["choices"][0]["message"]
    kept = [question, {"role": "assistant", "content": reply["content"]}]
    whole = body(*kept, user("Go on."))
    dropped = body(other, user("Go on."))
    found = plan(server, dropped, whole)
    assert found["cheapest"] == 1 and [row["index"] for row in found["candidates"]] == [0, 1]
    assert plan(server, dropped, whole) == found or plan(server, dropped)["candidates"][0]["cached_tokens"] < 20
    assert found["candidates"][1]["cached_tokens"] > 300 > found["candidates"][0]["cached_tokens"]
    for candidate, row in zip((whole, dropped), found["candidates"][::-1], strict=True):
        timings = server.ask("/v1/chat/completions", candidate)["timings"]
        assert row["prompt_tokens"] == timings["cache_n"] + timings["prompt_n"]
        assert abs(row["read_tokens"] - timings["prompt_n"]) <= GUARD
        assert row["read_tokens"] == row["prompt_tokens"] - row["cached_tokens"] and row["seconds"] >= 0


def test_another_namespace_has_nothing_cached(server):
    known = body(user(words(200, 3)))
    server.ask("/v1/chat/completions", known)
    mine, others = plan(server, known, known | {"cache_salt": "other"})["candidates"]
    assert mine["read_tokens"] <= GUARD and others["cached_tokens"] == 0


def test_a_prompt_is_read_in_idle_time(server):
    ahead = body(user(words(400, 4)))
    (row,) = server.ask("/cache/prefetch", {"requests": [ahead]})["requests"]
    assert row["read_tokens"] > 300
    until(lambda: plan(server, ahead)["candidates"][0]["cached_tokens"] > 300, "it was read ahead")
    assert server.ask("/v1/chat/completions", ahead)["timings"]["cache_n"] > 300


def test_prompts_are_read_now(server):
    bodies = [body(user(words(200, seed))) for seed in (5, 6)]
    rows = server.ask("/cache/prefetch", {"requests": [*bodies, {"prompt": words(50, 7)}], "when": "now"})["requests"]
    assert all(row["usage"]["completion_tokens"] == 0 for row in rows)
    assert all(row["read_tokens"] <= GUARD for row in plan(server, *bodies)["candidates"])
    forks = [body(bodies[0]["messages"][0], user(f"Branch {i}")) for i in range(3)]
    assert all(row["cached_tokens"] > 150 for row in plan(server, *forks)["candidates"])


def test_what_does_not_fit_is_never_the_cheapest(server):
    found = plan(server, {"prompt": "x " * 5000}, body(user(words(300, 9))))
    assert [row["fits"] for row in found["candidates"]] == [False, True] and found["cheapest"] == 1


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/cache/plan", {}),
        ("/cache/plan", {"candidates": []}),
        ("/cache/plan", {"candidates": [{}]}),
        ("/cache/plan", {"candidates": [{"messages": "x"}]}),
        ("/cache/plan", {"candidates": [{"prompt": "x", "n": 2}]}),
        ("/cache/plan", {"candidates": [{"prompt": "x"}] * 17}),
        ("/cache/prefetch", {"requests": [{"prompt": "x"}], "when": "later"}),
        ("/cache/prefetch", {"requests": [{"prompt": [1, 2, 3]}]}),
    ],
)
def test_what_cannot_be_planned_is_refused(server, path, wrong):
    reply = server.post(path, wrong)
    assert reply.status == 400 and reply.json["error"]["message"]


def test_what_was_prefetched_can_be_held_for_a_while(server):
    prompt = body(user(words(200, 77)))
    answer = server.ask("/cache/prefetch", {"requests": [prompt], "when": "now", "ttl_s": 3600})
    assert answer["requests"][0]["held"] is True
    pinned = [node for node in server.get("/cache/tree").json["nodes"] if node["pinned"]]
    (deepest,) = (node for node in pinned if node["end"] == max(other["end"] for other in pinned))
    assert deepest["end"] > 200
    assert server.post(f"/cache/nodes/{deepest['id']}/unpin", None).json["pinned"] is False


def test_a_node_is_pinned_until_its_time_is_over(server):
    server.ask("/v1/chat/completions", body(user(words(150, 78))))
    nodes = server.get("/cache/tree").json["nodes"]
    id = max((node for node in nodes if node["checkpoint"]), key=lambda node: node["last_use"])["id"]

    def is_pinned() -> bool:
        return any(node["id"] == id and node["pinned"] for node in server.get("/cache/tree").json["nodes"])

    assert server.post(f"/cache/nodes/{id}/pin?ttl_s=3600", None).json["pinned"] and is_pinned()
    assert server.post(f"/cache/nodes/{id}/pin", None).json["pinned"], "a pin without an end takes its place"
    assert server.post(f"/cache/nodes/{id}/unpin", None).json["pinned"] is False
    assert server.post(f"/cache/nodes/{id}/pin?ttl_s=1", None).json["pinned"]
    until(lambda: not is_pinned(), "the pin has ended")


@pytest.mark.parametrize("ttl", ["0", "-1", "1e3", "604801", "x", ""])
def test_a_time_out_of_bounds_is_refused(server, ttl):
    reply = server.post(f"/cache/nodes/1/pin?ttl_s={ttl}", None)
    assert reply.status == 400 and "ttl_s" in reply.json["error"]["message"]


def test_holding_needs_what_was_read(server):
    for wrong in ({"ttl_s": 60}, {"ttl_s": 0, "when": "now"}, {"ttl_s": 1e9, "when": "now"}):
        assert server.post("/cache/prefetch", {"requests": [body(user("a"))], **wrong}).status == 400
