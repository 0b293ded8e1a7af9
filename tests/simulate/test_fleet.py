"""Simulated fleets: the model does what it says, and the cluster's own choice is worth its while."""

import pytest
from bench.workload.arrivals import arrivals_of

from everwarm.simulate.fleet import Arrival, Machine, SimulatedReplica, simulate

SLOW = Machine(seconds_per_token=0.01, n_slots=2, memory_tokens=1000)


def arrival(at_s: float, *keys: int, reply_s: float = 1.0) -> Arrival:
    return Arrival(at_s, 0, keys, tuple(100 * (i + 1) for i in range(len(keys))), reply_s)


def test_a_replica_reads_what_is_new_and_one_at_a_time() -> None:
    replica = SimulatedReplica(SLOW)
    assert replica.serve(arrival(0, 1, 2)) == (0, pytest.approx(2.0))
    assert replica.serve(arrival(1, 1, 2, 3)) == (200, pytest.approx(2.0)), "one second of waiting, one of reading"
    assert replica.serve(arrival(10, 9)) == (0, pytest.approx(1.0)), "nobody is before it"


def test_a_replica_has_so_many_slots() -> None:
    replica = SimulatedReplica(SLOW)
    for _ in range(2):
        replica.serve(arrival(0, 1, reply_s=50))
    assert replica.n_running(5) == 2
    assert replica.serve(arrival(5, 1))[1] > 40


def test_a_full_memory_forgets_what_was_unused_for_longest() -> None:
    replica = SimulatedReplica(SLOW)
    for i in range(12):
        replica.serve(arrival(100 * i, 1000 + i))
    assert replica.n_reusable(arrival(0, 1000)) == 0 and replica.n_reusable(arrival(0, 1011)) == 100


def test_the_same_arrivals_cost_the_same() -> None:
    arrivals = arrivals_of(2, seed=1, minutes=2, sessions_per_replica=8)
    assert arrivals_of(2, seed=1, minutes=2, sessions_per_replica=8) == arrivals
    for routing in ("warm", "random"):
        assert simulate(arrivals, routing, 2, Machine()) == simulate(arrivals, routing, 2, Machine())


def test_warm_routing_reads_less_than_any_that_does_not_look() -> None:
    arrivals = arrivals_of(8, seed=3, minutes=10, sessions_per_replica=20)
    found = {name: simulate(arrivals, name, 8, Machine()) for name in ("warm", "session", "round robin", "random")}
    assert found["warm"].hit_rate > found["session"].hit_rate > found["random"].hit_rate
    assert found["warm"].median_s < found["round robin"].median_s
    assert simulate(arrivals, "warm", 8, Machine(), n_routers=4).hit_rate > found["session"].hit_rate
