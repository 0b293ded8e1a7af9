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

INTERVAL_S = 0.1  # each look wakes this process, also between two tokens of a reply
SWITCH_S = 0.001


def favour_the_loop() -> None:
    """Call once in a server process after set-up: objects that exist then are never garbage-collected."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class LoopLag:
    """Calls ``observe`` with every measured lag, in seconds. ``most_s``: the longest since ``forget_most``;
    ``most_busy_s``: the same of the part in which this process was computing; in the rest it waited for a processor."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self.most_s = 0.0
        self.most_busy_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._cpu = 0.0

    def forget_most(self) -> None:
        self.most_s = 0.0
        self.most_busy_s = 0.0

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
        self.most_s = max(self.most_s, late_s)
        self.most_busy_s = max(self.most_busy_s, busy_s)
        self._observe(late_s)
        self._set_timer()
