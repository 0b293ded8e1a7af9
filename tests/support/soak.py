"""Many conversations at once over streams, each with a secret of its own: what soak tests drive and count.

A secret is five digits, and any two differ in at least three: a model that gets one digit wrong names nobody else's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from support.server import Server

SMALL_TALK = ("Hello!", "What is 3 + 4?", "Who are you?", "What is 7 + 8?")
N_TURNS = 6
PLANNED_S = 20.0  # so long after a kill a stream may end with an error


def secrets() -> list[str]:
    """Values of polynomials of degree two at five points, modulo 11: any two agree at two of them at most."""
    codes = []
    for a, b, c in itertools.product(range(11), repeat=3):
        values = [(a + b * x + c * x * x) % 11 for x in range(5)]
        if values[0] and max(values) < 10:
            codes.append("".join(map(str, values)))
    return codes


@dataclass
class Seen:
    """What came of it."""

    statuses: Counter[int] = field(default_factory=Counter)
    n_done: int = 0
    n_recalled: int = 0
    n_asked: int = 0
    n_left: int = 0  # by the client, in mid-stream
    errors: list[tuple[float, str]] = field(default_factory=list)
    broken: list[tuple[float, str]] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)

    def unplanned(self) -> list[tuple[float, str]]:
        """Errors that no kill explains."""
        return [one for one in (*self.errors, *self.broken) if not any(0 <= one[0] - k < PLANNED_S for k in self.kills)]


class Soak:
    def __init__(self, server: Server, n_clients: int, share_leaving: float = 0.1, seed: int = 0) -> None:
        self._server, self._n_clients, self._leaving = server, n_clients, share_leaving
        self._codes = secrets()
        self.told: dict[str, int] = {}
        self._rng = random.Random(seed)
        self.seen = Seen()

    def run(self, seconds: float, kill_every_s: float | None) -> Seen:
        asyncio.run(self._run(time.monotonic() + seconds, kill_every_s))
        return self.seen

    async def _run(self, end: float, kill_every_s: float | None) -> None:
        clients = [self._client(i, end) for i in range(self._n_clients)]
        await asyncio.gather(*clients, *([] if kill_every_s is None else [self._killer(end, kill_every_s)]))

    async def _killer(self, end: float, every_s: float) -> None:
        while time.monotonic() + every_s < end:
            await asyncio.sleep(every_s)
            for pid in await asyncio.to_thread(lambda: self._server.engine_pids):
                self.seen.kills.append(time.monotonic())
                os.kill(pid, 9)

    async def _client(self, i: int, end: float) -> None:
        rng = random.Random(self._rng.randrange(1 << 40))
        while time.monotonic() < end:
            code = self._codes[rng.randrange(len(self._codes) // self._n_clients) * self._n_clients + i]
            await self._conversation(rng, code, f"salt {i % 4}", end)

    async def _conversation(self, rng: random.Random, code: str, salt: str, end: float) -> None:
        talk = [{"role": "user", "content": f"My secret code is {code}."}]
        self.told[code] = self.told.get(code, 0) + 1
        for turn in range(N_TURNS):
            if time.monotonic() > end:
                return
            text = await self._ask(rng, talk, salt)
            if text is None:
                return
            self.judge(text, code, asked=talk[-1]["content"].endswith("secret code?"))
            talk.append({"role": "assistant", "content": text})
            asks = turn % 2 == 0
            talk.append({"role": "user", "content": "What is my secret code?" if asks else rng.choice(SMALL_TALK)})

    def judge(self, text: str, code: str, asked: bool) -> None:
        self.seen.n_done += 1
        found = re.findall(r"\d{5}", text)
        self.seen.leaks += [f"{code} was shown {other}" for other in found if other != code and other in self.told]
        self.seen.n_asked += asked
        self.seen.n_recalled += asked and code in found

    async def _ask(self, rng: random.Random, talk: list[dict[str, str]], salt: str) -> str | None:
        """The text of a whole reply; None: it broke off, or the client left."""
        body = {
            "messages": talk, "stream": True, "temperature": 0, "max_tokens": 24, "cache_salt": salt,
            "chat_template_kwargs": {"enable_thinking": False},
        }  # fmt: skip
        n_most = rng.randrange(1, 6) if rng.random() < self._leaving else None
        try:
            return await asyncio.wait_for(self._stream(body, n_most), 300)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self.seen.broken.append((time.monotonic(), repr(error)))
            return None

    async def _stream(self, body: dict[str, Any], n_most: int | None) -> str | None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            data = json.dumps(body).encode()
            head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
            writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode() + data)
            status = int((await reader.readline()).split()[1])
            self.seen.statuses[status] += 1
            while (await reader.readline()).strip():
                pass
            if status != 200:
                await asyncio.sleep(0.5)
                return None
            return await self._read(reader, n_most)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, n_most: int | None) -> str | None:
        message, n = [], 0
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return "".join(message)
            event = json.loads(line[6:])
            if "error" in event:
                self.seen.errors.append((time.monotonic(), str(event["error"])[:200]))
                return None
            message += [choice["delta"].get("content") or "" for choice in event["choices"]]
            n += 1
            if n_most is not None and n >= n_most:
                self.seen.n_left += 1
                return None
        self.seen.broken.append((time.monotonic(), "the stream ended without an end"))
        return None
