"""Starts ``everwarm`` without waiting for its imports: one process has imported them and forks for every start.

Half of the time that a test server takes to start goes into importing modules. What runs after the fork is the same
``main`` with the arguments, environment and folder of the caller. Tests of the start itself use a fresh interpreter.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from tempfile import TemporaryFile
from typing import Any, TextIO

MAX_MESSAGE_BYTES = 1 << 20


class ForkedProcess:
    """A started command line, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, owner: ForkServer, pid: int, stderr: TextIO) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._owner = owner
        self._lock = threading.Lock()
        self._exit = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._reap(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._reap(None if timeout is None else int(timeout * 1000))
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def _reap(self, timeout_ms: int | None) -> int | None:
        """The exit code, or None while it runs. The fork server is the parent and has to collect it."""
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._exit, select.POLLIN)
            if poller.poll(timeout_ms):
                with self._lock:
                    if self.returncode is None:
                        self.returncode = self._owner.exit_code(self.pid)
                        os.close(self._exit)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The caller's end of the process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))

    def start(self, *arguments: str, **environment: str) -> ForkedProcess:
        """``everwarm ARGUMENTS`` with this process's environment and this one, its folder and its standard output."""
        reader, writer = os.pipe()
        try:
            return self._start(arguments, environment, (self._nothing, 1, writer), os.fdopen(reader))
        finally:
            os.close(writer)

    def run(self, *arguments: str, text: str, timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
        """The same, given a text, to its end."""
        with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
            given.write(text)
            given.seek(0)
            process = self._start(arguments, environment, (given.fileno(), out.fileno(), errors.fileno()), errors)
            try:
                code = process.wait(timeout_s)
            finally:
                process.kill()
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), errors.read())

    def _start(
        self, arguments: tuple[str, ...], environment: dict[str, str], fds: tuple[int, ...], stderr: TextIO
    ) -> ForkedProcess:
        """``fds``: its standard input, output and errors."""
        message = {"arguments": arguments, "environment": os.environ | environment, "folder": os.getcwd()}
        return ForkedProcess(self, self._ask(message, fds), stderr)

    def exit_code(self, pid: int) -> int:
        return self._ask({"pid": pid}, ())

    def _ask(self, message: dict[str, Any], fds: tuple[int, ...]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(fds))
            return int(self._socket.recv(100))

    def close(self) -> None:
        self._socket.close()
        os.close(self._nothing)
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """The one of this process, which ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    return server


# the process that forks


def _answer(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Answers requests until the tests end. Returns a second time for every start, in the forked process."""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 3)
        if not data:
            return None
        message = json.loads(data)
        if "pid" in message:
            reply = os.waitstatus_to_exitcode(os.waitpid(message["pid"], 0)[1])
        else:
            reply = os.fork()
            if reply == 0:
                sock.close()
                return message, fds
            for fd in fds:
                os.close(fd)
        sock.send(str(reply).encode())


def _become(message: dict[str, Any], fds: list[int]) -> None:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.argv = ["everwarm", *message["arguments"]]


def _main() -> None:
    import everwarm.gateway.server
    from everwarm.cli.app import main

    assert everwarm.gateway.server
    gc.collect()
    gc.freeze()  # so that a collection does not touch, and thereby copy, every page
    started = _answer(socket.socket(fileno=int(sys.argv[1])))
    if started is not None:
        _become(*started)
        main()


if __name__ == "__main__":
    _main()
