"""Files of settings: one table per command. Unknown tables and keys are errors; what is printed can be read back. And what
is wrong with a setting, in the words of its flag."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cyclopts import App

from everwarm.config import require

# Settings that have another name than their flag.
_FLAGS = {
    "n_ctx": "--ctx-size",
    "n_slots": "--slots",
    "n_batch": "--batch-size",
    "n_ubatch": "--ubatch-size",
    "n_threads": "--threads",
    "n_spares": "--spares",
    "n_snapshots": "--snapshots",
    "ram_bytes": "--cache-ram",
    "disk_bytes": "--disk-cache",
    "write_bytes_per_day": "--disk-write-budget",
    "max_body_bytes": "--max-body",
    "client_timeout_s": "--client-timeout",
    "request_timeout_s": "--request-timeout",
    "grace_s": "--grace",
}


def in_words_of_flags(message: str, command: App) -> str:
    """``n_ctx is 0; …`` as ``--ctx-size is 0; …``; a message about something else stays as it is."""
    found = re.match(r"([a-z][a-z_-]*) (is|has) ", message)
    if found is None:
        return message
    flag = _FLAGS.get(found[1], f"--{found[1].replace('_', '-')}")
    is_flag = flag.removeprefix("--") in _options(command)
    return flag + message[found.end(1) :] if is_flag else message


def as_toml(table: str, values: Mapping[str, Any], secret: Collection[str]) -> str:
    """The values of a command as its table; what is not set is left out, and so are secrets."""
    lines = [f"[{table}]"]
    for name, value in _flat(values):
        key = name.replace("_", "-")
        if name in secret and value is not None:
            lines.append(f"# {key} is set, and not shown")
        elif value is not None and value != ():
            lines.append(f"{key} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options of a command, also those that are in groups."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value if isinstance(value, int) else str(value))


def require_known_keys(app: App, path: Path) -> None:
    """Every table must be a command and every key one of its options. A file that cannot be read is refused elsewhere."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return
    _check(app, tables, path.name, ())


def _check(app: App, tables: Mapping[str, Any], file: str, above: tuple[str, ...]) -> None:
    commands = [name for name in app if not name.startswith("-")]
    options = _options(app) if above else set()
    for name, value in tables.items():
        if isinstance(value, dict) and name in commands:
            _check(app[name], value, file, (*above, name))
        else:
            place = f"[{'.'.join(above)}]" if above else "no table"
            known = commands if isinstance(value, dict) else options
            near = difflib.get_close_matches(name, known, 1)
            what = f"a table [{'.'.join((*above, name))}]" if isinstance(value, dict) else f"{name} in {place}"
            hint = f"did you mean {near[0]}?" if near else "give a table per command, like [serve], with its options"
            require(name.replace("_", "-") in options, f"{file} has {what}, which is nothing known; {hint}")


def _options(app: App) -> set[str]:
    if app.default_command is None:
        return set()
    arguments = app.assemble_argument_collection()
    return {name.lstrip("-") for argument in arguments for name in argument.names}
