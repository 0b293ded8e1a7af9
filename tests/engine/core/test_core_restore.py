"""Bringing a conversation back while the context is crowded: what moves out on the way must not be lost or mixed up."""

import numpy as np

from everwarm.engine.core import Core
from everwarm.engine.request import NewToken
from support.drive import (
    assert_greedy,
    check,
    drain,
    open_core,
    record_logits,
    run,
    slot_holding,
    step_until,
    submit,
    text,
)
from support.refusals import refuse_restores, refuse_splices

FIRST, SECOND = text(1, 150), text(2, 200)


def assert_as_cold(prompt: list[int], rows: list[np.ndarray], arch: str = "qwen35", atol: float = 5e-3) -> None:
    with open_core(arch, n_slots=1) as fresh:
        cold_rows = record_logits(fresh)
        run(fresh, prompt)
    np.testing.assert_allclose(rows[0], cold_rows[0], atol=atol)


def crowded(core: Core) -> None:
    """``SECOND`` lies in RAM; ``FIRST`` is in the slot, and the end of its reply is parked as well."""
    run(core, SECOND, 4, boundaries=(60,))
    run(core, FIRST, 4, boundaries=(100,), deterministic=True)  # moves everybody out first
    assert parked(core) == [153]


def parked(core: Core) -> list[int | None]:
    """How long the prompts are whose ends lie in spares."""
    spares = core.cache.residents.spares
    return [None if node is None else node.n_items for node in map(spares.node, spares)]


def give_away(core: Core, tokens: list[int]) -> None:
    core.cache.room.vacate(slot_holding(core, tokens))
    check(core)


def test_the_conversation_that_gave_way_can_come_back():
    with open_core(n_slots=1, n_spares=1, n_ctx=256) as core:
        crowded(core)
        assert run(core, [*SECOND, *text(3, 10)]).n_cached == 196
        assert run(core, [*FIRST, *text(4, 10)]).n_cached == 146


def test_kv_of_one_conversation_is_never_kept_for_another():
    following = [*FIRST, *text(4, 10)]
    with open_core(n_slots=1, n_spares=1, n_ctx=256) as core:
        crowded(core)
        refuse_restores(core)
        assert run(core, [*SECOND, *text(3, 10)]).n_cached == 60, "the point before the one that was refused"
        rows = record_logits(core)
        assert run(core, following).n_cached == 146
    assert_as_cold(following, rows)


def test_the_control_without_a_crowd_both_come_back_and_agree_with_a_cold_run():
    following = [*FIRST, *text(4, 10)]
    with open_core(n_slots=1, n_spares=1, n_ctx=1024) as core:
        crowded(core)
        assert run(core, [*SECOND, *text(3, 10)]).n_cached == 196
        rows = record_logits(core)
        assert run(core, following).n_cached == 146
    assert_as_cold(following, rows)


def test_a_second_attempt_does_not_count_on_what_the_first_moved_out():
    prompt = text(1, 200)
    with open_core(n_spares=5, n_ctx=256) as core:
        run(core, prompt, 4, boundaries=(50, 100))
        for spare, n_items in zip(core.cache.residents.spares, parked(core), strict=True):
            if n_items != 100:
                core.cache.checkpointer.move_out(spare)
        give_away(core, prompt)
        for other in (2, 3):
            run(core, text(other, 60))
        assert 100 in parked(core)
        refuse_splices(core)
        result = run(core, [*prompt, *text(4, 20)])
        assert result.n_cached == 100 and 100 not in parked(core)
        assert_greedy(core, [*prompt, *text(4, 20)], result)


def test_a_branch_inside_a_segment_is_brought_back_beside_a_running_request():
    """The checkpoint at 120 lies inside a segment of 96 cells."""
    prompt = text(1, 200)
    branch, again = [*prompt[:120], *text(9, 30)], [*prompt[:120], *text(10, 5)]
    with open_core(n_spares=2, n_ctx=256) as core:
        run(core, prompt, 4, boundaries=(50, 100))
        give_away(core, prompt)
        run(core, branch, 1)
        give_away(core, branch)
        submit(core, text(2, 90), 100)
        for _ in range(10):
            step_until(core, NewToken)
        request = submit(core, again)
        result = drain(core)[request.id]
        assert result.n_cached == 120
        assert_greedy(core, again, result)


def test_saving_the_old_conversation_does_not_evict_the_one_being_brought_back():
    short, long = text(1, 100), text(2, 200)
    with open_core("llama", n_slots=1) as core:
        run(core, short)
        run(core, long)
        per_token = core.cache.tree.ram_bytes / 103
        core.cache.ram_budget.n_bytes = int(per_token * 250)  # room for one and a half of them
        result = run(core, [*short, *text(3, 10)])
        assert result.n_cached == 100
        assert_greedy(core, [*short, *text(3, 10)], result)
        check(core)


def test_a_prompt_that_shares_more_with_a_running_request_than_with_what_is_kept():
    """The last node that is known of it agrees only in part, and stays the other conversation's."""
    other, first = [*text(1, 50), *text(3, 60)], [*text(1, 50), *text(2, 100)]
    following = [*other, *text(5, 10)]
    with open_core("llama", n_slots=3) as core:
        run(core, other)
        submit(core, first, 40)
        step_until(core, NewToken)
        request = submit(core, [*first, *text(4, 10)])
        assert drain(core)[request.id].n_cached == len(first)
        for slot in core.slots:
            core.cache.room.vacate(slot)
        rows = record_logits(core)
        assert run(core, following).n_cached == len(other)
    assert_as_cold(following, rows, "llama")


def test_kv_is_not_kept_for_a_text_that_a_running_request_shares_only_in_part():
    """A window cannot share cells, so a prompt takes KV of the running request through RAM."""
    opening = text(1, 100)
    other, long = [*opening, 7, *text(3, 20)], [*opening, 7, *text(2, 500)]
    following = [*other, *text(5, 10)]
    with open_core("gemma3", n_slots=3, n_ubatch=32, n_batch=256) as core:
        run(core, other, boundaries=(100,))
        first = submit(core, long)
        while core.slots[0].n_fed < 150 or core.slots[0].request is not first:
            core.step()
        request = submit(core, [*long[:150], *text(4, 30)])
        assert drain(core)[request.id].n_cached == 100
        for slot in core.slots:
            core.cache.room.vacate(slot)
        rows = record_logits(core)
        assert run(core, following).n_cached > 100
    assert_as_cold(following, rows, "gemma3", atol=2e-2)  # with KV of another text it is 0.27
