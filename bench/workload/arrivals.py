"""Arrivals for a fleet: sessions that share system prompts, come back after a while, and now and then a fan-out.

Only lengths and keys, no text: thousands of sessions take a moment. The same seed gives the same arrivals.
"""

from __future__ import annotations

import numpy as np

from everwarm.simulate.fleet import Arrival

N_KINDS = 12  # of system prompts with tools
FAN_OUT = 48  # requests that share a long document, all at once


def arrivals_of(n_replicas: int, seed: int, *, minutes: float = 30.0, sessions_per_replica: int = 60) -> list[Arrival]:
    """As many sessions per replica whatever the size, so that all sizes are equally busy."""
    rng = np.random.default_rng([seed, n_replicas])
    kinds = [(_key(rng), int(rng.integers(3_000, 12_000))) for _ in range(N_KINDS)]
    popularity = 1 / np.arange(1, N_KINDS + 1)
    arrivals: list[Arrival] = []
    for session in range(sessions_per_replica * n_replicas):
        kind = kinds[int(rng.choice(N_KINDS, p=popularity / popularity.sum()))]
        arrivals += _session(rng, session, kind, 60 * minutes * float(rng.random()))
    for i in range(max(1, n_replicas // 4)):
        kind = kinds[i % N_KINDS]
        arrivals += _fan_out(rng, 1_000_000 + FAN_OUT * i, kind, 60 * minutes * float(rng.random()))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _session(rng: np.random.Generator, session: int, kind: tuple[int, int], now: float) -> list[Arrival]:
    keys, ends, found = [kind[0]], [kind[1]], []
    for _ in range(1 + int(rng.geometric(0.12))):
        keys.append(_key(rng))
        ends.append(ends[-1] + int(rng.lognormal(5.5, 1.2)) + 20)
        reply = 40 + int(rng.lognormal(4.6, 0.7))
        found.append(Arrival(now, session, tuple(keys), tuple(ends), 0.016 * reply))
        keys.append(_key(rng))
        ends.append(ends[-1] + reply)
        now += 5.0 + float(rng.exponential(40.0))
    return found


def _fan_out(rng: np.random.Generator, session: int, kind: tuple[int, int], now: float) -> list[Arrival]:
    """An agent that starts many of its kind at once, on the same long beginning."""
    document, end = _key(rng), kind[1] + int(rng.integers(10_000, 30_000))
    return [
        Arrival(now + 0.02 * i, session + i, (kind[0], document, _key(rng)), (kind[1], end, end + 200), 2.0)
        for i in range(FAN_OUT)
    ]


def _key(rng: np.random.Generator) -> int:
    return int(rng.integers(1, 1 << 62))
