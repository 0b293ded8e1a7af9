"""One process that decodes pictures, as the gateway sees it: started, asked, killed, buried.

Spoken to from one thread at a time, which blocks; killed from any. What it says is not trusted: sizes are checked again,
and the digest of the pixels is computed on this side. Knows no event loop.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass

import blake3
import msgspec

from everwarm.config import require
from everwarm.errors import BadRequest, EverwarmError

log = logging.getLogger("everwarm.gateway")

WORKER = "everwarm.gateway.images.decoder_worker"
SLOW = "it took too long"
_START_S = 30.0
_LATE_S = 5  # after its time is over a child is killed; if nobody is there to do it, its thread still comes back
_MAX_HEAD_BYTES = 4096
# A child is given no secret of ours, and gives memory back to the system.
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_OWN_VARIABLES = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}


@dataclass(frozen=True, slots=True)
class Picture:
    width: int
    height: int
    rgb: bytes  # rows from the top, three bytes for each pixel
    digest: bytes

    @classmethod
    def of(cls, width: int, height: int, rgb: bytes) -> Picture:
        """The digest covers kind, size, layout and pixels: nothing of the file they came in."""
        assert len(rgb) == 3 * width * height, "rows and size disagree"
        about = struct.pack("<8sII8s", b"image", width, height, b"RGB")
        return cls(width, height, rgb, blake3.blake3(about).update(rgb).digest())


@dataclass(frozen=True, slots=True)
class PictureLimits:
    max_bytes: int = 20 << 20  # encoded
    max_pixels: int = 40_000_000
    max_side: int = 16_384
    max_pictures_per_request: int = 32
    max_pixels_per_request: int = 100_000_000
    timeout_s: float = 10.0  # for decoding one
    child_memory: int = 512 << 20
    n_children: int = 2
    n_pictures_per_child: int = 256
    max_waiting: int = 64  # for a child; more get 429
    cache_bytes: int = 256 << 20  # of pixels
    max_lent_bytes: int = 512 << 20  # of pixels that engines have or are being sent, for all requests together

    def __post_init__(self) -> None:
        least = {"max_bytes": 1024, "child_memory": 128 << 20, "max_waiting": 0, "cache_bytes": 0}
        most = {"max_bytes": (1 << 31) - 1, "max_pixels": 1 << 29, "max_side": (1 << 16) - 1, "n_children": 64}
        for name in self.__slots__:
            value = getattr(self, name)
            low, high = least.get(name, 1 if name != "timeout_s" else 0.001), most.get(name, 1 << 40)
            require(low <= value <= high, f"{name} of pictures is {value}; give {low} to {high}")


class Died(Exception):
    """A child is gone, in the midst of a picture."""

    def __init__(self, why: str, *, was_slow: bool) -> None:
        super().__init__(why)
        self.was_slow = was_slow


class Head(msgspec.Struct, frozen=True):
    """What a child says before the rows."""

    ready: bool = False
    width: int = 0
    height: int = 0
    wrong: str = ""


class Child:
    def __init__(self, limits: PictureLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # between starting and killing
        self._process: subprocess.Popen[bytes] | None = None
        self._wire, self._theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            late = struct.pack("ll", math.ceil(limits.timeout_s) + _LATE_S, 0)
            self._wire.setsockopt(socket.SOL_SOCKET, option, late)
        self._their_lifeline, self._lifeline = os.pipe()
        self._why = ""
        self.n_pictures = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_fit(self) -> bool:
        return not self._why and self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Blocks until it is ready, or raises what the server must be told. Does nothing when it runs already."""
        if self._process is not None:
            return
        with self._lock:
            if not self._why:
                self._process = self._spawn()
        self._theirs.close()
        os.close(self._their_lifeline)
        try:
            self._wire.settimeout(_START_S)
            head = self._head()
            self._wire.settimeout(None)
        except (OSError, EOFError, msgspec.MsgspecError):
            head = Head()
        if not head.ready:
            self.kill("it did not start")
            log.error("a picture decoder did not start: %s (%s)", self._why, self._end())
            raise EverwarmError("the picture decoder does not start; the server's log says more")

    def _spawn(self) -> subprocess.Popen[bytes]:
        limits = self._limits
        bounds = {
            "max_pixels": limits.max_pixels,
            "max_side": limits.max_side,
            "memory_bytes": limits.child_memory,
            "cpu_s": math.ceil(limits.timeout_s),
        }
        return subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, json.dumps(bounds), str(self._their_lifeline)],
            stdin=self._theirs.fileno(),
            stdout=subprocess.DEVNULL,
            pass_fds=(self._their_lifeline,),
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _OWN_VARIABLES,
        )

    def decode(self, data: bytes) -> Picture:
        """Blocks. ``BadRequest`` when the child finds the picture wrong, ``Died`` when it finds nothing any more."""
        self.n_pictures += 1
        try:
            self._wire.sendall(len(data).to_bytes(4, "big"))
            self._wire.sendall(data)
            head = self._head()
            if not head.wrong:
                self._check(head)
                rgb = self._exactly(3 * head.width * head.height)
        except (OSError, EOFError, msgspec.MsgspecError):
            self.kill("it stopped answering")
            raise self._died() from None
        if head.wrong:
            raise BadRequest(f"the picture cannot be used: {head.wrong}")
        return Picture.of(head.width, head.height, rgb)

    def _head(self) -> Head:
        n_bytes = int.from_bytes(self._exactly(4), "big")
        if n_bytes > _MAX_HEAD_BYTES:
            raise EOFError
        return msgspec.json.decode(self._exactly(n_bytes), type=Head)

    def _check(self, head: Head) -> None:
        n_pixels, longest = head.width * head.height, max(head.width, head.height)
        if min(head.width, head.height) < 1 or n_pixels > self._limits.max_pixels or longest > self._limits.max_side:
            raise EOFError

    def _exactly(self, n_bytes: int) -> bytes:
        """In one call and without a copy: nobody else waits while many megabytes arrive."""
        data = self._wire.recv(n_bytes, socket.MSG_WAITALL)
        if len(data) < n_bytes:
            raise EOFError
        return data

    # its end

    def kill(self, why: str) -> None:
        """From any thread, at any time. Whoever waits for an answer finds out."""
        with self._lock:
            self._why = self._why or why
            if self._process is not None:
                self._process.kill()
            with contextlib.suppress(OSError):  # it was buried already
                self._wire.shutdown(socket.SHUT_RDWR)

    def bury(self) -> None:
        """Kill it, wait for it, and close what is ours. Once."""
        self.kill("it is not needed any more")
        self._end()
        if self._process is None:
            self._theirs.close()
            os.close(self._their_lifeline)
        self._wire.close()
        os.close(self._lifeline)

    def _end(self) -> str:
        code = 0 if self._process is None else self._process.wait()
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"exit code {code}"

    def _died(self) -> Died:
        end = self._end()
        was_slow = self._why == SLOW or end == "SIGXCPU"
        return Died(f"{self._why} ({end})", was_slow=was_slow)
