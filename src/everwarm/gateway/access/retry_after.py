"""When somebody who is refused should come back: from what is ahead, at the speed that was measured. Pure."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from everwarm.engine.process.messages import Backlog

LEAST_S = 1
MOST_S = 600
MOST_ROUNDS = 4  # times that everything admitted ends


def next_place_s(backlog: Backlog) -> float:
    """Until the first of the running requests ends: its prompt is read, then it writes beside the others."""
    return backlog.n_next_read * backlog.read_s + backlog.n_next_write * backlog.write_s * max(1, backlog.n_running)


def all_done_s(backlog: Backlog) -> float:
    """Until everything that runs and waits has ended."""
    return backlog.n_to_read * backlog.read_s + backlog.n_to_write * backlog.write_s


def with_unseen(backlog: Backlog, n_unseen: int, n_read: float) -> Backlog:
    """The same with requests that were admitted and of which no engine has spoken yet: each with so much to read, and
    a reply of the average length."""
    more: dict[str, float] = {
        "n_to_read": backlog.n_to_read + n_unseen * n_read,
        "n_to_write": backlog.n_to_write + n_unseen * backlog.n_reply,
    }
    if not backlog.n_running and n_unseen:
        n_running = min(backlog.n_slots, n_unseen)
        more |= {"n_running": n_running, "n_next_read": n_read, "n_next_write": backlog.n_reply}
    return msgspec.structs.replace(backlog, **more)


def retry_after_s(backlogs: Sequence[Backlog], n_admitted: int, n_tokens: float, n_told: int) -> int:
    """Whole seconds until there is a place, while so many requests with so many prompt tokens are admitted. Whoever was
    told to come back before stands before, as far as a few rounds: the refused may never come, or come too often."""
    if not backlogs:
        return LEAST_S
    n_unseen = max(0, n_admitted - sum(backlog.n_running + backlog.n_waiting for backlog in backlogs))
    busiest = with_unseen(max(backlogs, key=all_done_s), n_unseen, n_tokens / max(1, n_admitted))
    n_rounds = min(MOST_ROUNDS, (n_told + 1) / max(1, n_admitted))
    return clamped(max(next_place_s(busiest), n_rounds * all_done_s(busiest)))


def clamped(seconds: float) -> int:
    return min(MOST_S, max(LEAST_S, math.ceil(seconds)))


@dataclass(slots=True)
class Told:
    """Who was told to come back and is not due yet; only how many."""

    most: int = 4096
    _due: collections.deque[float] = field(default_factory=collections.deque)

    def n_ahead(self, now: float) -> int:
        while self._due and self._due[0] <= now:
            self._due.popleft()
        return len(self._due)

    def add(self, now: float, wait_s: float) -> None:
        if len(self._due) < self.most:
            self._due.append(max(now + wait_s, self._due[-1] if self._due else 0.0))
