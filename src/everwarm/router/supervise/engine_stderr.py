"""An engine's standard error: passed on to our own as it comes, with its end remembered for whoever asks why it died.

A thread reads it, so that an event loop that is busy holds no engine up. Lines that are no JSON become it where the log is.
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
    """Give ``fd`` to a process as its standard error, then ``start``."""

    def __init__(self) -> None:
        self._ours, self.fd = os.pipe()
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._thread = threading.Thread(target=self._run, name="everwarm-stderr", daemon=True)
        self._thread.start()

    def close_theirs(self) -> None:
        """The process has its own copy now, or there is none."""
        os.close(self.fd)

    def last_words(self, wait_s: float) -> str:
        """The last lines, once the process has ended and everything was read."""
        self._thread.join(wait_s)  # a process of its own may still hold it
        return "\n".join(self._lines)

    def _run(self) -> None:
        is_json, rest = log_format() == "json", b""
        with contextlib.suppress(OSError), open(self._ours, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MOST_LINE:
                    lines, rest = [*lines, rest], b""
                self._pass_on(lines, is_json=is_json)
            if rest:
                self._pass_on([rest], is_json=is_json)

    def _pass_on(self, lines: list[bytes], *, is_json: bool) -> None:
        self._lines.extend(line.decode("utf-8", "replace") for line in lines)
        shown = (_as_json(line) if is_json and not line.startswith(b"{") else line for line in lines)
        data = b"".join(line + b"\n" for line in shown)
        with contextlib.suppress(OSError):  # nobody listens to us: the engine must not stop for that
            while data:
                data = data[os.write(_STDERR, data) :]


def _as_json(line: bytes) -> bytes:
    words = as_json("WARNING", "everwarm.engine.stderr", line.decode("utf-8", "replace"), time.time())
    return json.dumps(words, ensure_ascii=False).encode()
