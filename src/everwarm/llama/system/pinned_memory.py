"""Memory that a CUDA device copies to and from at the speed of its bus: registered with the CUDA runtime, page by page.

Finds the runtime that libllama brought along and knows three of its functions. Knows nothing of what lies in the memory.
Copies go to physical pages: no page of registered memory may be given back before it is released.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everwarm.types import Blob

_PORTABLE = 1  # for every device, not only the current one
_RUNTIME = re.compile(r"/\S*/libcudart[^/\s]*\.so[.\d]*$")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python's mmap does not name
_PIECE = 64 << 20  # is committed at once


@dataclass(frozen=True, slots=True)
class Runtime:
    """The functions of the CUDA runtime that are needed; all return 0 if all is well."""

    register: Callable[[int, int, int], int]
    unregister: Callable[[int], int]
    last_error: Callable[[], int]  # asking for it clears it


def loaded_runtime(maps: Path = Path("/proc/self/maps")) -> Runtime | None:
    """The CUDA runtime that is in this process already. None: libllama is no CUDA build, or has it linked in."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    found = next((match[0] for line in lines if (match := _RUNTIME.search(line))), None)
    if found is None:
        return None
    try:
        return runtime_of(ctypes.CDLL(found))
    except (OSError, AttributeError):
        return None


def runtime_of(cdll: Any) -> Runtime:
    """Looks up the functions by their names in the CUDA runtime."""
    register = cdll.cudaHostRegister
    unregister = cdll.cudaHostUnregister
    last_error = cdll.cudaGetLastError
    register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    register.restype = ctypes.c_int
    unregister.argtypes = [ctypes.c_void_p]
    unregister.restype = ctypes.c_int
    last_error.argtypes = []
    last_error.restype = ctypes.c_int
    return Runtime(register, unregister, last_error)


class Pinned:
    """Registered memory, until ``close``."""

    def __init__(self, runtime: Runtime, memory: Blob, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Commits all of it, which takes up to half a second for each gigabyte. ``OSError``: the memory stays as it
        was."""
        assert memory.ctypes.data % mmap.PAGESIZE == 0, "pinned memory begins with a page"
        self._runtime = runtime
        self._memory: Blob | None = memory
        self.size_bytes = memory.nbytes
        began = time.monotonic()
        _commit(memory, is_stopped)  # first: while the runtime registers memory, the device is blocked for others
        self.committed_s = time.monotonic() - began
        code = int(runtime.register(memory.ctypes.data, memory.nbytes, _PORTABLE))
        self.registered_s = time.monotonic() - began - self.committed_s
        if code:
            runtime.last_error()  # clears it; otherwise the next call would report it
            raise OSError(f"the CUDA runtime refused {memory.nbytes} bytes (error {code})")

    def close(self) -> None:
        memory = self._memory
        self._memory = None
        if memory is not None and self._runtime.unregister(memory.ctypes.data):
            self._runtime.last_error()


def _commit(memory: Blob, is_stopped: Callable[[], bool]) -> None:
    """Have the system find pages for all of it now. A system that does not know how finds them when they are registered."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise.restype = ctypes.c_int
    for at in range(0, memory.nbytes, _PIECE):
        if is_stopped():
            raise OSError("it is not needed any more")
        size = min(_PIECE, memory.nbytes - at)
        if madvise(memory.ctypes.data + at, size, _POPULATE_WRITE):
            return
