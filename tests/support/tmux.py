"""A real terminal: a program in tmux, keys typed into it, and what its screen shows."""

import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.server import until

PATIENCE_S = 60.0

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: no terminal to test in")


class Screen:
    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def tmux(self, *arguments: str, text: str | None = None) -> str:
        """Without the size of the terminal that the tests run in, which would count instead of the screen's."""
        command = ["tmux", "-S", str(self._socket), *arguments]
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True, env=env).stdout

    @property
    def text(self) -> str:
        """Everything that was shown, also what has scrolled away, without spaces at the ends of lines."""
        lines = self.tmux("capture-pane", "-p", "-S", "-2000").splitlines()
        return "\n".join(line.rstrip() for line in lines).rstrip()

    def type(self, text: str, *keys: str) -> None:
        if text:
            self.tmux("send-keys", "-l", text)
        if keys:
            self.tmux("send-keys", *keys)

    def paste(self, text: str) -> None:
        """As a terminal does it: marked as pasted where the program asks for that."""
        self.tmux("load-buffer", "-", text=text)
        self.tmux("paste-buffer", "-p")

    def wait_for(self, what: str, n: int = 1) -> None:
        until(lambda: self.text.count(what) >= n, f"{what!r} is shown {n} times", PATIENCE_S)

    @property
    def has_ended(self) -> bool:
        listed = subprocess.run(["tmux", "-S", str(self._socket), "list-sessions"], capture_output=True, check=False)
        return listed.returncode != 0


@contextmanager
def terminal(*command: str, folder: Path, width: int = 80, height: int = 30, **env: str) -> Iterator[Screen]:
    """The socket has a short name: its length is limited."""
    socket = Path(os.environ.get("TMPDIR", "/tmp"), f"everwarm-{uuid.uuid4().hex[:8]}")
    screen = Screen(socket)
    variables = [part for name, value in env.items() for part in ("-e", f"{name}={value}")]
    size = ("-x", str(width), "-y", str(height))
    screen.tmux("-f", os.devnull, "new-session", "-d", *size, *variables, "-c", str(folder), shlex.join(command))
    try:
        yield screen
    finally:
        subprocess.run(["tmux", "-S", str(socket), "kill-server"], capture_output=True, check=False)
        socket.unlink(missing_ok=True)
