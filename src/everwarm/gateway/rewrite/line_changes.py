"""Which lines of a text were changed, and the rule that would make that harmless. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CHANGED = 8  # lines; more is another text
MIN_SHARE = 0.5  # of lines that are the same, else it is another text
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
    return [_change(number, known[i], given[number - 1]) for i, number in pairs]


def _pairs(known: Sequence[str], given: Sequence[str]) -> list[tuple[int, int]] | None:
    """Where lines differ: the index in the one, and the number in the other. None: lines were added or left out, too."""
    if len(known) == len(given):
        return [(i, i + 1) for i, (a, b) in enumerate(zip(known, given, strict=True)) if a != b]
    matcher = difflib.SequenceMatcher(None, known, given, autojunk=False)
    codes = [code for code in matcher.get_opcodes() if code[0] == "replace" and code[2] - code[1] == code[4] - code[3]]
    return [(i1 + k, j1 + k + 1) for _, i1, i2, j1, _ in codes for k in range(i2 - i1)]


def _change(number: int, known: str, given: str) -> LineChange:
    before = _beginning(known, given)
    rests = [line[len(before) :][::-1] for line in (known, given)]
    after = _beginning(*rests)[::-1]
    return LineChange(number, _WORD_END.sub("", before), _WORD_START.sub("", after))
