"""Lines of system text that differ from request to request, counted for each namespace, with what they cost.

Compares each new system text with the newest ones that are like it. Holds text of clients: bounded, in memory alone, shown
to their own namespace only, and forgotten with it.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from everwarm.gateway.rewrite.line_changes import LineChange, changed_lines
from everwarm.gateway.rewrite.rules import SYSTEM_ROLES
from everwarm.lru import NamespacedLru
from everwarm.types import Json

MAX_TEXT_BYTES, MAX_TEXT, MAX_LINES = 16 << 20, 256 << 10, 4000
MAX_COMPARED = 8  # texts of a namespace
MAX_LINES_KEPT = 1024  # volatile ones, of all namespaces


@dataclass(slots=True)
class VolatileLine:
    """``n_tokens``: read by the requests in which it had changed."""

    change: LineChange
    n_changes: int = 0
    n_tokens: int = 0


@dataclass(slots=True)
class VolatileLines:
    _texts: NamespacedLru[str] = field(default_factory=lambda: NamespacedLru(MAX_TEXT_BYTES))
    _lines: NamespacedLru[VolatileLine] = field(default_factory=lambda: NamespacedLru(1 << 20, MAX_LINES_KEPT))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, namespace: str, messages: Sequence[Json]) -> tuple[VolatileLine, ...]:
        """The volatile lines that this request has changed."""
        lines = system_lines(messages)
        if lines is None:
            return ()
        text = "\n".join(lines)
        key = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        with self._lock:
            if self._texts.get(namespace, key) is not None:
                return ()
            newest = self._newest(namespace)
        like = (changed_lines(known.split("\n"), lines) for known in newest)
        found = next((changes for changes in like if changes is not None), [])
        with self._lock:
            self._texts.put(namespace, key, text, sys.getsizeof(text))
            return tuple(self._counted(namespace, change) for change in found)

    def charge(self, lines: Sequence[VolatileLine], n_tokens: int) -> None:
        """What a request has read in which these had changed: it counts for the first of them."""
        with self._lock:
            for line in lines[:1]:
                line.n_tokens += n_tokens

    def shown(self, reach: str) -> list[tuple[str, VolatileLine]]:
        """Those of namespaces with this prefix, the most expensive first."""
        with self._lock:
            names = [name for name in self._lines.namespaces() if name.startswith(reach)]
            found = [(name, line) for name in names for line in self._lines.values(name)]
        return sorted(found, key=lambda each: (-each[1].n_tokens, each[1].change.number))

    def forget(self, reach: str) -> None:
        with self._lock:
            for lru in (self._texts, self._lines):
                for name in [name for name in lru.namespaces() if name.startswith(reach)]:
                    lru.remove_all(name)

    def _newest(self, namespace: str) -> list[str]:
        return list(islice(self._texts.values(namespace), MAX_COMPARED))

    def _counted(self, namespace: str, change: LineChange) -> VolatileLine:
        for line in self._lines.values(namespace):
            joined = line.change.joined(change)
            if joined is not None:
                line.change = joined
                line.n_changes += 1
                return line
        new = VolatileLine(change, 1)
        n_bytes = 512 + 4 * (len(change.before) + len(change.after))
        self._lines.put(namespace, (change.number, change.before, change.after), new, n_bytes)
        return new


def system_lines(messages: Sequence[Json]) -> list[str] | None:
    """Of the first system message; None: there is none, or it is too long to be compared."""
    first = next((message for message in messages if message.get("role") in SYSTEM_ROLES), None)
    content = None if first is None else first.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    if not isinstance(content, str) or not content or len(content) > MAX_TEXT:
        return None
    lines = content.split("\n")
    return lines if len(lines) <= MAX_LINES else None
