"""Replicas come when prompts wait, and go when nobody needs them, without taking conversations along; several models."""

import concurrent.futures
from pathlib import Path
from typing import Any

from support.fleet import Fleet, fleet, model
from support.server import until, words

GROWS = "least = 1\nmost = 2\nwaiting-tokens = 400\nupscale-delay = 0.0\ndownscale-delay = 3.0"


def ask(cluster: Fleet, seed: int, n_words: int, **more: Any) -> Any:
    body = {"model": "grows", "messages": [{"role": "user", "content": words(n_words, seed)}], "max_tokens": 200}
    return cluster.post("/v1/chat/completions", {**body, "ignore_eos": True, **more})


def test_replicas_come_and_go(tmp_path: Path) -> None:
    both = model("grows", GROWS, 1.0), model("other", "count = 1", 1.0)
    with fleet(tmp_path, (tmp_path / "store").as_uri(), *both, n_nodes=3) as cluster:
        _several_models(cluster)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            replies = [pool.submit(ask, cluster, seed, 400) for seed in range(40)]
            until(lambda: len(replicas_of(cluster, "grows")) == 2, "a second replica has come", 120)
            homes = {seed: reply.result() for seed, reply in enumerate(replies)}
        assert all(reply.status == 200 for reply in homes.values()), "nobody was refused while it grew"
        late = {seed: ask(cluster, seed, 400, max_tokens=4) for seed in range(100, 106)}
        served = {seed: reply.headers["x-everwarm-replica"] for seed, reply in late.items()}
        assert set(served.values()) <= replicas_of(cluster, "grows")
        until(lambda: len(replicas_of(cluster, "grows")) == 1, "one replica has gone", 120)
        (left,) = replicas_of(cluster, "grows")
        for gone in set(served.values()) - {left}:
            until(lambda gone=gone: f"replica {gone} has put away" in cluster.log, "it put away before it went")
        moved = [seed for seed, name in served.items() if name != left]
        assert moved, "the one that went had conversations"
        for seed in moved:
            again = ask(cluster, seed, 400, max_tokens=4).json["usage"]
            assert again["prompt_tokens"] - again["prompt_tokens_details"]["cached_tokens"] <= 32, seed
        control = ask(cluster, 999, 400, max_tokens=4).json["usage"]
        assert control["prompt_tokens_details"]["cached_tokens"] < 32, "a control: what nobody read is read"


def replicas_of(cluster: Fleet, name: str) -> set[str]:
    text = cluster.get("/metrics").data.decode()
    return {part.split('"')[0] for part in text.split(f'model_id="{name}",replica="')[1:]}


def _several_models(cluster: Fleet) -> None:
    listed = cluster.get("/v1/models").json
    assert [row["id"] for row in listed["data"]] == ["grows", "other"] and listed["last_id"] == "other"
    question = [{"role": "user", "content": "Hello"}]
    for name in ("grows", "other"):
        assert (
            cluster.ask("/v1/chat/completions", {"model": name, "messages": question, "max_tokens": 2})["model"] == name
        )
        assert cluster.get(f"/v1/models/{name}").json["id"] == name
    missing = cluster.post("/v1/chat/completions", {"model": "neither", "messages": question})
    assert missing.status == 404 and "there are: grows, other" in missing.json["error"]["message"]
