"""The RAM tier's memory file and how much of it an engine may use. Both outlive the engine.

An engine that died for lack of memory comes back with half the RAM tier, because that counts against the same limit.
"""

from __future__ import annotations

import logging
import os

from everwarm.state.store.arena_file import budget_in, memory_file

log = logging.getLogger("everwarm.router")

_MIB = 1 << 20
LEAST_RAM_BYTES = 1 << 20  # half of less is nothing


class RamMemory:
    """``budget_bytes`` None: the engine chooses one from the machine's free memory."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.shrunk_to: int | None = None  # bytes, after a death for lack of memory
        self.fd = memory_file()
        self._must_clear = False

    def prepare(self) -> None:
        """For the next engine; call it while no process has the file mapped."""
        if self._must_clear:
            os.ftruncate(self.fd, 0)
            self._must_clear = False

    def shrink(self, *, was_ready: bool) -> None:
        """Halve the budget; the next engine drops what is worth least. If an engine with half the budget does not even
        become ready, the next one begins with an empty RAM tier."""
        self._must_clear = self._must_clear or (self.shrunk_to is not None and not was_ready)
        known = [n for n in (budget_in(self.fd), self.budget_bytes) if n is not None]
        if not known:
            return  # the engine died before there was an arena
        before = min(known)
        half = before // 2 if before >= 2 * LEAST_RAM_BYTES else 0
        log.warning("the RAM tier has %.1f MiB from now on (it had %.1f)", half / _MIB, before / _MIB)
        self.shrunk_to = self.budget_bytes = half

    def close(self) -> None:
        """Give the memory back."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
