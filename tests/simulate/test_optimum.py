"""The optimum: against trying everything, and never worse than a policy."""

from dataclasses import replace
from itertools import combinations

import pytest
from bench.workload import memory

from everwarm.errors import BadRequest
from everwarm.simulate.oracle import fewest_tokens
from everwarm.simulate.policies import OURS
from everwarm.simulate.replay import NAMES, replay
from everwarm.simulate.simulated_cache import LOW_WATER
from everwarm.simulate.simulated_machine import MachineSize
from everwarm.state.policy import Cut, CutKind
from support.small_traces import SMALL, STATE, random_turns, turn


def brute(turns, n_states, i=0, kept=frozenset()) -> int:
    """Every set of points of every path, without a thought."""
    if i == len(turns):
        return 0
    t = turns[i]
    prompt, path = tuple(t.prompt.codes.tolist()), tuple(t.path.codes.tolist())
    best = 10**9
    for start in {(), *(k for k in kept if len(k) < len(prompt) and prompt[: len(k)] == k)}:
        cost = max(0, t.n_stop - len(start))
        ends = range(max(1, len(start)), len(path) + 1)
        reach = kept | {path[:n] for n in ends}
        chosen = combinations(sorted(reach), min(n_states, len(reach)))
        best = min(best, *(cost + brute(turns, n_states, i + 1, frozenset(c)) for c in chosen))
    return best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("n_states", [1, 2])
def test_the_fewest_tokens_are_the_fewest_of_all_ways(seed, n_states):
    turns = random_turns(seed, n_turns=3, longest=5)
    assert fewest_tokens(turns, n_states) == brute(turns, n_states)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("name", NAMES)
def test_no_policy_reads_less_than_the_optimum(seed, name):
    turns = random_turns(seed)
    for n_states in (0, 1, 3):
        cost = replay(turns, name, SMALL, n_states * STATE, MachineSize(n_slots=1, n_spares=0))
        held = 33 if name == "fifo-32" else n_states + 1  # its slot keeps its own checkpoints beside the budget
        assert cost.n_read >= fewest_tokens(turns, held)


def test_a_policy_that_keeps_the_wrong_things_is_worse_than_ours_and_ours_worse_than_the_optimum():
    """The control: one that keeps nothing but the state after the first token."""
    bad = replace(OURS, name="bad", cuts=lambda *_: [Cut(1, CutKind.BOUNDARY)], keeps_ends=False)
    totals = {"bad": 0, "ours": 0, "optimum": 0}
    for seed in range(60):
        turns = random_turns(seed, n_turns=7)
        totals["bad"] += replay(turns, bad, SMALL, 8 * STATE, MachineSize(n_slots=1, n_spares=0)).n_read
        totals["ours"] += replay(turns, "ours", SMALL, 8 * STATE, MachineSize(n_slots=1, n_spares=0)).n_read
        totals["optimum"] += fewest_tokens(turns, 9)
    assert totals["optimum"] < totals["ours"] < totals["bad"]


def test_more_states_never_hurt_the_optimum():
    for seed in range(20):
        turns = random_turns(seed)
        reads = [fewest_tokens(turns, n) for n in range(5)]
        assert reads == sorted(reads, reverse=True)
    assert fewest_tokens([turn([1, 2, 3]), turn([1, 2, 3, 4])], 0) == 7
    assert fewest_tokens([turn([1, 2, 3]), turn([1, 2, 3, 4])], 1) == 4


def test_too_many_requests_are_refused_with_a_number():
    with pytest.raises(BadRequest, match="at most 12"):
        fewest_tokens([turn([i]) for i in range(13)], 1)


SHORT = {  # conversations of a few short turns, each kind with so few requests that the optimum can be found
    "in turn": lambda seed: memory.in_turn(seed, 0.01, n_talks=3, n_requests=12),
    "popular": lambda seed: memory.popular(seed, 0.05, n_talks=4, n_requests=12),
    "documents": lambda seed: memory.documents(seed, 0.01, n_documents=3, n_requests=11),
    "one-offs": lambda seed: memory.one_offs(seed, 0.01)[:12],
    "sub-agents": lambda seed: memory.subagents(seed, 0.01)[:10],
    "agents": lambda seed: memory.agents(seed, 0.01, n_agents=3)[:12],
    "branches": lambda seed: memory.branches(seed, 0.02, n_talks=2, n_requests=10),
}


def test_on_short_conversations_ours_is_within_a_tenth_of_the_optimum():
    """From three states on, which is one for each conversation. The optimum knows the future: no policy can, and with
    fewer states that is most of the difference."""
    totals = {"ours": 0, "spread": 0, "optimum": 0}
    machine = MachineSize(n_slots=1, n_spares=0)
    for make in SHORT.values():
        for seed in range(2):
            turns = make(seed)
            for n_states in (3, 6, 9):
                budget = 1 + int(n_states * STATE / LOW_WATER)  # a sweep leaves so many
                totals["optimum"] += fewest_tokens(turns, n_states + 1)
                for name in ("ours", "spread"):
                    totals[name] += replay(turns, name, SMALL, budget, machine).n_read
    assert totals["ours"] <= 1.1 * totals["optimum"] < totals["spread"], totals
