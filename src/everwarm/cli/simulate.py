"""``everwarm simulate``: replay a trace against policies and budgets. Parses, calls one function, prints the result."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from everwarm.config import parse_bytes, require
from everwarm.simulate.oracle import fewest_tokens, unavoidable_tokens
from everwarm.simulate.plot import Axis, line_chart
from everwarm.simulate.replay import DEFAULT_NAMES, NAMES, Cost, markdown, size_text, sweep
from everwarm.simulate.simulated_machine import KNOWN, Curves, MachineSize, parse_curves
from everwarm.simulate.trace import TraceTurn, parse

MAX_SLOTS = 256
MAX_CELLS = 1 << 30


def simulate(
    trace: Path,
    *,
    budget: str = "8GiB",
    policy: Annotated[str, Parameter(help=f"any of {', '.join(NAMES)}, separated by commas")] = ",".join(DEFAULT_NAMES),
    curves: Annotated[str, Parameter(help=f"one of {', '.join(KNOWN)}, or a JSON file")] = "27b",
    slots: int = 2,
    spares: int = 4,
    ctx_size: int = 131_072,
    disk_cache: str = "0",
    disk_gbps: float = 2.0,
    most: int | None = None,
    svg: Path | None = None,
    optimum: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Replay a trace of prompts against policies for placing and evicting checkpoints, and show what each would have read.

    Parameters
    ----------
    trace
        JSON lines: Everwarm's format (token ids or blocks), or Mooncake's (hash_ids of 512-token blocks).
    budget
        RAM for states and KV; several separated by commas, like 1GiB,4GiB,16GiB.
    slots
        How many conversations the device can hold at once.
    spares
        How many states the device can hold beside them.
    ctx_size
        How many tokens of KV the device holds.
    disk_cache
        Disk for what RAM cannot hold, like 100GiB; 0: none. fifo-32 has none.
    disk_gbps
        How fast that disk is read, in 10^9 bytes per second.
    most
        Replay only the first so many requests.
    svg
        Write a chart of the seconds by budget.
    optimum
        Also show the fewest tokens that any policy could read with that many states; for traces of few requests.
    """
    machine = _machine(slots, spares, ctx_size, disk_cache, disk_gbps)
    budgets = [parse_bytes(text) for text in budget.split(",")]
    model = KNOWN[curves] if curves in KNOWN else parse_curves(Path(curves).read_bytes())
    turns, started = _read(trace, most), time.process_time()
    costs = sweep(turns, [name.strip() for name in policy.split(",")], model, budgets, machine)
    rate = len(costs) * len(turns) / max(1e-9, time.process_time() - started)
    optima = {size: size // model.state_bytes + slots for size in budgets if optimum}
    _print(turns, costs, optima, rate)
    if svg is not None:
        svg.write_text(_chart(costs, model))


def _print(turns: list[TraceTurn], costs: list[Cost], optima: dict[int, int], rate: float) -> None:
    """``optima``: budgets of which the optimum is to be shown, with the states that fit."""
    console = Console(highlight=False, soft_wrap=True)
    n_unavoidable = sum(unavoidable_tokens(turns))
    n_prompt = sum(turn.prompt.n_tokens(turn.n_stop) for turn in turns)
    console.print(f"{len(turns):,} requests, {n_prompt:,} prompt tokens, {n_unavoidable:,} of them new\n", markup=False)
    console.print(markdown(costs), markup=False)
    for size, n in optima.items():
        console.print(f"\noptimum, {size_text(size)}, {n} states: {fewest_tokens(turns, n):,} tokens", markup=False)
    console.print(f"\n{rate:,.0f} requests simulated per second of CPU time", markup=False)


def _machine(slots: int, spares: int, ctx_size: int, disk_cache: str, disk_gbps: float) -> MachineSize:
    require(0 < slots <= MAX_SLOTS, f"slots is {slots}; give 1 to {MAX_SLOTS}")
    require(0 <= spares <= MAX_SLOTS, f"spares is {spares}; give 0 to {MAX_SLOTS}")
    require(0 < ctx_size <= MAX_CELLS, f"ctx-size is {ctx_size}; give 1 to {MAX_CELLS}")
    require(1e-3 <= disk_gbps <= 1e4, f"disk-gbps is {disk_gbps}; give 0.001 to 10000")
    return MachineSize(slots, spares, ctx_size, parse_bytes(disk_cache), 1e9 * disk_gbps)


def _read(path: Path, most: int | None) -> list[TraceTurn]:
    require(most is None or most > 0, f"most is {most}; give 1 or more")
    turns: list[TraceTurn] = []
    with path.open("rb") as lines:
        for turn in parse(lines):
            turns.append(turn)
            if len(turns) == most:
                break
    require(bool(turns), "the trace has no requests")
    return turns


def _chart(costs: list[Cost], curves: Curves) -> str:
    names = dict.fromkeys(cost.policy for cost in costs)
    lines = {name: sorted((float(c.budget_bytes), c.seconds) for c in costs if c.policy == name) for name in names}
    x = Axis("RAM for states and KV", is_log=all(cost.budget_bytes > 0 for cost in costs), show=size_text)
    return line_chart(f"{costs[0].n_requests:,} requests, curves of {curves.name}", x, Axis("seconds"), lines)
