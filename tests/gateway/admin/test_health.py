"""What a server says of itself while all is well and while it is not: its state over HTTP, and its log."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everwarm.gateway.admin.status import components
from everwarm.router.plan import ModelStatus
from everwarm.router.pool import Served
from everwarm.router.supervise.restart_policy import RestartHistory, RestartLimits
from support.cgroups import real_cgroup
from support.models import tiny_model
from support.server import ENTER, Server, metric, run_cli, serving, until

SECRET = "cormorant"


def engine(server: Server) -> dict[str, Any]:
    """What /health says of it; the gateway is alive all the time."""
    reply = server.get("/health")
    assert reply.status == 200 and reply.json["status"] == "ok"
    found: dict[str, Any] = reply.json["components"]["engine"]
    return found


def test_an_engine_that_cannot_come_back_says_why_and_when_it_is_tried_again(tmp_path):
    path = tmp_path / "secret-folder" / "one.gguf"
    path.parent.mkdir()
    shutil.copy(tiny_model("llama", width=64), path)
    with serving(model=path) as server:
        good = path.rename(tmp_path / "good")
        server.kill_engine()
        found: list[dict[str, Any]] = []

        def waits() -> bool:
            found.append(engine(server))
            return found[-1]["state"] == "down" and found[-1]["retry_in_s"] is not None

        until(waits, "it is given up, and the next try is planned")
        assert "one.gguf" in found[-1]["reason"] and found[-1]["attempts"] > 0
        reply = server.get("/ready")
        assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
        assert reply.json["reason"] == found[-1]["reason"] and reply.json["attempts"] >= found[-1]["attempts"]
        overview = server.get("/cache").json["engine"]
        assert "one.gguf" in overview["reason"] and overview["attempts"] > 0
        shown = server.get("/metrics").data.decode()
        assert metric(shown, "everwarm_engine_ready") == 0 and metric(shown, "everwarm_engine_failed_tries") > 0
        assert metric(shown, 'everwarm_engine_deaths_total{cause="killed"}') == 1
        told = (server.get(path).data for path in ("/health", "/ready", "/cache", "/v1/models"))
        assert b"secret-folder" not in b"".join(told)
        top = run_cli("top", "--once", "--url", server.url)
        assert "one.gguf" in top.stdout, top
        good.rename(path)
        until(server.is_ready, "it is back, though nobody asked")
        assert engine(server)["state"] == "ok" and engine(server)["reason"] is None
        assert server.complete("one", list(range(60, 80)))["tokens"] and engine(server)["attempts"] == 0


def test_of_many_models_nobody_is_named_to_those_without_a_key():
    asleep: Any = SimpleNamespace(
        is_ready=False,
        n_restarts=0,
        load=None,
        shrunk_to=None,
        deaths=RestartHistory(RestartLimits()),
        state="stopped",
        reason=None,
        last_failure=None,
    )
    statuses = {
        "private": ModelStatus("asleep", 0, 0, 0.0, "the model 'private' cannot be used"),
        "other": ModelStatus("asleep", 0, 0, 0.0, None),
    }
    planner: Any = SimpleNamespace(status=statuses.get)
    specs: list[Any] = [SimpleNamespace(id=id) for id in statuses]
    all_served = [Served(spec, asleep, planner) for spec in specs]
    (one,) = components(all_served).values()
    assert one["state"] == "degraded" and "1 of 2 models" in one["reason"] and "private" not in str(one)


@pytest.fixture(scope="module")
def logging_server() -> Iterator[Server]:
    with serving("--log-format", "json", "--api-key", "k") as server:
        yield server


def lines(server: Server, logger: str | None = None) -> list[dict[str, Any]]:
    """Every line is an object: what is no JSON fails here."""
    found = [json.loads(line) for line in server.message]
    return [line for line in found if logger in (None, line["logger"])]


def test_a_request_is_one_line_without_its_words(logging_server):
    server, n_before = logging_server, len(lines(logging_server))
    body = {"messages": [{"role": "user", "content": f"{SECRET} " * 40}], "max_tokens": 3}
    for stream in (False, True):
        assert server.post("/v1/chat/completions", body | {"stream": stream}, authorization="Bearer k").status == 200
    assert server.post("/completion", {"prompt": SECRET, "n_predict": 2}, authorization="Bearer k").status == 200
    until(lambda: len(lines(server, "everwarm.requests")) == 3, "all are told")
    until(server_is_idle(server), "nothing more is done")
    new = lines(server)[n_before:]
    assert [line["logger"] for line in new] == ["everwarm.requests"] * 3, new
    assert [line["kind"] for line in new] == ["chat", "chat", "completion"] and SECRET not in server.log
    first, second, _ = new
    assert first["n_cached"] == 0 and second["n_cached"] > 0 and first["n_prompt"] == second["n_prompt"]
    message = f"chat {second['n_prompt']:,} tokens: {second['n_cached']:,} reused, {second['n_read']:,} read, "
    assert second["message"].startswith(message) and second["request"].startswith("req_")


def server_is_idle(server: Server) -> Any:
    return lambda: all(not slot["is_processing"] for slot in server.get("/slots", authorization="Bearer k").json)


def test_a_crash_is_told_in_json_too(logging_server):
    os.kill(logging_server.engine_pid, signal.SIGSEGV)
    until(lambda: any("SIGSEGV" in line["message"] for line in lines(logging_server, "everwarm.router")), "it is told")
    until(logging_server.is_ready, "it is back")
    lines(logging_server)


HOG = """
import time
kept = []
while True:
    kept.append(bytearray(b"x" * (2 << 20)))
    time.sleep(0.002)
