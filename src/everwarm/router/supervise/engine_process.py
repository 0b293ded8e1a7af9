"""One engine process from its start to its end: its socket, its standard error, its heartbeat, and how it ended.

Knows frames and signals. Knows no requests, and does not decide whether another process follows: the supervisor does.

A thread reads the engine's standard error and passes it on, so that a busy event loop blocks no engine; the last
lines are kept to explain a death. Where the log is JSON, other lines are wrapped in JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from everwarm.engine.process import messages as m
from everwarm.errors import ModelFileError
from everwarm.logs import as_json, line_start, log_format
from everwarm.memory_limits import address_space_limit, cgroup_limits, n_oom_kills
from everwarm.router.catalog.gguf_header import read_header
from everwarm.router.catalog.memory_estimate import loaded_bytes
from everwarm.router.supervise.restart_policy import TICK_S, Ending, Heartbeat, RestartLimits

MOST_LINES = 40
_MOST_LINE = 1 << 16
_STDERR = 2
log = logging.getLogger("everwarm.router")
LAST_WORDS_S = 0.5  # for reading an engine's last lines


class Stderr:
    """Give ``fd`` to a process as its standard error, then ``close_theirs``."""

    def __init__(self) -> None:
        self._ours, self.fd = os.pipe()
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._thread = threading.Thread(target=self._run, name="everwarm-stderr", daemon=True)
        self._thread.start()

    def close_theirs(self) -> None:
        """Close this side's copy of what the process writes to."""
        os.close(self.fd)

    def last_words(self, wait_s: float) -> str:
        """The last lines, once the process has ended and everything was read."""
        self._thread.join(wait_s)  # a child of the engine may still hold it open
        return "\n".join(self._lines)

    def _run(self) -> None:
        is_json = log_format() == "json"
        rest = b""
        with contextlib.suppress(OSError), open(self._ours, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MOST_LINE:
                    lines = [*lines, rest]
                    rest = b""
                self._pass_on(lines, is_json=is_json)
            if rest:
                self._pass_on([rest], is_json=is_json)

    def _pass_on(self, lines: list[bytes], *, is_json: bool) -> None:
        self._lines.extend(line.decode("utf-8", "replace") for line in lines)
        shown = (_as_json(line) if is_json and not line.startswith(b"{") else line for line in lines)
        data = line_start().encode() + b"".join(line + b"\n" for line in shown)
        with contextlib.suppress(OSError):  # this process's standard error is closed: the engine must continue
            while data:
                data = data[os.write(_STDERR, data) :]


def _as_json(line: bytes) -> bytes:
    words = as_json("WARNING", "everwarm.engine.stderr", line.decode("utf-8", "replace"), time.time())
    return json.dumps(words, ensure_ascii=False).encode()


OnMessage = Callable[[m.ToGateway], None]


class Listener(asyncio.Protocol):
    """Passes an engine's messages on in the very call in which their bytes come: no task has to wake for a token.
    ``ended`` is done when the connection has ended; its result says what was wrong with a frame, or is empty."""

    def __init__(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._frames = m.FrameBuffer()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            for body in self._frames.feed(data):
                if isinstance(body, m.Failed):
                    log.error("the engine's answer to %d is skipped: %s", body.id, body.message)
                self._on_message(body if isinstance(body, m.Failed) else m.read_to_gateway(body))
        except (ValueError, msgspec.MsgspecError) as error:
            self.ended.set_result(f"it sent a frame that cannot be read: {error}")
        except Exception as error:
            log.exception("a frame of the engine could not be passed on")
            self.ended.set_result(f"a frame of it could not be passed on: {type(error).__name__}")

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result("")


class EngineProcess:
    """Lives once: ``start`` it, then ``run`` it. ``send`` and ``kill`` do nothing before and after that."""

    def __init__(self, limits: RestartLimits) -> None:
        self.started_at = time.monotonic()
        self.heartbeat = Heartbeat(self.started_at)
        self._limits = limits
        self._n_oom_kills = n_oom_kills()  # before it is started
        self._stderr = Stderr()
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._step_age_s: float | None = None  # of the running step, as the engine last reported
        self._kill_reason = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, memory: int) -> None:
        """Start the process. ``memory`` is the RAM tier's file."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            try:
                self._process = await _spawn(theirs.fileno(), memory, self._stderr)
            finally:
                self._stderr.close_theirs()
            undo.pop_all()
        self._socket = ours

    async def run(self, opening: m.Open, on_message: OnMessage) -> Ending:
        """Have the started process open a model, pass its messages on, and return how it ended."""
        assert self._process is not None and self._socket is not None, "start it first"
        with self._socket:
            listener = Listener(partial(self._pass_on, on_message))
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_connection(lambda: listener, sock=self._socket)
            self.started_at = time.monotonic()
            self.heartbeat = Heartbeat(self.started_at)
            self.send(opening)
            watch = asyncio.create_task(self._watch())
            try:
                killed_for = await listener.ended or self._kill_reason
            finally:
                watch.cancel()
                self._transport.close()
                self._transport = None
                self.kill(self._kill_reason or "its connection ended")
            code = await self._process.wait()
        last_words = await asyncio.to_thread(self._stderr.last_words, LAST_WORDS_S)
        return _ending(opening, code, killed_for, last_words, was_oom_killed=n_oom_kills() > self._n_oom_kills)

    def send(self, message: m.Message) -> None:
        self.write(m.frame(message))

    def write(self, frame: m.Frame) -> None:
        if self._transport is not None and not self._transport.is_closing():
            for part in frame:
                self._transport.write(part)

    def kill(self, reason: str) -> None:
        if self._process is not None and self._process.returncode is None:
            self._kill_reason = reason
            with contextlib.suppress(ProcessLookupError):
                # not by its transport, which would reap it: then the exit code is lost
                os.kill(self._process.pid, signal.SIGKILL)

    async def stop(self, wait_s: float) -> None:
        """Waits for a process that has got ``Stop``, then kills it."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), wait_s)
            self.kill("it did not stop in time")

    def _pass_on(self, on_message: OnMessage, message: m.ToGateway) -> None:
        self.heartbeat.note_message()
        if isinstance(message, m.Beat):
            self._step_age_s = message.step_age_s
        on_message(message)

    async def _watch(self) -> None:
        """Kill the process when it neither beats nor finishes a step. Time counts only while this process was awake."""
        heartbeat = self.heartbeat
        while True:
            await asyncio.sleep(TICK_S)
            heartbeat.tick(time.monotonic(), self._step_age_s)
            if heartbeat.silent_s > (self._limits.silent_s if heartbeat.has_spoken else self._limits.start_s):
                return self.kill(f"no sign of life for {heartbeat.silent_s:.1f} s")
            if heartbeat.step_s > self._limits.step_s:
                return self.kill(f"one step has been running for {heartbeat.step_s:.0f} s")


async def _spawn(socket_fd: int, memory: int, stderr: Stderr) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "everwarm.engine.process.worker",
        str(socket_fd),
        str(memory),
        str(os.getpid()),
        pass_fds=(socket_fd, memory),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=stderr.fd,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # otherwise an abort waits for a debugger
    )


def _ending(opening: m.Open, code: int, killed_for: str, last_words: str, *, was_oom_killed: bool) -> Ending:
    limit = min(cgroup_limits(), key=lambda each: each.limit_bytes, default=None)
    if not was_oom_killed:
        limit = address_space_limit() or limit
    needed = 0
    with contextlib.suppress(ModelFileError, OSError):
        path = Path(opening.model)
        needed = loaded_bytes(read_header(path), path.stat().st_size, opening.settings)
    return Ending(code, killed_for, last_words, was_oom_killed, limit, needed)
