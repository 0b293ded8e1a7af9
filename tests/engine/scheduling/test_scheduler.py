"""Who may decode how many tokens: replies first, then prompts, the shortest first, and the first come always some."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.engine.scheduling.scheduler import ELDEST_SHARE, Budget, Grant, Lane, fit, next_to_suspend, plan
from support.campaign import by_chance

readers = st.builds(Lane, slot=st.just(0), n_wanted=st.integers(1, 3000), is_writing=st.just(False))
writers = st.builds(Lane, slot=st.just(0), n_wanted=st.integers(1, 5), is_writing=st.just(True))
lanes = st.lists(readers | writers, max_size=16).map(
    lambda found: [Lane(i, lane.n_wanted, lane.is_writing, lane.n_wanted, i) for i, lane in enumerate(found)]
)
budgets = st.builds(Budget, n_step=st.integers(1, 2048), n_beside=st.integers(1, 600))


def sizes(grants: list[Grant]) -> dict[int, int]:
    return {grant.slot: grant.n_tokens for grant in grants}


@by_chance(100, 4000)
@given(lanes, budgets)
def test_grants_stay_within_the_budget_and_within_what_is_wanted(found, budget):
    grants = sizes(plan(found, budget))
    wanted = {lane.slot: lane.n_wanted for lane in found}
    assert sum(grants.values()) <= budget.n_step
    assert all(1 <= n <= wanted[slot] for slot, n in grants.items())
    if any(lane.is_writing for lane in found):
        assert sum(grants.get(lane.slot, 0) for lane in found if not lane.is_writing) <= budget.n_beside


@by_chance(100, 4000)
@given(lanes, budgets)
def test_every_reply_gets_exactly_one_token_and_comes_first(found, budget):
    writing = [lane.slot for lane in found if lane.is_writing][: budget.n_step]
    grants = plan(found, budget)
    assert [(grant.slot, grant.n_tokens) for grant in grants[: len(writing)]] == [(slot, 1) for slot in writing]


@by_chance(100, 4000)
@given(lanes, budgets)
def test_somebody_always_moves(found, budget):
    assert bool(plan(found, budget)) == bool(found)


def room_for_prompts(found: list[Lane], budget: Budget) -> int:
    n_writing = sum(lane.is_writing for lane in found)
    room = max(0, budget.n_step - n_writing)
    return min(room, budget.n_beside) if n_writing else room


@by_chance(100, 4000)
@given(lanes, budgets)
def test_the_prompt_that_was_admitted_first_always_gets_its_share(found, budget):
    reading = [lane for lane in found if not lane.is_writing]
    room = room_for_prompts(found, budget)
    if reading and room:
        share = sizes(plan(found, budget))[reading[0].slot]
        assert share >= min(reading[0].n_wanted, -(-room // ELDEST_SHARE))


@by_chance(100, 4000)
@given(lanes, budgets)
def test_prompts_are_read_one_after_the_other_and_nothing_wanted_is_left_lying(found, budget):
    """Whoever gets something, all that have less to read got all they want, but for the share of the first."""
    reading = [lane for lane in found if not lane.is_writing]
    grants = sizes(plan(found, budget))
    room = room_for_prompts(found, budget)
    assert sum(grants.get(lane.slot, 0) for lane in reading) == min(room, sum(lane.n_wanted for lane in reading))
    order = sorted(reading, key=lambda lane: (lane.n_left, lane.admitted))
    served = [lane for lane in order if lane.slot in grants and lane.slot != reading[0].slot]
    for lane in served:
        shorter = order[: order.index(lane)]
        assert all(grants.get(other.slot, 0) == other.n_wanted for other in shorter)


@by_chance(30, 1000)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), budgets)
def test_every_prompt_is_read_in_the_end(prompts, budget):
    left = dict(enumerate(prompts))
    for _ in range(sum(prompts) + 1):
        for grant in plan([Lane(i, n, False) for i, n in left.items() if n], budget):
            left[grant.slot] -= grant.n_tokens
    assert not any(left.values())


def played(prompts: list[int], budget: Budget) -> list[int]:
    """In which step each prompt is read."""
    left, done = dict(enumerate(prompts)), [0] * len(prompts)
    for step in range(1, 10_000):
        for grant in plan([Lane(i, n, False, n, i) for i, n in left.items()], budget):
            left[grant.slot] -= grant.n_tokens
        for i in [i for i, n in left.items() if n <= 0]:
            del left[i]
            done[i] = step
        if not left:
            break
    return done


def test_equal_prompts_are_done_one_after_the_other_and_a_short_one_at_once():
    assert played([4700] * 6, Budget(512, 128)) == [10, 19, 28, 37, 46, 56]
    assert played([4700, 4700, 4700, 20], Budget(512, 128))[-1] == 1


def test_the_control_even_shares_would_end_all_of_them_at_the_end():
    even = [-(-4700 // (512 // 6))] * 6
    assert even == [56] * 6 and sum(played([4700] * 6, Budget(512, 128))) < 0.65 * sum(even)


def test_a_long_prompt_is_read_although_short_ones_keep_coming():
    n_left, n_steps = 4096, 0
    while n_left > 0:
        found = [Lane(0, n_left, False, n_left, 0), *(Lane(i, 500, False, 500, n_steps + i) for i in range(1, 5))]
        n_left -= sizes(plan(found, Budget(512, 128)))[0]
        n_steps += 1
    assert 28 <= n_steps <= 4096 * ELDEST_SHARE // 512


def test_priority_comes_before_length():
    found = [Lane(0, 50, False, 50, 2, priority=1), Lane(1, 3000, False, 3000, 1)]
    assert sizes(plan(found, Budget(512, 128))) == {1: 512}


@pytest.mark.parametrize(("per_token_s", "expected"), [(1e-3, 50), (1e-9, 512), (1.0, 8)])
def test_a_step_beside_replies_takes_as_long_as_it_should(per_token_s, expected):
    assert Budget(512, 128).within(0.05, per_token_s) == Budget(512, expected)
    assert Budget(512, 128).within(0.0, per_token_s) == Budget(512, 128)


@pytest.mark.parametrize(("per_token_s", "expected"), [(0.0001, 512), (0.001, 250), (0.01, 128), (1.0, 128)])
def test_a_gpu_reads_more_beside_replies_as_long_as_a_step_is_short(per_token_s, expected):
    budget = Budget(512, 128, gpu_s=0.25)
    assert budget.within(0.0, per_token_s).n_beside == expected
    assert budget.within(0.05, per_token_s).n_beside == Budget(512, 128).within(0.05, per_token_s).n_beside


@pytest.mark.parametrize(("n_reading", "expected"), [(1, 127), (2, 127)])
def test_prompts_beside_a_reply_share_the_smaller_budget(n_reading, expected):
    found = [Lane(0, 1, True), *(Lane(i + 1, 5000, False, 5000, i) for i in range(n_reading))]
    grants = sizes(plan(found, Budget(512, 127)))
    assert grants[0] == 1 and grants[1] == expected and sum(grants.values()) == 128


def test_what_a_short_prompt_leaves_over_goes_to_the_long_one():
    assert sizes(plan([Lane(0, 1000, False), Lane(1, 10, False)], Budget(512, 128))) == {1: 10, 0: 502}


def test_no_lanes_no_grants():
    assert plan([], Budget(512, 128)) == []


# the rule that keeps the engine moving


@by_chance(100, 4000)
@given(lanes.filter(bool), budgets, st.data())
def test_the_oldest_gets_a_token_however_few_there_are(found, budget, data):
    oldest = data.draw(st.sampled_from(found)).slot
    grants = sizes(plan(found, budget, oldest))
    wanted = {lane.slot: lane.n_wanted for lane in found}
    assert grants[oldest] >= 1 and sum(grants.values()) <= budget.n_step
    assert all(1 <= n <= wanted[slot] for slot, n in grants.items())


@by_chance(100, 4000)
@given(lanes.filter(bool), budgets, st.integers(0, 3000), st.randoms(use_true_random=False))
def test_what_fits_begins_with_the_oldest_and_leaves_no_cell_that_somebody_wants(found, budget, n_free, rng):
    order = [lane.slot for lane in found]
    rng.shuffle(order)
    planned = plan(found, budget, order[0])
    kept, wanted = sizes(fit(planned, order, n_free)), sizes(planned)
    assert (order[0] in kept) == bool(n_free)
    assert sum(kept.values()) == min(n_free, sum(wanted.values()))
    assert all(1 <= n <= wanted[slot] for slot, n in kept.items())
    left_out = [order.index(slot) for slot in wanted if slot not in kept]
    assert all(order.index(slot) < min(left_out) for slot in kept) if left_out else True


@given(st.lists(st.integers(0, 63), unique=True))
def test_the_youngest_makes_room_and_the_oldest_never_does(order):
    chosen = next_to_suspend(order)
    assert chosen == (order[-1] if len(order) > 1 else None)
    assert not order or chosen != order[0]


def test_the_control_a_plan_that_does_not_know_the_oldest_may_leave_it_out():
    found = [*(Lane(i, 1, True) for i in range(4)), Lane(4, 100, False)]
    assert 4 not in sizes(plan(found, Budget(4, 128)))
    assert sizes(plan(found, Budget(4, 128), oldest=4))[4] == 1


def test_what_was_taken_back_with_a_draft_is_decoded_again_in_one_step():
    found = [Lane(0, 6, True, n_again=5), Lane(1, 1, True), Lane(2, 100, False)]
    assert sizes(plan(found, Budget(64, 32))) == {0: 6, 1: 1, 2: 32}
    assert sizes(plan(found, Budget(4, 32), oldest=2)) == {0: 2, 1: 1, 2: 1}
