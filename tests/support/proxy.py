"""A loopback proxy in front of a store, which does wrong what it is told to: late, cut off, half, twice, out of date."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

FAULTS = ("delay", "reset", "throttle", "error", "truncated", "twice", "stale", "flipped")
DELAY_S = 0.4
_HOPS = {"connection", "transfer-encoding", "keep-alive", "content-length"}


class Proxy:
    """``share`` of the requests meet one of ``faults``."""

    def __init__(self, target: str, seed: int = 0) -> None:
        self.target = urlsplit(target).netloc
        self.faults: tuple[str, ...] = ()
        self.share = 0.0
        self.is_silent = False  # takes requests and never answers
        self.met: Counter[str] = Counter()
        self.n_requests = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.released = threading.Event()
        self.endpoint = ""

    def draw(self) -> str | None:
        with self._lock:
            self.n_requests += 1
            if not self.faults or self._random.random() >= self.share:
                return None
            fault = self._random.choice(self.faults)
            self.met[fault] += 1
            return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: ClassVar[Proxy]

    def do_GET(self) -> None:
        self._forward()

    def do_PUT(self) -> None:
        self._forward()

    def do_HEAD(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def do_DELETE(self) -> None:
        self._forward()

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.draw()
        if self.proxy.is_silent:
            self.proxy.released.wait(60)
            fault = "reset"
        if fault == "delay":
            self.proxy.released.wait(DELAY_S)
        if fault == "reset":
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return self.connection.close()
        if fault in ("throttle", "error"):
            return self._say(503 if fault == "throttle" else 500, {}, b"<Error><Code>SlowDown</Code></Error>")
        if fault == "stale" and self.command in ("GET", "HEAD"):
            return self._say(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        for _ in range(2 if fault == "twice" and self.command == "PUT" else 1):
            status, headers, data = self._ask(body)
        if fault == "flipped" and self.command == "GET" and status < 300 and data:
            at = len(data) // 2
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        self._say(status, headers, data, cut=fault == "truncated")

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.proxy.target, timeout=60)
        try:
            connection.request(self.command, self.path, body or None, dict(self.headers.items()))
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _say(self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False) -> None:
        length = next((v for k, v in headers.items() if k.lower() == "content-length"), str(len(data)))
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in _HOPS:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def handle(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Whoever hangs up is the client's business."""


@contextlib.contextmanager
def proxied(target: str, seed: int = 0) -> Iterator[Proxy]:
    proxy = Proxy(target, seed)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = _Server(("127.0.0.1", 0), handler)
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
