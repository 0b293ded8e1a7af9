"""A proxy in front of a server that remembers what a client asked and what it was answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support.server import PATIENCE_S, Reply, Server

N_LONG = 300  # characters
HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "host", "accept-encoding")


@dataclass(frozen=True)
class Exchange:
    path: str
    headers: dict[str, str]
    body: Any
    reply: Reply

    @property
    def timings(self) -> dict[str, Any]:
        """llama-server's accounting, from the last event that has it."""
        found: dict[str, Any] = next(event["timings"] for event in reversed(self.reply.events) if "timings" in event)
        return found


@contextlib.contextmanager
def recorded(server: Server) -> Iterator[tuple[str, list[Exchange]]]:
    """The proxy's address, and the POST requests in the order in which their answers ended."""
    exchanges: list[Exchange] = []
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server, exchanges))
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", exchanges
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join(PATIENCE_S)


def _handler(server: Server, exchanges: list[Exchange]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items() if name.lower() not in HOP}
            reply = self._passed_on("POST", data, headers)
            exchanges.append(Exchange(self.path, headers, json.loads(data), reply))

        def do_GET(self) -> None:
            self._passed_on("GET", None, {})

        def _passed_on(self, method: str, data: bytes | None, headers: dict[str, str]) -> Reply:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
            with contextlib.closing(connection), contextlib.suppress(BrokenPipeError):
                connection.request(method, self.path, data, headers)
                return self._returned(connection.getresponse())
            return Reply(0, {}, b"")  # the client has gone

        def _returned(self, response: http.client.HTTPResponse) -> Reply:
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            parts = []
            while part := response.read1():
                parts.append(part)
                self.wfile.write(part)
                self.wfile.flush()
            return Reply(response.status, dict(response.getheaders()), b"".join(parts))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


# a recording that can be kept: the shapes of real requests without anybody's prose

_LETTERS = re.compile(r"[^\W\d_]+")
_NEUTRAL = (
    "a",
    "in",
    "one",
    "lamp",
    "river",
    "garden",
    "morning",
    "mountain",
    "afternoon",
    "everything",
    "neighbouring",
)
_KEPT = frozenset({"name", "type", "role", "id", "tool_call_id", "model", "required", "enum", "default", "$schema"})


def neutral(value: Any) -> Any:
    """The same structure with other words of the same lengths. What programs read stays: names, types, choices."""
    match value:
        case str():
            return _LETTERS.sub(lambda word: _of_length(len(word[0])), value)
        case list():
            return [neutral(item) for item in value]
        case dict():
            return {key: item if _is_kept(key, item) else neutral(item) for key, item in value.items()}
    return value


def _is_kept(key: str, item: Any) -> bool:
    return key in _KEPT and not isinstance(item, dict)  # a tool's parameter may be called ``name``


def _of_length(n: int) -> str:
    return _NEUTRAL[n - 1] if n <= len(_NEUTRAL) else (_NEUTRAL[-1] * n)[:n]


def shortened(value: Any) -> Any:
    """The same structure with long texts cut off."""
    match value:
        case str():
            return value[:N_LONG]
        case list():
            return [shortened(item) for item in value]
        case dict():
            return {key: shortened(item) for key, item in value.items()}
    return value


def shape(value: Any) -> Any:
    """Field names and kinds, without what they say."""
    match value:
        case list():
            return [shape(item) for item in value]
        case dict():
            return {key: shape(item) for key, item in value.items()}
    return type(value).__name__


def compare(client: str, exchanges: list[Exchange], renewed: Callable[[], dict[str, Any]]) -> None:
    """What is replayed where there is no npm has the form of what was sent just now."""
    path = Path(__file__).parent / "recorded" / f"{client}.json"
    if os.environ.get("EVERWARM_RECORD"):
        path.write_text(json.dumps(renewed(), indent=1, ensure_ascii=False) + "\n")
    kept = json.loads(path.read_text())
    assert [shape(request["body"]) for request in kept["requests"]] == [shape(e.body) for e in exchanges]
    assert all(
        set(request["headers"]) <= set(e.headers) for request, e in zip(kept["requests"], exchanges, strict=True)
    )
