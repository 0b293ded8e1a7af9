"""How ``--help`` looks: a line per option, under headings. What does not fit into the line is left out, and so are the
headings of rarely needed flags, unless ``--help-all`` asks for them; with ``--help-env`` the line has the environment
variable.
"""

from __future__ import annotations

import io
import re
import sys
import textwrap

from cyclopts import Group
from cyclopts.help import HelpEntry, HelpPanel
from rich.console import Console, ConsoleOptions
from rich.text import Text

HELP_ALL = "--help-all"
_SHOWS_ALL = HELP_ALL in sys.argv

NETWORK = Group("Network", sort_key=0)
MODELS = Group("Many models", sort_key=1)
MEMORY = Group("Context and memory", sort_key=2)
COMPUTE = Group("Compute", sort_key=3)
CHECKPOINTS = Group("Checkpoints", sort_key=4)
REQUESTS = Group("Defaults of requests", sort_key=5, show=_SHOWS_ALL)
PLACEMENT = Group("Where weights lie", sort_key=6, show=_SHOWS_ALL)
ROPE = Group("RoPE and YaRN", sort_key=7, show=_SHOWS_ALL)
HELP_ENV = "--help-env"
_NAMES_WIDTH = 26
_MOST_CHOICES = 24  # characters; longer lists are in the reference
_CLAUSE = re.compile(r"(?:; |: |\. | \(|, (?:or|which|for|like|and) )(?!\S*\])")  # where a text can end
_UNSAID = ("False", "True", "None", "()", "[]")  # defaults that the text or the flag's two names say already


class LineFormatter:
    """What cyclopts calls to print a page of help, part by part."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:  # noqa: ARG002
        entries = [entry for entry in panel.entries if entry.display_labels]
        if not entries:
            return
        shows_variables = HELP_ENV in sys.argv and panel.format == "parameter"
        is_short = panel.format == "command" or sys.argv[1:2] == ["serve"]  # elsewhere there are few options
        shows_all = not is_short or HELP_ALL in sys.argv
        console.print(Text(str(panel.title), "bold"))
        for entry in entries:
            about, more = (_variable(entry), "") if shows_variables else _about(entry)
            for line in option_lines(_names(entry), about, more, console.width, shows_all=shows_all):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()

    def render_usage(self, console: Console, options: ConsoleOptions, usage: object) -> None:  # noqa: ARG002
        words = _plain(usage)
        console.print(words if words.startswith("Usage") else f"Usage: {words}", markup=False, highlight=False)
        console.print()


def option_lines(names: str, about: str, more: str, width: int, *, shows_all: bool) -> list[str]:
    """One line that fits into ``width``: clauses are left out from the end of the text. With ``shows_all``, or where not
    even the first clause fits, more lines. Pure."""
    room = max(20, width - _NAMES_WIDTH - 4)
    shown = about if shows_all else shortened(about, room - len(more))
    first, *rest = textwrap.wrap(f"{shown}{more}", room) or [""]
    under = [" " * (_NAMES_WIDTH + 4) + text for text in rest]
    if len(names) > _NAMES_WIDTH and len(names) + 4 + len(first) > width:
        return [f"  {names}", " " * (_NAMES_WIDTH + 4) + first, *under]
    return [f"  {names:<{_NAMES_WIDTH}}  {first}".rstrip(), *under]


def shortened(text: str, room: int) -> str:
    """As many of its clauses as fit, at least the first. Pure."""
    ends = [found.start() for found in _CLAUSE.finditer(text)] + [len(text)]
    return text[: max((end for end in ends if end <= room), default=ends[0])]


def _names(entry: HelpEntry) -> str:
    """The short name and the first long one, with what they take; other spellings are in the reference."""
    longs = (*([entry.positional_label] if entry.positional_label else []), *entry.positive_names)
    shorts = [name for name in entry.positive_shorts if len(name) == len("-c")]
    names = ", ".join([*shorts[:1], *longs[:1]]) or ", ".join(entry.display_labels[:1])
    return f"{names} {entry.metavar}" if entry.metavar and not entry.positional_label else names


def _about(entry: HelpEntry) -> tuple[str, str]:
    """The text, and what is never left out: the default."""
    text = _plain(entry.description)
    choices = ", ".join(entry.choices or ())
    if choices and len(choices) <= _MOST_CHOICES:
        text = f"{text} ({choices})" if text else choices
    if entry.default == "True" and entry.negative_names:
        return text, f" [on; {entry.negative_names[0]}]"
    is_told = entry.default and entry.default not in _UNSAID and "default:" not in text
    return text, f" [{entry.default}]" if is_told else ""


def _variable(entry: HelpEntry) -> str:
    return ", ".join(entry.env_var or ())


def _plain(description: object) -> str:
    """Cyclopts gives Markdown or text to render."""
    if description is None:
        return ""
    plain = Console(file=io.StringIO(), width=10_000, no_color=True, highlight=False, markup=False, emoji=False)
    with plain.capture() as written:
        plain.print(description, end="")
    return " ".join(written.get().split())
