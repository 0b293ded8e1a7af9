"""A child process that decodes what strangers sent: little memory and CPU time, no files and no secrets, and it dies with
its parent.

Standard input is a socket: a length and a file come in; a length, a head (JSON) and bytes go out. The head describes what
was decoded, or says what is wrong. Imports nothing of Everwarm, so that little is in a child's memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of memory, of the time for one file, and of what is decoded of it."""

    memory_bytes: int
    cpu_s: int
    max_pixels: int = 0  # of an image
    max_side: int = 0
    max_samples: int = 0  # of a sound

    @classmethod
    def of_this_process(cls) -> Bounds:
        """From the command line, ``BOUNDS LIFELINE``. This process dies with its parent from now on."""
        die_with_parent(int(sys.argv[2]))
        return cls(**json.loads(sys.argv[1]))


class Unusable(Exception):
    """A file that is refused, with a message for the client."""


def serve(answer: Callable[[socket.socket, bytes, Bounds], None], bounds: Bounds) -> None:
    """Answers files until the parent closes the socket. Files cannot be opened any more: import everything before."""
    confine(bounds.memory_bytes)
    with socket.socket(fileno=0) as wire:
        say(wire, {"ready": True})
        while (data := _received(wire)) is not None:
            allow_cpu(bounds.cpu_s)
            answer(wire, data, bounds)
            del data


def die_with_parent(lifeline: int) -> None:
    """The kernel kills this process when the parent ends, however it ends, because that closes the other end of this pipe:
    also inside a decoder, and even when this process is stopped."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)  # the default is SIGIO, which also ends it
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(lifeline, 1)  # end of file: it was closed before F_SETFL
        os._exit(1)


def confine(memory_bytes: int) -> None:
    """Limits memory; forbids new files, sockets and processes, writes to disk and output to stderr."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_DATA: memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def allow_cpu(cpu_s: int) -> None:
    """The limit counts from the start of the process, so it is raised for every file. The kernel enforces it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def say(wire: socket.socket, head: dict[str, object]) -> None:
    data = json.dumps(head).encode()
    wire.sendall(len(data).to_bytes(4, "big") + data)


def _received(wire: socket.socket) -> bytes | None:
    head = wire.recv(4, socket.MSG_WAITALL)
    n_bytes = int.from_bytes(head, "big")
    if len(head) < 4:
        return None
    data = wire.recv(n_bytes, socket.MSG_WAITALL) if n_bytes else b""
    return data if len(data) == n_bytes else None
