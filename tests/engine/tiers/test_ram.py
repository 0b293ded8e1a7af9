"""What a new engine finds in the memory of a dead one: the same bytes, at once, and never a wrong one."""

from __future__ import annotations

import os

import numpy as np
import pytest

from support.drive import EVERY_KIND, GUARD, HYBRIDS, check, open_core, run, text, tidy
from support.kept_cores import die, fingerprint_of_slot
from support.models import tiny_model

ARCHITECTURES = tuple(dict.fromkeys((*HYBRIDS, *EVERY_KIND)))
HISTORY, NEW, STABLE = text(1, 600), text(2, 40), 580
NEXT = [*HISTORY[:STABLE], *NEW]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_new_engine_goes_on_from_the_memory_of_the_old_one_with_the_same_bytes(memory, arch):
    with open_core(arch) as core:
        run(core, HISTORY, stable=STABLE)
        tidy(core)
        there = run(core, NEXT)
        expected = fingerprint_of_slot(core, len(NEXT) + 3)
    with open_core(arch, memory=memory) as core:
        run(core, HISTORY, stable=STABLE)
        die(core)
    with open_core(arch, memory=memory) as core:
        assert core.cache.ram.n_adopted > 0
        again = run(core, NEXT)
        assert again.n_cached == STABLE and again.tokens == there.tokens
        assert again.checkpoint is not None and again.checkpoint.how == "from ram"
        assert fingerprint_of_slot(core, len(NEXT) + 3) == expected
        die(core)
    with open_core(arch) as core:
        assert run(core, NEXT).n_cached == 0, "this test could not fail"


def test_branches_namespaces_and_their_junctions_all_come_back(memory):
    branches = [[*HISTORY[:300], *text(20 + i, 200)] for i in range(4)]
    with open_core(memory=memory, n_slots=4, n_spares=2) as core:
        for branch in branches:
            run(core, branch, stable=480, boundaries=(100, 300))
        run(core, HISTORY, stable=STABLE, namespace="other")
        die(core)
        n_bytes = core.cache.tree.ram_bytes
    with open_core(memory=memory, n_slots=4, n_spares=2) as core:
        assert core.cache.tree.ram_bytes <= n_bytes
        for branch in branches:
            assert run(core, [*branch[:480], *NEW]).n_cached == 480
        assert run(core, [*HISTORY[:300], *NEW]).n_cached == 300
        assert run(core, NEXT, namespace="other").n_cached == STABLE
        assert run(core, NEXT, namespace="third").n_cached == 0
        die(core)


def test_generations_of_engines_add_to_one_memory(memory):
    talk = HISTORY
    for turn in range(5):
        with open_core(memory=memory) as core:
            result = run(core, talk, stable=len(talk) - 5)
            assert turn == 0 or result.n_processed <= 45 + 5 + GUARD
            die(core)
        talk = [*talk[:-5], *text(30 + turn, 50)]


def test_bytes_that_changed_are_not_used_and_the_answer_is_right_all_the_same(memory):
    with open_core() as core:
        golden = run(core, NEXT).tokens
    with open_core(memory=memory) as core:
        run(core, HISTORY, stable=STABLE)
        die(core)
        states = [n.checkpoint for n in core.cache.tree.nodes() if n.checkpoint is not None]
        for checkpoint in states:
            assert checkpoint.state is not None
            checkpoint.state[len(checkpoint.state) // 2] ^= 1  # as a wild write would
    with open_core(memory=memory) as core:
        core.cache.ram.flush()  # its thread has looked at everything
        assert core.cache.ram.n_unsound == len(states)
        result = run(core, NEXT)
        assert result.n_cached == 0 and result.tokens == golden
        assert core.counts.n_quarantined > 0


def test_another_file_or_another_setting_finds_nothing(memory, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_model("qwen35", width=128).read_bytes())
    with open_core(path=path, memory=memory) as core:
        run(core, HISTORY, stable=STABLE)
        die(core)
    with open_core(path=path, memory=memory) as core:
        assert core.cache.ram.n_adopted > 0, "this test could not fail"
        die(core)
    with open_core(path=path, memory=memory, cache_type_k="q8_0", cache_type_v="q8_0") as core:
        assert core.cache.ram.n_adopted == 0
        run(core, HISTORY, stable=STABLE)
        die(core)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1  # other weights
    path.write_bytes(data)
    with open_core(path=path, memory=memory, cache_type_k="q8_0", cache_type_v="q8_0") as core:
        assert core.cache.ram.n_adopted == 0 and run(core, NEXT).n_cached == 0


def test_an_engine_with_a_smaller_budget_keeps_what_is_worth_most(memory):
    """It drops the rest before it asks for its context, and the memory goes back at once."""
    conversations = [text(30 + i, 400) for i in range(6)]
    with open_core(width=128, memory=memory) as core:
        for conversation in conversations:
            run(core, conversation, stable=380)
        run(core, HISTORY, stable=STABLE)
        core.cache.ram.pin(next(node for node in core.cache.tree.nodes() if node.n_items == STABLE))
        die(core)
        n_before = core.cache.tree.ram_bytes
    budget = n_before // 3
    with open_core(width=128, memory=memory, ram_bytes=budget) as core:
        assert core.cache.ram.n_adopted > 0 and 0 < core.cache.tree.ram_bytes <= budget == core.cache.ram_budget.n_bytes
        assert os.fstat(memory).st_blocks * 512 < n_before
        check(core)
        core.cache.ram.arena.check()
        assert run(core, NEXT).n_cached == STABLE, "what is pinned goes last"
        cold = [run(core, [*conversation[:380], *NEW]).n_cached == 0 for conversation in conversations]
        assert any(cold)
        die(core)


def test_what_was_evicted_or_erased_does_not_come_back(memory):
    with open_core(memory=memory) as core:
        run(core, HISTORY, stable=STABLE)
        die(core)
        core.cache.ram_budget.n_bytes = 0
        core.cache.ram_budget.enforce()
        die(core)
    with open_core(memory=memory) as core:
        assert core.cache.ram.n_adopted == 0 and run(core, NEXT).n_cached == 0


def test_what_was_written_to_an_arena_without_room_is_still_served(memory, monkeypatch):
    with open_core(memory=memory) as core:
        monkeypatch.setattr(core.cache.ram.arena, "_take", lambda _n: None)
        run(core, HISTORY, stable=STABLE)
        tidy(core)
        assert run(core, NEXT).n_cached == STABLE and core.cache.ram.arena.n_outside > 0
        core.cache.ram.flush()
    with open_core(memory=memory) as core:
        assert core.cache.ram.n_adopted == 0


def test_segments_that_reach_beyond_a_branch_keep_only_their_own_side(memory, tmp_path):
    """KV from disk may be longer than the prompt it was brought for."""
    from everwarm.engine.settings import StoreSettings

    store = StoreSettings(str(tmp_path / "states"), restore_policy="always")
    with open_core(memory=None, store=store) as core:
        run(core, HISTORY, stable=STABLE, boundaries=(200,))
        core.put_away()
    other = [*HISTORY[:200], *text(50, 300)]
    with open_core(memory=memory, store=store) as core:
        run(core, NEXT)
        run(core, other, stable=480)
        die(core)
    with open_core(memory=memory) as core:
        assert run(core, NEXT).n_cached >= STABLE
        assert run(core, [*other[:480], *NEW]).n_cached == 480
        cold = np.array(run(core, [*other[:480], *NEW], use_cache=False).tokens)
        assert np.array_equal(cold, run(core, [*other[:480], *NEW]).tokens)
