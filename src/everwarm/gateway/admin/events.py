"""Telling people who watch what happens, as server-sent events. Costs nothing while nobody does.

Requests are told as they go; everything else is looked at every half second while somebody watches. Whoever does not
read what is sent is let go: browsers come back by themselves.
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

LOOK_S = 0.5
LOOKS_PER_STATS = 4
MOST_WATCHERS, MOST_OF_ONE = 32, 8  # in all, and of one user
MOST_UNREAD = 256

Overview = Callable[[str], Awaitable[Json]]  # what GET /cache says of a model


@dataclass(slots=True, eq=False)
class EventWatcher:
    model: str
    visibility: Visibility
    about: Json  # who it is
    user: str = ""  # whose key it came with; "" is an admin's
    unread: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MOST_UNREAD))

    def tell(self, frame: bytes) -> bool:
        """False: it has not read for too long."""
        try:
            self.unread.put_nowait(frame)
        except asyncio.QueueFull:
            return False
        return True

    def let_go(self) -> None:
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
        self._seen: dict[tuple[str, str], Json] = {}  # what was last told, by event and model
        self.is_closed = False

    @contextlib.contextmanager
    def watching(self, watcher: EventWatcher) -> Iterator[None]:
        n_own = sum(each.user == watcher.user for each in self._watchers)
        if watcher.user and n_own >= MOST_OF_ONE:
            raise Overloaded(f"this key watches {n_own} times already; end one of these first")
        if len(self._watchers) >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} others are watching already; try again later")
        self._watchers.add(watcher)
        if self._task is None:
            self._recent.tell = self._tell_of_request
            self._seen = {}
            self._look()  # what is so now is no news
            self._task = asyncio.create_task(self._run(), name="everwarm-watch")
        try:
            yield
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._rest()

    def _rest(self) -> None:
        self._recent.tell = None
        if self._task is not None:
            self._task.cancel()
        self._task = None

    async def frames(self, watcher: EventWatcher) -> AsyncGenerator[bytes, None]:
        yield sse_named("hello", await self._overview(watcher.model) | watcher.about)
        while not self.is_closed and (told := await watcher.unread.get()) is not None:
            yield told

    def close(self) -> None:
        """Whoever watches is let go, so that the server can stop."""
        self.is_closed = True
        self.let_everybody_go()

    def let_everybody_go(self) -> None:
        for watcher in self._watchers:
            watcher.let_go()

    # telling

    def _tell(self, data: bytes, model: str | None = None) -> None:
        for watcher in list(self._watchers):
            if (model is None or watcher.model == model) and not watcher.tell(data):
                watcher.let_go()

    def _tell_of_request(self, row: RequestRecord) -> None:
        """To whom it belongs with its words, to whoever else may see it without."""
        namespace, frames = row.caller.namespace, dict[bool, bytes]()
        for watcher in [each for each in self._watchers if each.visibility.shows(namespace)]:
            with_words = watcher.visibility.shows_words(namespace)
            if with_words not in frames:
                frames[with_words] = sse_named("request", cache_encode.request(row, with_words=with_words))
            if not watcher.tell(frames[with_words]):
                watcher.let_go()

    async def _run(self) -> None:
        n = 0
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()
            n += 1
            if n % LOOKS_PER_STATS == 0:
                for model in {watcher.model for watcher in self._watchers}:
                    with contextlib.suppress(EverwarmError):
                        self._tell_stats(model, await self._overview(model))

    def _tell_stats(self, model: str, overview: Json) -> None:
        for watcher in [each for each in self._watchers if each.model == model]:
            if not watcher.tell(sse_named("stats", overview | watcher.about)):
                watcher.let_go()

    def _look(self) -> None:
        """Tell what is different from the last time."""
        for standing in self._pool.standings():
            id, load = standing.spec.id, standing.supervisor.load
            self._news("model", id, {"id": id, "status": standing.status.phase.value}, None)
            numbers = {"n_running": load.n_running if load else 0, "n_queued": load.n_queued if load else 0}
            self._news("engine", id, {"model": id, **cache_encode.condition(standing), **numbers}, id)
            if load is not None:
                self._news("tree", id, {"model": id, "version": load.version}, id)

    def _news(self, event: str, model: str, data: Json, only_for: str | None) -> None:
        before = self._seen.get((event, model))
        if before != data:
            self._seen[event, model] = data
            if before is not None:
                self._tell(sse_named(event, data), only_for)
