"""Which replica gets a request: simulated fleets of 2 to 64 replicas, and what one decision takes.

Wanted: at most 200 µs for a decision among 64 replicas with 10,000 keys each. ``python -m bench.routing FILE.svg`` also
writes a chart.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

from bench.measure import table
from bench.workload.arrivals import arrivals_of
from everwarm.gateway.chat.prefix_keys import prefixes_of
from everwarm.router.replica_score import Holdings, ReplicaLoad, choose
from everwarm.simulate.fleet import ROUTINGS, FleetResult, Machine, simulate
from everwarm.simulate.plot import Axis, line_chart

SIZES = (2, 4, 8, 16, 32, 64)
N_REPLICAS, N_KEYS, N_BOUNDARIES = 64, 10_000, 64


def run() -> None:
    _fleets()
    print()
    _decision()


def _fleets() -> list[FleetResult]:
    results = []
    for n in SIZES:
        arrivals = arrivals_of(n, seed=0)
        results += [simulate(arrivals, routing, n, Machine()) for routing in ROUTINGS]
        results.append(_renamed(simulate(arrivals, "warm", n, Machine(), n_routers=4)))
    head = ("replicas", "routing", "hit rate", "imbalance", "median", "p95")
    table(
        "Simulated fleets: first tokens of a 27B hybrid, 60 sessions per replica in 30 minutes",
        head,
        map(_row, results),
    )
    return results


def _renamed(result: FleetResult) -> FleetResult:
    return FleetResult("warm, 4 ingresses", *(getattr(result, name) for name in FleetResult.__slots__[1:]))


def _row(result: FleetResult) -> tuple[str, ...]:
    shown = (
        f"{100 * result.hit_rate:.1f} %",
        f"{result.imbalance:.2f}",
        f"{result.median_s:.2f} s",
        f"{result.p95_s:.2f} s",
    )
    return f"{result.n_replicas}", result.routing, *shown


def _decision() -> None:
    rng = random.Random(0)
    names, shared = [f"r{i}" for i in range(N_REPLICAS)], [rng.getrandbits(64) for _ in range(N_KEYS // 5)]
    held = {name: shared + [rng.getrandbits(64) for _ in range(N_KEYS - len(shared))] for name in names}
    holdings, loads = Holdings(), [ReplicaLoad(rng.random(), rng.randrange(8), 8) for _ in names]
    for name in names:
        holdings.replace(name, held[name])
    ends = [400 * (i + 1) for i in range(N_BOUNDARIES)]
    taken = []
    for _ in range(5000):
        keys = [*shared[:8], *rng.sample(held[rng.choice(names)], N_BOUNDARIES - 8)]
        dice = rng.random(), rng.random()
        began = time.perf_counter()
        choose(holdings.reach(keys, ends, names), ends[-1], loads, dice)
        taken.append(time.perf_counter() - began)
    began = time.perf_counter()
    holdings.replace(names[0], held[names[0]][100:] + [rng.getrandbits(64) for _ in range(100)])
    published = time.perf_counter() - began
    messages = [{"role": "user", "content": "word " * 100} for _ in range(N_BOUNDARIES)]
    began = time.perf_counter()
    for _ in range(100):
        prefixes_of({"messages": messages})
    hashed = (time.perf_counter() - began) / 100
    rows = [
        (
            f"decision, {N_REPLICAS} × {N_KEYS:,} keys, {N_BOUNDARIES} boundaries",
            f"{1e6 * statistics.median(taken):.0f} µs",
        ),
        ("the same, 95th percentile", f"{1e6 * sorted(taken)[int(0.95 * len(taken))]:.0f} µs"),
        ("processing what one replica published", f"{1e3 * published:.1f} ms"),
        (f"keys of a request with {N_BOUNDARIES} messages, 32 kB", f"{1e6 * hashed:.0f} µs"),
    ]
    table("Time of one decision", ("", "time"), rows)


def chart(results: list[FleetResult]) -> str:
    names = dict.fromkeys(result.routing for result in results)
    lines = {n: [(r.n_replicas, r.p95_s) for r in results if r.routing == n] for n in names}
    x, y = Axis("replicas", is_log=True), Axis("seconds, p95", is_log=True)
    return line_chart("Time to first token, 27B hybrid, simulated", x, y, lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(chart(_fleets()))
    print()
    _decision()