"""


@contextlib.contextmanager
def hog(group: Path) -> Iterator[None]:
    """Somebody in the cgroup who takes all its memory."""
    command = [sys.executable, "-c", ENTER, str(group / "cgroup.procs"), sys.executable, "-c", HOG]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_under_a_memory_limit_the_ram_tier_is_small_and_smaller_after_the_kernel_killed():
    limit = 260 << 20
    with real_cgroup(limit) as group, serving(cgroup=group) as server:
        budget = metric(server.get("/metrics").data.decode(), "everwarm_ram_budget_bytes")
        assert 0 < budget < limit / 4
        first = server.engine_pid
        Path(f"/proc/{first}/oom_score_adj").write_text("1000")  # the kernel's first choice
        with hog(group):
            until(lambda: first not in server.engine_pids, "the kernel has killed it")
        until(server.is_ready, "it is back")
        until(lambda: b"everwarm_ram_budget_bytes " in server.get("/metrics").data, "it has said what it has")
        shown = server.get("/metrics").data.decode()
        assert metric(shown, 'everwarm_engine_deaths_total{cause="memory"}') >= 1
        assert metric(shown, "everwarm_ram_budget_bytes") <= budget / 2
        ram = server.get("/health").json["components"]["ram"]
        assert ram["state"] == "degraded" and ram["budget_bytes"] <= budget / 2
        assert "ran out of memory (the kernel killed it); the limit is 260 MiB" in server.log


def test_a_disk_tier_that_another_server_holds_is_seen_everywhere_and_taken_over(tmp_path):
    flags = ("--disk-cache", "64MiB", "--state-dir", str(tmp_path / "private-folder"))
    model = tiny_model("llama", width=64)
    with contextlib.ExitStack() as first:
        first.enter_context(serving(*flags, model=model))
        with serving(*flags, model=model) as second:

            def disk() -> dict[str, Any] | None:
                found: dict[str, Any] | None = second.get("/health").json["components"].get("disk")
                return found

            until(lambda: disk() is not None, "the second server is degraded")
            seen = disk() or {}
            assert seen["state"] == "degraded" and "another Everwarm" in seen["reason"]
            assert "private-folder" not in seen["reason"], "anybody may ask"
            tier = second.get("/cache").json["tiers"]["disk"]
            assert tier["degraded"] and "another Everwarm" in tier["reason"]
            assert metric(second.get("/metrics").data.decode(), "everwarm_disk_degraded") == 1
            first.close()
            until(lambda: disk() is None, "it takes the folder over", 60)
            assert second.get("/cache").json["tiers"]["disk"]["degraded"] is False
            assert metric(second.get("/metrics").data.decode(), "everwarm_disk_degraded") == 0
