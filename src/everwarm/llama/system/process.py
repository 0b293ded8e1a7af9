"""Process settings of an engine: it dies with its parent, and collects garbage rarely."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have Linux kill this process when its parent ends, however that ends. Elsewhere the closed socket tells it."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before this was set
        os._exit(1)


def collect_rarely() -> None:
    """Keep the garbage collector out of the steps: what is loaded stays for good, and a step leaves next to nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
