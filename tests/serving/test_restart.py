"""Conversations that outlive their server: stopped, killed, or only its engine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.server import GUARD, Server, is_alive, metric, serving, until, words

SECRET = "4711"
THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def _first_turn(server: Server) -> list[dict[str, Any]]:
    talk = [{"role": "user", "content": f"The code is {SECRET}. {words(400)}"}]
    return [*talk, {"role": "assistant", "content": _say(server, talk)["choices"][0]["message"]["content"]}]


def _say(server: Server, talk: list[dict[str, Any]]) -> Any:
    return server.ask("/v1/chat/completions", {"messages": talk, "temperature": 0, "max_tokens": 12, **THINKING})


def _n_written(server: Server) -> float:
    return metric(server.get("/metrics").data.decode(), "everwarm_disk_objects_written_total")


def _next_turn(server: Server, talk: list[dict[str, Any]]) -> tuple[int, int, str]:
    """How many prompt tokens there were and were known, and what was said."""
    answer = _say(server, [*talk, {"role": "user", "content": "What is the code?"}])
    usage = answer["usage"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], n_cached, answer["choices"][0]["message"]["content"]


def _stop(server: Server, how: str) -> None:
    engine = server.engine_pid
    if how == "killed":
        until(lambda: _n_written(server) > 0, "the turn is on disk")
        os.kill(server.process.pid, signal.SIGKILL)
    else:
        server.process.terminate()
    server.process.wait(40)
    until(lambda: not is_alive(engine), "the engine is gone")


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> tuple[list[dict[str, Any]], str]:
    """The conversation and its next answer, without any interruption."""
    with serving() as server:
        talk = _first_turn(server)
        return talk, _next_turn(server, talk)[2]


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_after_a_restart_the_next_turn_goes_on_from_disk(tmp_path: Path, golden, how):
    flags = ("--disk-cache", "1GiB", "--state-dir", str(tmp_path / "states"), "--restore-policy", "always")
    with serving(*flags) as server:
        talk = _first_turn(server)
        _stop(server, how)
    assert talk == golden[0]
    n_new = 120  # the first reply, the question, and what the template puts around them
    with serving(*flags) as server:
        n_prompt, n_cached, message = _next_turn(server, talk)
        assert n_prompt - n_cached <= n_new + GUARD
        assert message == golden[1]
    with serving() as server:
        assert _next_turn(server, talk)[1] == 0, "this test could not fail"


def test_an_engine_that_dies_finds_its_conversations_again(tmp_path: Path, golden):
    flags = ("--disk-cache", "1GiB", "--state-dir", str(tmp_path / "states"), "--restore-policy", "always")
    with serving(*flags) as server:
        talk = _first_turn(server)
        until(lambda: _n_written(server) > 0, "the turn is on disk")
        server.kill_engine()
        until(lambda: not server.is_ready(), "the death is noticed")
        until(server.is_ready, "it is back")
        n_prompt, n_cached, message = _next_turn(server, talk)
    assert n_cached > 0.6 * n_prompt and message == golden[1]


def _is_settled(server: Server) -> bool:
    """Whether an engine that has nothing to do has done all that it does then."""
    seen = [server.get("/metrics").data.decode()]
    time.sleep(0.2)
    seen.append(server.get("/metrics").data.decode())
    sizes = [metric(text, "everwarm_ram_arena_bytes") for text in seen]
    return sizes[0] == sizes[1] > 0 and metric(seen[1], "everwarm_ram_waiting") == 0


def test_an_engine_that_is_killed_leaves_its_conversations_in_memory(golden):
    """Nothing is on disk here: the RAM tier belongs to the gateway."""
    with serving() as server:
        talk = _first_turn(server)
        for _ in range(3):
            until(lambda: _is_settled(server), "everything is in RAM")
            server.kill_engine()
            until(lambda: not server.is_ready(), "the death is noticed")
            until(server.is_ready, "it is back")
            n_prompt, n_cached, message = _next_turn(server, talk)
            assert n_prompt - n_cached <= 120 + GUARD and message == golden[1]


def test_the_directory_is_the_owners_alone(tmp_path: Path):
    with serving("--disk-cache", "1GiB", "--state-dir", str(tmp_path / "states")) as server:
        _first_turn(server)
        until(lambda: _n_written(server) > 0, "the turn is on disk")
        found = [tmp_path / "states", *(tmp_path / "states").rglob("*")]
        assert [oct(path.stat().st_mode & 0o077) for path in found] == ["0o0"] * len(found) and len(found) > 4


def test_without_a_disk_cache_nothing_is_written(tmp_path: Path):
    with serving("--state-dir", str(tmp_path / "states")) as server:
        _first_turn(server)
    assert not (tmp_path / "states").exists()
