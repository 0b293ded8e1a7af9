"""``python -m bench suite``: play what has not been played yet, then write the report.

Every scenario that is over is one line in the data file, so a run that was cut off goes on where it was. A file that was
made with other settings, another version or another machine is never continued.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.suite import report, sessions
from bench.suite.play import PAUSE_S, play
from bench.suite.servers import SERVERS, TRIED, Setup, runner
from everwarm import __version__
from everwarm.llama import abi

DOCS = Path(__file__).parents[2] / "docs/benchmarks"
NAMES = tuple(played.name for played in sessions.ALL)


def run() -> None:
    """The short form, under six minutes on a quiet machine."""
    _run(_parser().parse_args([]))


def main() -> None:
    _run(_parser().parse_args())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.suite", description="Play conversations on all servers.")
    parser.add_argument("--size", type=float, default=0.15, help="1: conversations of up to 40,000 tokens")
    parser.add_argument("--seeds", type=int, default=1, help="other texts of the same kinds; their spread is shown")
    parser.add_argument("--ctx", type=int, default=16384, help="cells of the context, for all slots together")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="default: all but one")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds before each request")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES, help="scenarios")
    parser.add_argument("--servers", nargs="*", default=SERVERS, help="also: " + ", ".join(_variants()))
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the report")
    parser.add_argument("--name", default="suite", help="of the files")
    parser.add_argument("--note", default="", help="about the machine, for the report")
    parser.add_argument("--fresh", action="store_true", help="forget what has been played")
    return parser


def _variants() -> list[str]:
    return [f"llama-server {name}" for name in TRIED]


def _run(given: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers must go, too
    data = given.out / "data" / f"{given.name}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    about = _about(given)
    done = [] if given.fresh else _continued(data, about)
    if not done:
        data.write_text(json.dumps({"about": about}) + "\n")
    for played, seed in _to_play(given, done):
        began = time.monotonic()
        line = _played(played, seed, given)
        done.append(line)
        with data.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{played.name}, seed {seed}: {time.monotonic() - began:.0f} s; {report.in_a_line(line)}", flush=True)
    for name, text in report.files(about, done, given.name).items():
        (given.out / name).write_text(text)
    print(report.totals_table(done, given.servers))


def _about(given: argparse.Namespace) -> dict[str, Any]:
    """Everything that a figure depends on, as far as we know."""
    settings = {key: getattr(given, key) for key in ("size", "seeds", "ctx", "threads", "pause", "note")}
    machine = {"cores": os.cpu_count(), "arch": platform.machine(), "cpu": _cpu(), "system": platform.system()}
    versions = {"everwarm": __version__, "libllama": abi.BUILD, "python": platform.python_version()}
    return {"settings": settings, "servers": list(given.servers), "machine": machine, "versions": versions}


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _continued(data: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    if not data.exists():
        return []
    head, *lines = [json.loads(line) for line in data.read_text().splitlines()] or [{}]
    return lines if head.get("about") == about else []


def _to_play(given: argparse.Namespace, done: Sequence[dict[str, Any]]) -> Iterator[tuple[sessions.Played, int]]:
    over = {(line["scenario"], line["seed"]) for line in done}
    for seed in range(given.seeds):
        for played in sessions.ALL:
            if played.name in given.only and (played.name, seed) not in over:
                yield played, seed


def _played(played: sessions.Played, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    setup = Setup(given.ctx, given.threads, ram_mib=played.ram_mib, swaps=played.swaps)
    runners = [runner(name, setup) for name in given.servers]
    result = play(played.steps(seed, given.size), runners, given.pause)
    return {"scenario": played.name, "seed": seed, "load": round(os.getloadavg()[0], 1), **result}
