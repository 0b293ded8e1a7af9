"""Everwarm as a server process, for benchmarks over HTTP, and asking any server the same question."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    host: str
    pid: int | None = None
    log: list[str] = field(default_factory=list)  # its log


@dataclass(frozen=True, slots=True)
class Reply:
    first_s: float
    total_s: float
    tokens: list[int]
    timings: dict[str, Any]
    at_s: tuple[float, ...] = ()  # when tokens came, each of them; those of one chunk come together

    @property
    def stream_s(self) -> float:
        """From the first token to the last."""
        return self.total_s - self.first_s

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks with tokens: what a reader sees stand still."""
        return [later - earlier for earlier, later in itertools.pairwise(self.at_s) if later > earlier]


@contextlib.contextmanager
def everwarm(*arguments: str, log: str = "WARNING", source: Path | None = None) -> Iterator[Server]:
    """``source``: the ``src`` folder of another checkout, to compare with."""
    command = [sys.executable, "-m", "everwarm", "serve", *arguments, "--port", "0"]
    environment = os.environ | {"EVERWARM_LOG": log} | ({} if source is None else {"PYTHONPATH": str(source)})
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    log: list[str] = []
    listener = threading.Thread(target=lambda stream=process.stderr: log.extend(stream), daemon=True)
    try:
        for line in process.stderr:
            log.append(line)
            found = re.search(r"http://([^/\s]+)", line)
            if found:
                break
        else:
            raise RuntimeError(f"everwarm did not start: {''.join(log)}")
        listener.start()
        yield Server("Everwarm", found[1], process.pid, log)
    finally:
        process.terminate()
        process.wait(60)
        if listener.is_alive():
            listener.join(60)
        process.stderr.close()


def ask(server: Server, tokens: list[int], n_predict: int, **more: Any) -> Reply:
    body = {"prompt": tokens, "n_predict": n_predict, "temperature": 0, "stream": True, "ignore_eos": True, **more}
    connection = http.client.HTTPConnection(server.host, timeout=600)
    began = time.perf_counter()
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    first, reply, timings, at = 0.0, [], {}, []
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"{server.name}: {chunk['error']}")
            now = time.perf_counter() - began
            first = first or now
            reply += chunk.get("tokens", [])
            at += [now] * len(chunk.get("tokens", ()))
            timings = chunk.get("timings", timings)
    connection.close()
    return Reply(first, time.perf_counter() - began, reply, timings, tuple(at))


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(server.host, timeout=600)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{server.name} answered {answer.status}: {data}")
    return dict(data)
