"""Measuring on a machine that others use as well: what was disturbed is measured again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SETTLE_S = 0.25  # what is measured has idle work of its own
_LOOKS, _APART_S = 4, 0.002


def is_quiet() -> bool:
    """Whether no other process wants a core, at several moments."""
    for _ in range(_LOOKS):
        if int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) > 1:
            return False
        time.sleep(_APART_S)
    return True


def undisturbed(n: int, attempt: Callable[[], T], patience_s: float = 60.0) -> list[T]:
    """``n`` results of attempts before and after which the machine was quiet. When patience ends, whatever there is."""
    quiet: list[T] = []
    others: list[T] = []
    deadline = time.monotonic() + patience_s
    while len(quiet) < n and (time.monotonic() < deadline or len(quiet) + len(others) < n):
        began_quiet = is_quiet()
        result = attempt()
        time.sleep(SETTLE_S)
        (quiet if began_quiet and is_quiet() else others).append(result)
    if len(quiet) < n:
        print(f"(others used the machine: {len(quiet)} of {n} measurements were undisturbed)")
    return quiet or others
