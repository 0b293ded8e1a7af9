"""From outside: a model file that is overwritten while it is served, put back later, or only touched."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from support.models import tiny_model
from support.server import Server, metric, serving, until

PROMPT = [*range(40, 140)] * 3
NEXT = [*PROMPT, *range(7, 27)]
OLD, NEW = (tiny_model("llama", seed=seed) for seed in (0, 1))


def overwrite(path: Path, source: Path) -> None:
    with path.open("r+b") as file:
        file.write(source.read_bytes())


def restarts(server: Server) -> int:
    ready = server.get("/ready").json
    return int(ready["restarts"]) if ready["status"] == "ready" else -1


def reply_to(server: Server, prompt: list[int], **more: object) -> tuple[list[int], int]:
    answer = server.complete("live", prompt, 16, **more)
    return answer["tokens"], answer["timings"]["cache_n"]


def assert_stream_ends_with_an_error(server: Server, act: Callable[[], None]) -> None:
    """What was streamed so far may not be gone on with, and the client hears why."""
    body = {"prompt": NEXT, "n_predict": 3000, "ignore_eos": True, "stream": True}
    with contextlib.closing(server.connect()) as connection:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        with contextlib.closing(connection.getresponse()) as response:
            assert response.readline().startswith(b"data: ")
            act()
            rest = response.read()
    assert b'"error"' in rest and b"live.gguf was changed" in rest and b"it is being restarted" in rest


def test_a_model_file_overwritten_in_place_is_served_anew_and_nothing_is_mixed_up(tmp_path: Path) -> None:
    live = tmp_path / "live.gguf"
    shutil.copyfile(OLD, live)
    flags = (
        "--disk-cache",
        "1GiB",
        "--state-dir",
        str(tmp_path / "states"),
        "--restore-policy",
        "always",
        "--no-prewarm",
    )
    with serving(*flags, model=live) as server:
        first, _ = reply_to(server, PROMPT)
        until(lambda: n_written(server) > 0, "the turn is on disk")
        assert_stream_ends_with_an_error(server, lambda: overwrite(live, NEW))
        second, n_cached = reply_to(server, PROMPT)
        assert n_cached == 0 and second == reply_to(server, PROMPT, cache_prompt=False)[0] != first
        assert restarts(server) == 1 and "live.gguf was changed" in server.get("/ready").json["last_restart"]
        assert "live.gguf was changed while it was in use: the engine is restarted with the new file" in server.log
        until(lambda: n_written(server) > 0, "the new file's turn is on disk, too")
        overwrite(live, OLD)
        until(lambda: restarts(server) == 2, "the engine notices by itself, with nobody asking")
        third, n_cached = reply_to(server, [*PROMPT, *first, *NEXT])
        assert n_cached >= len(PROMPT) and third == reply_to(server, [*PROMPT, *first, *NEXT], cache_prompt=False)[0]
        os.utime(live)
        n_cached = reply_to(server, [*PROMPT, *first, *NEXT, *third])[1]
        assert n_cached >= len(PROMPT) and restarts(server) == 2 and "live.gguf is unchanged" in server.log
    folders = {path.parent.name for path in (tmp_path / "states").rglob("*.ew")}
    assert len(folders) == 2, "each file has its own"


def n_written(server: Server) -> float:
    return metric(server.get("/metrics").data.decode(), "everwarm_disk_objects_written_total")
