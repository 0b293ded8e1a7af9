"""Qwen Code, a real agent, without a network: a file read, an edit, and a turn after the engine was killed.

The program is the one from npm (``make agents``); the server and the engine are real; what the model says is scripted. It
writes the arguments of tool calls anew, without blanks: what the model wrote is rendered all the same. Where it resumes, it
changes its own first message: from there on the prompt is another one, as in ``test_scenarios``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.programs import output_of
from support.prompts import n_new
from support.recording import recorded
from support.server import GUARD, Server, until, words

QWEN = Path(__file__).parents[2] / "build" / "agents" / "node_modules" / ".bin" / "qwen"
MODEL = "everwarm-tiny"
SPACING = 410  # tokens between checkpoints inside a long message of this model
FIRST, SECOND = "Read note.txt and write it anew.", "Now say it backwards."
WRITTEN, TURNED = "I have written it.", "Backwards it is nretnal."
NOTE = f"lantern\n{words(120, 5)}\n"

pytestmark = pytest.mark.skipif(
    not QWEN.exists(), reason="qwen-code is not installed: run make agents, which needs npm"
)


def call(name: str, **arguments: str) -> str:
    """As the model writes it: with blanks in its JSON."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script(work: Path) -> list[dict[str, str]]:
    """The latest first."""
    note = str(work / "note.txt")
    read, write = call("read_file", file_path=note), call("write_file", file_path=note, content=NOTE)
    return [
        {"when": SECOND, "say": f"It was lantern.\n</think>\n\n{TURNED}"},
        {"when": "Successfully", "say": f"Done.\n</think>\n\n{WRITTEN}"},
        {"when": "the word in this file", "say": f"There it is.\n</think>\n\n{write}"},
        {"when": FIRST, "say": f"I shall look.\n</think>\n\n{read}"},
    ]


@pytest.fixture
def server(work: Path, scripted: Callable[..., Any]) -> Iterator[Server]:
    with scripted(script(work), 65536) as server:
        yield server


def qwen(home: Path, work: Path, url: str, *arguments: str) -> str:
    """What it prints. It finds nothing of its user's and nothing outside this machine."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "PWD": str(work)}
    env |= {"OPENAI_API_KEY": "-", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": MODEL}
    env |= {"QWEN_TELEMETRY_ENABLED": "false", "NO_UPDATE_NOTIFIER": "1", "CI": "1"}
    options = [
        "--auth-type",
        "openai",
        "--approval-mode",
        "yolo",
        "--safe-mode",
        "--system-prompt",
        "You are an agent.",
    ]
    return output_of([str(QWEN), *options, *arguments], work, env)


def test_an_agent_reads_only_what_is_new_though_the_engine_was_killed(server, tmp_path, work):
    with recorded(server) as (url, exchanges):
        assert WRITTEN in qwen(tmp_path, work, url, FIRST)
        assert (work / "note.txt").read_text() == NOTE
        dead = server.engine_pids
        server.kill_engine()
        server.next_engine(dead)
        until(server.is_ready, "the next engine is ready")
        assert TURNED in qwen(tmp_path, work, url, "--continue", SECOND)
    assert all(exchange.reply.status == 200 for exchange in exchanges)
    first, *turns = [exchange for exchange in exchanges if exchange.body.get("tools")]
    assert first.timings["prompt_n"] > 5000 and len(turns) == 3
    for (before, turn), more in zip(pairwise((first, *turns)), (GUARD, GUARD, SPACING), strict=True):
        assert turn.timings["prompt_n"] <= n_new(server, before.body, turn.body) + more < 1500
    assert [turn.timings["cache"]["restored_replies"] for turn in turns] == [1, 2, 2]
