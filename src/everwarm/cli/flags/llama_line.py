"""llama-server's command line and variables, turned into our flags by the table of ``llama_flags``. Pure.

What the table does not have passes unchanged: our own flags, and mistakes for the parser to name.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from cyclopts import Parameter

from everwarm.cli.flags.llama_flags import ROWS, Row
from everwarm.errors import BadRequest

PREFIX = "LLAMA_ARG_"
_NEGATED = "LLAMA_ARG_NO_"
_TRUE = ("on", "enabled", "true", "1")
_FALSE = ("off", "disabled", "false", "0")

_POSITIVE = {name: row for row in ROWS for name in row.names}
_NEGATIVE = {name: row for row in ROWS for name in row.negatives}

Value = str | bool | list[str]


def our_line(tokens: Sequence[str], options: type) -> list[str]:
    """The same command line in our flags. ``options``: where ours are declared."""
    ours: list[str] = []
    rest = deque(tokens)
    while rest:
        token = rest.popleft()
        if token == "--":
            return [*ours, token, *rest]
        name, equals, inline = _split(token)
        row = _POSITIVE.get(name) or _NEGATIVE.get(name)
        if row is None or (row.refusal and name in declared(options)):
            ours.append(token)
        elif name == "--slots":
            ours += _slots(inline if equals else None, rest)
        else:
            n_values = row.n_values if name in _POSITIVE else 0
            values = [inline] if equals else [rest.popleft() for _ in range(min(n_values, len(rest)))]
            if len(values) < n_values:
                raise BadRequest(f"{name} needs a value")
            ours += [_flag(to, value) for to, value in _given(row, name, values, is_on=name in _POSITIVE)]
    return ours


def _split(token: str) -> tuple[str, str, str]:
    """llama-server takes ``_`` for ``-`` in long names; we take ``--name=value`` as well."""
    if not token.startswith("--"):
        return token, "", ""
    name, equals, value = token.partition("=")
    return name.replace("_", "-"), equals, value


def _slots(inline: str | None, rest: deque[str]) -> list[str]:
    """A number follows our flag; none follows llama-server's, which is about GET /slots."""
    if inline is None and (not rest or rest[0].startswith("-")):
        return ["--slots-endpoint"]
    return [f"--parallel={rest.popleft() if inline is None else inline}"]


def _flag(to: str, value: Value) -> str:
    if isinstance(value, bool):
        return to if value else f"--no-{to.removeprefix('--')}"
    return f"{to}={value}"


def _given(row: Row, name: str, values: list[str], *, is_on: bool) -> Iterator[tuple[str, Value]]:
    """Our flags and their values for one of theirs; ``BadRequest`` if it is refused. ``name``: for the message."""
    refusal = row.refusal if is_on else row.refuses_negatives
    if refusal and not (is_on and values and values[0] in row.only):
        raise BadRequest(f"{name} of llama-server is not offered: {refusal}")
    if row.refusal or not row.to:
        return
    if name in ("-dev", "--device", "LLAMA_ARG_DEVICE") and values == ["none"]:
        yield from (("--n-gpu-layers", "0"), ("--op-offload", False))
        return
    if row.n_values:
        parts = [part for part in values[0].split(",") if part] if row.is_list else values
        for part in parts:
            value = part if row.convert is None else row.convert(part)
            if value or not part:  # a value that becomes nothing means: as it is without the flag
                yield row.to, value
        return
    for to in (row.to if is_on or not row.to_negative else row.to_negative).split():
        flag, equals, value = to.partition("=")
        yield flag, value if equals else is_on


def from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    """What llama-server's variables say, by the names of our flags."""
    found: dict[str, Value] = {}
    for row in ROWS:
        negated = row.env.replace(PREFIX, _NEGATED) if row.negatives and row.env.startswith(PREFIX) else ""
        if negated and negated in environment:
            given = _given(row, negated, [], is_on=False)
        elif row.env and row.env in environment:
            given = _from_variable(row, environment[row.env])
        else:
            continue
        for to, value in given:
            known = found.get(to)
            if isinstance(known, list):
                found[to] = [*known, str(value)]
            else:
                found[to] = [str(value)] if row.is_list else value
    return found


def _from_variable(row: Row, text: str) -> Iterator[tuple[str, Value]]:
    if row.n_values:
        return _given(row, row.env, [text], is_on=True)
    word = text.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise BadRequest(f"{row.env} is {text[:40]!r}; give 1 or 0")
    is_on = word in _TRUE
    if not is_on and not row.negatives:
        return iter(())
    return _given(row, row.env, [], is_on=is_on)


def unknown_variables(environment: Collection[str]) -> list[str]:
    known = {row.env for row in ROWS} | {row.env.replace(PREFIX, _NEGATED) for row in ROWS if row.negatives}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


@functools.cache
def declared(options: type) -> frozenset[str]:
    """The flags that a class of options has, with those of the classes in it."""
    names: set[str] = set()
    for field, hint in typing.get_type_hints(options, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            names |= declared(typing.cast("type", hint))
            continue
        own = [extra.name for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Parameter) and extra.name]
        names |= {name for given in own for name in given} or {f"--{field.replace('_', '-')}"}
    return frozenset(names)
