"""Simulates many replicas: which one a request goes to, what is read there, and how long the first token takes.

A replica reads one prompt at a time and writes as many replies as it has slots; it forgets what was unused for longest
when its memory is full. What routers know of replicas is as old as the last publication, except for what they sent
themselves. ``warm`` is ``router.replica_score``, the code that the cluster runs. Pure: the dice are a seeded generator.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from everwarm.router.replica_score import Holdings, ReplicaLoad, choose

PUBLISHED_EVERY_S = 1.0
ROUTINGS = ("warm", "session", "round robin", "random")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: ``keys[i]`` stands for its first ``ends[i]`` tokens."""

    at_s: float
    session: int
    keys: tuple[int, ...]
    ends: tuple[int, ...]
    reply_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What every replica is. ``memory_tokens``: how many tokens it can keep, in all its tiers."""

    seconds_per_token: float = 3.5e-4
    n_slots: int = 8
    memory_tokens: int = 1_000_000


@dataclass(slots=True)
class SimulatedReplica:
    machine: Machine
    busy_until: float = 0.0
    read_s: float = 0.0
    n_served: int = 0
    version: int = 0  # of what it has kept
    _kept: OrderedDict[int, int] = field(default_factory=OrderedDict)
    _n_kept: int = 0
    _slots: list[float] = field(default_factory=list)

    def n_reusable(self, arrival: Arrival) -> int:
        return max((end for key, end in zip(arrival.keys, arrival.ends, strict=True) if key in self._kept), default=0)

    def serve(self, arrival: Arrival) -> tuple[int, float]:
        """How many tokens were reused, and the seconds until the first token."""
        slot = heapq.heappop(self._slots) if len(self._slots) == self.machine.n_slots else 0.0
        start = max(arrival.at_s, self.busy_until, slot)
        n_reused = min(self.n_reusable(arrival), arrival.ends[-1] - 1)
        read_s = (arrival.ends[-1] - n_reused) * self.machine.seconds_per_token
        self.busy_until = start + read_s
        heapq.heappush(self._slots, self.busy_until + arrival.reply_s)
        self._keep(arrival)
        self.read_s += read_s
        self.n_served += 1
        return n_reused, self.busy_until - arrival.at_s

    def n_running(self, now: float) -> int:
        return sum(until > now for until in self._slots)

    def keys(self) -> list[int]:
        return list(self._kept)

    def _keep(self, arrival: Arrival) -> None:
        self.version += 1
        for key, start, end in zip(arrival.keys, (0, *arrival.ends), arrival.ends, strict=False):
            self._n_kept += 0 if key in self._kept else end - start
            self._kept[key] = self._kept.pop(key, end - start)
        while self._n_kept > self.machine.memory_tokens:
            self._n_kept -= self._kept.popitem(last=False)[1]


@dataclass(frozen=True, slots=True)
class FleetResult:
    """``hit_rate``: tokens not read of all. ``imbalance``: the busiest replica's reading over the mean."""

    routing: str
    n_replicas: int
    hit_rate: float
    imbalance: float
    median_s: float
    p95_s: float


Pick = Callable[[Arrival], int]


def simulate(
    arrivals: Sequence[Arrival], routing: str, n_replicas: int, machine: Machine, *, n_routers: int = 1, seed: int = 0
) -> FleetResult:
    replicas = [SimulatedReplica(machine) for _ in range(n_replicas)]
    dice = np.random.default_rng(seed)
    picks = [_pick(routing, replicas, dice) for _ in range(n_routers)]
    n_tokens = n_reused = 0
    firsts = []
    for i, arrival in enumerate(arrivals):
        reused, first_s = replicas[picks[i % n_routers](arrival)].serve(arrival)
        n_tokens = n_tokens + arrival.ends[-1]
        n_reused = n_reused + reused
        firsts.append(first_s)
    reading = [replica.read_s for replica in replicas]
    imbalance = max(reading) / max(1e-9, sum(reading) / n_replicas)
    return FleetResult(
        routing,
        n_replicas,
        n_reused / max(1, n_tokens),
        imbalance,
        float(np.median(firsts)),
        float(np.quantile(firsts, 0.95)),
    )


def _pick(routing: str, replicas: list[SimulatedReplica], dice: np.random.Generator) -> Pick:
    n = len(replicas)
    turn = [0]

    def next_one(_arrival: Arrival) -> int:
        turn[0] += 1
        return turn[0] % n

    picks: dict[str, Pick] = {
        "random": lambda _arrival: int(dice.integers(n)),
        "round robin": next_one,
        "session": lambda arrival: arrival.session * 2_654_435_761 % (1 << 32) * n >> 32,
        "warm": WarmPick(replicas, dice),
    }
    return picks[routing]


class WarmPick:
    """As the cluster's router does it: what it sent is known at once, everything else when it was published."""

    def __init__(self, replicas: list[SimulatedReplica], dice: np.random.Generator) -> None:
        self._replicas = replicas
        self._dice = dice
        self._names = [str(i) for i in range(len(replicas))]
        self._holdings = Holdings()
        self._busy_until = [0.0] * len(replicas)
        self._versions = [-1] * len(replicas)
        self._published = -PUBLISHED_EVERY_S

    def __call__(self, arrival: Arrival) -> int:
        now = arrival.at_s
        if now - self._published >= PUBLISHED_EVERY_S:
            self._hear(now)
        reach = self._holdings.reach(arrival.keys, arrival.ends, self._names)
        loads = [self._load(i, now) for i in range(len(self._replicas))]
        i = choose(reach, arrival.ends[-1], loads, (self._dice.random(), self._dice.random()))
        self._holdings.add(self._names[i], arrival.keys)
        read_s = (arrival.ends[-1] - reach[i]) * loads[i].seconds_per_byte
        self._busy_until[i] = max(now, self._busy_until[i]) + read_s
        return i

    def _hear(self, now: float) -> None:
        self._published = now
        for i, replica in enumerate(self._replicas):
            self._busy_until[i] = replica.busy_until
            if self._versions[i] != replica.version:
                self._versions[i] = replica.version
                self._holdings.replace(self._names[i], replica.keys())

    def _load(self, i: int, now: float) -> ReplicaLoad:
        replica = self._replicas[i]
        machine = replica.machine
        return ReplicaLoad(
            busy_s=max(0.0, self._busy_until[i] - now),
            n_running=replica.n_running(now),
            n_slots=machine.n_slots,
            seconds_per_byte=machine.seconds_per_token,
            reply_s=2.0,
        )
