"""The lag of the event loop, which shows that something delays every request.

A timer is set for ``INTERVAL_S`` and measures how much later it is called. To keep the lag small, threads hand over the
interpreter lock often and garbage is collected rarely.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

INTERVAL_S = 0.1  # each look wakes this process, also between two tokens of a reply
SWITCH_S = 0.001


def favour_the_loop() -> None:
    """Call once in a server process after set-up: objects that exist then are never garbage-collected."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@dataclass(frozen=True, slots=True)
class Lag:
    """``busy_s``: the part of ``wall_s`` in which this process was computing; in the rest it waited for a processor."""

    wall_s: float = 0.0
    busy_s: float = 0.0


class LoopLag:
    """Calls ``observe`` with every measured lag, in seconds."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._most = Lag()
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._cpu = 0.0

    def take_most(self) -> Lag:
        """The longest lags since the last call."""
        most, self._most = self._most, Lag()
        return most

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        self._set_timer()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _set_timer(self) -> None:
        self._due, self._cpu = time.monotonic() + INTERVAL_S, time.process_time()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._measure)

    def _measure(self) -> None:
        late_s = max(0.0, time.monotonic() - self._due)
        busy_s = min(late_s, time.process_time() - self._cpu)
        self._most = Lag(max(self._most.wall_s, late_s), max(self._most.busy_s, busy_s))
        self._observe(late_s)
        self._set_timer()
