"""What nobody can avoid reading, against one comparison after the other."""

import pytest
from bench.workload.chat import image, to_turn
from bench.workload.scenarios import SCENARIOS, scenario

from everwarm.simulate.oracle import Known, unavoidable_tokens
from support.items import prompt_of
from support.small_traces import random_turns, shared_by_hand, turn


@pytest.mark.parametrize("seed", range(60))
def test_the_oracle_agrees_with_comparing_everything(seed):
    turns = random_turns(seed, n_turns=14, n_letters=1 + seed % 4)
    for i, n_unavoidable in enumerate(unavoidable_tokens(turns)):
        assert turns[i].n_stop - n_unavoidable == shared_by_hand(turns, i)


def test_a_reply_is_free_but_for_its_last_token():
    first = turn([1, 2, 3], [4, 5, 6])
    assert unavoidable_tokens([first, turn([1, 2, 3, 4, 5, 6, 7])]) == [3, 2]


def test_what_was_not_read_before_a_cancel_is_not_free():
    cut, whole = turn([1, 2, 3, 4, 5], stop_at=2), turn([1, 2, 3, 4, 5])
    assert unavoidable_tokens([cut, whole]) == [2, 3]


def test_two_images_are_never_the_same_because_of_their_place():
    known, a, b = Known(), image("a"), image("b")
    known.add(prompt_of([1, a, 2]))
    assert known.n_shared(prompt_of([1, a, 3])) == 2
    assert known.n_shared(prompt_of([1, b, 2])) == 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_has_something_to_save_and_something_new(name):
    turns = [to_turn(step) for step in scenario(name, seed=3, size=0.1)]
    n_prompt = sum(turn.prompt.n_tokens(turn.n_stop) for turn in turns)
    assert 0 < sum(unavoidable_tokens(turns)) < n_prompt
