"""llama-server's own tests against Everwarm, beside the same run on llama-server: ``make compat``.

The tests come out of the source archive of the libllama wheel and are never part of this repository. With names of files
(``python -m bench.compat.suite test_completion``) only those are run, and with ``-k=EXPRESSION`` only some of their tests;
with ``--only=everwarm`` the outcomes of llama-server are those of the last run. Tests share servers: see ``plugin``.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "compat"
TESTS = FOLDER / "tools" / "server" / "tests"
SIDES = ("llama-server", "everwarm")
TIMEOUT_S = "90"  # of one test, with the start of its servers


def main() -> None:
    only = [arg.removeprefix("--only=") for arg in sys.argv[1:] if arg.startswith("--only=")]
    files = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
    chosen = [arg for arg in sys.argv[1:] if arg.startswith("-k=")]
    results: dict[str, dict[str, str]] = {}
    for side in only or SIDES:
        results = kept(side, run(side, [f"unit/{file}.py" for file in files] or ["unit"], chosen))
    report({side: {k: v for k, v in found.items() if _is_of(k, files)} for side, found in results.items()})


def kept(side: str, found: dict[str, str]) -> dict[str, dict[str, str]]:
    """Everything that is known by now, with these outcomes."""
    known = FOLDER / "results.json"
    results = {side: {} for side in SIDES} | (json.loads(known.read_text()) if known.exists() else {})
    results[side] |= found
    known.write_text(json.dumps(results, indent=1))
    return results


def _is_of(name: str, files: list[str]) -> bool:
    return not files or name.split("::")[0] in files


def run(side: str, names: list[str], chosen: list[str], *, n_workers: int = 2, record: str = "") -> dict[str, str]:
    """The outcome of every test. ``record``: the name of its files, where it is not the server's."""
    launcher = FOLDER / f"run-{side}"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m bench.compat.launch {side} "$@"\n')
    launcher.chmod(0o755)
    print(f"{side} …", flush=True)
    outcomes, log_file = FOLDER / f"{record or side}.jsonl", FOLDER / f"{record or side}.log"
    outcomes.unlink(missing_ok=True)
    (TESTS / "tmp").mkdir(exist_ok=True)  # for slot files
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "LLAMA_SERVER_BIN_PATH": str(launcher),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GOMP_SPINCOUNT": "1000",  # two servers and two tests on few cores: threads that spin long wait for each other
        "OMP_WAIT_POLICY": "active",
        "COMPAT_RECORD": str(outcomes),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.compat.plugin", "-p", "no:cacheprovider"]
    command += ["-n", str(n_workers), "--dist=loadfile", "--timeout", TIMEOUT_S, "-m", "not slow", *chosen, *names]
    with log_file.open("w") as log:
        subprocess.run(command, cwd=TESTS, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    return dict(map(json.loads, outcomes.read_text().splitlines())) if outcomes.exists() else {}


def report(results: dict[str, dict[str, str]]) -> None:
    theirs, ours = (results[side] for side in SIDES)
    print(f"{'':<28}{'llama-server':>14}{'everwarm':>10}{'only there':>12}{'only here':>11}")
    for file in sorted({name.split("::")[0] for name in theirs}):
        there = {name for name, outcome in theirs.items() if outcome == "passed" and name.startswith(file + "::")}
        here = {name for name, outcome in ours.items() if outcome == "passed" and name.startswith(file + "::")}
        print(f"{file:<28}{len(there):>14}{len(here):>10}{len(there - here):>12}{len(here - there):>11}")
    for side in SIDES:
        print(side, dict(collections.Counter(results[side].values())))
    only_there = {
        name for name, outcome in theirs.items() if outcome == "passed" and ours.get(name, "passed") != "passed"
    }
    reasons = explained()
    print("passed there and not here:")
    for name in sorted(only_there):
        print(f"  {name}: {reasons.get(name, 'NOT EXPLAINED')}")
    for name in sorted(name for name in reasons if theirs.get(name) == ours.get(name) == "passed"):
        print(f"  {name} passes here by now: remove it from differences.toml")
    if only_there - reasons.keys():
        raise SystemExit(f"{len(only_there - reasons.keys())} of these are not in bench/compat/differences.toml")


def explained() -> dict[str, str]:
    """Why a test that passes on llama-server does not pass here, by its name."""
    rows = tomllib.loads((Path(__file__).parent / "differences.toml").read_text())["difference"]
    return {test: row["why"] for row in rows for test in row["tests"]}


if __name__ == "__main__":
    main()
