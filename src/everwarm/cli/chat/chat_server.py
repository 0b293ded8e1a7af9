"""A server to chat with: one that runs, or one that is started for this chat and stopped after it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from urllib.parse import urlsplit

from everwarm.errors import BadRequest, EverwarmError
from everwarm.gateway.client import Client
from everwarm.types import Json

_ANSWER_S = 3600


@dataclass(frozen=True, slots=True)
class ReplyCost:
    """What one reply took."""

    n_reused: int
    n_read: int
    n_written: int
    first_s: float
    tokens_per_second: float

    def text(self) -> str:
        return (
            f"reused {self.n_reused:,}, read {self.n_read:,} tokens · first token after {1e3 * self.first_s:,.0f} ms · "
            f"{self.tokens_per_second:.1f} tokens/s"
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a reply; the last one has the cost."""

    text: str = ""
    reasoning: str = ""
    cost: ReplyCost | None = None


def choose_model(client: Client, wanted: str | None) -> str | None:
    """Asks the server what it has. The wanted model, the only one, or the only one in memory."""
    found = client.get("/v1/models")["data"]
    names = [str(model["id"]) for model in found]
    loaded = [str(model["id"]) for model in found if model.get("status", {}).get("value") == "loaded"]
    if wanted is not None:
        known = {wanted, *names} & {name for model in found for name in (model["id"], *model.get("aliases", ()))}
        if wanted not in known:
            raise BadRequest(f"{client.url} has no model {wanted!r}; it has {', '.join(names) or 'none'}")
        return wanted
    for some in (names, loaded):
        if len(some) == 1:
            return some[0]
    raise BadRequest(f"{client.url} has several models; choose with --model: {', '.join(names) or 'none'}")


def stream(client: Client, body: Json) -> Iterator[Piece]:
    """A reply as it comes. If the caller closes this, the connection closes, and the server stops writing."""
    began = time.monotonic()
    first_s: float | None = None
    timings: Json = {}
    for chunk in _chunks(client, {**body, "stream": True}):
        timings = chunk.get("timings", timings)
        for choice in chunk.get("choices", []):
            delta = choice.get("delta", {})
            piece = Piece(delta.get("content") or "", delta.get("reasoning_content") or "")
            if piece.text or piece.reasoning:
                first_s = time.monotonic() - began if first_s is None else first_s
                yield piece
    if timings:
        counts = (timings["cache_n"], timings["prompt_n"], timings["predicted_n"])
        yield Piece(cost=ReplyCost(*counts, first_s or 0.0, timings["predicted_per_second"]))


def _chunks(client: Client, body: Json) -> Iterator[Json]:
    where = urlsplit(client.url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    if client.api_key:
        headers["Authorization"] = f"Bearer {client.api_key}"
    connection = kind(where.netloc, timeout=_ANSWER_S)
    try:
        path = where.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise EverwarmError(_message(response.read()))
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if line.startswith(b"data: ") and data != b"[DONE]":
                chunk = json.loads(data)
                if "error" in chunk:
                    raise EverwarmError(chunk["error"]["message"])
                yield chunk
    except http.client.HTTPException as error:
        raise EverwarmError(f"the connection to {client.url} broke: {error}") from None
    finally:
        connection.close()


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode("utf-8", "replace")[:500]


@contextlib.contextmanager
def own_server(serve: list[str]) -> Iterator[Client]:
    """A server that is started with these arguments, and stopped at the end.

    It is for this machine alone, wherever other servers listen (``EVERWARM_SERVE_HOST``, as in a container), and is called
    with the key that the environment gives it. It has a session of its own: Ctrl-C in the terminal stops a reply, not the
    server.
    """
    command = [sys.executable, "-m", "everwarm", "serve", *serve, "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    try:
        with _ending_on_hangup():
            lines = []
            for line in process.stderr:
                lines.append(line)
                found = re.search(r"http://[^/\s]+", line)
                if found:
                    break
            else:
                raise EverwarmError(_reason(lines))
            threading.Thread(target=process.stderr.read, daemon=True).start()  # so that its log never fills the pipe
            keys = os.environ.get("EVERWARM_SERVE_API_KEY")
            yield Client(found[0], keys and keys.split(",")[0].strip())  # the server takes several
    finally:
        process.terminate()
        process.wait(15)


def _reason(lines: list[str]) -> str:
    """The server's last error line, without the program's name: the caller prints that itself."""
    errors = [line.strip() for line in lines if line.startswith("everwarm: ")]
    return errors[-1].removeprefix("everwarm: ") if errors else "".join(lines).strip() or "the server did not start"


@contextlib.contextmanager
def _ending_on_hangup() -> Iterator[None]:
    """A closed terminal ends the chat in order, so that its server does not stay behind."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(1)

    before = {name: signal.signal(name, end) for name in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
