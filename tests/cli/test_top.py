"""``everwarm top`` and ``everwarm cache tree`` beside a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import Server, metric, run_cli, serving, until, words


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("states")
    return path


@pytest.fixture(scope="module")
def server(directory) -> Iterator[Server]:
    with serving("--disk-cache", "64MiB", "--state-dir", str(directory), "--api-key", "k", "--cache-text") as server:
        for n_turns, question in enumerate((21, 22), 1):
            messages = [
                {"role": "system", "content": words(40, 1)},
                {"role": "user", "content": words(20, question)},
            ]
            body = {"messages": messages, "max_tokens": 4}
            assert server.post("/v1/chat/completions", body, authorization="Bearer k").status == 200
            until(lambda n=n_turns: len(list(directory.rglob("state-*.ew"))) >= n, "a state is on disk")
            until(lambda: lag_s(server) == 0, "and all that the turn writes")
        yield server


def lag_s(server: Server) -> float:
    return metric(server.get("/metrics", authorization="Bearer k").data.decode(), "everwarm_disk_lag_seconds")


def test_one_picture_says_what_was_reused(server):
    tokens = server.get("/cache", authorization="Bearer k").json["tokens"]
    shown = run_cli("top", "--once", "--url", server.url, "--api-key", "k")
    assert shown.returncode == 0, shown.stderr
    assert f"{tokens['reused']:,} reused" in shown.stdout and f"{tokens['read']:,} read" in shown.stdout
    assert "everwarm-tiny  ready" in shown.stdout and shown.stdout.count("done") == 2
    assert "…" not in shown.stdout, "it does not fit 80 columns"
    for tier in ("device", "RAM", "disk"):
        assert f"\n{tier} " in shown.stdout


def test_a_server_that_does_not_answer_is_an_error_and_so_is_a_wrong_key(server):
    wrong = run_cli("top", "--once", "--url", server.url, "--api-key", "wrong")
    assert wrong.returncode == 1 and "API key" in wrong.stderr and "Traceback" not in wrong.stderr
    nobody = run_cli("top", "--once", "--url", "http://127.0.0.1:1")
    assert nobody.returncode == 1 and "no answer" in nobody.stderr
    nonsense = run_cli("top", "--once", "--url", "file:///etc/passwd")
    assert nonsense.returncode == 1 and "not a server's address" in nonsense.stderr


def test_the_tree_of_a_server_and_of_its_folder_branch_alike(server, directory):
    live = run_cli("cache", "tree", "--url", server.url, "--api-key", "k")
    assert live.returncode == 0, live.stderr
    assert "namespace" in live.stdout and "Note 1. stone" in live.stdout and "├──" in live.stdout
    less = run_cli("cache", "tree", "--url", server.url, "--api-key", "k", "--limit", "2")
    assert "more are not shown" in less.stdout and less.stdout.count("──") == 2
    stored = run_cli("cache", "tree", "--state-dir", str(directory))
    assert stored.returncode == 0, stored.stderr
    assert stored.stdout.count("stable (") == 2 and "├──" in stored.stdout and "everwarm-tiny" in stored.stdout
    nothing = run_cli("cache", "tree", "--state-dir", str(directory / "none"))
    assert nothing.returncode == 0 and "nothing is kept" in nothing.stdout
    both = run_cli("cache", "tree", "--url", server.url, "--state-dir", str(directory))
    assert both.returncode == 1 and "leave out" in both.stderr
