"""Sessions to one server: so many at a time, the turns of each in order, with disturbances in the midst."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from bench.suite.summary import percent, quantile
from bench.traces.recorded import AgentSession, Turn
from everwarm.prompt.prompt import Prompt
from everwarm.simulate.oracle import Known

MAX_DELAY_S = 0.1  # a person's pauses are cut short: they only give a server more idle time
CHAT = "/v1/chat/completions"
Happens = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: its tokens, and seconds until the first word and the end. ``n_known``: what an infinite cache would have
    had of it when it was sent, from requests that were answered then: of two that run side by side, either may read what
    both begin with. None: the tokens are not known."""

    n_prompt: int
    n_cached: int
    n_known: int | None
    first_s: float
    total_s: float
    n_reply: int


@dataclass(slots=True)
class Played:
    answers: list[Answered] = field(default_factory=list)
    seconds: float = 0.0  # while requests ran, without restarts

    @property
    def cached_percent(self) -> float:
        return percent(sum(each.n_cached for each in self.answers), sum(each.n_prompt for each in self.answers))

    @property
    def regret(self) -> int | None:
        """Tokens that were read again although an infinite cache would have had them."""
        known = [(each.n_known, each.n_cached) for each in self.answers if each.n_known is not None]
        return sum(max(0, n_known - n_cached) for n_known, n_cached in known) if known else None

    def first_s(self, share: float) -> float:
        return quantile([each.first_s for each in self.answers], share)

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.seconds


class Replay:
    """``tokens``: those of each turn's prompt, where they are known; they tell what was read again."""

    def __init__(self, host: Callable[[], str], tokens: Mapping[Turn, list[int]], model: str = "") -> None:
        self._host, self._tokens, self._model = host, tokens, model
        self._known = Known()
        self._lock = threading.Lock()

    def play(self, sessions: Sequence[AgentSession], n_clients: int, between: Sequence[Happens] = ()) -> Played:
        """All sessions in as many parts as disturbances allow; these happen between two parts, while nothing runs."""
        played = Played()
        n_parts = len(between) + 1
        for part in range(n_parts):
            if part:
                between[part - 1]()
            began = time.perf_counter()
            with ThreadPoolExecutor(n_clients) as pool:
                done = pool.map(lambda session, part=part: self._session(session, part, n_parts), sessions)
                played.answers += [answer for answers in done for answer in answers]
            played.seconds += time.perf_counter() - began
        return played

    def _session(self, session: AgentSession, part: int, n_parts: int) -> list[Answered]:
        n = len(session.turns)
        return [self._ask(turn) for turn in session.turns[n * part // n_parts : n * (part + 1) // n_parts]]

    def _ask(self, turn: Turn) -> Answered:
        time.sleep(min(turn.delay_s, MAX_DELAY_S))
        body = dict(turn.body) | ({"model": self._model} if self._model else {})
        tokens = self._tokens.get(turn)
        if tokens is None:
            return asked(self._host(), body, turn.n_reply)
        prompt = Prompt.of_tokens(tokens)
        with self._lock:
            n_known = self._known.n_shared(prompt)
        found = asked(self._host(), body, turn.n_reply)
        with self._lock:
            self._known.add(prompt)
        return replace(found, n_known=n_known)


def asked(host: str, body: Mapping[str, Any], n_reply: int) -> Answered:
    """Streams a greedy chat completion; the figures are those of its ``usage``, which every OpenAI server can send."""
    more = {"max_tokens": n_reply, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(host, timeout=600)
    began = time.perf_counter()
    try:
        connection.request("POST", CHAT, json.dumps({**body, **more}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{host} answered {response.status}: {response.read(400)!r}")
        first, usage = None, {}
        for line in response:
            chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            if "error" in chunk:
                raise RuntimeError(f"{host}: {chunk['error']}")
            if first is None and _has_words(chunk):
                first = time.perf_counter() - began
            usage = chunk.get("usage") or usage
    finally:
        connection.close()
    total = time.perf_counter() - began
    n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answered(usage["prompt_tokens"], n_cached, None, first or total, total, usage["completion_tokens"])


def _has_words(chunk: Mapping[str, Any]) -> bool:
    choices = chunk.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
