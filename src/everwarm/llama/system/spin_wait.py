"""How long libllama's threads spin while they wait for each other: long on a quiet machine, briefly on a busy one.

libllama's OpenMP threads synchronise hundreds of times per token. A long spin at each barrier is fastest while they have
the cores to themselves. When other processes need the cores, too, it is a hundred times too slow, because a thread spins
for one that is not running. libgomp reads its spin count once, but uses a brief one while it manages more threads than
there are cores. So a guard measures how long the threads of this process wait for a core, and while that is long it keeps
a second team of threads asleep: only their number matters. Linux and libgomp only; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Half a millisecond. The brief spin is 1,000 iterations if the policy is active, and otherwise 100, which is too brief.
POLICY = {"GOMP_SPINCOUNT": "20000", "OMP_WAIT_POLICY": "active"}

_SAMPLE_S = 0.2
_TASKS = "/proc/self/task"


@dataclass(slots=True)
class Contention:
    """Whether the cores are contended: from the first busy sample on, until enough calm samples follow. Pure."""

    busy_share: float = 0.35  # of the time that runnable threads did not run; this server's gateway alone causes 0.2
    n_calm_needed: int = 25
    is_contended: bool = False
    _n_calm: int = 0

    def sample(self, waited_share: float) -> bool:
        busy = waited_share > self.busy_share
        self._n_calm = 0 if busy else self._n_calm + 1
        self.is_contended = busy or (self.is_contended and self._n_calm < self.n_calm_needed)
        return self.is_contended


class SecondTeam:
    """One OpenMP thread more than there are cores, asleep from ``start`` until ``stop``."""

    def __init__(self, cdll: ctypes.CDLL) -> None:
        self._parallel = cdll.GOMP_parallel  # AttributeError: another OpenMP
        self._parallel.restype = None
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # what they do: free(NULL)
        self._over: threading.Event | None = None

    def start(self) -> None:
        if self._over is None:
            self._over = threading.Event()
            threading.Thread(target=self._hold, args=(self._over,), name="everwarm-second-team", daemon=True).start()

    def stop(self) -> None:
        if self._over is not None:
            self._over.set()  # a team ends with the thread that started it
            self._over = None

    def _hold(self, over: threading.Event) -> None:
        self._parallel(self._nothing, None, (os.cpu_count() or 1) + 1, 0)
        over.wait()


@contextmanager
def long_spin() -> Iterator[bool]:
    """Load libgomp inside: it then reads this spin count. False: the environment sets a policy already, which is kept."""
    if POLICY.keys() & os.environ.keys():
        yield False
        return
    os.environ.update(POLICY)
    try:
        yield True
    finally:
        for name in POLICY:  # child processes must not inherit it
            del os.environ[name]


def guard(cdll: ctypes.CDLL) -> None:
    """Watch for contention for as long as this process lives."""
    try:
        waited_s()
        team = SecondTeam(cdll)
    except (OSError, AttributeError):
        return
    threading.Thread(target=_watch, args=(team,), name="everwarm-spin-guard", daemon=True).start()


def _watch(team: SecondTeam) -> None:
    contention = Contention()
    waited = waited_s()
    at = time.monotonic()
    while True:
        time.sleep(_SAMPLE_S)
        waited_before = waited
        at_before = at
        waited = waited_s()
        at = time.monotonic()
        if contention.sample((waited - waited_before) / (at - at_before)):
            team.start()
        else:
            team.stop()


def waited_s() -> float:
    """How long the threads of this process have waited for a core, summed, since they started."""
    total = 0
    for task in os.listdir(_TASKS):
        try:
            total += int(_read(f"{_TASKS}/{task}/schedstat").split()[1])
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
    return total / 1e9


def _read(path: str) -> bytes:
    """A short file. A Python file object would take five times as long, and the loop's thread waits for the lock."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 128)
    finally:
        os.close(fd)
