"""Requests that an engine has not answered yet, and what happens to them when it dies.

A request that has streamed nothing is sent again to the next engine, a limited number of times: a request that kills every
engine ends at its second. Knows frames and queues; knows no process.
"""

from __future__ import annotations

import asyncio
import http
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from everwarm.engine.process import messages as m
from everwarm.errors import EngineStopped, Refused

MAX_UNREAD_BYTES = 8 << 20  # of one reply that its client does not read
MIN_UNREAD_BYTES = MAX_UNREAD_BYTES // 16  # of one reply, however many there are
MAX_ALL_UNREAD_BYTES = 128 << 20  # of all replies
MAX_REPLAYS = 1  # of a request that an engine had begun when it died
MAX_REPLAYS_WAITING = 3  # of one that only waited

SLOW_CLIENT = http.HTTPStatus.REQUEST_TIMEOUT


@dataclass(slots=True, eq=False)
class Pending:
    """A request or question without its last answer. ``frame`` is sent again if the engine dies before it answers. Its
    messages wait here for the one task that reads them."""

    id: int
    frame: m.Frame
    has_begun: bool = False  # in the engine that runs now
    has_streamed: bool = False
    is_of_one_life: bool = False  # another engine would not understand it
    n_replays: int = 0
    n_unread: int = 0  # bytes of the reply that wait here
    _waiting: deque[tuple[m.ToGateway, int]] = field(default_factory=deque)  # with their weights
    _reader: asyncio.Future[None] | None = None  # of the task that waits for a message

    def put(self, message: m.ToGateway) -> None:
        weight = weight_of(message)
        self.n_unread += weight
        self._waiting.append((message, weight))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    @property
    def may_be_replayed(self) -> bool:
        """A request that was being answered when the engine died may be the cause; one that only waited hardly is."""
        n_most = MAX_REPLAYS if self.has_begun else MAX_REPLAYS_WAITING
        return not self.has_streamed and not self.is_of_one_life and self.n_replays < n_most

    async def get(self) -> m.ToGateway:
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message, weight = self._waiting.popleft()
        self.n_unread -= weight
        return message


class PendingRequests:
    """All requests without their last answer, and the one owner of their ids."""

    def __init__(self) -> None:
        self._by_id: dict[int, Pending] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._by_id.values()))

    def __contains__(self, id: int) -> bool:
        return id in self._by_id

    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def add(self, pending: Pending) -> None:
        self._by_id[pending.id] = pending

    def remove(self, id: int) -> bool:
        """False: it was over already."""
        return self._by_id.pop(id, None) is not None

    def deliver(self, message: Any) -> m.Cancel | None:
        """Hand an engine's message to its request. A cancellation that is returned is for the engine."""
        pending = self._by_id.get(message.id)
        if pending is None:
            return None
        if isinstance(message, m.Begun):
            pending.has_begun = True
        if isinstance(message, m.TextPiece):
            pending.has_streamed = True
            pending.frame = ()  # it will not be sent again
        pending.put(message)
        if isinstance(message, m.Done | m.Failed | m.Answer):
            del self._by_id[message.id]
        elif pending.n_unread > MIN_UNREAD_BYTES and pending.n_unread > unread_limit(len(self)):
            return self._end_unread(pending)
        return None

    def _end_unread(self, pending: Pending) -> m.Cancel:
        """The client reads more slowly than the engine writes. The cache keeps what was written, as for any request that
        ends early."""
        del self._by_id[pending.id]
        reason = f"the reply was ended: its client was {pending.n_unread:,} bytes behind; read faster or ask for less"
        pending.put(m.Failed(pending.id, SLOW_CLIENT.value, "client_too_slow", reason))
        return m.Cancel(pending.id)

    def keep_for_replay(self, why: str, back_in_s: int | None) -> None:
        """After an engine's death: keep what the next engine may be sent, and fail the rest."""
        for pending in self:
            if pending.may_be_replayed:
                pending.n_replays += 1
                pending.has_begun = False
            else:
                reason = f"the engine died while answering ({why}); it is being restarted, try again"
                self._fail(pending, reason, back_in_s)

    def fail_all(self, reason: str, back_in_s: int | None = None) -> None:
        for pending in self:
            self._fail(pending, reason, back_in_s)

    def _fail(self, pending: Pending, reason: str, back_in_s: int | None) -> None:
        failed = m.Failed(pending.id, EngineStopped.status, EngineStopped.code, reason, retry_after_s=back_in_s)
        pending.put(failed)
        del self._by_id[pending.id]


def weight_of(message: m.ToGateway) -> int:
    """About how many bytes a piece of a reply takes while it waits."""
    if not isinstance(message, m.TextPiece):
        return 0
    n_probs = sum(1 + len(prob.top) for prob in message.probs) if message.probs else 0
    return 200 + len(message.text) + 8 * len(message.tokens) + 160 * n_probs


def unread_limit(n_pending: int) -> int:
    """How far behind a client may be before its reply is ended. The more replies, the less for each."""
    return max(MIN_UNREAD_BYTES, min(MAX_UNREAD_BYTES, MAX_ALL_UNREAD_BYTES // max(1, n_pending)))


def failure(message: m.Failed) -> Refused:
    """An engine's refusal as an error to raise."""
    about = (message.n_prompt, message.n_context, message.retry_after_s)
    return Refused(message.status, message.code, message.message, *about)
