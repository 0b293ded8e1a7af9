"""Which replica is asked: reuse against waiting, both in seconds."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.router.replica_score import Holdings, ReadingQueue, ReplicaLoad, choose

FAST = ReplicaLoad(n_slots=4, seconds_per_byte=1e-3, reply_s=1.0)


def busy(seconds: float) -> ReplicaLoad:
    return ReplicaLoad(busy_s=seconds, n_slots=4, seconds_per_byte=1e-3, reply_s=1.0)


def test_the_replica_that_has_read_most_is_asked() -> None:
    held = [0, 900, 500]
    index = choose(held, 1000, [FAST] * 3, (0.0, 0.0))
    assert (index, held[index]) == (1, 900)
    assert FAST.first_token_s(1000 - held[index]) == pytest.approx(0.1)


@pytest.mark.parametrize(("wait_s", "index"), [(0.39, 0), (0.41, 1)])
def test_waiting_longer_than_reading_again_is_not_worth_it(wait_s: float, index: int) -> None:
    assert choose([500, 100], 1000, [busy(wait_s), FAST], (0.9, 0.0)) == index


def test_full_slots_cost_the_time_until_one_is_free() -> None:
    full = ReplicaLoad(n_running=4, n_slots=4, seconds_per_byte=1e-3, reply_s=8.0)
    assert full.wait_s == pytest.approx(2.0) and FAST.wait_s == 0
    assert choose([1000, 0], 1000, [full, FAST], (0.0, 0.0)) == 1


@given(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True), st.lists(st.floats(0, 9), min_size=1))
def test_where_nobody_has_anything_the_emptier_of_two_is_asked(a: float, b: float, waits: list[float]) -> None:
    index = choose([0] * len(waits), 100, [busy(s) for s in waits], (a, b))
    assert sum(wait >= waits[index] for wait in waits) >= min(2, len(waits))


def test_a_popular_beginning_does_not_pile_up() -> None:
    """64 requests at once, all with the same 10,000 bytes and one replica that has them."""
    n, until, held = 8, [0.0] * 8, [10_000] + [0] * 7
    asked: Counter[int] = Counter()
    for i in range(64):
        loads = [ReplicaLoad(until[r], 0, 64, 1e-3, 1.0) for r in range(n)]
        index = choose(held, 10_500, loads, (i / 64, 0.5))
        until[index] += (10_500 - held[index]) * loads[index].seconds_per_byte
        held[index] = 10_000
        asked[index] += 1
    assert len(asked) > 1 and max(asked.values()) < 40
    assert max(until) < 64 * 0.5, "sooner than one replica alone"


def test_reading_that_has_ended_is_not_waited_for() -> None:
    """A conversation restored from the shared store is read sooner than its bytes say; its next turn stays with it."""
    queue = ReadingQueue()
    queue.send(0.0, "a", 0.4)
    queue.send(0.1, "b", 0.2)
    assert queue.busy_s(0.1) == pytest.approx(0.5)
    queue.end("b")
    assert queue.busy_s(0.1) == pytest.approx(0.3)
    queue.end("a")
    assert queue.busy_s(0.1) == 0


def test_a_publication_may_be_a_period_old() -> None:
    queue = ReadingQueue()
    queue.publish(10.0, 0.8, period_s=1.0)
    assert queue.busy_s(10.0) == 0, "it may all be over"
    queue.publish(10.0, 3.0, period_s=1.0)
    assert queue.busy_s(10.0) == pytest.approx(2.0) and queue.busy_s(12.5) == 0
    queue.send(10.0, "a", 0.5)
    assert queue.busy_s(10.0) == pytest.approx(2.5), "it is read after what is there"


def test_ties_are_broken_by_the_dice() -> None:
    assert {choose([500] * 4, 1000, [FAST] * 4, (i / 4, 0.0)) for i in range(4)} == {0, 1, 2, 3}


def test_reach_is_the_longest_prefix_that_each_has() -> None:
    holdings = Holdings()
    holdings.add("a", [1, 2, 3])
    holdings.add("b", [1])
    holdings.add("c", [9])
    assert holdings.reach([1, 2, 3, 4], [10, 20, 30, 40], ["c", "b", "a", "new"]) == [0, 10, 30, 0]
    holdings.replace("a", [1, 2])
    assert holdings.reach([1, 2, 3, 4], [10, 20, 30, 40], ["a"]) == [20]
    assert holdings.holders(1) == ["a", "b"]
    holdings.drop("a")
    assert holdings.holders(1) == ["b"] and holdings.names == {"b", "c"}


@given(st.lists(st.tuples(st.sampled_from("arrd"), st.sampled_from("xyz"), st.sets(st.integers(0, 9)))))
def test_both_views_of_holdings_agree(steps: list[tuple[str, str, set[int]]]) -> None:
    holdings, right = Holdings(), dict[str, set[int]]()
    for what, name, keys in steps:
        if what == "a":
            holdings.add(name, keys)
            right[name] = right.get(name, set()) | keys
        elif what == "r":
            holdings.replace(name, keys)
            right[name] = set(keys)
        else:
            holdings.drop(name)
            right.pop(name, None)
        holdings.check()
    names, keys = sorted(right), list(range(10))
    wanted = [max((key + 1 for key in right[name]), default=0) for name in names]
    assert holdings.reach(keys, [key + 1 for key in keys], names) == wanted
