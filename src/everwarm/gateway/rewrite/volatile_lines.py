"""Lines of system text that differ from request to request: how often and at what cost, for each namespace, and a rule that
would make them harmless.

Compares each new system text with the newest ones that are like it. Holds text of clients: bounded, in memory alone, shown
to their own namespace only, and forgotten with it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from everwarm.gateway.rewrite.rules import SYSTEM_ROLES
from everwarm.lru import NamespacedLru
from everwarm.types import Json

MAX_TEXT_BYTES = 16 << 20
MAX_TEXT = 256 << 10
MAX_LINES = 4000
MAX_COMPARED = 8  # texts of a namespace
MAX_LINES_KEPT = 1024  # volatile ones, of all namespaces
MAX_CHANGED = 8  # lines; more is another text
MIN_SHARE = 0.5  # of lines that are the same, else it is another text
MAX_ALIGNED = 100  # lines between the first difference and the last: aligning takes their third power
MAX_AROUND = 1000  # characters of what stays the same in a line
_WORD_END = re.compile(r"[\w.:/\\+-]+$")
_WORD_START = re.compile(r"^[\w.:/\\+-]+")
_SPECIAL = re.compile(r"([.^$*+?{}\[\]\\|()])")


@dataclass(slots=True)
class VolatileLine:
    """A line that differs. ``before`` and ``after`` are what stays the same around the difference; ``n_tokens``: read by
    the requests in which it had changed."""

    number: int  # from 1
    before: str
    after: str
    n_changes: int = 1
    n_tokens: int = 0

    def joins(self, other: VolatileLine) -> bool:
        """Becomes one change that explains both, and counts it. False: they have nothing in common."""
        before = _beginning(self.before, other.before)
        after = _beginning(self.after[::-1], other.after[::-1])[::-1]
        if not (before or after) or before not in (self.before, other.before):
            return False
        self.number = other.number
        self.before = before
        self.after = after
        self.n_changes += 1
        return True

    def rule(self) -> str | None:
        """As TOML; None: nothing of the line stays the same, so no pattern would match it alone."""
        if not self.before.strip() and not self.after.strip():
            return None
        pattern = f"{_SPECIAL.sub(_escaped, self.before)}.*{_SPECIAL.sub(_escaped, self.after)}"
        name = f"line-{self.number}"
        return f'[[rule]]\nname = "{name}"\nmatch = {json.dumps(pattern, ensure_ascii=False)}\naction = "end"\n'


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
        """Adds the tokens that a request has read to the first of the lines that it had changed."""
        with self._lock:
            for line in lines[:1]:
                line.n_tokens += n_tokens

    def shown(self, reach: str) -> list[tuple[str, VolatileLine]]:
        """The lines of namespaces with this prefix, the most expensive first."""
        with self._lock:
            names = [name for name in self._lines.namespaces() if name.startswith(reach)]
            found = [(name, line) for name in names for line in self._lines.values(name)]
        return sorted(found, key=lambda each: (-each[1].n_tokens, each[1].number))

    def forget(self, reach: str) -> None:
        with self._lock:
            for lru in (self._texts, self._lines):
                for name in [name for name in lru.namespaces() if name.startswith(reach)]:
                    lru.remove_all(name)

    def _newest(self, namespace: str) -> list[str]:
        return list(islice(self._texts.values(namespace), MAX_COMPARED))

    def _counted(self, namespace: str, change: VolatileLine) -> VolatileLine:
        for line in self._lines.values(namespace):
            if line.joins(change):
                return line
        n_bytes = 512 + 4 * (len(change.before) + len(change.after))
        self._lines.put(namespace, (change.number, change.before, change.after), change, n_bytes)
        return change


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


# which lines differ; pure


def _beginning(one: str, other: str) -> str:
    """What both begin with."""
    n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:n]


def _escaped(found: re.Match[str]) -> str:
    return "\\" + found[1]


def changed_lines(known: Sequence[str], given: Sequence[str]) -> list[VolatileLine] | None:
    """The lines of ``given`` that stand in the place of others; None: it is the same text, or another one altogether."""
    pairs = _pairs(known, given)
    n_most = max(len(known), len(given))
    if not pairs or len(pairs) > MAX_CHANGED or (n_most - len(pairs)) / n_most < MIN_SHARE:
        return None
    changes = [_change(number, known[i], given[number - 1]) for i, number in pairs]
    return changes if all(len(change.before) + len(change.after) <= MAX_AROUND for change in changes) else None


def _pairs(known: Sequence[str], given: Sequence[str]) -> list[tuple[int, int]] | None:
    """Where lines differ: the index in the one, and the number in the other. None: they are too many to be aligned."""
    if len(known) == len(given):
        return [(i, i + 1) for i, (a, b) in enumerate(zip(known, given, strict=True)) if a != b]
    n_first = _n_same(known, given)
    n_last = _n_same(known[n_first:][::-1], given[n_first:][::-1])
    inner = known[n_first : len(known) - n_last]
    other = given[n_first : len(given) - n_last]
    if max(len(inner), len(other)) > MAX_ALIGNED:
        return None
    matcher = difflib.SequenceMatcher(None, inner, other, autojunk=False)
    codes = [code for code in matcher.get_opcodes() if code[0] == "replace" and code[2] - code[1] == code[4] - code[3]]
    return [(n_first + i1 + k, n_first + j1 + k + 1) for _, i1, i2, j1, _ in codes for k in range(i2 - i1)]


def _n_same(one: Sequence[str], other: Sequence[str]) -> int:
    """How many lines both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _change(number: int, known: str, given: str) -> VolatileLine:
    before = _beginning(known, given)
    rests = [line[len(before) :][::-1] for line in (known, given)]
    after = _beginning(*rests)[::-1]
    return VolatileLine(number, _WORD_END.sub("", before), _WORD_START.sub("", after))
