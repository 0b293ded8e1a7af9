"""How late the event loop is: the sign that something keeps everybody waiting.

A task sleeps for a moment and looks how much later it woke. Threads share one lock with the loop, so they hand it over
often, and garbage is collected rarely.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

INTERVAL_S = 0.02
SWITCH_S = 0.001


def favour_the_loop() -> None:
    """For the process of a server, when all is set up: what is there stays for good."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@dataclass(frozen=True, slots=True)
class Lag:
    """``busy_s``: as much of it as this process was computing; the rest of ``wall_s`` it waited for a processor."""

    wall_s: float = 0.0
    busy_s: float = 0.0


class LoopLag:
    """``observe`` hears of every moment's lag, in seconds."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._most = Lag()

    def take_most(self) -> Lag:
        """The longest lags since this was asked last."""
        most, self._most = self._most, Lag()
        return most

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch(), name="everwarm-lag")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            due, cpu = time.monotonic() + INTERVAL_S, time.process_time()
            await asyncio.sleep(INTERVAL_S)
            late_s = max(0.0, time.monotonic() - due)
            busy_s = min(late_s, time.process_time() - cpu)
            self._most = Lag(max(self._most.wall_s, late_s), max(self._most.busy_s, busy_s))
            self._observe(late_s)
