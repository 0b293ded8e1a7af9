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
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from support.fork_server import ForkedProcess, fork_server

Process = subprocess.Popen[str] | ForkedProcess
GUARD = 16
ENTER = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.argv[2], sys.argv[2:])"
PATIENCE_S = 30.0
AT_IMPORT = {"EVERWARM_CONFIG", "PYTHONPATH"}  # what is read before anything can be forked
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
    process: Process
    message: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def log(self) -> str:
        return "".join(self.message)

    @property
    def engine_pid(self) -> int:
        (pid,) = self.engine_pids
        return pid

    @property
    def engine_pids(self) -> list[int]:
        """The engines that are alive, whichever models they have."""
        return [pid for pid in children(self.process.pid) if is_alive(pid) and _is_engine(pid)]

    def next_engine(self, before: Collection[int]) -> int:
        """The engine that is started now, long before it is ready."""
        found: list[int] = []

        def has_come() -> bool:
            found[:] = set(self.engine_pids) - set(before)
            return bool(found)

        until(has_come, "another engine is started")
        return found[0]

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

    def complete(self, model: str, tokens: list[int], n: int = 8, **more: Any) -> Any:
        """What a model writes after these tokens: always the same ones."""
        greedy = {"temperature": 0, "ignore_eos": True, "return_tokens": True, "deterministic": True}
        return self.ask("/completion", {"model": model, "prompt": tokens, "n_predict": n} | greedy | more)

    def listed(self, model: str) -> Any:
        """What the list of models says about one."""
        (found,) = (row for row in self.get("/v1/models").json["data"] if row["id"] == model)
        return found

    def status_of(self, model: str) -> str:
        return str(self.listed(model)["status"]["value"])

    @property
    def n_loads(self) -> int:
        return self.log.count(" was loaded in ")

    def is_settled(self, model: str) -> bool:
        """Whether its engine has nothing to do and has done all that it does then."""
        seen = [self.get(f"/metrics?model={model}").data.decode()]
        time.sleep(0.2)
        seen.append(self.get(f"/metrics?model={model}").data.decode())
        if not all("everwarm_ram_arena_bytes " in text for text in seen):
            return False
        sizes = [metric(text, "everwarm_ram_arena_bytes") for text in seen]
        return sizes[0] == sizes[1] > 0 and metric(seen[1], "everwarm_ram_waiting") == 0

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
def serving(*flags: str, n_ctx: int = 4096, model: Path | None = None, cgroup: Path | None = None) -> Iterator[Server]:
    """A server that answers; it is told to stop at the end, and must. Without a model it has the embedded one. In a cgroup
    it decides itself how much it keeps in RAM."""
    with _started("--demo" if model is None else str(model), *flags, n_ctx=n_ctx, cgroup=cgroup) as server:
        yield server


@contextlib.contextmanager
def serving_models(source: Path, *flags: str, n_ctx: int = 4096) -> Iterator[Server]:
    """A server of many models, one of them in memory unless told otherwise."""
    limit = () if "--models-max" in flags else ("--models-max", "1")
    with _started("--models", str(source), *limit, *flags, n_ctx=n_ctx) as server:
        yield server


@contextlib.contextmanager
def _started(*flags: str, n_ctx: int, cgroup: Path | None = None) -> Iterator[Server]:
    where = ("--port", "0", "--ctx-size", str(n_ctx))
    disk = () if "--disk-cache" in flags else ("--disk-cache", "0")
    given = (*flags, *(("--cache-ram",) if cgroup is not None else ()))
    size = [part for pair in zip(SIZE[::2], SIZE[1::2], strict=True) if pair[0] not in given for part in pair]
    with listening(_process(cgroup, "serve", *where, *size, *disk, *flags)) as server:
        yield server


@contextlib.contextmanager
def listening(process: Process, scheme: str = "http") -> Iterator[Server]:
    """The server that this process becomes, which is told to stop at the end."""
    server = Server("", process)
    listener = threading.Thread(target=_listen, args=(server, scheme), daemon=True)
    listener.start()
    try:
        until(lambda: bool(server.url) or not listener.is_alive(), "the server has started")
        assert server.url, f"the server did not start: {server.log}"
        yield server
    finally:
        end(server.process)
        listener.join(PATIENCE_S)


def _process(cgroup: Path | None, *arguments: str) -> Process:
    """A fresh interpreter where the fork server's would not do: inside a cgroup, and with what is read at import."""
    if cgroup is None and "EVERWARM_CONFIG" not in os.environ:
        return fork_server().start(*arguments)
    enter = [] if cgroup is None else [sys.executable, "-c", ENTER, str(cgroup / "cgroup.procs")]
    return subprocess.Popen([*enter, sys.executable, "-m", "everwarm", *arguments], stderr=subprocess.PIPE, text=True)


def end(process: Process) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def _listen(server: Server, scheme: str) -> None:
    """Everything it says, until it ends; its address is the first URL."""
    assert server.process.stderr is not None
    with server.process.stderr as lines:
        for line in lines:
            server.message.append(line)
            found = re.search(rf"{scheme}://[^/\s,]+", line)
            if found and not server.url:
                server.url = found[0]


def run_cli(
    *arguments: str, text: str | None = None, timeout_s: float = 60.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """The command line, to its end."""
    wide = {"COLUMNS": "200", "NO_COLOR": "1"} | env
    if not AT_IMPORT & (os.environ | env).keys():
        return fork_server().run(*arguments, text=text or "", timeout_s=timeout_s, **wide)
    command = [sys.executable, "-m", "everwarm", *arguments]
    full = os.environ | wide
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, env=full, check=False)


def until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def _is_engine(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"everwarm.engine.process.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def is_alive(pid: int) -> bool:
    """Running, and not merely waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """While a process does nothing. The gateway notices after some seconds and kills it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def workers_of(gateway: int) -> list[int]:
    """Engines that a gateway started, also when it is gone and they are somebody else's children."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_worker(pid, gateway)]


def _is_worker(pid: int, gateway: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"everwarm.engine.process.worker" in words and words[-1] == str(gateway).encode() and is_alive(pid)


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


def key_file(folder: Path) -> Path:
    """A key for a remote store."""
    path = folder / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path
