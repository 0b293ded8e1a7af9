"""``python -m bench [NAME ...]``: run benchmarks and print Markdown. Without names, all of them."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import time

from everwarm import __version__
from everwarm.llama import abi

NAMES = (
    "loop",
    "throughput",
    "speculation",
    "pacing",
    "lookup",
    "residency",
    "restore",
    "match",
    "look",
    "store",
    "slot_files",
    "objects",
    "swap",
    "pictures",
    "templates",
    "forms",
    "http",
    "token_cost",
    "page",
    "routing",
    "overload",
    "crowd",
    "clients",
    "workspace",
)
ALONE = (
    "suite",
    "scaling",
    "traces",
    "policy",
    "volatile",
    "remote",
    "state_types",
    "packing",
    "ray",
    "last_frame",
)  # these write reports or need more: only where they are named


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Everwarm, beside llama-server.")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"any of: {', '.join(NAMES + ALONE)}")
    names = parser.parse_args().names
    unknown = [name for name in names if name not in NAMES + ALONE]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; give any of: {', '.join(NAMES + ALONE)}")
    print(f"Everwarm {__version__}, libllama {abi.BUILD}, {os.cpu_count()} cores, {platform.machine()}, ", end="")
    print(f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}: `python -m bench {' '.join(names)}`\n")
    for name in names:
        importlib.import_module(f"bench.{name}").run()
        print(flush=True)


if __name__ == "__main__":
    main()
