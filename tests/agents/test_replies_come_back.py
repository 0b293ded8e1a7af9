"""A file that the model writes is read once, however the client spells the call when it sends it back.

The server and the engine are real; what the model says is scripted, in a spelling that no client sends back.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server import GUARD, Server, is_alive, metric, until, words

FILE = f"é {words(160, 3)}"
CALL = f'{{"name": "write", "arguments": {{"path":  "a.txt", "text": {json.dumps(FILE)}, "n": 1.50}}}}'
WRITTEN = f"I shall write.\n</think>\n\nHere it is.\n<tool_call>\n{CALL}\n</tool_call>"
QUESTION = "Please write it down."
N_NEW = 40  # tokens of a result and what opens the next reply
SCRIPT = [
    {"when": "It was written.", "say": "Good.\n</think>\n\nDone."},
    {"when": QUESTION, "say": WRITTEN},
]
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "n": {"type": "number"}},
}
RESULT = "It was written."


@pytest.fixture(scope="module")
def recordings() -> Path:
    return Path(__file__).parents[1] / "support" / "recorded"


@pytest.fixture
def server(scripted: Callable[..., Any]) -> Iterator[Server]:
    with scripted(SCRIPT, 16384) as server:
        yield server


def n_read(server: Server) -> int:
    return int(metric(server.get("/metrics").data.decode(), "llamacpp:prompt_tokens_total"))


def compact(arguments: str) -> str:
    """As a client that parses and writes it again."""
    return json.dumps(json.loads(arguments), separators=(",", ":"), ensure_ascii=False)


# one turn in each dialect: ask, and give the result back


def chat(server: Server, question: str, *, stream: bool = False, **more: Any) -> Any:
    function = {"name": "write", "description": "Writes.", "parameters": PARAMETERS}
    body: dict[str, Any] = {"max_tokens": 900, "tools": [{"type": "function", "function": function}], **more}
    messages: list[Any] = [{"role": "user", "content": question}]
    if stream:
        message = _added_up(server.post("/v1/chat/completions", body | {"messages": messages, "stream": True}).events)
    else:
        message = server.ask("/v1/chat/completions", body | {"messages": messages})["choices"][0]["message"]
    (call,) = message["tool_calls"]
    respelled = {**call, "function": {**call["function"], "arguments": compact(call["function"]["arguments"])}}
    assert respelled != call
    messages += [message | {"tool_calls": [respelled]}, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]
    return body | {"messages": messages}


def _added_up(events: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        for name in ("content", "reasoning_content"):
            found[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                found["tool_calls"].append({"id": call["id"], "type": "function", "function": call["function"]})
            else:
                found["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return found


def responses(server: Server, question: str) -> Any:
    tool = {"type": "function", "name": "write", "description": "Writes.", "parameters": PARAMETERS}
    body: dict[str, Any] = {"max_output_tokens": 900, "tools": [tool], "store": False, "reasoning": {"effort": "high"}}
    items: list[Any] = [{"role": "user", "content": question}]
    output = server.ask("/v1/responses", body | {"input": items})["output"]
    call = output[-1]
    output[-1] = {**call, "arguments": compact(call["arguments"])}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    return body | {"input": [*items, *output, result]}


def anthropic(server: Server, question: str) -> Any:
    tool = {"name": "write", "description": "Writes.", "input_schema": PARAMETERS}
    body: dict[str, Any] = {"max_tokens": 900, "tools": [tool], "thinking": {"type": "adaptive"}, "model": "any"}
    messages: list[Any] = [{"role": "user", "content": question}]
    content = server.ask("/v1/messages", body | {"messages": messages})["content"]
    assert content[-1]["input"]["text"] == FILE
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": RESULT}
    return body | {
        "messages": [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    }


def ollama(server: Server, question: str) -> Any:
    function = {"name": "write", "description": "Writes.", "parameters": PARAMETERS}
    body: dict[str, Any] = {"model": "everwarm-tiny", "stream": False, "think": True, "options": {"num_predict": 900}}
    body["tools"] = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": question}]
    message = server.ask("/api/chat", body | {"messages": messages})["message"]
    assert "id" not in message["tool_calls"][0], "this dialect's clients know no ids"
    return body | {"messages": [*messages, message, {"role": "tool", "tool_name": "write", "content": RESULT}]}


PATHS = {chat: "/v1/chat/completions", responses: "/v1/responses", anthropic: "/v1/messages", ollama: "/api/chat"}


def go_on(server: Server, path: str, body: Any) -> int:
    """How many tokens were read for the next turn."""
    before = n_read(server)
    server.ask(path, body | ({"stream": False} if path == "/api/chat" else {}))
    return n_read(server) - before


def test_every_dialect_reads_only_the_result(server):
    n_file = server.n_tokens(FILE)
    assert n_file > 300
    for dialect, path in PATHS.items():
        body = dialect(server, f"{dialect.__name__}: {QUESTION}")
        assert go_on(server, path, body) <= N_NEW, dialect.__name__
    body = chat(server, f"streamed: {QUESTION}", stream=True)
    assert go_on(server, "/v1/chat/completions", body) <= N_NEW


def test_it_is_said_and_bound_to_a_namespace_and_forgotten(server):
    body = chat(server, QUESTION)
    answer = server.ask("/v1/chat/completions", body | {"prompt_cache_diagnostics": True})
    assert answer["timings"]["cache"]["restored_replies"] == 1
    assert answer["prompt_cache_diagnostics"]["restored_replies"] == 1
    prompt = server.rendered(body["messages"], tools=body["tools"])
    assert CALL in prompt, "what is shown is what is read"
    stranger = server.ask("/v1/chat/completions", body | {"cache_salt": "other"})
    assert stranger["timings"]["cache"]["restored_replies"] == 0
    assert CALL not in server.rendered(body["messages"], tools=body["tools"], cache_salt="other")
    assert CALL not in server.rendered(body["messages"], tools=body["tools"], deterministic=True)
    assert CALL not in server.rendered(body["messages"], tools=body["tools"], cache_prompt=False)
    changed = json.loads(json.dumps(body).replace("a.txt", "b.txt"))
    assert "b.txt" in server.rendered(changed["messages"], tools=body["tools"])
    assert server.call("DELETE", "/cache").status == 200
    assert CALL not in server.rendered(body["messages"], tools=body["tools"])


def test_a_server_that_was_killed_still_knows_it(tmp_path, scripted):
    """What is answered is remembered: it is in the file before the last event is sent."""
    flags = ("--disk-cache", "1GiB", "--state-dir", str(tmp_path / "state"))
    with scripted(SCRIPT, 8192, *flags) as server:
        body = chat(server, QUESTION)
        engine = server.engine_pid
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(40)
        until(lambda: not is_alive(engine), "the engine is gone")
    with scripted(SCRIPT, 8192, *flags) as server:
        assert CALL in server.rendered(body["messages"], tools=body["tools"])
        assert server.ask("/v1/chat/completions", body)["timings"]["cache"]["restored_replies"] == 1


def test_what_opencode_sends_after_the_models_own_text(recordings, scripted):
    """The recorded requests, with the call as the model wrote it and as opencode spells it."""
    requests = json.loads((recordings / "opencode.json").read_text())["requests"]
    asked, with_result = (requests[i]["body"] for i in (1, 2))
    sent = with_result["messages"][-2]
    (call,) = sent["tool_calls"]
    arguments = json.dumps(json.loads(call["function"]["arguments"]))
    assert arguments != call["function"]["arguments"]
    written = f'<tool_call>\n{{"name": "read", "arguments": {arguments}}}\n</tool_call>'
    says = f"{sent['reasoning_content']}\n</think>\n\n{written}"
    script = [{"when": "Read note.txt", "say": says}]
    with scripted(script, 16384) as server:
        reply = _added_up(server.post("/v1/chat/completions", asked).events)
        assert reply["tool_calls"][0]["function"]["arguments"] == arguments
        id = reply["tool_calls"][0]["id"]
        body = json.loads(json.dumps(with_result).replace(call["id"], id))
        (end,) = (e for e in server.post("/v1/chat/completions", body).events if e.get("timings") and e["choices"])
        n_result = server.n_tokens(body["messages"][-1]["content"])
        assert end["timings"]["cache"]["restored_replies"] == 1
        assert end["timings"]["prompt_n"] <= n_result + GUARD
