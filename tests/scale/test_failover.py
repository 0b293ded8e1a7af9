"""Servers that share a store: what one has read, another goes on from, also when the first was killed."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from bench.seaweed import BUCKET, S3

from support.proxy import FAULTS, proxied
from support.server import Server, children, is_alive, metric, serving, until, words

GUARD = 16
SYSTEM = {"role": "system", "content": words(300, 3)}
FIRST = [SYSTEM, {"role": "user", "content": words(120, 4)}]


@contextmanager
def sharing(key: Path, prefix: str, *flags: str, endpoint: str | None = None) -> Iterator[Server]:
    """A server with nothing of its own on disk."""
    more = () if endpoint is None else ("--remote-endpoint", endpoint)
    shared = ("--remote", f"s3://{BUCKET}/{prefix}", "--remote-key", str(key), "--restore-policy", "always")
    patient = () if "--remote-wait" in flags else ("--remote-wait", "10")
    with serving(*shared, *more, *patient, *flags) as server:
        yield server


@pytest.fixture
def prefix() -> str:
    return f"fleet-{uuid.uuid4().hex}"


def chat(server: Server, messages: list[dict[str, str]], n: int = 12) -> Any:
    return server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": n, "temperature": 0, "seed": 1})


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def n_cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def measure(server: Server, name: str) -> float:
    text = server.get("/metrics").data.decode()
    return metric(text, f"everwarm_remote_{name}")


def is_shared(server: Server) -> bool:
    """Whether everything it has done is in the store."""
    seen = []
    for _ in range(3):
        seen.append((measure(server, "bytes_written_total"), measure(server, "bytes_waiting")))
        time.sleep(0.2)
    return seen[0] == seen[-1] and seen[0][0] > 0 and seen[0][1] == 0


def kill_all(server: Server) -> None:
    """Gateway and engine, at once, without a word."""
    engines = server.engine_pids
    others = children(server.process.pid)
    for pid in (server.process.pid, *others):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    until(lambda: not any(map(is_alive, engines)), "the engine is gone")


def next_turn(answer: Any) -> list[dict[str, str]]:
    return [*FIRST, {"role": "assistant", "content": text_of(answer)}, {"role": "user", "content": words(30, 5)}]


def n_common(server: Server, *conversations: list[dict[str, str]]) -> int:
    """Tokens that both prompts begin with."""
    texts = [server.rendered(messages) for messages in conversations]
    a, b = (
        server.ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        for text in texts
    )
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_another_server_goes_on_where_a_killed_one_was(s3: S3, key: Path, prefix: str):
    with sharing(key, prefix) as server:
        first = chat(server, FIRST)
        until(lambda: is_shared(server), "the turn is in the store")
        kill_all(server)
    with sharing(key, prefix) as server:
        second = chat(server, next_turn(first))
        assert measure(server, "hits_total") == 1
        again = chat(server, FIRST)
    with serving() as server:
        cold = chat(server, next_turn(first))
        assert n_cached(cold) == 0 and text_of(chat(server, FIRST)) == text_of(again) == text_of(first)
        n_shared = n_common(server, FIRST, next_turn(first))
    assert text_of(second) == text_of(cold)
    assert n_shared - n_cached(second) <= GUARD < n_shared, "it read again what the killed one had read"


def test_a_completion_goes_on_from_another_servers_reply(s3: S3, key: Path, prefix: str):
    tokens = [*range(40, 240), *range(30, 130)]
    with sharing(key, prefix) as server:
        reply = server.complete("", tokens, 16)["tokens"]
        until(lambda: is_shared(server), "the turn is in the store")
    with sharing(key, prefix) as server:
        longer = [*tokens, *reply, *range(50, 80)]
        there = server.complete("", longer, 8)
        assert there["timings"]["prompt_n"] <= 30 + GUARD + 1, there["timings"]
    with serving() as server:
        assert server.complete("", longer, 8)["tokens"] == there["tokens"]


def test_a_stop_leaves_everything_in_the_store(s3: S3, key: Path, prefix: str):
    with sharing(key, prefix) as server:
        first = chat(server, FIRST)
    with sharing(key, prefix) as server:
        assert n_cached(chat(server, next_turn(first))) > 300


def test_two_keys_on_one_bucket_share_nothing(s3: S3, key: Path, prefix: str, tmp_path: Path):
    other = tmp_path / "other"
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    with sharing(key, prefix) as server:
        first = chat(server, FIRST)
    with sharing(other, prefix) as server:
        second = chat(server, next_turn(first))
        assert n_cached(second) == 0 and measure(server, "refused_total") == 0
    with sharing(key, prefix) as server:
        assert n_cached(chat(server, next_turn(first))) > 300, "this test could not fail"


# somebody who can write to the bucket


def objects(s3: S3, prefix: str) -> dict[str, bytes]:
    keys = {"aws_access_key_id": s3.access, "aws_secret_access_key": s3.secret, "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=s3.endpoint, **keys)
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    found = {row["Key"]: client.get_object(Bucket=BUCKET, Key=row["Key"])["Body"].read() for row in listed}
    client.close()
    return found


def write(s3: S3, things: dict[str, bytes]) -> None:
    keys = {"aws_access_key_id": s3.access, "aws_secret_access_key": s3.secret, "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=s3.endpoint, **keys)
    for name, data in things.items():
        client.put_object(Bucket=BUCKET, Key=name, Body=data)
    client.close()


def forge(there: dict[str, bytes]) -> dict[str, bytes]:
    """Another MAC behind every object."""
    return {name: data[:-32] + bytes(32) for name, data in there.items() if name.endswith(".ew")}


def flip(there: dict[str, bytes]) -> dict[str, bytes]:
    mid = {name: len(data) // 2 for name, data in there.items()}
    return {
        name: data[: mid[name]] + bytes([data[mid[name]] ^ 4]) + data[mid[name] + 1 :] for name, data in there.items()
    }


def swap(there: dict[str, bytes]) -> dict[str, bytes]:
    """Every object under the name of another of its kind."""
    names = sorted(there, key=lambda name: name.rpartition("/")[2])
    return {name: there[other] for name, other in zip(names, [*names[1:], names[0]], strict=True)}


def truncate(there: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data[:-1] for name, data in there.items()}


@pytest.mark.parametrize("harm", [forge, flip, swap, truncate])
def test_what_somebody_else_laid_there_is_never_loaded(s3: S3, key: Path, prefix: str, harm: Callable[..., Any]):
    with sharing(key, prefix) as server:
        first = chat(server, FIRST)
        chat(server, [SYSTEM, {"role": "user", "content": words(60, 9)}])
    there = objects(s3, prefix)
    write(s3, harm(there))
    with sharing(key, prefix) as server:
        second = chat(server, next_turn(first))
        assert n_cached(second) == 0 and measure(server, "hits_total") == 0 and measure(server, "refused_total") > 0
    write(s3, there)
    with sharing(key, prefix) as server:
        right = chat(server, next_turn(first))
        assert n_cached(right) > 300 and text_of(right) == text_of(second), "this test could not fail"


def test_another_models_states_are_never_loaded(s3: S3, key: Path, prefix: str):
    """Its objects are laid where this model looks, under the names that this model looks for."""
    with sharing(key, prefix) as server:
        first = chat(server, FIRST)
    there = objects(s3, prefix)
    with sharing(key, prefix, "--cache-type-k", "q8_0", "--flash-attn", "on") as server:
        assert n_cached(chat(server, next_turn(first))) == 0
    both = objects(s3, prefix)
    foreign = {name: data for name, data in both.items() if name not in there}
    own, theirs = sorted(there, key=_kind), sorted(foreign, key=_kind)
    write(s3, {mine: foreign[other] for mine, other in zip(own, theirs, strict=False)})
    with sharing(key, prefix) as server:
        assert n_cached(chat(server, next_turn(first))) == 0 and measure(server, "refused_total") > 0


def _kind(name: str) -> str:
    return name.rpartition("/")[2].split("-")[0]


# a store that fails


def test_the_service_goes_on_while_the_store_fails(s3: S3, key: Path, prefix: str):
    asked = [[SYSTEM, {"role": "user", "content": words(40 + 10 * i, 20 + i)}] for i in range(8)]
    with serving() as server:
        expected = [text_of(chat(server, messages)) for messages in asked]
    with proxied(s3.endpoint, seed=3) as proxy:
        for share in (0.0, 0.3, 1.0):
            proxy.faults, proxy.share = FAULTS, share
            with sharing(key, prefix, "--remote-wait", "0.25", endpoint=proxy.endpoint) as server:
                assert [text_of(chat(server, messages)) for messages in asked] == expected
        assert proxy.met.total() > 8


def test_a_dead_store_is_asked_once(s3: S3, key: Path, prefix: str):
    with proxied(s3.endpoint) as proxy:
        proxy.is_silent = True
        with sharing(key, prefix, "--grace", "1", "--remote-wait", "0.25", endpoint=proxy.endpoint) as server:
            first = text_of(chat(server, FIRST))
            assert measure(server, "breaker_open") == 1
            n_asked = proxy.n_requests
            for i in range(5):
                chat(server, [SYSTEM, {"role": "user", "content": words(40, 50 + i)}])
            assert proxy.n_requests - n_asked <= 4, "each request asked the dead store again"
            proxy.is_silent = False
            proxy.released.set()
            until(lambda: measure(server, "breaker_open") == 0, "somebody noticed that it answers again")
            assert text_of(chat(server, FIRST)) == first
