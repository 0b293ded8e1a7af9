"""What a step costs where a GPU repeats the ones that are alike: the figures are those of an H200, in plain steps."""

import pytest

from everwarm.engine.speculation.draft_length import Pacing, Record, StepShape
from everwarm.engine.speculation.step_cost import FIRST_RUN, N_CHANGES, RepeatedStepCost, StepCost
from support.drafts import draft_of

FIRST, SECOND = 0.36, 1.3  # what the first step of another size takes longer, and the second
SHAPE = StepShape(n_rows=1, n_replies=1, n_cut=0, overhead_s=0.0)


def row_s(n_rows: int) -> float:
    return 1.0 + 0.1 * (n_rows - 1)


class Gpu:
    """Takes so long for each step, and tells what it took."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._before = (0, 0)

    def run(self, *steps: int) -> None:
        for n_rows in steps:
            last, one_before = self._before
            change = FIRST if n_rows != last else SECOND if n_rows != one_before else 0.0
            self.cost.learn(n_rows, row_s(n_rows) + change)
            self._before = (n_rows, last)


def known(*last_steps: int) -> RepeatedStepCost:
    """Plain steps with drafts of three tokens among them, and then these."""
    cost = RepeatedStepCost()
    gpu = Gpu(cost)
    for _ in range(2 * N_CHANGES):
        gpu.run(*([1] * 8), 4)
    gpu.run(*last_steps)
    return cost


def test_what_a_change_costs_is_not_taken_for_what_a_step_costs():
    gpu = Gpu(RepeatedStepCost())
    gpu.run(*([1] * 8), 4, *([1] * 8), 4, 1, 1, 1)
    assert gpu.cost.seconds(1) == pytest.approx(1.0)
    plain = Gpu(StepCost())  # the control
    plain.run(*([1] * 8), 4, *([1] * 8), 4, 1, 1, 1)
    assert plain.cost.seconds(1) > 1.05


def test_rows_that_never_repeat_are_known_once_changes_are():
    cost = known(6, 1, 1, 1, 6, 1, 1, 1)
    assert cost.seconds(6) == pytest.approx(row_s(6), rel=0.02)
    young = RepeatedStepCost()
    Gpu(young).run(1, 1, 1, 1, 6, 1)
    assert young.seconds(6) != pytest.approx(row_s(6), rel=0.02)  # the control: it is still a guess


@pytest.mark.parametrize(
    ("last_steps", "n_rows", "more"),
    [
        ((1, 1, 1), 4, FIRST + (FIRST + SECOND) / FIRST_RUN),  # out of plain steps, and back
        ((1, 1, 1), 1, 0.0),  # as usual
        ((1, 1, 4), 4, SECOND),  # in a row: the way back has to be paid in any case
        ((1, 1, 4), 6, FIRST),
        ((1, 4, 4), 4, 0.0),
        ((1, 1, 4, 1), 4, FIRST + FIRST / FIRST_RUN),  # the second of the plain steps would be dear anyhow
    ],
)
def test_a_step_costs_what_it_and_the_next_ones_take_longer(last_steps, n_rows, more):
    cost = known()
    cost._run = FIRST_RUN
    Gpu(cost).run(1)
    for step in last_steps:
        cost.passed(step)
    cost._run = FIRST_RUN
    assert cost.seconds_with_change(n_rows, usual=1) == pytest.approx(row_s(n_rows) + more, rel=0.02)
    assert StepCost().seconds_with_change(n_rows, usual=1) is None
    free = StepCost()
    free.learn(1, 1.0)
    assert free.seconds_with_change(n_rows, usual=1) == free.seconds(n_rows)  # the control: a CPU repeats nothing


def test_drafts_that_come_in_a_row_share_the_way_back():
    def change_s(n_in_a_row: int) -> float:
        cost = known()
        for _ in range(20):
            cost.seconds_with_change(4, usual=1)
            Gpu(cost).run(*([4] * n_in_a_row), 1, 1, 1)
        return (cost.seconds_with_change(4, usual=1) or 0.0) - (cost.seconds(4) or 0.0)

    assert change_s(8) < change_s(2) < change_s(1)


def chosen_length(cost: StepCost, n: int, confidence: float) -> int:
    return Pacing(cost=cost).length(draft_of(range(n), confidence), Record(), SHAPE)


def test_a_draft_now_and_then_must_bring_more_than_the_change_costs():
    short, long = (1, 0.9), (12, 0.97)
    free = StepCost()
    for n_rows in (1, 2, 4, 8, 16) * 8:
        free.learn(n_rows, row_s(n_rows))
    assert chosen_length(free, *short) == 1  # the control: where nothing is repeated it pays
    assert chosen_length(known(1, 1, 1), *short) == 0
    assert chosen_length(known(1, 1, 1), *long) >= 8
    assert chosen_length(known(1, 1, 1, 3), *short) == 1, "the way back has to be paid in any case"


@pytest.mark.parametrize("kind", [StepCost, RepeatedStepCost])
def test_rows_beyond_the_most_that_were_measured_never_cost_less_than_these(kind):
    """One row may be measured a little too slow, and two as fast."""
    cost = kind()
    for n_rows, seconds in ((1, 1.0), (2, 0.9), (4, 0.9)):
        for _ in range(100):
            cost.learn(n_rows, seconds)
    assert cost.seconds(4) < cost.seconds(1)
    assert all(cost.seconds(n) == cost.seconds(4) for n in (5, 16, 64, 512))


def test_reading_a_prompt_teaches_nothing_but_that_the_next_step_is_another():
    cost = known(1, 1, 1)
    before = [cost.seconds(n) for n in range(1, 64)]
    cost.learn_reading(512, 0.001)  # a GPU is not done when it returns
    assert [cost.seconds(n) for n in range(1, 64)] == before
    assert cost._before[0] == 512
    on_cpu = StepCost()
    on_cpu.learn(1, 1.0)
    guess = on_cpu.seconds(40)
    on_cpu.learn_reading(512, 100.0)
    assert on_cpu.seconds(40) != guess  # the control
