"""``python -m bench.workload NAME --seed 0 --out FILE``: write a scenario, or ``mixed``, as a trace for the simulator."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.workload.chat import to_turn
from bench.workload.scenarios import SCENARIOS, mixed, scenario
from everwarm.simulate.oracle import unavoidable_tokens
from everwarm.simulate.trace import to_line


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.workload", description="Write a seeded trace.")
    parser.add_argument("name", choices=[*SCENARIOS, "mixed"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=float, default=1.0, help="scales all lengths")
    parser.add_argument("--sessions", type=int, default=24, help="of mixed")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.name == "mixed":
        steps = mixed(given.seed, given.sessions, size=given.size)
    else:
        steps = scenario(given.name, given.seed, given.size)
    turns = [to_turn(step) for step in steps]
    given.out.write_bytes(b"".join(map(to_line, turns)))
    n_unavoidable = sum(unavoidable_tokens(turns))
    n_avoidable = sum(turn.prompt.n_tokens(turn.n_stop) for turn in turns) - n_unavoidable
    print(f"{given.out}: {len(turns)} requests, {n_avoidable:,} tokens avoidable, {n_unavoidable:,} not")


if __name__ == "__main__":
    main()
