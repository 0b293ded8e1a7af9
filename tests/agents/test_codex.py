"""Codex, a real agent, without a network: two turns with a command in the first, and nothing is read twice.

The agent is the program from npm (``make agents``); the server and the engine are real; what the model says is scripted.
With EVERWARM_RECORD=1 what the agent sends is kept, in other words and fewer of them, for ``test_recorded``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.programs import output_of
from support.prompts import n_common, responses_tokens
from support.recording import Exchange, compare, neutral, recorded, shortened
from support.server import GUARD, Server, metric

CODEX = Path(__file__).parents[2] / "build" / "agents" / "node_modules" / ".bin" / "codex"
MODEL = "everwarm-tiny"
FIRST, SECOND = "Read note.txt and tell me the code word.", "Now say it backwards."
FOUND, TURNED = "The code word is lantern.", "Backwards it is nretnal."
OUTSIDE = "http://127.0.0.1:9"  # where nobody answers
FLAGS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")  # commands of this script only

pytestmark = pytest.mark.skipif(not CODEX.exists(), reason="codex is not installed: run make agents, which needs npm")


def script() -> list[dict[str, str]]:
    """The latest first, for earlier messages stand near a prompt's end as well."""
    call = {"name": "exec_command", "arguments": {"cmd": "cat note.txt"}}
    return [
        {"when": SECOND, "say": f"It was lantern.\n</think>\n\n{TURNED}"},
        {"when": "the word in this file", "say": f"There it is.\n</think>\n\n{FOUND}"},
        {"when": FIRST, "say": f"I shall look.\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>"},
    ]


def config(url: str) -> str:
    return f"""
        model = "{MODEL}"
        model_provider = "everwarm"
        check_for_update_on_startup = false
        analytics.enabled = false
        features = {{ plugins = false, apps = false }}

        [model_providers.everwarm]
        name = "Everwarm"
        base_url = "{url}/v1"
        wire_api = "responses"
    """


@pytest.fixture
def server(scripted: Callable[..., Any]) -> Iterator[Server]:
    with scripted(script(), 24576) as server:
        yield server


def codex(home: Path, work: Path, *arguments: str) -> str:
    """What it says in the end. It finds nothing of its user's and nothing outside this machine."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    env |= {"HTTP_PROXY": OUTSIDE, "HTTPS_PROXY": OUTSIDE}
    return output_of([str(CODEX), "exec", *arguments, *FLAGS], work, env, timeout_s=120)


def test_codex_reads_only_what_is_new(server, tmp_path, work):
    home = tmp_path / "home"
    home.mkdir()
    with recorded(server) as (url, exchanges):
        (home / "config.toml").write_text(config(url))
        assert codex(home, work, FIRST).strip() == FOUND
        assert codex(home, work, "resume", "--last", SECOND).strip() == TURNED
    assert all(exchange.reply.status == 200 for exchange in exchanges)
    first, with_result, second = exchanges
    result = with_result.body["input"][-1]
    assert result["type"] == "function_call_output"
    assert "exited with code 0" in result["output"] and "lantern is the word" in result["output"]
    assert second.body["input"][: len(first.body["input"])] == first.body["input"]
    assert n_read(first) > 5000
    for before, turn in ((first, with_result), (with_result, second)):
        prompts = [responses_tokens(server, exchange.body, []) for exchange in (before, turn)]
        assert n_read(turn) <= len(prompts[1]) - n_common(*prompts) + GUARD < 1000
    assert metric(server.get("/metrics").data.decode(), "everwarm_full_rereads_total") == 0
    compare("codex", exchanges, lambda: _kept(exchanges, work))


def n_read(exchange: Exchange) -> int:
    """Tokens of the prompt that did not come from the cache, by the last event of the stream."""
    event = json.loads(exchange.reply.data.rpartition(b"data: ")[2])
    assert event["type"] == "response.completed"
    usage = event["response"]["usage"]
    return int(usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"])


def _kept(exchanges: list[Exchange], work: Path) -> dict[str, Any]:
    requests = []
    for i, exchange in enumerate(exchanges):
        headers = {name: exchange.headers[name] for name in ("session-id", "thread-id")}
        body = json.loads(json.dumps(exchange.body).replace(str(work), "/project"))
        requests.append({"headers": headers, "body": _in_other_words(body), "follows": i - 1 if i else None})
    numbered = json.loads(_numbered(json.dumps(requests)))
    return {"client": "codex 0.166.0", "path": exchanges[0].path, "requests": numbered}


def _in_other_words(body: dict[str, Any]) -> dict[str, Any]:
    """What the agent's makers wrote is replaced and shortened; what this test said stays."""
    items = [item if _is_ours(item) else shortened(neutral(item)) for item in body["input"]]
    about = dict.fromkeys(body["client_metadata"], "-")
    return body | {"input": items, "tools": shortened(neutral(body["tools"])), "client_metadata": about}


def _is_ours(item: dict[str, Any]) -> bool:
    message = json.dumps(item)
    return item.get("role") not in ("developer", "user") or any(text in message for text in (FIRST, SECOND))


def _numbered(text: str) -> str:
    """With numbers for random names: the same name has the same number."""
    numbers: dict[str, str] = {}
    pattern = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?<=_)[0-9a-f]{24}"
    return re.sub(pattern, lambda name: numbers.setdefault(name[0], f"{len(numbers):024x}"), text)
