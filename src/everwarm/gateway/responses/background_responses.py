"""Responses in the background: they run on after their request was answered, and are shown by id until they are stored.

A bounded number runs, in all and for each namespace. Nothing of a response is stored before it is over, so one that runs
while the server dies is lost; one that is cancelled, also because the server stops, is stored as it is then. The newest few
that cannot be stored are shown from memory. Knows tasks; knows no model and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from everwarm.errors import Overloaded
from everwarm.types import Json

log = logging.getLogger("everwarm.gateway")

MAX_RUNNING = 64
MAX_RUNNING_EACH = 16  # of one namespace
MAX_UNSTORED = 64  # responses that could not be stored, the newest


@dataclass(frozen=True, slots=True, eq=False)
class BackgroundResponse:
    writing: asyncio.Task[Json]  # its result: the response when it is over
    storing: asyncio.Task[None]  # waits for that; is never cancelled, so nothing that is over gets lost
    shown: Callable[[str], Json]  # the response as it is now, with a status


class BackgroundResponses:
    def __init__(self) -> None:
        self._running: dict[tuple[str, str], BackgroundResponse] = {}  # by namespace and id
        self._unstored: dict[tuple[str, str], Json] = {}

    def require_room(self, namespace: str) -> None:
        n_own = sum(own == namespace for own, _ in self._running)
        if n_own >= MAX_RUNNING_EACH or len(self._running) >= MAX_RUNNING:
            raise Overloaded(
                f"{n_own} responses of yours and {len(self._running)} of all clients run in the background; at most "
                f"{MAX_RUNNING_EACH} and {MAX_RUNNING} may, try again later"
            )

    def start(
        self,
        namespace: str,
        id: str,
        shown: Callable[[str], Json],
        work: Coroutine[Any, Any, Json],
        keep: Callable[[Json], Awaitable[bool]],
        when_over: Callable[[], None],
    ) -> None:
        """``work`` returns the response when it is over. ``keep`` stores it, or what ``shown`` returns if the work was
        cancelled; it returns False if it could not."""
        writing = asyncio.create_task(work, name="everwarm-background-response")

        async def store() -> None:
            await asyncio.wait([writing])
            if (namespace, id) not in self._running:
                return  # it was discarded
            over = shown("cancelled") if writing.cancelled() else writing.result()
            if not await _is_kept(keep, over):
                self._unstored[namespace, id] = over
                while len(self._unstored) > MAX_UNSTORED:
                    del self._unstored[next(iter(self._unstored))]

        def end(_: asyncio.Task[None]) -> None:
            self._running.pop((namespace, id), None)
            when_over()

        storing = asyncio.create_task(store(), name="everwarm-background-storing")
        storing.add_done_callback(end)
        self._running[namespace, id] = BackgroundResponse(writing, storing, shown)

    def find(self, namespace: str, id: str) -> Json | None:
        """The response, if it still runs or could not be stored."""
        found = self._running.get((namespace, id))
        return self._unstored.get((namespace, id)) if found is None else found.shown("in_progress")

    async def cancel(self, namespace: str, id: str) -> None:
        """Returns when it is over and stored. Does nothing if it does not run."""
        found = self._running.get((namespace, id))
        if found is not None:
            found.writing.cancel()
            await asyncio.wait([found.storing])

    def forget(self, namespace: str, id: str) -> bool:
        """Forgets one that could not be stored; False: there is none."""
        return self._unstored.pop((namespace, id), None) is not None

    async def discard(self, prefix: str) -> int:
        """Ends all of namespaces with this prefix, and stores nothing of them; returns how many there were."""
        gone = {key: each for key, each in self._running.items() if key[0].startswith(prefix)}
        unstored = [key for key in self._unstored if key[0].startswith(prefix)]
        for key, each in gone.items():
            del self._running[key]
            each.writing.cancel()
        for key in unstored:
            del self._unstored[key]
        await asyncio.gather(*(each.storing for each in gone.values()), return_exceptions=True)
        return len(gone) + len(unstored)

    async def close(self) -> None:
        running = list(self._running.values())
        for each in running:
            each.writing.cancel()
        await asyncio.gather(*(each.storing for each in running), return_exceptions=True)


async def _is_kept(keep: Callable[[Json], Awaitable[bool]], over: Json) -> bool:
    try:
        return await keep(over)
    except Exception:
        log.exception("a response in the background could not be stored")
        return False
