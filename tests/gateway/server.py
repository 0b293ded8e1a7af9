"""A real server process to test against, and what can be asked of it without a client library."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

GUARD = 16
PATIENCE_S = 30.0
SIZE = ("--slots", "2", "--threads", "1", "--cache-ram", "512MiB")


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        """What was streamed, without the end mark."""
        lines = [line.removeprefix(b"data: ") for line in self.data.split(b"\n\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


@dataclass
class Server:
    url: str
    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def log(self) -> str:
        return "".join(self.said)

    @property
    def engine_pid(self) -> int:
        (pid,) = children(self.process.pid)
        return pid

    def connect(self, timeout_s: float = PATIENCE_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """``body``: bytes as they are, or anything that becomes JSON. Headers in Python's spelling."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = self.connect()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json"} | named)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.call("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.call("POST", path, body, **headers)

    def ask(self, path: str, body: Any) -> Any:
        """The JSON of an answer that must be a good one."""
        reply = self.post(path, body)
        assert reply.status == 200, reply.data
        return reply.json

    def n_tokens(self, text: str) -> int:
        return len(self.ask("/tokenize", {"content": text})["tokens"])

    def rendered(self, messages: list[dict[str, Any]], **more: Any) -> str:
        return str(self.ask("/apply-template", {"messages": messages, **more})["prompt"])

    def is_idle(self) -> bool:
        return not any(slot["is_processing"] for slot in self.get("/slots").json) and self._n_waiting() == 0

    def _n_waiting(self) -> float:
        return sum(metric(self.get("/metrics").data.decode(), f"llamacpp:requests_{what}") for what in BUSY)

    def is_ready(self) -> bool:
        return self.get("/ready").status == 200

    def kill_engine(self) -> None:
        os.kill(self.engine_pid, signal.SIGKILL)


BUSY = ("processing", "deferred")


def metric(text: str, name: str) -> float:
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(value)


@contextlib.contextmanager
def serving(*flags: str, n_ctx: int = 4096) -> Iterator[Server]:
    """A server that answers; it is told to stop at the end, and must."""
    where = ("--port", "0", "--ctx-size", str(n_ctx))
    disk = () if "--disk-cache" in flags else ("--disk-cache", "0")
    command = [sys.executable, "-m", "everwarm.cli", "serve", "--demo", *where, *SIZE, *disk, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    server = Server("", process)
    listener = threading.Thread(target=_listen, args=(server,), daemon=True)
    listener.start()
    try:
        until(lambda: bool(server.url) or not listener.is_alive(), "the server has started")
        assert server.url, f"the server did not start: {server.log}"
        yield server
    finally:
        _end(process)
        listener.join(PATIENCE_S)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def _listen(server: Server) -> None:
    """Everything it says, until it ends; its address is the first URL."""
    assert server.process.stderr is not None
    with server.process.stderr as lines:
        for line in lines:
            server.said.append(line)
            found = re.search(r"http://[^/\s]+", line)
            if found and not server.url:
                server.url = found[0]


def run_cli(
    *arguments: str, text: str | None = None, timeout_s: float = 60.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """The command line, to its end."""
    command = [sys.executable, "-m", "everwarm.cli", *arguments]
    wide = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"} | env
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, env=wide, check=False)


def until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def is_alive(pid: int) -> bool:
    """Running, and not merely waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def raw(port: int, data: bytes, timeout_s: float = PATIENCE_S) -> bytes:
    """Whatever the server says to these bytes until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
        return _everything(sock)


def _everything(sock: socket.socket) -> bytes:
    got = b""
    with contextlib.suppress(OSError):
        while piece := sock.recv(1 << 16):
            got += piece
    return got


def words(n: int, seed: int = 0) -> str:
    """Text of ``n`` words that no other seed begins with."""
    return f"Note {seed}. " + " ".join(f"{WORDS[(seed + 7 * i + i * i) % len(WORDS)]} {i}" for i in range(n // 2))


WORDS = ("river", "stone", "lamp", "garden", "window", "paper", "cloud", "bread", "music", "winter", "silver", "road")
