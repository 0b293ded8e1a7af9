"""Server-sent events for clients that watch a server. Costs nothing while there are no watchers.

Requests are reported as they proceed; everything else is polled every half second while there is a watcher. A watcher that
does not read its events is disconnected: browsers reconnect by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from everwarm.errors import EverwarmError, Overloaded
from everwarm.gateway.access.auth import Visibility
from everwarm.gateway.admin import cache_encode
from everwarm.gateway.admin.request_log import RequestLog, RequestRecord
from everwarm.gateway.http.sse import sse_named
from everwarm.router.pool import Pool
from everwarm.types import Json

POLL_S = 0.5
POLLS_PER_STATS = 4
MOST_WATCHERS, MOST_OF_ONE = 32, 8  # in all, and of one user
MOST_UNREAD = 256

Overview = Callable[[str], Awaitable[Json]]  # the body of GET /cache for a model


@dataclass(slots=True, eq=False)
class EventWatcher:
    model: str
    visibility: Visibility
    about: Json  # its role and namespace
    user: str = ""  # the namespace of its key; "" for an admin
    unread: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MOST_UNREAD))

    def enqueue(self, frame: bytes) -> bool:
        """False if its queue is full."""
        try:
            self.unread.put_nowait(frame)
        except asyncio.QueueFull:
            return False
        return True

    def disconnect(self) -> None:
        while not self.unread.empty():
            self.unread.get_nowait()
        self.unread.put_nowait(None)


class EventHub:
    def __init__(self, pool: Pool, recent: RequestLog, overview: Overview) -> None:
        self._pool = pool
        self._recent = recent
        self._overview = overview
        self._watchers: set[EventWatcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._seen: dict[tuple[str, str], Json] = {}  # what was last sent, by event and model
        self.is_closed = False

    @contextlib.contextmanager
    def watching(self, watcher: EventWatcher) -> Iterator[None]:
        n_own = sum(each.user == watcher.user for each in self._watchers)
        if watcher.user and n_own >= MOST_OF_ONE:
            raise Overloaded(f"this key has {n_own} event streams open already; close one of them first")
        if len(self._watchers) >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} event streams are open already; try again later")
        self._watchers.add(watcher)
        if self._task is None:
            self._recent.notify = self._send_request
            self._seen = {}
            self._poll()  # records the current values, which are not sent as changes
            self._task = asyncio.create_task(self._run(), name="everwarm-watch")
        try:
            yield
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._stop_polling()

    def _stop_polling(self) -> None:
        self._recent.notify = None
        if self._task is not None:
            self._task.cancel()
        self._task = None

    async def frames(self, watcher: EventWatcher) -> AsyncGenerator[bytes, None]:
        yield sse_named("hello", await self._overview(watcher.model) | watcher.about)
        while not self.is_closed and (frame := await watcher.unread.get()) is not None:
            yield frame

    def close(self) -> None:
        """Disconnects all watchers, so that the server can stop."""
        self.is_closed = True
        self.disconnect_all()

    def disconnect_all(self) -> None:
        for watcher in self._watchers:
            watcher.disconnect()

    # sending

    def _send(self, data: bytes, model: str | None = None) -> None:
        for watcher in list(self._watchers):
            if (model is None or watcher.model == model) and not watcher.enqueue(data):
                watcher.disconnect()

    def _send_request(self, row: RequestRecord) -> None:
        """Sends it with its text to watchers that may see the text, and without to the others that may see the request."""
        namespace = row.caller.namespace
        frames = dict[bool, bytes]()
        for watcher in [each for each in self._watchers if each.visibility.shows(namespace)]:
            with_words = watcher.visibility.shows_words(namespace)
            if with_words not in frames:
                frames[with_words] = sse_named("request", cache_encode.request(row, with_words=with_words))
            if not watcher.enqueue(frames[with_words]):
                watcher.disconnect()

    async def _run(self) -> None:
        n = 0
        while True:
            await asyncio.sleep(POLL_S)
            self._poll()
            n += 1
            if n % POLLS_PER_STATS == 0:
                for model in {watcher.model for watcher in self._watchers}:
                    with contextlib.suppress(EverwarmError):
                        self._send_stats(model, await self._overview(model))

    def _send_stats(self, model: str, overview: Json) -> None:
        for watcher in [each for each in self._watchers if each.model == model]:
            if not watcher.enqueue(sse_named("stats", overview | watcher.about)):
                watcher.disconnect()

    def _poll(self) -> None:
        """Sends what has changed since the last call."""
        for served in self._pool.all_served():
            id, load = served.spec.id, served.supervisor.load
            self._send_if_changed("model", id, {"id": id, "status": served.status.phase}, None)
            numbers = {"n_running": load.n_running if load else 0, "n_queued": load.n_queued if load else 0}
            self._send_if_changed("engine", id, {"model": id, **cache_encode.condition(served), **numbers}, id)
            if load is not None:
                self._send_if_changed("tree", id, {"model": id, "version": load.version}, id)

    def _send_if_changed(self, event: str, model: str, data: Json, only_for: str | None) -> None:
        before = self._seen.get((event, model))
        if before != data:
            self._seen[event, model] = data
            if before is not None:
                self._send(sse_named(event, data), only_for)
