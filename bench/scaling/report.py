"""Measure everything, or what is named, and write docs/benchmarks/scaling.md, its plots and its data.

The data file has the figures of every kind of measurement, and where and when they were measured: what is not measured
this time is reported from there.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.scaling import context, disk, slots, tree, turns
from bench.scaling.fit import TOLERANCE, Curve, Growth
from everwarm import __version__
from everwarm.llama import abi
from everwarm.simulate.plot import Axis, line_chart

DOCS = Path(__file__).parents[2] / "docs/benchmarks"
AXES = {
    "context": "tokens of context",
    "turns": "turns",
    "tree": "checkpoints",
    "slots": "slots",
    "disk": "objects on disk",
}
MEASURES: dict[str, Callable[[], list[Curve]]] = {
    "tree": tree.curves,
    "slots": slots.curves,
    "turns": turns.curves,
    "context": context.curves,
    "disk": disk.curves,
}
WANTED: dict[str, dict[str, tuple[Growth, str]]] = {
    "context": context.WANTED,
    "turns": turns.WANTED,
    "tree": tree.WANTED,
    "slots": slots.WANTED,
    "disk": {name: (should, why) for name, (_, should, why) in disk.WANTED.items()},
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of measurement: where and when, and its curves."""

    about: str
    curves: Sequence[Curve]


def run(names: Sequence[str] = tuple(MEASURES), out: Path = DOCS) -> None:
    (out / "data").mkdir(parents=True, exist_ok=True)
    found = _read(out / "data/scaling.json")
    for name in names:
        began = time.monotonic()
        found[name] = Measured(_about(name), MEASURES[name]())
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    for name, text in files(found).items():
        (out / name).write_text(text)
    print(_table(found))


def _about(name: str) -> str:
    cores, machine, python = os.cpu_count(), platform.machine(), platform.python_version()
    load = os.getloadavg()[0]
    return (
        f"Everwarm {__version__}, libllama {abi.BUILD}, {cores} cores, {machine}, Python {python}, "
        f"{time.strftime('%Y-%m-%d')}, load of the machine {load:.1f}: `python -m bench.scaling {name}`"
    )


def _read(path: Path) -> dict[str, Measured]:
    """What was measured before."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    return {name: Measured(each["about"], _curves(name, each["curves"])) for name, each in stored.items()}


def _curves(name: str, points: Mapping[str, Sequence[Sequence[float]]]) -> list[Curve]:
    wanted = WANTED[name]
    return [Curve(each, *wanted[each], tuple((n, s) for n, s in points[each])) for each in points if each in wanted]


def files(found: Mapping[str, Measured]) -> dict[str, str]:
    """Everything the report consists of, by file name."""
    plots = {f"scaling-{name}.svg": _plot(name, found[name].curves) for name in AXES if name in found}
    data = {
        name: {"about": each.about, "curves": {curve.name: curve.points for curve in each.curves}}
        for name, each in found.items()
    }
    images = "\n\n".join(f"![{name.removesuffix('.svg')}]({name})" for name in plots)
    runs = "\n".join(f"| {name} | {found[name].about} |" for name in AXES if name in found)
    parts = [
        "# How costs grow",
        "`python -m bench scaling` writes this page; do not edit it. [README](README.md) describes the benchmarks.",
        "Each operation is measured at several sizes. The exponent is the *k* of *t = c · nᵏ*, fitted by least squares to "
        "the logarithms, once over all sizes and once over the upper half of them. An exponent is as expected if it is at "
        f"most {TOLERANCE:g} above 0 (constant) or 1 (linear).",
        _table(found),
        images,
        "## How it is measured",
        "Most times are the minimum of several runs and count the CPU time of the measuring thread, so other work on the "
        "machine has little influence. Two are measured by the clock: saving a turn (the median, because most of it is "
        "waiting for the disk) and a step (the fastest tenth of the steps). In the group *disk*, opening is given both "
        "ways, and reading every header counts the CPU time of all threads. Its objects are real files in conversations "
        "of ten turns, written without `fsync`, so the device does not matter. An object takes about 1.1 KB of memory "
        "(`python -m bench objects`).",
        f"| group | measured |\n|---|---|\n{runs}",
        "Raw data: [data/scaling.json](data/scaling.json). `python -m bench.scaling disk` measures one group again.",
    ]
    return {"scaling.md": "\n\n".join(parts) + "\n", "data/scaling.json": json.dumps(data, indent=1) + "\n", **plots}


def _table(found: Mapping[str, Measured]) -> str:
    head = ("group", "operation", "expected", "reason", "smallest", "largest", "exponent", "upper half", "as expected")
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in AXES:
        for curve in found[name].curves if name in found else ():
            (n_first, first), (n_last, last) = curve.points[0], curve.points[-1]
            ends = f"{_time(first)} at {n_first:,.0f} | {_time(last)} at {n_last:,.0f}"
            verdict = "yes" if curve.is_as_it_should_be else "**no**"
            text.append(
                f"| {name} | {curve.name} | {curve.should} | {curve.why} | {ends} "
                f"| {curve.exponent:.2f} | {curve.late_exponent:.2f} | {verdict} |"
            )
    return "\n".join(text)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} µs"


def _count(n: float) -> str:
    """``8k`` for powers of two, thousands for other numbers."""
    if n >= 1024 and n % 1024 == 0 and n % 1000:
        return f"{n / 1024:g}k"
    return f"{n:,.0f}"


def _plot(name: str, curves: Sequence[Curve]) -> str:
    lines = {curve.name: [(n, 1e3 * max(s, 1e-7)) for n, s in curve.points] for curve in curves}
    x = Axis(AXES[name], is_log=True, show=_count)
    return line_chart(f"Costs by {AXES[name]}", x, Axis("milliseconds", is_log=True), lines)
