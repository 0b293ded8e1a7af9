"""Pinning the RAM tier's memory, so that states and KV are copied at the speed of the bus: whether, and the doing.

Runs on that tier's own thread while requests are served. Whatever goes wrong is said in the log, and nothing else changes.
"""

from __future__ import annotations

import logging

from everwarm.engine.settings import PinRam
from everwarm.llama.pinned import NotPinned, Pinned, Runtime
from everwarm.state.arena import Arena

log = logging.getLogger("everwarm.ram")

FREE_SHARE = 0.5  # of the host's free memory: what is pinned is nobody else's any more
_MIB = 1 << 20


def why_not(wanted: PinRam, *, is_on_gpu: bool, n_bytes: int, free_bytes: int) -> str | None:
    """None: it is worth pinning. ``on`` pins however little memory is free."""
    if wanted == "off":
        return "--pin-ram is off"
    if not is_on_gpu:
        return "the model is not on a GPU"
    if n_bytes == 0:
        return "there is no RAM tier"
    if wanted == "auto" and n_bytes > FREE_SHARE * free_bytes:
        return f"its {n_bytes // _MIB} MiB are more than half of the {free_bytes // _MIB} MiB that are free"
    return None


def pin(arena: Arena, runtime: Runtime | None) -> Pinned | None:
    """Hold the arena's first part in place, and register it."""
    if runtime is None:
        log.info("RAM is not pinned: libllama brought no CUDA runtime along")
        return None
    try:
        pinned = Pinned(runtime, arena.hold())
    except NotPinned as error:
        arena.release()
        log.warning("RAM is not pinned: %s", error)
        return None
    times = (pinned.committed_s, pinned.registered_s)
    log.info("%d MiB of RAM are pinned (committed in %.2f s, registered in %.2f s)", pinned.size_bytes // _MIB, *times)
    return pinned
