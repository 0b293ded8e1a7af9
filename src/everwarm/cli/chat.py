"""``everwarm chat``: a chat in the terminal, with a running server or one of its own, that shows what was reused."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from rich.console import Console

from everwarm.errors import EverwarmError
from everwarm.types import Json


def chat_locally(serve: list[str], system: str | None, temperature: float, max_tokens: int) -> int:
    """Chat with a server of one's own, started with these arguments of ``serve``."""
    with _own_server(serve) as url:
        return chat_with(url, None, system, temperature, max_tokens)


@contextlib.contextmanager
def _own_server(serve: list[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "everwarm", "serve", *serve, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"http://[^/\s]+", line)
            if found:
                break
        else:
            raise EverwarmError("".join(lines).strip() or "the server did not start")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # so that its log never fills the pipe
        yield found[0]
    finally:
        process.terminate()
        process.wait(15)


def chat_with(url: str, api_key: str | None, system: str | None, temperature: float, max_tokens: int) -> int:
    """Chat until the end of input. An empty line is ignored, ``/new`` starts over, ``/quit`` ends."""
    console = Console(highlight=False)
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    start = list(messages)
    console.print("[dim]/new starts over, /quit ends[/]")
    while True:
        try:
            text = console.input("[cyan]you[/]    ").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if text == "/quit":
            return 0
        if text == "/new":
            messages = list(start)
        elif text:
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, "temperature": temperature, "max_tokens": max_tokens, "stream": True}
            try:
                messages.append({"role": "assistant", "content": _answer(console, url, api_key, body)})
            except (OSError, EverwarmError) as error:
                console.print(f"[red]{error}[/]", markup=True)
                messages.pop()


def _answer(console: Console, url: str, api_key: str | None, body: Json) -> str:
    console.print("[green]model[/]  ", end="")
    text = ""
    began = time.monotonic()
    timings: Json = {}
    first: float | None = None
    for chunk in _chunks(url, api_key, body):
        timings = chunk.get("timings", timings)
        for choice in chunk.get("choices", []):
            piece = choice.get("delta", {}).get("content") or ""
            if piece and first is None:
                first = time.monotonic() - began
            text += piece
            console.print(piece, end="", markup=False)
    console.print()
    if timings:
        console.print(
            f"[dim]       reused {timings['cache_n']}, read {timings['prompt_n']} tokens · "
            f"first token after {1e3 * (first or 0):.0f} ms · {timings['predicted_per_second']:.1f} tokens/s[/]"
        )
    return text


def _chunks(url: str, api_key: str | None, body: Json) -> Iterator[Json]:
    where = urlsplit(url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    connection = kind(where.netloc, timeout=3600)
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
    finally:
        connection.close()


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode("utf-8", "replace")[:500]
