"""Exactness: what is restored is bit for bit what a cold run would have made, and nothing deleted leaks into it."""

import numpy as np
import pytest

from everwarm.engine.core import Core
from everwarm.engine.slots import Slot
from support.drive import (
    STATEFUL,
    drain,
    memory_of,
    open_core,
    record_logits,
    replay,
    run,
    slot_holding,
    submit,
    text,
    tidy,
)

SPARES = pytest.mark.parametrize("n_spares", [0, 4])
EXACT = [*STATEFUL, "gemma3"]
CLOSE = 2e-2  # plain attention with other chunks: the last bits differ


def conversation() -> list[list[int]]:
    """Read, extend, edit in the middle, truncate, edit near the end, return to the beginning."""
    base = text(1, 150)
    return [
        base,
        [*base, *text(2, 40)],
        [*base[:100], *text(3, 60)],
        base[:120],
        [*base[:140], *text(4, 30)],
        [*base, *text(2, 40), *text(5, 10)],
        base,
    ]


def is_exact(core: Core, slot: Slot) -> bool:
    return memory_of(core.context, slot.seq) == replay(core, slot)


@SPARES
@pytest.mark.parametrize("arch", EXACT)
def test_every_turn_of_an_edited_conversation_equals_a_cold_run_with_the_same_cuts(arch, n_spares):
    with open_core(arch, n_spares=n_spares) as core:
        cached = 0
        for turn in conversation():
            result = run(core, turn, 5, boundaries=(50, 100), deterministic=True)
            slot = slot_holding(core, turn)
            assert core.context.is_clean(slot.seq)
            assert is_exact(core, slot)
            cached += result.n_cached
        assert cached > 500  # the control: most of it did come from checkpoints


@pytest.mark.parametrize("arch", EXACT)
def test_the_comparison_notices_one_changed_token(arch):
    """The control of the two tests above."""
    with open_core(arch, n_slots=1) as core:
        run(core, text(1, 60), 3, deterministic=True)
        slot = core.slots[0]
        edited = slot.items.codes.copy()
        edited[20] += 1
        assert memory_of(core.context, slot.seq) != replay(core, slot, edited)


def test_the_comparison_notices_the_state_of_one_token_more():
    with open_core(n_slots=1) as core:
        run(core, text(1, 60), 3, deterministic=True)
        cold = replay(core, core.slots[0])
        run(core, text(1, 60), 4, deterministic=True)
        assert memory_of(core.context, core.slots[0].seq) != cold


@SPARES
@pytest.mark.parametrize("arch", EXACT)
def test_logits_after_an_edit_are_those_of_a_run_that_never_saw_the_old_text(arch, n_spares):
    before, after = text(1, 150), [*text(1, 150)[:100], *text(3, 60)]
    with open_core(arch, n_spares=n_spares) as core:
        run(core, before, 8, boundaries=(50, 100), deterministic=True)
        rows = record_logits(core)
        warm = run(core, after, 8, boundaries=(50, 100), deterministic=True)
    with open_core(arch, n_spares=n_spares) as fresh:
        cold_rows = record_logits(fresh)
        cold = run(fresh, after, 8, boundaries=(50, 100), deterministic=True)
    assert warm.n_cached == 100 and cold.n_cached == 0
    assert warm.tokens == cold.tokens
    assert all(np.array_equal(a, b) for a, b in zip(rows, cold_rows, strict=True))


def test_logits_of_the_unedited_text_are_others():
    """The control: logits do tell the two prompts apart."""
    rows = []
    for prompt in (text(1, 150), [*text(1, 150)[:100], *text(3, 60)]):
        with open_core() as core:
            recorded = record_logits(core)
            run(core, prompt, 1, deterministic=True)
            rows.append(recorded[0])
    assert not np.allclose(rows[0], rows[1], atol=CLOSE)


@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "gemma3", "llama"])
def test_beside_other_conversations_only_the_last_bits_differ(arch):
    target = [*text(1, 150)[:120], *text(3, 40)]
    with open_core(arch, n_spares=4) as core:
        run(core, text(1, 150), 4, boundaries=(100,))
        run(core, text(9, 200), 4)
        rows = record_logits(core)
        warm = run(core, target, 1)
    with open_core(arch) as fresh:
        cold_rows = record_logits(fresh)
        run(fresh, target, 1)
    assert warm.n_cached >= 100
    np.testing.assert_allclose(rows[0], cold_rows[0], atol=0.2)


# plain attention and sliding windows


def test_a_deterministic_request_of_plain_attention_does_not_depend_on_what_others_did():
    following = [*text(1, 120), *text(2, 40)]
    with open_core("llama") as core:
        submit(core, [*text(1, 120), *text(3, 40)])
        submit(core, text(4, 90))
        drain(core)
        rows = record_logits(core)
        run(core, following, deterministic=True)
    with open_core("llama") as fresh:
        cold_rows = record_logits(fresh)
        run(fresh, following, deterministic=True)
    assert all(np.array_equal(a, b) for a, b in zip(rows, cold_rows, strict=True))


