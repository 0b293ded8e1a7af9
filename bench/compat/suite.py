"""llama-server's own tests against Everwarm, beside the same run on llama-server: ``make compat``.

The tests come out of the source archive of the libllama wheel and are never part of this repository. With names of files
(``python -m bench.compat.suite test_completion``) only those are run, and with ``-k=EXPRESSION`` only some of their tests;
with ``--only=everwarm`` the outcomes of llama-server are those of the last run. Tests that fail are run again, each with
servers of its own: see ``plugin``.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "compat"
TESTS = FOLDER / "tools" / "server" / "tests"
SIDES = ("llama-server", "everwarm")
TIMEOUT_S = "90"  # of one test, with the start of its servers


def main() -> None:
    only = [arg.removeprefix("--only=") for arg in sys.argv[1:] if arg.startswith("--only=")]
    files = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
    known = FOLDER / "results.json"
    results = {side: {} for side in SIDES} | (json.loads(known.read_text()) if known.exists() else {})
    chosen = [arg for arg in sys.argv[1:] if arg.startswith("-k=")]
    for side in only or SIDES:
        results[side] |= run(side, [f"unit/{file}.py" for file in files] or ["unit"], chosen)
    known.write_text(json.dumps(results, indent=1))
    report({side: {k: v for k, v in found.items() if _is_of(k, files)} for side, found in results.items()})


def _is_of(name: str, files: list[str]) -> bool:
    return not files or name.split("::")[0] in files


def run(side: str, names: list[str], chosen: list[str]) -> dict[str, str]:
    """The outcome of every test."""
    launcher = FOLDER / f"run-{side}"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m bench.compat.launch {side} "$@"\n')
    launcher.chmod(0o755)
    print(f"{side} …", flush=True)
    found = _outcomes(side, [*chosen, *names], {})
    again = [_node(name) for name, outcome in found.items() if outcome == "failed"]
    if again:
        print(f"{side}: {len(again)} of {len(found)} again, with servers of their own …", flush=True)
        found |= _outcomes(side, again, {"COMPAT_FRESH": "1"})
    return found


def _outcomes(side: str, which: list[str], more: dict[str, str]) -> dict[str, str]:
    environment = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(FOLDER / f"run-{side}"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}",
        "PYTHONDONTWRITEBYTECODE": "1",
        **more,
    }
    report = FOLDER / f"{side}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.compat.plugin", "-p", "no:cacheprovider", "-n", "2"]
    command += ["--dist=loadfile", "--timeout", TIMEOUT_S, f"--junitxml={report}", "-m", "not slow", *which]
    with (FOLDER / f"{side}{'-again' if more else ''}.log").open("w") as log:
        subprocess.run(command, cwd=TESTS, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    return {
        f"{case.get('classname', '').removeprefix('unit.')}::{case.get('name')}": _outcome(case)
        for case in ElementTree.parse(report).iter("testcase")
    }


def _node(name: str) -> str:
    """A test as pytest takes it on its command line."""
    file, _, test = name.partition("::")
    return f"unit/{file}.py::{test}"


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "skipped" if "skipped" in kinds else "failed" if kinds & {"failure", "error"} else "passed"


def report(results: dict[str, dict[str, str]]) -> None:
    theirs, ours = (results[side] for side in SIDES)
    print(f"{'':<28}{'llama-server':>14}{'everwarm':>10}{'only there':>12}{'only here':>11}")
    for file in sorted({name.split("::")[0] for name in theirs}):
        there = {name for name, outcome in theirs.items() if outcome == "passed" and name.startswith(file + "::")}
        here = {name for name, outcome in ours.items() if outcome == "passed" and name.startswith(file + "::")}
        print(f"{file:<28}{len(there):>14}{len(here):>10}{len(there - here):>12}{len(here - there):>11}")
    for side in SIDES:
        print(side, dict(collections.Counter(results[side].values())))
    print("passed there and not here:")
    for name in sorted(name for name, outcome in theirs.items() if outcome == "passed" and ours.get(name) != "passed"):
        print(" ", name)


if __name__ == "__main__":
    main()
