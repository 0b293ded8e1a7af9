"""Run everything and write docs/benchmarks/scaling.md, its plots and its data."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.scaling import context, slots, tree, turns
from bench.scaling.fit import TOLERANCE, Curve
from everwarm import __version__
from everwarm.llama import abi
from everwarm.simulate.plot import Axis, Series, line_chart

DOCS = Path(__file__).parents[2] / "docs/benchmarks"
AXES = {"context": "tokens of context", "turns": "turns", "tree": "checkpoints", "slots": "slots"}


def run(out: Path = DOCS) -> None:
    (out / "data").mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Curve]] = {}
    kinds = (("tree", tree.curves), ("slots", slots.curves), ("turns", turns.curves), ("context", context.curves))
    for name, measure in kinds:
        began = time.monotonic()
        found[name] = measure()
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    about = _about()
    for name, text in files(about, found).items():
        (out / name).write_text(text)
    print(_table(found))


def _about() -> str:
    cores, machine, python = os.cpu_count(), platform.machine(), platform.python_version()
    load = os.getloadavg()[0]
    return (
        f"Everwarm {__version__}, libllama {abi.BUILD}, {cores} cores, {machine}, Python {python}, "
        f"{time.strftime('%Y-%m-%d')}, load of the machine {load:.1f}: `python -m bench scaling`"
    )


def files(about: str, found: Mapping[str, Sequence[Curve]]) -> dict[str, str]:
    """Everything the report consists of, by file name."""
    plots = {f"scaling-{name}.svg": _plot(name, found[name]) for name in AXES if name in found}
    data = {name: {curve.name: curve.points for curve in curves} for name, curves in found.items()}
    images = "\n\n".join(f"![{name.removesuffix('.svg')}]({name})" for name in plots)
    parts = [
        "# How it grows",
        "Written by `python -m bench scaling`; do not edit. What it means and how it is made: [README](README.md).",
        f"{about}. Raw data: [data/scaling.json](data/scaling.json).",
        "Times are the least of several, of the thread's own time, so that other people's work shows little. Saving "
        "is a median by the clock, for most of it is waiting for the disk; a step is the quickest tenth by the clock. "
        "The exponent is *k* of *t = c · nᵏ*, by least squares on logarithms: over all sizes, and over the upper half of "
        f"them. It is as it should be up to {TOLERANCE:g} more than 0 (constant) or 1 (linear).",
        _table(found),
        images,
    ]
    return {"scaling.md": "\n\n".join(parts) + "\n", "data/scaling.json": json.dumps(data, indent=1) + "\n", **plots}


def _table(found: Mapping[str, Sequence[Curve]]) -> str:
    text = ["| by | what | should be | because | first | last | exponent | upper half | |", "|" + "---|" * 9]
    for name in AXES:
        for curve in found.get(name, ()):
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


def _plot(name: str, curves: Sequence[Curve]) -> str:
    series = [Series(curve.name, tuple((n, 1e3 * max(s, 1e-7)) for n, s in curve.points)) for curve in curves]
    x = Axis(AXES[name], is_log=True, show=lambda n: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}")
    return line_chart(f"How it grows with {AXES[name]}", x, Axis("ms", is_log=True), series)
