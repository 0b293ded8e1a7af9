"""Tries a constraint in a child process before the engine compiles it. The child is ``trial_worker``.

Some schemas and grammars of a few hundred bytes take llguidance minutes, gigabytes or more stack than there is. Here they
cost a child that is killed. What passes takes the engine no longer than it took the child.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import sys
import time

import msgspec

from everwarm.config import Constraint
from everwarm.errors import BadRequest, EverwarmError

STACK_BYTES = 8 << 20
TRIAL_S = 1.5
START_S = 30.0
WORKER = "everwarm.llama.constraints.trial_worker"
HEADER = struct.Struct("<I")
# The child gets no secret from the environment.
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")


class NamedTokens(msgspec.Struct, frozen=True):
    """The tokens of a vocabulary that a grammar can name."""

    n_tokens: int
    control: dict[str, int]  # tokens that match no text
    defined: dict[str, int]  # tokens that the tokenizer finds in any text
    eog: list[int]  # any of them ends a reply; the first is the main one


class TrialResult(msgspec.Struct, frozen=True):
    """``error`` is empty where the grammar can be used."""

    grammar: str = ""
    error: str = ""


class Trial:
    """The child as the engine sees it: started when it is first needed, and again after it was killed."""

    def __init__(self, names: NamedTokens) -> None:
        self._names = names
        self._child: subprocess.Popen[bytes] | None = None

    def grammar(self, constraint: Constraint) -> str:
        """The constraint's grammar, or BadRequest with the reason. For one thread at a time."""
        child = self._running()
        try:
            _send(child, msgspec.msgpack.encode(constraint))
            result = msgspec.msgpack.decode(_receive(child, TRIAL_S), type=TrialResult)
        except (OSError, EOFError, TimeoutError):
            self.close()
            raise BadRequest(
                "the schema or grammar is too complex to be forced; make it smaller or less nested"
            ) from None
        if result.error:
            raise BadRequest(f"the schema or grammar cannot be used: {result.error}")
        return result.grammar

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = self._started()
        return self._child

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", WORKER]
        env = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env)
        try:
            _send(child, msgspec.msgpack.encode(self._names))
            _receive(child, START_S)
        except (OSError, EOFError, TimeoutError):
            _end(child)
            raise EverwarmError("the process that tries out schemas and grammars did not start") from None
        return child

    def close(self) -> None:
        if self._child is not None:
            _end(self._child)
            self._child = None


def _send(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    view = memoryview(HEADER.pack(len(data)) + data)
    while view:
        view = view[child.stdin.write(view) :]


def _receive(child: subprocess.Popen[bytes], patience_s: float) -> bytes:
    deadline = time.monotonic() + patience_s
    (size,) = HEADER.unpack(_read(child, HEADER.size, deadline))
    return _read(child, size, deadline)


def _read(child: subprocess.Popen[bytes], n_bytes: int, deadline: float) -> bytes:
    assert child.stdout is not None
    data = b""
    while len(data) < n_bytes:
        if not select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        piece = child.stdout.read(n_bytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
