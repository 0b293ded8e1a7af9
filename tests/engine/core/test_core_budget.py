"""Limits: checkpoints per path, bytes of RAM, what is said in the log."""

import logging
from collections.abc import Iterator

import pytest

from everwarm.engine.core import Core
from everwarm.engine.settings import EngineSettings
from everwarm.errors import BadRequest
from everwarm.state.policy import CheckpointParams
from everwarm.state.tree import Node
from support.campaign import crossed
from support.drive import EVERY_KIND, assert_greedy, check, checkpoints, drain, open_core, run, submit, text, tidy

KIB = 1024


def leaves(core: Core) -> Iterator[Node]:
    return (node for node in core.cache.tree.nodes() if not node.children)


def most_on_a_path(core: Core) -> int:
    return max(sum(node.checkpoint is not None for node in leaf.lineage()) for leaf in leaves(core))


# per path


@pytest.mark.parametrize(("arch", "most", "n_spares"), crossed(("qwen35", "mamba2", "gemma3"), (1, 2, 5), (0, 4)))
def test_no_path_holds_more_checkpoints_than_allowed(arch, most, n_spares):
    params = CheckpointParams(max_checkpoints=most, every_n_tokens=20, min_gap=0, min_tokens=0)
    history = text(1, 120)
    with open_core(arch, n_spares=n_spares, checkpoints=params) as core:
        for turn in range(4):
            result = run(core, history)
            assert most_on_a_path(core) <= most
            assert_greedy(core, history, result)
            history = [*history, *result.tokens, *text(10 + turn, 60)]
            assert turn == 0 or result.n_processed <= 60 + 1 + 16


def test_a_branch_taken_above_existing_checkpoints_counts_on_their_path():
    shared = text(1, 200)
    with open_core(checkpoints=CheckpointParams(max_checkpoints=2)) as core:
        run(core, [*shared, *text(2, 50)])
        run(core, [*shared, *text(3, 50)], 1)
        assert most_on_a_path(core) <= 2


@pytest.mark.parametrize("n_spares", [0, 4])
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_zero_switches_the_mechanism_off(arch, n_spares):
    with open_core(arch, n_spares=n_spares, checkpoints=CheckpointParams(max_checkpoints=0)) as core:
        first = run(core, text(1, 100))
        run(core, text(2, 100), boundaries=(50,))
        again = run(core, text(1, 100))
        assert checkpoints(core) == [] and core.counts.n_created == 0
        assert again.tokens == first.tokens
        # KV alone needs none, and a window that still reaches back
        assert (again.n_cached > 0) == (arch in ("llama", "gemma3"))


def test_wide_spacing_takes_few_and_dense_spacing_many():
    counts = []
    for every in (0, 300, 30):
        with open_core(checkpoints=CheckpointParams(every_n_tokens=every, max_checkpoints=100)) as core:
            run(core, text(1, 900), 1, boundaries=(100, 200))
            counts.append(len(checkpoints(core)))
    assert counts[0] < counts[1] < counts[2]


# bytes


@pytest.mark.parametrize(
    ("arch", "budget", "n_spares"), crossed(EVERY_KIND, (0, 150 * KIB, 300 * KIB, 750 * KIB), (0, 4))
)
def test_a_small_budget_is_never_exceeded_and_the_answers_stay_right(arch, budget, n_spares):
    with open_core(arch, n_spares=n_spares, ram_bytes=budget, n_ctx=1024) as core:
        ask_around(core)


def test_logits_added_to_a_kept_checkpoint_stay_within_the_budget():
    """A prompt that ends where a boundary of an earlier one was kept."""
    with open_core(n_spares=4, ram_bytes=0) as core:
        run(core, text(1, 60), 1, boundaries=(50,))
        run(core, text(1, 50), 1)


def ask_around(core: Core) -> None:
    """Four conversations in two slots, with idle work between; every step checks the budget."""
    histories = [text(seed, 100) for seed in (1, 2, 3, 4)]
    for turn in range(3):
        for i, history in enumerate(histories):
            result = run(core, history, boundaries=(60,))
            assert_greedy(core, history, result)
            histories[i] = [*history[:-3], *result.tokens, *text(100 * turn + i, 30)]
            tidy(core)


def test_a_budget_that_shrinks_is_honoured_at_once():
    with open_core(n_slots=1) as core:
        for seed in range(6):
            run(core, text(seed, 150), boundaries=(60,))
        before = core.cache.tree.ram_bytes
        core.cache.ram_budget.n_bytes = before // 3
        core.cache.ram_budget.enforce()
        check(core)
        assert 0 < core.cache.tree.ram_bytes <= before // 3
        assert_greedy(core, text(1, 150), run(core, text(1, 150)))