def test_plain_attention_takes_no_checkpoints_and_reads_one_token_of_an_identical_prompt():
    prompt = text(1, 100)
    with open_core("llama", n_spares=4) as core:
        run(core, prompt, 4)
        again = run(core, prompt, 4)
        assert again.n_processed == 1
        assert core.counts.n_created == 0 and len(core.cache.residents.spares) == 0


@pytest.mark.parametrize("at", [1, 37, 99])
def test_plain_attention_rereads_from_the_edit_on(at):
    prompt = text(1, 100)
    edited = [*prompt[:at], *text(2, 30)]
    with open_core("llama", n_slots=1) as core:
        run(core, prompt, 4)
        rows = record_logits(core)
        warm = run(core, edited, 4)
    assert warm.n_cached == at and warm.n_processed == 30
    with open_core("llama", n_slots=1) as fresh:
        cold_rows = record_logits(fresh)
        cold = run(fresh, edited, 4)
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(rows, cold_rows, atol=CLOSE)


def test_a_window_model_comes_back_past_its_window():
    """Far behind the window the old cells are gone; only a checkpoint leads back."""
    prompt = text(1, 400)
    back = [*prompt[:150], *text(2, 20)]
    with open_core("gemma3") as core:
        assert core.model.n_swa == 64
        run(core, prompt, 4, boundaries=(150,), deterministic=True)
        run(core, text(5, 300), 4)
        warm = run(core, back, 4, boundaries=(150,), deterministic=True)
        assert is_exact(core, slot_holding(core, back))
    assert warm.n_cached == 150
    with open_core("gemma3") as fresh:
        assert run(fresh, back, 4, boundaries=(150,), deterministic=True).tokens == warm.tokens


# after other things happened


@SPARES
@pytest.mark.parametrize("arch", EXACT)
def test_a_conversation_moved_to_ram_and_back_is_exact(arch, n_spares):
    with open_core(arch, n_spares=n_spares) as core:
        run(core, text(1, 200), 6, boundaries=(90,), deterministic=True)
        tidy(core)
        for other in (5, 6, 7):
            run(core, text(other, 150), 3)
        back = run(core, [*text(1, 200)[:180], *text(8, 20)], 6, deterministic=True)
        assert back.n_cached == 90
        assert is_exact(core, slot_holding(core, text(1, 180)))


# states and KV of different origins


SHARED, TAIL = text(1, 120), text(2, 60)


def read_beside_others(core: Core) -> None:
    submit(core, [*SHARED, *text(3, 40)], 4, boundaries=(120,))
    submit(core, [*SHARED[:110], *text(4, 50)], 4)
    drain(core)


@SPARES
def test_a_deterministic_request_is_exact_after_the_same_prefix_was_read_beside_others(n_spares):
    with open_core(n_spares=n_spares) as core:
        read_beside_others(core)
        for turn in ([*SHARED, *TAIL], [*SHARED, *TAIL, *text(5, 30)]):
            run(core, turn, 4, boundaries=(120,), deterministic=True)
            assert is_exact(core, slot_holding(core, turn))


def test_a_deterministic_conversation_is_cached_although_others_read_its_beginning_first():
    with open_core() as core:
        read_beside_others(core)
        run(core, [*SHARED, *TAIL], 4, boundaries=(120,), deterministic=True)
        assert run(core, [*SHARED, *TAIL, *text(5, 30)], 4, deterministic=True).n_cached > 120


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "gemma3"])
def test_an_edit_inside_a_reply_is_exact_for_the_one_after_it_too(arch):
    """The reply's KV was written token by token; the first edit reads part of it in one chunk and keeps a state there."""
    prompt = text(1, 100)
    with open_core(arch, n_slots=1) as core:
        reply = run(core, prompt, 40, deterministic=True).tokens
        for edit in (2, 3):
            result = run(core, [*prompt, *reply[:30], *text(edit, 40)], 4, deterministic=True)
            assert is_exact(core, core.slots[0])
        assert result.n_cached >= 96


def test_kv_of_an_unknown_history_is_never_put_under_a_clean_state():
    """A segment that ends inside a chunk has no history of its own; random conversations get there by many branches."""
    prompt = text(1, 100)
    with open_core(n_slots=1) as core:
        for turn in (prompt, [*prompt[:30], *text(3, 40)]):
            run(core, turn, 4, deterministic=True)
        for node in core.cache.tree.nodes():
            if node.segment is not None:
                node.segment.chunks = None
        turn = [*prompt[:30], *text(4, 40)]
        run(core, turn, 4, deterministic=True)
        assert is_exact(core, core.slots[0])


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "gemma3"])
def test_a_sequence_called_clean_is_exact_also_after_part_of_a_segment_was_brought_back(arch):
    with open_core(arch, n_slots=1) as core:
        for turn in conversation():
            run(core, turn, 5, boundaries=(50, 100))
            if core.context.is_clean(core.slots[0].seq):
                assert is_exact(core, core.slots[0])


def test_a_pure_recurrent_conversation_in_one_slot_is_exact_without_asking_for_it():
    with open_core("mamba2", n_slots=1) as core:
        for turn in conversation():
            run(core, turn, 5, boundaries=(50, 100))
            assert core.context.is_clean(core.slots[0].seq) and is_exact(core, core.slots[0])
