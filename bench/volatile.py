"""Text that changes inside a message: what is read again where a prompt parts from what is known for the first time.

``python -m bench volatile`` plays the held-out set of ``bench.workload.volatile`` on Everwarm and llama-server;
``python -m bench.volatile --set tuned --before ../main/src`` another set, and beside the code of another checkout.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.measure import table
from bench.suite.play import play
from bench.suite.servers import Everwarm, LlamaServer, Runner, Setup
from bench.suite.summary import figures
from bench.workload.chat import Step
from bench.workload.volatile import HELD_OUT, TUNED, Kinds, conversations

SETS = {"tuned": TUNED, "held-out": HELD_OUT}
N_CTX, N_THREADS = 16384, 1

Row = dict[str, Any]


def run() -> None:
    _run(_parser().parse_args([]))


def main() -> None:
    _run(_parser().parse_args())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.volatile", description=__doc__)
    parser.add_argument("--set", choices=SETS, default="held-out", help="of formats and seeds")
    parser.add_argument("--before", type=Path, help="the src folder of another checkout")
    parser.add_argument("--seeds", type=int, nargs="*", help="default: those of the set")
    parser.add_argument("--alone", action="store_true", help="without llama-server")
    parser.add_argument("--ram-mib", type=int, help="what states may take; default: 8 GiB")
    return parser


def _run(given: argparse.Namespace) -> None:
    setup = Setup(N_CTX, N_THREADS, ram_mib=given.ram_mib)
    runners: list[Runner] = [Everwarm(setup)]
    if given.before is not None:
        runners.append(Everwarm(setup, "Everwarm before", given.before))
    if not given.alone:
        runners.append(LlamaServer(setup))
    kinds = SETS[given.set] if given.seeds is None else replace(SETS[given.set], seeds=tuple(given.seeds))
    played = conversations(kinds)
    result = play([step for steps in played.values() for step in steps], runners)
    seeds = ", ".join(map(str, kinds.seeds))
    _print(f"Read again: {given.set}, {len(played)} conversations, seeds {seeds}", kinds, played, result["rows"])
    for name, weight in result["weights"].items():
        grown = (weight["end"]["rss_bytes"] - weight["empty"]["rss_bytes"]) >> 20
        print(f"\n{name}: {grown} MiB more memory at the end", end="")
    print()


def _print(title: str, kinds: Kinds, played: Mapping[str, Sequence[Step]], rows: Mapping[str, Sequence[Row]]) -> None:
    """A line for each kind, over all seeds, and sums."""
    by_kind: dict[str, dict[str, list[Row]]] = {}
    at = 0
    for name, steps in played.items():
        kind = by_kind.setdefault(name.rsplit(", seed", 1)[0], {server: [] for server in rows})
        for server, all_rows in rows.items():
            kind[server] += all_rows[at : at + len(steps)]
        at += len(steps)
    lines = [_line(kind, found) for kind, found in by_kind.items()]
    for label, names in (("system prompts", kinds.blocks), ("edited results", kinds.results), ("all", by_kind)):
        summed = {server: [row for name in names for row in by_kind[name][server]] for server in rows}
        lines.append(_line(f"**{label}**", summed))
    table(title, ["", "avoidable", *(f"{server}{what}" for server in rows for what in ("", " %", " s"))], lines)


def _line(name: str, rows: Mapping[str, Sequence[Row]]) -> list[str]:
    found = {server: figures(own) for server, own in rows.items()}
    first = next(iter(found.values()))
    cells = [name, f"{first.n_avoidable:,}"]
    for server, each in found.items():
        seconds = sum(row["ms"] for row in rows[server]) / 1e3
        cells += [f"{each.n_regret:,}", f"{each.regret_percent:.1f}", f"{seconds:.1f}"]
    return cells


if __name__ == "__main__":
    main()
