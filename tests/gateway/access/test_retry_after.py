"""Whoever is refused is told when to come back: from what is ahead and from the speed that was measured."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.engine.core import Core
from everwarm.engine.process.messages import Backlog
from everwarm.engine.scheduling.admission import backlog_of
from everwarm.engine.settings import EngineSettings
from everwarm.engine.stats import Speed
from everwarm.errors import EngineStopped, Overloaded
from everwarm.gateway.access.limits import (
    LEAST_S,
    MOST_S,
    AdmissionLimits,
    PendingRetries,
    all_done_s,
    next_place_s,
    retry_after_s,
    with_unseen,
)
from everwarm.gateway.access.middleware import error_response
from everwarm.gateway.settings import ServerSettings
from everwarm.router.supervise.supervisor import Supervisor
from support.drive import open_core, run, submit, text

numbers = st.floats(0, 1e6)
speeds = st.floats(1e-5, 1.0)
counts = st.integers(0, 64)
backlogs = st.builds(Backlog, counts, counts, counts, numbers, numbers, numbers, numbers, numbers, speeds, speeds)
# 2 of 4 run: 1,000 tokens to read at 1 ms each, 1,600 to write at 25 ms for each of all
BUSY = Backlog(2, 2, 2, 500, 1000, 1600, 0, 400, 0.001, 0.025)
IDLE = Backlog(2, 0, 0, 500, 0, 0, 0, 0, 0.001, 0.025)


def test_the_first_place_is_free_when_the_running_request_with_least_left_has_ended():
    assert next_place_s(BUSY) == pytest.approx(400 * 0.025 * 2)
    assert retry_after_s([BUSY], 4, 0, 0) == 20


def test_whoever_was_told_before_stands_before():
    assert all_done_s(BUSY) == pytest.approx(1 + 40)
    assert [retry_after_s([BUSY], 4, 0, n) for n in (3, 7, 11)] == [41, 82, 123]
    assert retry_after_s([BUSY], 4, 0, 4000) == 164  # who never comes back costs nobody more than four rounds


def test_what_the_engine_has_not_spoken_of_yet_counts_as_well():
    seen = with_unseen(IDLE, 4, 250)
    assert (seen.n_running, seen.n_next_read, seen.n_next_write) == (2, 250, 500)
    assert (seen.n_to_read, seen.n_to_write) == (1000, 2000)
    assert retry_after_s([IDLE], 4, 1000, 0) == 26  # 250 tokens to read, 500 to write beside another
    assert with_unseen(BUSY, 0, 250) == BUSY


@given(st.lists(backlogs, max_size=3), st.integers(0, 300), numbers, st.integers(0, 10_000), st.integers(0, 100))
def test_it_is_whole_bounded_and_later_for_whoever_comes_later(found, n_admitted, n_tokens, n_pending, more):
    first, later = (retry_after_s(found, n_admitted, n_tokens, n) for n in (n_pending, n_pending + more))
    assert LEAST_S <= first <= later <= MOST_S and isinstance(first, int)
    if not found:
        assert first == LEAST_S


def test_of_many_models_the_busiest_counts():
    assert retry_after_s([IDLE, BUSY], 4, 0, 0) == 20 == retry_after_s([BUSY, IDLE], 4, 0, 0)


def test_pending_retries_are_counted_until_they_are_due_and_up_to_a_maximum():
    pending = PendingRetries(most=3)
    for wait_s in (5, 9, 7, 100):
        pending.add(0.0, wait_s)
    assert [pending.n_ahead(now) for now in (0.0, 5.0, 8.0, 9.0)] == [3, 2, 2, 0]


def test_a_refusal_says_how_long_and_the_next_one_says_more():
    limits = AdmissionLimits(ServerSettings(max_requests=2), lambda: [BUSY])
    waits = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(limits.admitted(100))
        for _ in range(3):
            with pytest.raises(Overloaded) as refused, limits.admitted(100):
                pass
            reply = error_response(refused.value, "req_1", "/v1/chat/completions")
            waits.append(int(reply.headers["retry-after"]))
            assert reply.status_code == 429 and f"in about {waits[-1]} s" in str(refused.value)
    assert waits == [21, 41, 62]
    with limits.admitted(100):
        pass


def ahead_of(core: Core) -> Backlog:
    return backlog_of(core.slots, core.queue, core.speed, core.counts.new_share)


def test_an_engine_counts_what_is_ahead():
    with open_core(n_slots=2, n_ctx=2048, width=64) as core:
        idle = ahead_of(core)
        assert (idle.n_running, idle.n_to_read, idle.n_to_write, all_done_s(idle)) == (0, 0, 0, 0)
        for i in range(4):
            submit(core, text(10 + i, 100), 50)
        before = ahead_of(core)
        assert (before.n_running, before.n_to_read, before.n_to_write) == (0, 400, 200)
        for _ in range(3):
            core.step()
        ahead = ahead_of(core)
        assert ahead.n_running == 2 and 200 <= ahead.n_to_read < 400 and 0 < ahead.n_next_write <= 50
        assert ahead.n_to_write < 200 and ahead.read_s > 0


def test_replies_are_expected_to_be_as_long_as_they_were():
    with open_core(n_slots=1, width=64) as core:
        run(core, text(1, 20), 10)
        submit(core, text(2, 20), 1000, ignore_eos=False)  # it may write so much; others did not
        assert ahead_of(core).n_to_write == 10
        submit(core, text(3, 20), 1000, ignore_eos=True)  # nothing else ends it
        assert ahead_of(core).n_to_write == 1010
        assert core.speed.n_reply == 10


def test_the_first_measurement_replaces_the_guess():
    speed = Speed()
    speed.learn(4, 2.0)
    assert speed.write_s == 0.5
    speed.learn(1, 1.0)
    assert 0.5 < speed.write_s < 1.0
    speed.learn(100, 25.0)
    assert speed.seconds_per_token == 0.25, "many tokens are of a prompt"


def test_the_short_steps_at_the_end_of_a_prompt_hardly_change_how_fast_prompts_are_read():
    """A step has a cost of its own beside its tokens: of a prompt's last pieces each token takes long."""
    speed = Speed()
    for _ in range(5):
        speed.learn(400, 0.4)
    for _ in range(2):
        speed.learn(40, 0.1)
    assert 0.001 < speed.seconds_per_token < 0.0012
    for _ in range(20):
        speed.learn(400, 0.8)
    assert speed.seconds_per_token > 0.0019, "the machine became slower, and that is learned"


@pytest.mark.parametrize(("load_s", "expected"), [(None, None), (0.2, 1), (41.3, 42)])
def test_an_engine_that_restarts_is_back_after_as_long_as_its_last_load_took(load_s, expected):
    async def ask() -> int | None:
        supervisor = Supervisor("model.gguf", EngineSettings())
        supervisor.load_s = load_s
        assert supervisor.back_in_s is None  # it is stopped: nobody knows
        supervisor.state = "restarting"
        back_in_s = supervisor.back_in_s
        supervisor.forget()
        return back_in_s

    error = EngineStopped("the engine is being restarted", asyncio.run(ask()))
    assert error.retry_after_s == expected
    assert error_response(error, "req_1", "/").headers["retry-after"] == str(expected or 2)
