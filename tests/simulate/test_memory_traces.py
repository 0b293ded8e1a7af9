"""Traces on which memory is short: ours reads no more than the best of the other policies, and the engine reads what the
simulator says. Token counts, no clocks; ``python -m bench policy`` has the whole grid."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from bench.policy import CLOSE, OTHERS, TUNED, Budget, Cell, measure, whole_bytes
from bench.policy_engine import curves_of, play
from bench.workload.memory import trace

from everwarm.simulate.oracle import unavoidable_tokens
from everwarm.simulate.policies import OURS, smallest_hole
from everwarm.simulate.replay import replay
from everwarm.simulate.simulated_cache import SimulatedCache
from everwarm.simulate.simulated_machine import LARGE, TINY, Curves, MachineSize
from everwarm.state.policy import CutKind
from everwarm.state.store.arena_file import memory_file
from everwarm.state.tree import Node
from support.campaign import CAMPAIGN
from support.drive import open_core

LITTLE = 8 << 30  # for a model of 27B
LOST = ("in turn", "popular", "agents", "branches")  # on which an earlier policy lost to every simple one
NEAR = 0.02  # of the prompt tokens: engine and simulator


@pytest.mark.parametrize(("name", "share"), [*zip(LOST, (0.1, 0.4, 0.1, 0.4), strict=True)])
def test_ours_is_close_to_the_best_or_better(name, share):
    """With one of two budgets; in a campaign with both."""
    found = measure(Cell(name, "blocks", TUNED, "27b"), [Budget(0.1), Budget(0.4)] if CAMPAIGN else [Budget(share)])
    assert [each.budget for each in found if each.ratio > CLOSE] == []
    assert sum(each.reads["ours"] for each in found) < min(sum(each.reads[o] for each in found) for o in OTHERS)


# The traces on which every simple policy was better once, with the budgets of then, in GiB for a model of 27B.
GIB = [("in turn", 8), ("popular", 8), ("popular", 16), ("agents", 4), ("agents", 8), ("branches", 8), ("branches", 32)]


@pytest.mark.parametrize(("name", "gib"), GIB)
def test_ours_finds_more_than_every_simple_policy_with_so_many_gib(name, gib):
    turns = trace(name, "blocks", TUNED)
    n_read = {policy: replay(turns, policy, LARGE, gib << 30).n_read for policy in ("ours", *OTHERS)}
    assert n_read["ours"] <= CLOSE * min(n_read[policy] for policy in OTHERS)


def test_with_less_memory_than_one_conversation_takes_the_device_serves_the_one_that_goes_on():
    """It read every other turn of a burst again: copies of what the device holds had filled RAM."""
    turns = trace("agents", "blocks", TUNED)[:100]
    budget = 30_000 * TINY.kv_bytes_per_token
    assert max(len(each.prompt) for each in turns) * TINY.kv_bytes_per_token > budget
    n_read = {policy: replay(turns, policy, TINY, budget).n_read for policy in ("ours", *OTHERS)}
    assert n_read["ours"] <= CLOSE * min(n_read[policy] for policy in OTHERS)


@pytest.mark.parametrize("name", ["in turn", "branches"])
def test_without_what_is_learned_the_same_places_read_much_more(name):
    """The control: a policy that weighs without learning."""
    turns = trace(name, "blocks", TUNED)
    blind = replace(OURS, name="blind", learns=False, victims=smallest_hole)
    assert replay(turns, "ours", LARGE, LITTLE).n_read < 0.9 * replay(turns, blind, LARGE, LITTLE).n_read


def n_read_of(name: str, form: str, seed: int, curves: Curves, share: float) -> int:
    turns = trace(name, form, seed)
    return replay(turns, "ours", curves, int(share * whole_bytes(turns, unavoidable_tokens(turns), curves))).n_read


def test_a_parked_state_stays_on_the_device_while_ram_has_no_room_for_it(monkeypatch):
    n_read = n_read_of("in turn", "hinted", TUNED, LARGE, 0.1)
    monkeypatch.setattr(SimulatedCache, "_parked_bytes", lambda _self, _node: 0)
    assert n_read < 0.25 * n_read_of("in turn", "hinted", TUNED, LARGE, 0.1), "the control: it leaves all the same"


def test_the_kv_that_a_spare_alone_holds_needs_room_as_well(monkeypatch):
    """A state for which there was room took 80,000 tokens of KV along, and those evicted other conversations."""
    n_read = n_read_of("popular", "hinted", 2, LARGE, 0.1)
    monkeypatch.setattr(SimulatedCache, "_parked_bytes", lambda _self, node: 0 if has_copy(node) else LARGE.state_bytes)
    assert n_read < 0.8 * n_read_of("popular", "hinted", 2, LARGE, 0.1), "the control: its KV does not count"


def has_copy(node: Node) -> bool:
    return node.checkpoint is None or node.checkpoint.kind is CutKind.END or node.checkpoint.state is not None


def test_a_parked_state_that_is_worth_less_than_those_in_ram_gives_its_spare_up(monkeypatch):
    n_read = n_read_of("branches", "hinted", TUNED, LARGE, 0.05)
    monkeypatch.setattr(SimulatedCache, "_spare_of_least", lambda _self: None)
    assert n_read < 0.9 * n_read_of("branches", "hinted", TUNED, LARGE, 0.05), "the control: it keeps it"


def test_twice_the_memory_reads_less_where_the_tree_is_swept_in_parts():
    """With more nodes than are weighed at once the longest conversation was a part by itself, and lost its last state."""
    much, more = (n_read_of("popular", "plain", TUNED, TINY, share) for share in (0.2, 0.4))
    assert more < 0.6 * much


@pytest.mark.parametrize("share", [0.1, 0.2])
@pytest.mark.parametrize(("name", "form"), [("in turn", "hinted"), ("popular", "plain"), ("branches", "plain")])
def test_the_engine_reads_what_the_simulator_says_when_memory_is_short(name, form, share):
    """An engine as a server has it: what a turn leaves is copied to the memory that outlives it."""
    turns = trace(name, form, 5, size=0.02, n_vocab=250)[:48]
    with open_core(n_slots=2, n_ctx=4096, n_spares=4) as core:
        curves = curves_of(core)
    budget = int(share * whole_bytes(turns, unavoidable_tokens(turns), curves))
    with (
        os.fdopen(memory_file()) as memory,
        open_core(n_slots=2, n_ctx=4096, n_spares=4, ram_bytes=budget, memory=memory.fileno()) as core,
    ):
        played = play(core, turns)
    machine = MachineSize(n_slots=2, n_spares=4, n_cells=4096)
    simulated = {policy: replay(played.turns, policy, curves, budget, machine).n_read for policy in ("ours", "lru")}
    n_read = sum(played.reads)
    assert abs(n_read - simulated["ours"]) <= NEAR * played.n_prompt
    assert n_read <= simulated["lru"]
    assert share > 0.1 or n_read < simulated["lru"], "the control: memory was short"
