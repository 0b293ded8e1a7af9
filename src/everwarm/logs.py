"""The log: one line per event on standard error, as text or as JSON, for the gateway and its engines alike.

``EVERWARM_LOG`` sets the lowest level, ``EVERWARM_LOG_FORMAT`` the format. A warning that is repeated many times within
some seconds is logged a few times and then counted. Lines contain sizes and reasons, never text of prompts.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, get_args

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]

LEVEL_VARIABLE = "EVERWARM_LOG"
FORMAT_VARIABLE = "EVERWARM_LOG_FORMAT"
FIELDS = "fields"  # in ``extra``: what a JSON line has beside its message
MOST_ALIKE = 5  # within ALIKE_S; more are counted
ALIKE_S = 10.0
_MOST_KINDS = 256


def log_to_stderr(chosen: LogFormat | None = None) -> None:
    """Set the log up once; processes that are started later use the same format."""
    if chosen is not None:
        os.environ[FORMAT_VARIABLE] = chosen
    level = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine() if log_format() == "json" else logging.Formatter(line_start() + _TEXT))
    handler.addFilter(RateLimit())
    logging.basicConfig(level=logging.getLevelNamesMapping().get(level, logging.INFO), handlers=[handler])


def log_format() -> LogFormat:
    """The format that the environment sets; anything but a known one is text."""
    chosen = os.environ.get(FORMAT_VARIABLE, "text").lower()
    return "json" if chosen == get_args(LogFormat)[1] else "text"


def line_start() -> str:
    """What a line on a terminal begins with: it clears a progress bar, which is drawn again below."""
    return "\r\x1b[K" if sys.stderr.isatty() else ""


_TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonLine(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the line's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = as_json(record.levelname, record.name, record.getMessage(), record.created)
        fields = getattr(record, FIELDS, None)
        if isinstance(fields, dict):
            line |= {key: value for key, value in fields.items() if key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def as_json(level: str, logger: str, message: str, created: float) -> dict[str, object]:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created)) + f".{int(created * 1000) % 1000:03d}Z"
    return {"time": at, "level": level, "logger": logger, "message": message}


class RateLimit(logging.Filter):
    """Lets a warning through ``MOST_ALIKE`` times in ``ALIKE_S``; the next one after that says how many were left out.

    Messages from the same place in the code count as alike, with any arguments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: OrderedDict[tuple[str, int, str], tuple[float, int]] = OrderedDict()  # since when, how many

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = (record.name, record.levelno, str(record.msg))
        now = self._clock()
        since, n = self._seen.pop(kind, (now, 0))
        n_left_out = max(0, n - MOST_ALIKE)
        if now - since >= ALIKE_S:
            since, n = now, 0
        self._seen[kind] = (since, n + 1)
        if len(self._seen) > _MOST_KINDS:
            self._seen.popitem(last=False)
        if n == 0 and n_left_out:
            record.msg = f"{record.getMessage()} ({n_left_out} more like it were left out)"
            record.args = None
        return n < MOST_ALIKE
