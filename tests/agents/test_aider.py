"""aider, a real agent, without a network: a question about a file, and a turn after the engine was killed.

The program is the one from PyPI (``make agents``), in an environment of its own; the server and the engine are real; what
the model says is scripted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.programs import output_of
from support.prompts import n_new
from support.recording import recorded
from support.server import GUARD, Server, until

AIDER = Path(__file__).parents[2] / "build" / "agents" / "aider" / "bin" / "aider"
MODEL = "everwarm-tiny"
FIRST, SECOND = "Tell me the word in note.txt.", "Now say it backwards."
FOUND, TURNED = "The word is lantern.", "Backwards it is nretnal."

pytestmark = pytest.mark.skipif(not AIDER.exists(), reason="aider is not installed: run make agents, which needs pip")


@pytest.fixture
def server(scripted: Callable[..., Any]) -> Iterator[Server]:
    script = [
        {"when": SECOND, "say": f"It was lantern.\n</think>\n\n{TURNED}"},
        {"when": FIRST, "say": f"There it is.\n</think>\n\n{FOUND}"},
    ]
    with scripted(script, 32768) as server:
        yield server


def aider(home: Path, work: Path, url: str, message: str) -> str:
    """What it prints. It finds nothing of its user's and nothing outside this machine."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "PWD": str(work), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env |= {"OPENAI_API_KEY": "-", "OPENAI_API_BASE": f"{url}/v1", "AIDER_ANALYTICS": "false"}
    switches = (
        "git",
        "check-update",
        "show-model-warnings",
        "pretty",
        "show-release-notes",
        "detect-urls",
        "gitignore",
    )
    options = ["--model", f"openai/{MODEL}", "--edit-format", "ask", "--yes-always", "--restore-chat-history"]
    options += [f"--no-{switch}" for switch in switches]
    return output_of([str(AIDER), *options, "--message", message, "note.txt"], work, env)


def test_an_agent_reads_only_what_is_new_though_the_engine_was_killed(server, tmp_path, work):
    with recorded(server) as (url, exchanges):
        assert FOUND in aider(tmp_path, work, url, FIRST)
        dead = server.engine_pids
        server.kill_engine()
        server.next_engine(dead)
        until(server.is_ready, "the next engine is ready")
        assert TURNED in aider(tmp_path, work, url, SECOND)
    assert all(exchange.reply.status == 200 for exchange in exchanges)
    assert exchanges[0].timings["prompt_n"] > 100
    for before, turn in pairwise(exchanges):
        assert turn.timings["prompt_n"] <= n_new(server, before.body, turn.body) + GUARD
