"""Which lines of a text were changed, and the rule that would make that harmless. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CHANGED = 8  # lines; more is another text
MIN_SHARE = 0.5  # of lines that are the same, else it is another text
MAX_ALIGNED = 100  # lines between the first difference and the last: aligning takes their third power
MAX_AROUND = 1000  # characters of what stays the same in a line
_WORD_END = re.compile(r"[\w.:/\\+-]+$")
_WORD_START = re.compile(r"^[\w.:/\\+-]+")
_SPECIAL = re.compile(r"([.^$*+?{}\[\]\\|()])")


@dataclass(frozen=True, slots=True)
class LineChange:
    """A line that differs. ``before`` and ``after`` are what stays the same around the difference."""

    number: int  # from 1
    before: str
    after: str

    def joined(self, other: LineChange) -> LineChange | None:
        """One change that explains both; None: they have nothing in common."""
        before = _beginning(self.before, other.before)
        after = _beginning(self.after[::-1], other.after[::-1])[::-1]
        if (before or after) and (before == self.before or before == other.before):
            return LineChange(other.number, before, after)
        return None

    def rule(self) -> str | None:
        """As TOML; None: nothing of the line stays the same, so no pattern would match it alone."""
        if not self.before.strip() and not self.after.strip():
            return None
        pattern = f"{_SPECIAL.sub(_escaped, self.before)}.*{_SPECIAL.sub(_escaped, self.after)}"
        name = f"line-{self.number}"
        return f'[[rule]]\nname = "{name}"\nmatch = {json.dumps(pattern, ensure_ascii=False)}\naction = "end"\n'


def _beginning(one: str, other: str) -> str:
    """What both begin with."""
    n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:n]


def _escaped(found: re.Match[str]) -> str:
    return "\\" + found[1]


def changed_lines(known: Sequence[str], given: Sequence[str]) -> list[LineChange] | None:
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
    inner, other = known[n_first : len(known) - n_last], given[n_first : len(given) - n_last]
    if max(len(inner), len(other)) > MAX_ALIGNED:
        return None
    matcher = difflib.SequenceMatcher(None, inner, other, autojunk=False)
    codes = [code for code in matcher.get_opcodes() if code[0] == "replace" and code[2] - code[1] == code[4] - code[3]]
    return [(n_first + i1 + k, n_first + j1 + k + 1) for _, i1, i2, j1, _ in codes for k in range(i2 - i1)]


def _n_same(one: Sequence[str], other: Sequence[str]) -> int:
    """How many lines both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _change(number: int, known: str, given: str) -> LineChange:
    before = _beginning(known, given)
    rests = [line[len(before) :][::-1] for line in (known, given)]
    after = _beginning(*rests)[::-1]
    return LineChange(number, _WORD_END.sub("", before), _WORD_START.sub("", after))
