"""Waiting long for each other on a quiet machine, briefly on a busy one.

libllama's OpenMP threads meet hundreds of times per token. A long spin at each meeting is fastest while they have the cores
to themselves; when others want the cores too it is a hundred times too slow, because a thread spins for one that is not
running. libgomp reads its spin count once, but falls back to a brief one while it manages more threads than there are
cores. So a guard looks at how long our threads were kept from running, and while that is long it holds a second team of
threads, asleep: nothing but their number matters. Linux and libgomp only; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Half a millisecond; and a brief spin is 1,000 turns if the policy is active, else only 100, which is too brief.
POLICY = {"GOMP_SPINCOUNT": "20000", "OMP_WAIT_POLICY": "active"}

_LOOK_S = 0.2
_TASKS = "/proc/self/task"


@dataclass(slots=True)
class SpinVerdict:
    """Crowded from the first busy look on, until it has been calm for a while. Pure."""

    crowded_share: float = 0.35  # of the time, in which threads that could run did not; our own gateway causes 0.2
    n_calm_needed: int = 25
    is_crowded: bool = False
    _n_calm: int = 0

    def look(self, waited_share: float) -> bool:
        busy = waited_share > self.crowded_share
        self._n_calm = 0 if busy else self._n_calm + 1
        self.is_crowded = busy or (self.is_crowded and self._n_calm < self.n_calm_needed)
        return self.is_crowded


class SecondTeam:
    """As many OpenMP threads as there are cores, asleep from ``gather`` until ``dismiss``."""

    def __init__(self, cdll: ctypes.CDLL) -> None:
        self._parallel = cdll.GOMP_parallel  # AttributeError: another OpenMP
        self._parallel.restype = None
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # what they do: free(NULL)
        self._over: threading.Event | None = None

    def gather(self) -> None:
        if self._over is None:
            self._over = threading.Event()
            threading.Thread(target=self._hold, args=(self._over,), name="everwarm-crowd", daemon=True).start()

    def dismiss(self) -> None:
        if self._over is not None:
            self._over.set()  # a team ends with the thread that leads it
            self._over = None

    def _hold(self, over: threading.Event) -> None:
        self._parallel(self._nothing, None, (os.cpu_count() or 1) + 1, 0)
        over.wait()


@contextmanager
def long_spin() -> Iterator[bool]:
    """While libgomp is loaded inside, it reads our spin count. False: somebody has chosen a policy, which is kept."""
    if POLICY.keys() & os.environ.keys():
        yield False
        return
    os.environ.update(POLICY)
    try:
        yield True
    finally:
        for name in POLICY:  # not for the processes we start
            del os.environ[name]


def guard(cdll: ctypes.CDLL) -> None:
    """Watch this process for as long as it lives."""
    try:
        waited_s()
        team = SecondTeam(cdll)
    except (OSError, AttributeError):
        return
    threading.Thread(target=_watch, args=(team,), name="everwarm-crowding", daemon=True).start()


def _watch(team: SecondTeam) -> None:
    verdict, waited, at = SpinVerdict(), waited_s(), time.monotonic()
    while True:
        time.sleep(_LOOK_S)
        waited_before, waited, at_before, at = waited, waited_s(), at, time.monotonic()
        if verdict.look((waited - waited_before) / (at - at_before)):
            team.gather()
        else:
            team.dismiss()


def waited_s() -> float:
    """How long this process's threads have waited for a core, all together, since they began."""
    total = 0
    for task in os.listdir(_TASKS):
        try:
            with open(f"{_TASKS}/{task}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[1])
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
    return total / 1e9
