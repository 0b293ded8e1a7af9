"""The command line, as cyclopts sees it: every flag with its default and what it says of itself."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Any

from cyclopts import App
from docstring_parser import parse

from everwarm.cli.app import app
from generating.markdown import code, prose, table, written_by

# What the machine decides; another reader would have another value.
MADE_HERE = {
    "--state-dir": "`everwarm/states` in the user's cache directory",
    "--threads": "the CPUs the process may use",
}
_UNSAID = {
    "--flash-attn": "flash attention",
    "--api-key": "the server's, where it has one",
    "--temperature": "how freely the model picks; 0: the likeliest token",
    "--max-tokens": "the most tokens of one answer",
    "--checkpoint-every": "as the server was given",
    "--max-checkpoints": "as the server was given",
}
_PLAIN_GROUPS = ("Parameters", "Arguments")


@dataclasses.dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    negatives: tuple[str, ...]
    group: str
    help: str
    default: str
    choices: tuple[str, ...]

    def row(self) -> list[str]:
        names = ", ".join(map(code, (*self.names, *self.negatives)))
        picked = f" One of {', '.join(map(code, self.choices))}." if self.choices else ""
        text = self.help.rstrip(".") + "." if self.help else ""
        return [names, self.default, text + picked]


def flags(command: App) -> Iterator[Flag]:
    """Of one command, in the order in which they were written down."""
    described = {p.arg_name: p.description or "" for p in parse(inspect.getdoc(command.default_command) or "").params}
    for argument in command.assemble_argument_collection():
        if not argument.show or argument.name == "*":
            continue
        negatives = tuple(name for name in argument.negatives if not name.startswith("--empty-"))
        names = tuple(dict.fromkeys(name for name in argument.names if name not in argument.negatives))
        text = argument.parameter.help or described.get(argument.field_info.name, "")
        help = " ".join(text.split()) or _UNSAID.get(names[0], "")
        if argument.field_info.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            names = (names[0].removeprefix("--").upper(), *names)
        groups = argument.parameter.group
        first = groups[0] if isinstance(groups, tuple) else groups
        group = getattr(first, "name", None) or str(first)
        yield Flag(names, negatives, group, help, _default(names[0], argument), _choices(argument.hint))


def _default(name: str, argument: Any) -> str:
    value = argument.field_info.default
    if name in MADE_HERE:
        return MADE_HERE[name]
    if argument.field_info.required:
        return "must be given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None or value == () or value is inspect.Parameter.empty else code(str(value))


def _choices(hint: Any) -> tuple[str, ...]:
    found = [hint, *typing.get_args(hint)]
    return next((typing.get_args(one) for one in found if typing.get_origin(one) is typing.Literal), ())


def serve_flags() -> list[Flag]:
    return list(flags(app["serve"]))


def serve_page() -> str:
    groups: dict[str, list[Flag]] = {}
    for flag in serve_flags():
        groups.setdefault("Which model" if flag.group in _PLAIN_GROUPS else flag.group, []).append(flag)
    parts = [
        written_by("src/everwarm/cli/flags/serve_options.py"),
        "# Flags of `everwarm serve`\n",
        "Every flag can be given in three ways. The first that says something wins:\n",
        "1. on the command line: `--ctx-size 65536`;\n"
        "2. in the environment: `EVERWARM_SERVE_CTX_SIZE=65536`;\n"
        "3. in the TOML file that `EVERWARM_CONFIG` names: `ctx-size = 65536` in the table `[serve]`.\n",
        "`everwarm config` prints what holds, as such a file; unknown tables and keys are errors. "
        "Sizes are numbers like `8GiB` or `500MB`. An empty default means: not set, and the "
        "text says what happens then. Other variables are [below](#other-variables). What to change for which model is in the "
        "[tuning guide](../tuning.md).\n",
    ]
    order = ["Which model", *dict.fromkeys(group for group in groups if group != "Which model")]
    for group in order:
        parts.append(f"## {group}\n")
        parts.append(table(["flag", "default", "meaning"], [flag.row() for flag in groups[group]]))
    parts.append(_OTHER_VARIABLES)
    return "\n".join(parts)


_OTHER_VARIABLES = """## Other variables

| variable | meaning |
|---|---|
| `EVERWARM_CONFIG` | a TOML file with settings; it must exist |
| `EVERWARM_LIBLLAMA` | the path of a libllama that you built, see [GPUs](../gpu.md) |
| `EVERWARM_LOG` | the least level that is logged: `DEBUG`, `INFO` (default), `WARNING` … |
| `EVERWARM_LOG_FORMAT` | `text` (default) or `json`; `--log-format` wins |
| `XDG_DATA_HOME` | where the user's data directory is, with the [builds of libllama](../gpu.md); default: `~/.local/share` |
| `XDG_CACHE_HOME` | where the user's cache directory is; default: `~/.cache` |
"""


def other_page() -> str:
    parts = [
        written_by("src/everwarm/cli/"),
        "# Commands\n",
        "`everwarm COMMAND --help` says the same. `serve` has [a page of its own](flags.md). Options of every command can also come "
        "from the environment (`EVERWARM_CHAT_SYSTEM=…`) or from a table of that name in the file of `EVERWARM_CONFIG`.\n",
    ]
    for name, command in _commands(app, ("everwarm",)):
        if name == "everwarm serve":
            continue
        told = parse(inspect.getdoc(command.default_command) or "") if command.default_command else None
        parts.append(f"## `{name}`\n")
        parts.append(prose(_description(command, told)) + "\n")
        rows = [flag.row() for flag in flags(command)] if told is not None else []
        if rows:
            parts.append(table(["option", "default", "meaning"], rows))
    return "\n".join(parts)


def _description(command: App, told: Any) -> str:
    text = command.help if told is None else f"{told.short_description or ''}\n\n{told.long_description or ''}"
    return inspect.cleandoc(text).strip()


def _commands(parent: App, path: tuple[str, ...]) -> Iterator[tuple[str, App]]:
    for name in parent:
        if not name.startswith("-"):
            yield " ".join((*path, name)), parent[name]
            yield from _commands(parent[name], (*path, name))
