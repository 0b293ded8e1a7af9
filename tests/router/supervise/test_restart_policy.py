"""When an engine is started again, and what is said about why it died."""

import signal

import pytest

from everwarm.memory_limits import ADDRESS_SPACE, MemoryLimit
from everwarm.router.supervise.restart_policy import (
    MAX_DEATHS,
    MOST_REQUEST_GAP_S,
    Ending,
    RestartHistory,
    RestartLimits,
    cause_of,
    explained,
)

PATIENCE = RestartLimits()


def dies(deaths: RestartHistory, n: int, at: float, *, ready_for_s: float | None = None) -> float:
    """So many lives, each ready for a while before it ends."""
    for _ in range(n):
        if ready_for_s is not None:
            deaths.ready(at)
            at += ready_for_s
        deaths.died(at)
        at += 1.0
    return at


def test_deaths_in_quick_succession_are_enough():
    deaths = RestartHistory(PATIENCE)
    dies(deaths, MAX_DEATHS - 1, 0.0, ready_for_s=4.0)
    assert not deaths.is_enough
    dies(deaths, 1, 100.0, ready_for_s=4.0)
    assert deaths.is_enough


def test_deaths_far_apart_on_an_idle_server_do_not_add_up():
    deaths = RestartHistory(PATIENCE)
    at = dies(deaths, 20 * MAX_DEATHS, 0.0, ready_for_s=PATIENCE.steady_s)
    assert deaths.n_in_row == 1 and not deaths.is_enough
    dies(deaths, MAX_DEATHS - 1, at)
    assert deaths.is_enough, "this test could not fail"


def test_an_engine_that_never_gets_ready_does_not_become_steady_by_waiting():
    deaths = RestartHistory(PATIENCE)
    for n in range(MAX_DEATHS):
        deaths.died(1000.0 * n)
    assert deaths.is_enough


def test_a_served_request_makes_everything_forgotten():
    deaths = RestartHistory(PATIENCE)
    dies(deaths, MAX_DEATHS, 0.0)
    deaths.give_up()
    deaths.forgive()
    dies(deaths, MAX_DEATHS - 1, 50.0)
    assert not deaths.is_enough and deaths.n_given_up == 0


def test_a_try_after_giving_up_is_one_life():
    deaths = RestartHistory(PATIENCE)
    dies(deaths, MAX_DEATHS, 0.0)
    deaths.give_up()
    dies(deaths, 1, 10.0, ready_for_s=1.0)
    assert deaths.is_enough


def test_waits_between_tries_grow_and_are_bounded_and_spread():
    deaths, waits = RestartHistory(PATIENCE), []
    for _ in range(200):
        deaths.give_up()
        assert deaths.retry_s(0.0) <= deaths.retry_s(0.5) <= deaths.retry_s(1.0) <= PATIENCE.most_retry_s
        waits.append(deaths.retry_s(0.5))
    assert waits[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0] and set(waits[7:]) == {60.0}
    assert deaths.retry_s(0.0) < 60.0


def test_a_request_has_it_tried_sooner_but_makes_no_storm():
    deaths = RestartHistory(PATIENCE)
    for _ in range(50):
        deaths.give_up()
        gap_s = deaths.request_gap_s(gave_reason=False)
        assert 0.0 < gap_s <= min(MOST_REQUEST_GAP_S, deaths.retry_s(0.5))
    assert gap_s == MOST_REQUEST_GAP_S == deaths.request_gap_s(gave_reason=True)
    first = RestartHistory(PATIENCE)
    first.give_up()
    assert first.request_gap_s(gave_reason=True) == 0.0, "whoever put a file right need not wait"


GROUP = MemoryLimit("the cgroup's memory.max", 220 << 20, 0)
SPACE = MemoryLimit(ADDRESS_SPACE, 500 << 20, 0)
BAD_ALLOC = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"


@pytest.mark.parametrize(
    ("ending", "cause", "message"),
    [
        (
            Ending(-9, was_oom_killed=True, limit=GROUP, needed_bytes=300 << 20),
            "memory",
            ("memory", "220 MiB", "300"),
        ),
        (Ending(-6, last_words=BAD_ALLOC, limit=SPACE), "memory", ("memory", "500 MiB (ulimit -v)")),
        (Ending(-6, last_words="GGML_ASSERT(ctx->mem_buffer != NULL) failed", limit=SPACE), "memory", ("memory",)),
        (Ending(1, last_words="...\nMemoryError"), "memory", ("memory", "this machine")),
        (Ending(1, last_words="libx.so: failed to map segment from shared object"), "memory", ("memory",)),
        (Ending(-9, "no sign of life for 6.1 s", was_oom_killed=True), "hang", ("no sign of life",)),
        (Ending(-9), "killed", ("SIGKILL", "it was killed")),
        (Ending(-6, last_words="GGML_ASSERT(x) failed", limit=GROUP), "crash", ("SIGABRT", "log")),
        (Ending(-11), "crash", ("SIGSEGV", "libllama or a driver")),
        (Ending(-int(signal.SIGBUS)), "crash", ("SIGBUS", "model file")),
        (Ending(-4), "crash", ("SIGILL", "CPU")),
        (Ending(-63), "crash", ("signal 63",)),
        (Ending(3, was_oom_killed=True), "exit", ("exit code 3",)),
        (Ending(0, last_words="MemoryError"), "exit", ("exit code 0",)),
    ],
)
def test_an_ending_is_said_in_words(ending, cause, message):
    assert cause_of(ending) == cause
    assert all(part in explained(ending) for part in message), explained(ending)
