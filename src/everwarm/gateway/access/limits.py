"""Admission limits: how many requests and prompt tokens may run and wait. Checked before anything is tokenized.

Until its prompt is tokenized, a request counts as an estimate from its body; then as its prompt tokens; and as nothing once
the engine has finished it. A client that does not read its answer loses its place when another request needs it, and one
client that holds every place cannot keep out another. Knows no HTTP.
"""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from everwarm.engine.process.messages import Backlog
from everwarm.errors import EngineStopped, Overloaded
from everwarm.gateway.settings import ServerSettings

_BYTES_PER_TOKEN = 3  # a conservative estimate
DRAINING_RETRY_S = 5
STALLED_S = 1.0  # a client that has read nothing for so long may lose its place to another request
LEAST_S = 1
MOST_S = 600
MOST_ROUNDS = 4  # one round: everything that is admitted ends


def estimated_tokens(n_bytes: int) -> int:
    return max(1, n_bytes // _BYTES_PER_TOKEN)


class AdmittedRequest:
    """One admitted request. ``cut_off`` closes its connection; without it the request cannot be ended early."""

    def __init__(self, limits: AdmissionLimits, client: str, n_tokens: int, cut_off: Callable[[], None] | None) -> None:
        self._limits = limits
        self._cut_off = cut_off
        self._blocked_at: float | None = None
        self.client = client
        self.n_tokens = n_tokens
        self.is_held = True

    def recount(self, n_tokens: int) -> None:
        """Replaces the estimate by a better token count."""
        if self.is_held:
            self._limits.n_tokens += n_tokens - self.n_tokens
            self.n_tokens = n_tokens

    def release(self) -> None:
        """Called when the engine has finished the request. Idempotent."""
        if self.is_held:
            self.is_held = False
            self._limits.forget(self)

    def note_sending(self) -> None:
        """A write to the client begins, and blocks while the client does not read."""
        self._blocked_at = self._blocked_at or self._limits.clock()

    def note_sent(self) -> None:
        self._blocked_at = None

    @property
    def stalled_s(self) -> float:
        """For how long its client has read nothing; 0 if the connection cannot be closed."""
        if self._blocked_at is None or self._cut_off is None:
            return 0.0
        return self._limits.clock() - self._blocked_at

    def give_up(self) -> None:
        self.release()
        if self._cut_off is not None:
            self._cut_off()


class AdmissionLimits:
    def __init__(
        self,
        settings: ServerSettings,
        backlogs: Callable[[], Sequence[Backlog]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``backlogs``: those of the running engines; called only when a request is refused."""
        self.clock = clock
        self._settings = settings
        self._backlogs = backlogs
        self._places: dict[AdmittedRequest, None] = {}
        self._n_of_client: Counter[str] = Counter()
        self.n_tokens = 0
        self.is_draining = False
        self._pending_retries = PendingRetries()

    @property
    def n_requests(self) -> int:
        return len(self._places)

    @property
    def n_reserved(self) -> int:
        """Places beyond ``max_requests``, for clients that have no other request."""
        return max(1, self._settings.max_requests // 8)

    @contextlib.contextmanager
    def admitted(
        self,
        n_body_bytes: int,
        client: str = "",
        *,
        n_context: int | None = None,
        cut_off: Callable[[], None] | None = None,
    ) -> Iterator[AdmittedRequest]:
        """Counts the request until the block ends or the place is released; ``Overloaded`` if there is no room. A prompt
        counts at most ``n_context`` tokens."""
        n_tokens = estimated_tokens(n_body_bytes)
        place = self._admit(client, n_tokens if n_context is None else min(n_tokens, n_context), cut_off)
        try:
            yield place
        finally:
            place.release()

    def forget(self, place: AdmittedRequest) -> None:
        del self._places[place]
        self.n_tokens -= place.n_tokens
        self._n_of_client[place.client] -= 1
        if not self._n_of_client[place.client]:
            del self._n_of_client[place.client]

    def _admit(self, client: str, n_tokens: int, cut_off: Callable[[], None] | None) -> AdmittedRequest:
        if self.is_draining:
            raise EngineStopped("the server is stopping; try another one or later", DRAINING_RETRY_S)
        while (lack := self._lack(n_tokens)) is not None:
            stalled = max(self._places, key=lambda place: place.stalled_s)
            if stalled.stalled_s >= STALLED_S:
                stalled.give_up()
            elif self._may_be_reserved_for(client):
                break
            else:
                raise self._overloaded(lack)
        place = AdmittedRequest(self, client, n_tokens, cut_off)
        self._places[place] = None
        self._n_of_client[client] += 1
        self.n_tokens += n_tokens
        return place

    def _lack(self, n_tokens: int) -> str | None:
        """Why there is no ordinary place, or ``None``."""
        if self.n_requests >= self._settings.max_requests:
            return f"{self.n_requests} requests are running or waiting already"
        if self.n_requests and self.n_tokens + n_tokens > self._settings.max_waiting_tokens:
            return f"prompts of about {self.n_tokens} tokens are waiting already"
        return None

    def _may_be_reserved_for(self, client: str) -> bool:
        return not self._n_of_client[client] and self.n_requests < self._settings.max_requests + self.n_reserved

    def _overloaded(self, why: str) -> Overloaded:
        now = self.clock()
        wait_s = retry_after_s(self._backlogs(), self.n_requests, self.n_tokens, self._pending_retries.n_ahead(now))
        self._pending_retries.add(now, wait_s)
        return Overloaded(f"{why}; try again in about {wait_s} s", wait_s)


def next_place_s(backlog: Backlog) -> float:
    """Seconds until the first running request ends: prefill of its prompt, then decoding together with the others."""
    return backlog.n_next_read * backlog.read_s + backlog.n_next_write * backlog.write_s * max(1, backlog.n_running)


def all_done_s(backlog: Backlog) -> float:
    """Seconds until everything that runs and waits has ended."""
    return backlog.n_to_read * backlog.read_s + backlog.n_to_write * backlog.write_s


def with_unseen(backlog: Backlog, n_unseen: int, n_read: float) -> Backlog:
    """The backlog plus ``n_unseen`` admitted requests that no engine has reported yet, each with ``n_read`` tokens to read
    and a reply of average length."""
    more: dict[str, float] = {
        "n_to_read": backlog.n_to_read + n_unseen * n_read,
        "n_to_write": backlog.n_to_write + n_unseen * backlog.n_reply,
    }
    if not backlog.n_running and n_unseen:
        n_running = min(backlog.n_slots, n_unseen)
        more |= {"n_running": n_running, "n_next_read": n_read, "n_next_write": backlog.n_reply}
    return msgspec.structs.replace(backlog, **more)


def retry_after_s(backlogs: Sequence[Backlog], n_admitted: int, n_tokens: float, n_pending: int) -> int:
    """Whole seconds until there is a place, given the admitted requests and their prompt tokens. The ``n_pending`` requests
    that were refused earlier go first, but add at most ``MOST_ROUNDS`` rounds: a client may never retry, or too often."""
    if not backlogs:
        return LEAST_S
    n_unseen = max(0, n_admitted - sum(backlog.n_running + backlog.n_waiting for backlog in backlogs))
    busiest = with_unseen(max(backlogs, key=all_done_s), n_unseen, n_tokens / max(1, n_admitted))
    n_rounds = min(MOST_ROUNDS, (n_pending + 1) / max(1, n_admitted))
    return clamped(max(next_place_s(busiest), n_rounds * all_done_s(busiest)))


def clamped(seconds: float) -> int:
    return min(MOST_S, max(LEAST_S, math.ceil(seconds)))


@dataclass(slots=True)
class PendingRetries:
    """Counts the refused requests whose ``Retry-After`` has not passed yet."""

    most: int = 4096
    _due: collections.deque[float] = field(default_factory=collections.deque)

    def n_ahead(self, now: float) -> int:
        while self._due and self._due[0] <= now:
            self._due.popleft()
        return len(self._due)

    def add(self, now: float, wait_s: float) -> None:
        if len(self._due) < self.most:
            self._due.append(max(now + wait_s, self._due[-1] if self._due else 0.0))
