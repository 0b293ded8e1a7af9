"""An engine's standard error: passed on to this process's as it comes. The last lines are kept to explain a death.

A thread reads it, so that a busy event loop blocks no engine. Where the log is JSON, other lines are wrapped in JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque

from everwarm.logs import as_json, log_format

MOST_LINES = 40
_MOST_LINE = 1 << 16
_STDERR = 2


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
        data = b"".join(line + b"\n" for line in shown)
        with contextlib.suppress(OSError):  # this process's standard error is closed: the engine must go on
            while data:
                data = data[os.write(_STDERR, data) :]


def _as_json(line: bytes) -> bytes:
    words = as_json("WARNING", "everwarm.engine.stderr", line.decode("utf-8", "replace"), time.time())
    return json.dumps(words, ensure_ascii=False).encode()
