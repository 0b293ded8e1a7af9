"""Every endpoint that takes a body, with large, deep, recursive, wide and slow ones, beside a server that stays responsive.

The short form looks at what is said, at who lives, and at memory; the long one (EVERWARM_CAMPAIGN=1) sends larger ones, and
measures and prints how late the event loop was: at most 20 ms of the gateway's own computing more than when idle.
"""

import contextlib
import inspect
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everwarm.gateway.admin.cache_plan import CachePlanner
from everwarm.gateway.admin.models import Models
from everwarm.gateway.anthropic.routes import Anthropic
from everwarm.gateway.embeddings import Embeddings
from everwarm.gateway.llamaserver.routes import LlamaServer
from everwarm.gateway.ollama.routes import Ollama
from everwarm.gateway.openai.routes import OpenAI
from everwarm.gateway.responses.routes import Responses
from support.server import Server, metric, serving

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
SIZE = 30_000_000 if CAMPAIGN else 3_000_000  # bytes of what is refused
MOST_LAG_S = 0.02
GROWN_BYTES = 400 << 20  # the gateway may have grown by so much at any time
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
QUESTION = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 2}
MESSAGES = {
    "/v1/chat/completions": "messages",
    "/chat/completions": "messages",
    "/v1/chat/completions/input_tokens": "messages",
    "/chat/completions/input_tokens": "messages",
    "/apply-template": "messages",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/api/chat": "messages",
    "/v1/responses": "input",
    "/responses": "input",
    "/v1/responses/input_tokens": "input",
    "/v1/responses/compact": "input",
}
TEXTS = {
    "/v1/completions": "prompt",
    "/completion": "prompt",
    "/completions": "prompt",
    "/api/generate": "prompt",
    "/tokenize": "content",
    "/detokenize": "tokens",
    "/api/show": "model",
    "/api/create": "model",
    "/api/copy": "source",
    "/slots/0?action=erase": "filename",
    "/models/load": "model",
    "/models/unload": "model",
    "/infill": "input_prefix",
    "/props": "anything",
    "/lora-adapters": "id",
    "/render": "texts",
    "/cache/plan": "candidates",
    "/cache/prefetch": "requests",
}
VECTORS = {
    "/v1/embeddings": "input",
    "/embeddings": "content",
    "/embedding": "content",
    "/api/embed": "input",
    "/api/embeddings": "prompt",
    "/rerank": "documents",
    "/reranking": "documents",
    "/v1/rerank": "documents",
    "/v1/reranking": "documents",
}
# of any length, if it can be parsed
COUNTS = (
    "/apply-template",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/input_tokens",
    "/chat/completions/input_tokens",
    "/v1/responses/input_tokens",
    "/tokenize",
    "/props",
    "/render",
)
REFUSED = (400, 404, 413)
NO_VECTORS = (*REFUSED, 501)  # of a model that writes text
TAKEN = (200, *REFUSED)
TAKES_TOOLS = [path for path in MESSAGES if "count" not in path and "template" not in path]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--tool-format", "qwen-xml", n_ctx=8192) as server:
        server.ask("/v1/chat/completions", QUESTION)
        yield server


def body(path: str, output: bytes, **more: Any) -> bytes:
    """A request in the path's dialect that says this."""
    field = (MESSAGES | TEXTS | VECTORS)[path]
    common = {"max_tokens": 2, "num_predict": 2, "max_output_tokens": 16, "stream": False, **more}
    return json.dumps(common).encode()[:-1] + f', "{field}": '.encode() + output + b"}"


def message(content: bytes) -> bytes:
    return b'[{"role": "user", "content": ' + content + b"}]"


