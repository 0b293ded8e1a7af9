"""Which part of an unfinished Markdown text will not change any more. Pure."""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def settled(text: str) -> int:
    """How many characters are finished blocks: up to the last blank line that is not inside a fenced block."""
    end = start = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        start += len(line)
        found = _FENCE.match(line)
        if fence:
            if found is not None and found[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif found is not None:
            fence = found[1]
        elif not line.strip() and line.endswith("\n"):
            end = start
    return end
