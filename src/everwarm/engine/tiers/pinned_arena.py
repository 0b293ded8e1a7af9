"""Pinning the RAM tier's memory, so that a GPU copies states and KV at the speed of the bus: decides whether and when,
and does it.

On a thread of its own, while the model loads or requests are served. Memory is pinned when enough of it is used. A
failure is only logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from everwarm.engine.settings import PinRam
from everwarm.llama.system.pinned_memory import Pinned, Runtime
from everwarm.state.store.arena import Arena

log = logging.getLogger("everwarm.ram")

FREE_SHARE = 0.5  # of the host's free memory: pinned pages are lost to all other processes
WORTH_BYTES = 64 << 20  # less is copied in a few milliseconds anyhow
_MIB = 1 << 20


def why_not(wanted: PinRam, *, is_on_gpu: bool, n_bytes: int, free_bytes: int) -> str | None:
    """None: it may be pinned. ``on`` pins however little memory is free."""
    if wanted == "off":
        return "--pin-ram is off"
    if not is_on_gpu:
        return "the model is not on a GPU"
    if n_bytes == 0:
        return "there is no RAM tier"
    if wanted == "auto" and n_bytes > FREE_SHARE * free_bytes:
        return f"its {n_bytes // _MIB} MiB are more than half of the {free_bytes // _MIB} MiB that are free"
    return None


class Pinning:
    """Pins an arena once; undone by ``close``."""

    def __init__(self, arena: Arena, find_runtime: Callable[[], Runtime | None], *, at_once: bool = False) -> None:
        self._arena = arena
        self._find_runtime = find_runtime
        self._worth_bytes = 0 if at_once else WORTH_BYTES
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pinned: Pinned | None = None
        self.start_if_worth_it()

    @property
    def n_bytes(self) -> int:
        pinned = self._pinned
        return 0 if pinned is None else pinned.size_bytes

    def start_if_worth_it(self) -> None:
        """Starts pinning once enough memory is used. Call it from one thread at a time."""
        if self._thread is None and self._arena.n_used >= self._worth_bytes:
            self._thread = threading.Thread(target=self._run, name="everwarm-pin", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Unpins the memory. Waits for at most one piece of the work."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        if self._pinned is not None:
            self._pinned.close()
            self._arena.release()
            self._pinned = None

    # the thread

    def _run(self) -> None:
        try:
            self._pin()
            self._arena.look_at_found(self._stopped.is_set)
        except Exception:
            log.exception("RAM is not pinned")

    def _pin(self) -> None:
        runtime = self._find_runtime()
        if runtime is None:
            return log.info("RAM is not pinned: libllama brought no CUDA runtime along")
        try:
            pinned = Pinned(runtime, self._arena.hold(), self._stopped.is_set)
        except OSError as error:
            self._arena.release()
            return log.log(logging.INFO if self._stopped.is_set() else logging.WARNING, "RAM is not pinned: %s", error)
        self._pinned = pinned
        shown = (pinned.size_bytes // _MIB, pinned.committed_s, pinned.registered_s)
        log.info("%d MiB of RAM are pinned (committed in %.2f s, registered in %.2f s)", *shown)
