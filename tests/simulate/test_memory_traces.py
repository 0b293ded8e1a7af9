"""Traces on which memory is short: ours reads no more than the best of the other policies, and the engine reads what the
simulator says. Token counts, no clocks; ``python -m bench policy`` has the whole grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.policy import CLOSE, OTHERS, TUNED, Budget, Cell, measure
from bench.workload.memory import trace

from everwarm.simulate.curves import LARGE, Curves
from everwarm.simulate.policies import OURS, smallest_hole
from everwarm.simulate.replay import replay
from everwarm.simulate.simulated_cache import DeviceSize
from everwarm.simulate.trace import TraceTurn
from support.campaign import CAMPAIGN
from support.drive import open_core, tidy
from support.drive import run as ask
from support.small_traces import turn

LITTLE = 8 << 30  # for a model of 27B
LOST = ("in turn", "popular", "agents", "branches")  # on which an earlier policy lost to every simple one
NEAR = 0.02  # of the prompt tokens: engine and simulator


@pytest.mark.parametrize(("name", "share"), [*zip(LOST, (0.1, 0.4, 0.1, 0.4), strict=True)])
def test_ours_is_close_to_the_best_or_better(name, share):
    """With one of two budgets; in a campaign with both."""
    found = measure(Cell(name, "blocks", TUNED, "27b"), [Budget(0.1), Budget(0.4)] if CAMPAIGN else [Budget(share)])
    assert [each.budget for each in found if each.ratio > CLOSE] == []
    assert sum(each.reads["ours"] for each in found) < min(sum(each.reads[o] for each in found) for o in OTHERS)


@pytest.mark.parametrize("name", ["in turn", "branches"])
def test_without_what_is_learned_the_same_places_read_much_more(name):
    """The control: a policy that weighs without learning."""
    turns = trace(name, "blocks", TUNED)
    blind = replace(OURS, name="blind", learns=False, victims=smallest_hole)
    assert replay(turns, "ours", LARGE, LITTLE).n_read < 0.9 * replay(turns, blind, LARGE, LITTLE).n_read


@pytest.mark.parametrize(("name", "form", "share"), [("in turn", "hinted", 0.2), ("popular", "plain", 0.2)])
def test_the_engine_reads_what_the_simulator_says_when_memory_is_short(name, form, share):
    turns = trace(name, form, 5, size=0.02, n_vocab=250)[:48]
    n_prompt = sum(len(each.prompt) for each in turns)
    with open_core(n_slots=2, n_ctx=4096, n_spares=4) as core:
        shape = core.sizes.shape
        budget = core.cache.ram_budget.n_bytes = int(
            share * n_prompt / 4 * shape.kv_bytes_per_token + 8 * shape.state_bytes
        )
        n_read, said = played(core, turns)
    curves = Curves("engine", shape.state_bytes, shape.kv_bytes_per_token, 1e9, ((0, 1e-3),))
    device = DeviceSize(n_slots=2, n_spares=4, n_cells=4096)
    simulated = {policy: replay(said, policy, curves, budget, device).n_read for policy in ("ours", "lru")}
    assert n_read <= simulated["ours"] + NEAR * n_prompt
    assert n_read < simulated["lru"] - NEAR * n_prompt, "the control: memory was short"


def played(core, turns: list[TraceTurn]) -> tuple[int, list[TraceTurn]]:
    """Tokens that the engine reads, and the same turns with the replies it gave."""
    n_read, said = 0, []
    for each in turns:
        result = ask(core, each.prompt.codes.tolist(), 5, boundaries=each.boundaries, stable=each.stable)
        tidy(core)
        n_read += result.n_processed
        said.append(turn(each.prompt.codes, result.tokens, each.at_s, boundaries=each.boundaries, stable=each.stable))
    return n_read, said
