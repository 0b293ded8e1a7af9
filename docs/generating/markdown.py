"""Tables and notices as Markdown text. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def written_by(source: str) -> str:
    return f"<!-- Written by docs/generate.py from {source}: change it there. -->\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row(head), "|" + "---|" * len(head)]
    return "\n".join([*lines, *(_row(row) for row in rows)]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def prose(text: str) -> str:
    """A docstring's words in Markdown: literals get one backquote."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)
