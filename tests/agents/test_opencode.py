"""opencode, a real agent, without a network: two turns with a tool in the first, and nothing is read twice.

The agent is the program from npm (``make agents``); the server and the engine are real; what the model says is scripted.
With EVERWARM_RECORD=1 what the agent sends is kept, in other words, for ``test_recorded``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.programs import output_of
from support.prompts import n_new
from support.recording import Exchange, compare, neutral, recorded
from support.server import GUARD, Server, metric

OPENCODE = Path(__file__).parents[2] / "build" / "agents" / "node_modules" / ".bin" / "opencode"
MODEL = "everwarm-tiny"
FIRST, SECOND = "Read note.txt and tell me the code word.", "Now say it backwards."
FOUND, TURNED = "The code word is lantern.", "Backwards it is nretnal."
SWITCHES = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "SHARE", "CLAUDE_CODE")

pytestmark = pytest.mark.skipif(
    not OPENCODE.exists(), reason="opencode is not installed: run make agents, which needs npm"
)


def script(note: Path) -> list[dict[str, str]]:
    """The latest first, for earlier messages stand near a prompt's end as well."""
    call = {"name": "read", "arguments": {"filePath": str(note)}}
    return [
        {"when": "Generate a title", "say": "It is about a word.\n</think>\n\nA code word"},
        {"when": SECOND, "say": f"It was lantern.\n</think>\n\n{TURNED}"},
        {"when": "the word in this file", "say": f"There it is.\n</think>\n\n{FOUND}"},
        {"when": FIRST, "say": f"I shall look.\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>"},
    ]


@pytest.fixture
def server(work: Path, scripted: Callable[..., Any]) -> Iterator[Server]:
    with scripted(script(work / "note.txt"), 16384) as server:
        yield server


def opencode(home: Path, work: Path, url: str, *arguments: str) -> str:
    """What it prints. It finds nothing of its user's and nothing outside this machine."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "-"},
        "models": {MODEL: {"limit": {"context": 16384, "output": 1024}}},
    }
    config = {
        "provider": {"everwarm": provider},
        "model": f"everwarm/{MODEL}",
        "permission": {"external_directory": "allow"},
    }
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PWD": str(work),
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
    }
    env |= {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("DATA", "CONFIG", "CACHE", "STATE")}
    env |= {f"OPENCODE_DISABLE_{name}": "1" for name in SWITCHES}
    return output_of([str(OPENCODE), "run", *arguments], work, env, timeout_s=120)


def test_an_agent_reads_only_what_is_new(server, tmp_path, work):
    with recorded(server) as (url, exchanges):
        assert FOUND in opencode(tmp_path, work, url, FIRST)
        assert TURNED in opencode(tmp_path, work, url, "--continue", SECOND)
    assert all(exchange.reply.status == 200 for exchange in exchanges)
    (title,), turns = ([e for e in exchanges if bool(e.body.get("tools")) is has] for has in (False, True))
    first, with_result, second = turns
    assert with_result.body["messages"][-1]["role"] == "tool"
    assert "lantern is the word" in with_result.body["messages"][-1]["content"]
    assert first.timings["prompt_n"] > 5000
    for before, turn in ((first, with_result), (with_result, second)):
        assert turn.timings["prompt_n"] <= n_new(server, before.body, turn.body) + GUARD < 1000
    assert metric(server.get("/metrics").data.decode(), "everwarm_full_rereads_total") == 0
    compare("opencode", [title, *turns], lambda: _kept([title, *turns], work))


def _kept(exchanges: list[Exchange], work: Path) -> dict[str, Any]:
    requests = []
    for i, exchange in enumerate(exchanges):
        body = json.loads(json.dumps(exchange.body).replace(str(work), "/project"))
        headers = {name: value for name, value in exchange.headers.items() if name.startswith("x-")}
        headers = {name: "ses_1" if "session" in name else value for name, value in headers.items()}
        requests.append({"headers": headers, "body": _in_other_words(body), "follows": i - 1 if i > 1 else None})
    return {"client": "opencode 1.18.33", "path": exchanges[0].path, "requests": requests}


def _in_other_words(body: dict[str, Any]) -> dict[str, Any]:
    """What the agent's makers wrote is replaced; what this test said stays."""
    messages = [m if _is_ours(m) else m | {"content": neutral(m["content"])} for m in body["messages"]]
    return body | {"messages": messages} | ({"tools": neutral(body["tools"])} if "tools" in body else {})


def _is_ours(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" or any(output in message["content"] for output in (FIRST, SECOND))
