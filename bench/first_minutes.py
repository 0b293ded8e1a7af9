"""A new user's first minutes: from nothing to the first answer of the embedded model, by the clock.

``python -m bench.first_minutes [--wheel FILE] [--uv PROGRAM]``: a clean environment, the wheel installed into it with all
its dependencies, one question. With uv the same in one command. What it downloads comes from where pip gets its packages,
so times include the network, or pip's cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.measure import table

ROOT = Path(__file__).parents[1]
QUESTION, ANSWER = "What is the capital of France?", "Paris"
WANTED_S = 60.0
CHAT = ("chat", "--demo", "--temperature", "0")


def run(wheel: Path, uv: str | None) -> None:
    rows = with_pip(wheel) + ([] if uv is None else with_uv(uv, wheel))
    table(f"from nothing to the first answer, seconds (wanted: {WANTED_S:.0f})", ("", "step", "in all"), rows)


def with_pip(wheel: Path) -> list[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as home:
        environment = Path(home) / "environment"
        steps = (
            ("python -m venv", [sys.executable, "-m", "venv", str(environment)]),
            ("pip install everwarm", [str(environment / "bin/pip"), "install", "--quiet", str(wheel)]),
            ("everwarm chat --demo, its answer", [str(environment / "bin/everwarm"), *CHAT]),
        )
        return timed(steps, Path(home))


def with_uv(uv: str, wheel: Path) -> list[tuple[str, str, str]]:
    """One command, which makes the environment as well."""
    with tempfile.TemporaryDirectory() as home:
        command = [uv, "tool", "run", "--quiet", "--python", sys.executable, "--from", str(wheel), "everwarm", *CHAT]
        return timed((("uvx everwarm chat --demo, its answer", command),), Path(home))


def timed(steps: Sequence[tuple[str, list[str]]], home: Path) -> list[tuple[str, str, str]]:
    began = time.monotonic()
    rows = []
    for name, command in steps:
        step_began = time.monotonic()
        done = _answered(command, home)
        now = time.monotonic()
        rows.append((name, f"{now - step_began:.1f}", f"{now - began:.1f}"))
    if ANSWER not in done:
        raise SystemExit(f"the answer is not {ANSWER!r}: {done[-500:]}")
    return rows


def _answered(command: list[str], home: Path) -> str:
    """What the command prints. Its home is new: nothing that this machine's user has set up is found there."""
    own = {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), "XDG_CACHE_HOME": str(home / "cache")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EVERWARM")} | own
    done = subprocess.run(command, input=f"{QUESTION}\n", capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _built(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.first_minutes", description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="default: built from this checkout, which is not counted")
    parser.add_argument("--uv", help="the uv program, to measure its one command as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(given.wheel or _built(Path(folder)), given.uv)


if __name__ == "__main__":
    main()