def many(one: bytes, size: int = SIZE) -> bytes:
    return b"[" + b",".join([one] * (size // (len(one) + 1))) + b"]"


HOSTILE: dict[str, Callable[[], bytes]] = {
    "wide": lambda: many(b"{}"),
    "wide content": lambda: message(many(b"{}")),
    "parts": lambda: message(many(b'{"type":"text","text":"a"}')),
    "deep": lambda: message(b"[" * (SIZE // 2) + b"]" * (SIZE // 2)),
    "text": lambda: message(b'"' + b"a b " * (SIZE // 4) + b'"'),
    "signs": lambda: message(b'"' + "😀é".encode() * (SIZE // 6) + b'"'),
    "one word": lambda: message(b'"' + b"aB3/" * (SIZE // 4) + b'"'),
    "messages": lambda: many(b'{"role":"user","content":"a"}', 600_000),
    "numbers": lambda: many(b"1"),
    "long numbers": lambda: many(b"1" * 4000),
    "no JSON": lambda: b"[" * SIZE,
}


def recursive(n: int) -> dict[str, Any]:
    return {
        "type": "object",
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * n}, "b": {"description": "A" * 1000 * n}},
        "properties": {f"p{i}": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]} for i in range(n)},
    }


def tools(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "f", "description": "d"}
    if path == "/v1/messages":
        return {"tools": [named | {"input_schema": schema}], "tool_choice": {"type": "any"}}
    if "responses" in path:
        return {"tools": [named | {"type": "function", "parameters": schema}], "tool_choice": "required"}
    return {"tools": [{"type": "function", "function": named | {"parameters": schema}}], "tool_choice": "required"}


def watched(server: Server, what: str, do: Callable[[], None]) -> None:
    """No engine dies, memory stays within bounds; in the long form the loop is never late: of three times the best one
    counts, for what other processes do to this one only adds to it."""
    pid, before, most, done = server.engine_pid, rss_bytes(server.process.pid), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], rss_bytes(server.process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        lags = [lag_s(server, do) - lag_s(server, lambda: time.sleep(0.5)) for _ in range(3 if CAMPAIGN else 0)]
        if not CAMPAIGN:
            do()
    finally:
        done.set()
        watcher.join()
    assert server.engine_pid == pid, what
    assert most[0] - before < GROWN_BYTES, f"{what}: {(most[0] - before) / 1e6:.0f} MB"
    if CAMPAIGN:
        shown = ", ".join(f"{1e3 * lag:.1f}" for lag in lags)
        print(f"{what}: lag {shown} ms more than idle, +{(most[0] - before) / 1e6:.0f} MB")
        assert min(lags) <= MOST_LAG_S, what


def lag_s(server: Server, do: Callable[[], None]) -> float:
    """The longest lag meanwhile, as far as the gateway itself was computing."""
    server.get("/metrics")
    do()
    return metric(server.get("/metrics").data.decode(), "everwarm_loop_lag_most_busy_seconds")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def send(server: Server, path: str, data: bytes, allowed: Collection[int]) -> None:
    assert asked(server, path, data) in allowed


def asked(server: Server, path: str, data: bytes) -> int:
    """The status; what is refused before it was read whole may also end in a closed connection."""
    with contextlib.suppress(ConnectionError):
        return server.post(path, data).status
    return 413


def test_every_endpoint_that_reads_a_body_is_tried_here():
    kinds = (OpenAI, Ollama, Anthropic, Responses, LlamaServer, Models, Embeddings, CachePlanner)
    dialects = [kind(**dict.fromkeys(inspect.signature(kind).parameters)) for kind in kinds]
    routes = [route for dialect in dialects for route in dialect.routes()]
    reading = [route for route in routes if "POST" in (route.methods or ()) and route.name != "not_offered"]
    taking = {route.path for route in reading if "refuse" not in route.name} | {"/render"}
    tried = {path.partition("?")[0].replace("/slots/0", "/slots/{id}") for path in (*MESSAGES, *TEXTS, *VECTORS)}
    unread = {"/api/pull", "/v1/responses/{id}/cancel"}
    assert taking - unread == tried, (
        "a pull is refused unread, unless an admin of this server may; a cancel has no body"
    )


@pytest.mark.parametrize("path", [*MESSAGES, *TEXTS, *VECTORS])
def test_hostile_bodies_are_refused_and_nobody_else_hears_of_it(server, path):
    kinds = HOSTILE if CAMPAIGN or path == "/v1/chat/completions" else dict(list(HOSTILE.items())[::4])
    for kind, output in kinds.items():
        data = body(path, output())
        allowed = TAKEN if path in COUNTS else NO_VECTORS if path in VECTORS else REFUSED
        watched(server, f"{path} {kind} {len(data) / 1e6:.1f} MB", partial(send, server, path, data, allowed))
    assert server.post("/v1/chat/completions", QUESTION).status == 200


@pytest.mark.parametrize("path", TAKES_TOOLS)
def test_schemas_that_refer_to_themselves_cost_what_they_weigh(server, path):
    for n in (40, 400) if CAMPAIGN else (40,):
        data = body(path, message(b'"hi"'), **tools(path, recursive(n)))
        watched(server, f"{path} recursive {len(data) / 1e6:.2f} MB", partial(send, server, path, data, (200, 400)))


def test_a_large_conversation_is_answered_like_a_small_one(server):
    """An image of megabytes and a long history reach the places where they are told what is wrong with them."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "aB3/" * (SIZE // 4)}}
    refused = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]})
    assert "reads text only" in refused.json["error"]["message"]
    history = [{"role": role, "content": "Well, then."} for role in ("user", "assistant")] * 2000
    prompt = server.ask("/apply-template", {"messages": history})["prompt"]
    assert prompt.count("Well, then.") == 4000
    refused = server.post("/v1/chat/completions", {"messages": [*history, *QUESTION["messages"]]})
    assert refused.json["error"]["code"] == "exceed_context_size_error"
    tokens = server.ask("/tokenize", {"content": "warm words " * 20_000, "with_pieces": True})["tokens"]
    assert "".join(token["piece"] for token in tokens) == "warm words " * 20_000


def test_slow_bodies_hold_no_place_of_others(server):
    """Bodies that never end: whoever else asks is answered meanwhile."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30)) for _ in range(40)]
        for i, sock in enumerate(slow):
            sock.sendall(head + (b"Content-Length: 1000000\r\n\r\n{" if i % 2 else CHUNKED))
        watched(
            server, "slow bodies", lambda: send(server, "/v1/chat/completions", json.dumps(QUESTION).encode(), (200,))
        )


def test_bodies_beyond_the_budget_wait_outside(server):
    """Half of the budget is one client's: what it announces beyond that is not read."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30)) for _ in range(3)]
        for sock in held:
            sock.sendall(head + b"Content-Length: 30000000\r\n\r\n")
        for sock in held[:2]:
            sock.sendall(b" " * 29_000_000)
        deadline = time.monotonic() + 30
        while asked(server, "/v1/chat/completions", b" " * 12_000_000) != 429:
            assert time.monotonic() < deadline, "another 12 MB were read"
        assert server.post("/v1/chat/completions", QUESTION).status == 200
    assert server.post("/v1/chat/completions", QUESTION).status == 200