def test_the_ledger_is_zero_when_everything_was_evicted():
    with open_core(n_slots=1) as core:
        for seed in range(3):
            run(core, text(seed, 100))
        core.cache.ram_budget.n_bytes = 0
        core.cache.ram_budget.enforce()
        check(core)
        assert core.cache.tree.ram_bytes == 0


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_idle_work_ends_and_changes_no_answer(arch):
    with open_core(arch, n_spares=3) as core:
        first = run(core, text(1, 100), 5)
        tidy(core)
        assert not core.tidy()
        assert run(core, text(1, 100), 5).tokens == first.tokens


def test_conversations_running_together_within_a_small_budget_stay_right():
    with open_core(ram_bytes=250 * KIB, n_ctx=512, n_slots=3, n_spares=2) as core:
        for turn in range(2):
            prompts = {submit(core, p, 8).id: p for p in ([*text(s, 90), *text(turn, 20)] for s in range(1, 6))}
            for request_id, result in drain(core).items():
                assert_greedy(core, prompts[request_id], result)


@pytest.mark.parametrize(
    "bad",
    [
        {"n_slots": 0},
        {"n_slots": 65},
        {"n_spares": -1},
        {"n_spares": 254},
        {"ram_bytes": -1},
        {"idle_cells": -1},
        {"prefill_beside_decode": 0},
        {"n_ctx": 0},
        {"n_ubatch": 4096, "n_batch": 2048},
        {"n_threads": 0},
    ],
)
def test_settings_out_of_bounds_are_refused(bad):
    with pytest.raises(BadRequest):
        EngineSettings(**bad)


# the log


def lines(caplog: pytest.LogCaptureFixture, beginning: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith(beginning)]


@pytest.mark.parametrize("n_spares", [0, 4])
def test_every_checkpoint_made_restored_or_dropped_is_one_line(caplog, n_spares):
    caplog.set_level(logging.DEBUG, "everwarm.engine")
    params = CheckpointParams(max_checkpoints=3, every_n_tokens=30)
    with open_core(n_spares=n_spares, checkpoints=params) as core:
        history = text(1, 150)
        for turn in range(3):
            history = [*history, *run(core, history).tokens, *text(5 + turn, 40)]
            run(core, text(50 + turn, 100))
        run(core, text(52, 100))
        counts = core.counts
    assert min(counts.n_created, counts.n_restored, counts.n_dropped) > 0
    assert len(lines(caplog, "checkpoint created")) == counts.n_created
    assert len(lines(caplog, "checkpoint restored")) == counts.n_restored
    assert len(lines(caplog, "checkpoint dropped")) == counts.n_dropped


def test_a_line_says_how_many_where_and_how_big(caplog):
    caplog.set_level(logging.DEBUG, "everwarm.engine")
    with open_core() as core:
        run(core, text(1, 31))
    first = lines(caplog, "checkpoint created")[0]
    assert first.startswith("checkpoint created: 1 of 32, n_tokens 27, pos 27, ") and "MiB, ram, near-end" in first


def test_a_full_reread_is_a_warning_with_its_reason(caplog):
    caplog.set_level(logging.WARNING, "everwarm.engine")
    with open_core() as core:
        run(core, text(1, 100))
        run(core, text(1, 60))
    [warning] = lines(caplog, "full re-read")
    assert warning == (
        "full re-read of 60 tokens although 60 were known: no checkpoint was kept inside the shared part"
    )
    assert core.counts.n_full_rereads == 1


def test_a_full_reread_after_eviction_says_so(caplog):
    caplog.set_level(logging.WARNING, "everwarm.engine")
    with open_core(n_slots=1) as core:
        run(core, text(1, 100))
        run(core, text(2, 100))
        for node in list(core.cache.tree.nodes()):
            if node.segment is not None:
                core.cache.tree.drop_segment(node)
        run(core, text(1, 100))
    assert lines(caplog, "full re-read")[-1].endswith("its KV or its checkpoints were evicted")


def test_nothing_is_warned_of_when_nothing_is_read_twice(caplog):
    caplog.set_level(logging.WARNING, "everwarm.engine")
    with open_core(n_spares=2) as core:
        run(core, text(1, 100))
        run(core, text(1, 100))
        run(core, text(2, 100))
    assert caplog.records == []
