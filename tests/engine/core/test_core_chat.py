"""Ordinary conversations: what was read once is not read again."""

import pytest

from everwarm.config import Sampling
from everwarm.engine.request import Finish, NewToken
from everwarm.state.policy import CheckpointParams, CutKind
from support.campaign import crossed
from support.drive import (
    EVERY_KIND,
    GUARD,
    HYBRIDS,
    STATEFUL,
    check,
    checkpoints,
    memory_of,
    open_core,
    replay,
    run,
    slot_holding,
    step_until,
    submit,
    text,
    tidy,
)

SPARES = pytest.mark.parametrize("n_spares", [0, 4])


@SPARES
@pytest.mark.parametrize("arch", STATEFUL)
def test_three_short_turns_reuse_all_but_the_last_four_tokens(arch, n_spares):
    """31, 48 and 65 tokens; each turn shares all but the last four of the one before."""
    first, more = text(1, 31), text(2, 65)
    second = first[:27] + more[:21]
    third = second[:44] + more[21:42]
    with open_core(arch, n_spares=n_spares) as core:
        results = [run(core, turn) for turn in (first, second, third)]
    assert [len(turn) for turn in (first, second, third)] == [31, 48, 65]
    assert results[0].n_cached == 0
    assert results[1].n_cached >= 27 and results[2].n_cached >= 44
    assert all(result.n_processed <= 21 for result in results[1:])


def test_with_checkpoints_off_the_same_chat_is_read_from_the_start():
    """The control: it is the checkpoints that make the turns cheap."""
    first = text(1, 31)
    second = first[:27] + text(2, 21)
    with open_core(checkpoints=CheckpointParams(max_checkpoints=0)) as core:
        run(core, first)
        assert run(core, second).n_cached == 0


@pytest.mark.parametrize(("arch", "n_spares", "n"), crossed((*STATEFUL, "gemma3", "llama"), (0, 4), (2, 3, 17, 100)))
def test_an_identical_prompt_is_hardly_read_and_answers_the_same(arch, n_spares, n):
    prompt = text(3, n)
    with open_core(arch, n_spares=n_spares) as core:
        first, second, third = (run(core, prompt, 6) for _ in range(3))
        spares = len(core.cache.residents.spares)
    assert first.n_cached == 0
    for again in (second, third):
        assert again.tokens == first.tokens
        assert again.n_processed <= (0 if spares else GUARD)


@pytest.mark.parametrize("arch", STATEFUL)
@pytest.mark.parametrize("read_another_way", [False, True])
def test_an_end_that_still_stands_is_gone_on_from_without_touching_it(arch, read_another_way, monkeypatch):
    with open_core(arch, n_spares=4) as core:
        whole = run(core, text(3, 90), 6)
    with open_core(arch, n_spares=4) as core:
        run(core, text(3, 90), 1)  # the reply's token is not decoded: the slot stands at the prompt's end
        slot = slot_holding(core, text(3, 90))
        if read_another_way:  # the control
            slot.hold(slot.items, slot.node, [(1, 90)])
        unparked = []
        unpark = core.context.unpark
        monkeypatch.setattr(core.context, "unpark", lambda *seqs: (unparked.append(seqs), unpark(*seqs)))
        again = run(core, text(3, 90), 6)
        assert again.tokens == whole.tokens and again.n_processed == 0
        assert bool(unparked) is read_another_way
        assert memory_of(core.context, slot.seq) == replay(core, slot)


def test_a_first_token_leaves_before_its_prompts_end_is_kept():
    with open_core(n_spares=4) as core:
        submit(core, text(3, 90), 6)
        step_until(core, NewToken)
        assert 90 not in checkpoints(core)
        core.keep_ends()
        assert 90 in checkpoints(core)
        check(core)


@pytest.mark.parametrize("n", [2, 3])
def test_plain_attention_shares_part_of_an_edge_with_another_slot(n):
    """The reply is longer than the prompt, so the prompt does not count as the slot's own conversation."""
    with open_core("llama") as core:
        first = run(core, text(3, n), 6)
        again = run(core, text(3, n), 6)
    assert again.tokens == first.tokens and again.n_processed == 1


@SPARES
def test_an_identical_prompt_is_found_again_after_idle_work(n_spares):
    with open_core(n_spares=n_spares) as core:
        first = run(core, text(3, 90), 6)
        tidy(core)
        assert run(core, text(3, 90), 6).tokens == first.tokens


@pytest.mark.parametrize(("arch", "n_spares", "n", "max_tokens"), crossed(EVERY_KIND, (0, 4), (1, 2), (0, 1, 3)))
def test_the_shortest_prompts_never_spin(arch, n_spares, n, max_tokens):
    prompt = text(4, n)
    with open_core(arch, n_spares=n_spares) as core:
        for _ in range(4):
            result = run(core, prompt, max_tokens)
            assert len(result.tokens) == max_tokens and result.finish is Finish.LENGTH


@SPARES
@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "gemma3", "llama"])
def test_a_strict_prefix_of_an_earlier_prompt_is_answered_right(arch, n_spares):
    prompt = text(5, 120)
    with open_core(arch, n_spares=n_spares) as core:
        run(core, prompt, 5, boundaries=(40, 80))
        shorter = run(core, prompt[:90], 5)
        at_a_cut = run(core, prompt[:80], 5)
    assert shorter.n_cached >= (80 if arch != "gemma3" else 64)
    with open_core(arch) as fresh:
        assert run(fresh, prompt[:90], 5).tokens == shorter.tokens
        assert run(fresh, prompt[:80], 5).tokens == at_a_cut.tokens


@SPARES
def test_the_reply_sent_back_untouched_is_not_read_again(n_spares):
    prompt = text(6, 60)
    with open_core(n_spares=n_spares) as core:
        reply = run(core, prompt, 12)
        following = run(core, [*prompt, *reply.tokens, *text(7, 20)])
    assert following.n_processed <= 21  # the last token of a reply is never decoded by the turn that wrote it


def test_a_checkpoint_at_a_message_boundary_serves_a_prompt_that_was_cut_short():
    """Taken at 10,540 while reading 11,052 tokens, used by 10,607 tokens that share 10,603."""
    long = text(8, 11_052)
    shorter = [*long[:10_603], *text(9, 4)]
    with open_core(width=64, n_ctx=12_288, n_threads=2) as core:
        run(core, long, 1, boundaries=(10_540,))
        result = run(core, shorter, 1)
    assert len(shorter) == 10_607
    assert result.n_shared == 10_603
    assert result.n_cached == 10_540 and result.checkpoint.n_tokens == 10_540
    assert result.checkpoint.kind == CutKind.BOUNDARY.value


def test_without_the_boundary_less_of_it_is_reused():
    """The control: the boundary is what the reuse above comes from."""
    long = text(8, 1_500)
    with open_core(width=64) as core:
        run(core, long, 1)
        assert run(core, [*long[:1_400], *text(9, 4)], 1).n_cached < 1_300


@pytest.mark.parametrize("arch", HYBRIDS[:2])
def test_the_second_visit_to_a_branch_is_cheap(arch):
    """Nobody knew of the branch the first time; the second visitor paid and kept it for the third."""
    shared = text(10, 400)
    with open_core(arch) as core:
        run(core, [*shared, *text(11, 50)])
        second = run(core, [*shared, *text(12, 50)])
        third = run(core, [*shared, *text(13, 50)])
    assert second.n_shared == third.n_shared == 400
    assert third.n_processed <= 50 + 1
    assert third.checkpoint.kind in (CutKind.BRANCH.value, CutKind.EVERY.value)


def test_what_a_request_says_of_its_cache_is_consistent():
    with open_core() as core:
        for turn in (text(1, 50), [*text(1, 50), *text(2, 9)], text(1, 30)):
            result = run(core, turn)
            assert result.n_processed + result.n_cached == result.n_prompt == len(turn)
            assert result.n_cached <= result.n_shared <= len(turn)
        assert core.counts.n_requests == 3


def test_a_prompt_that_wrote_nothing_is_known_to_its_end():
    prompt = text(1, 50)
    with open_core(n_spares=0) as core:
        run(core, prompt, 1)
        following = run(core, [*prompt, *text(2, 9)])
    assert following.n_cached <= following.n_shared


def test_the_stable_point_is_what_the_next_turn_starts_from():
    prompt = text(14, 200)
    with open_core() as core:
        run(core, prompt, stable=150)
        assert 150 in checkpoints(core)
        following = run(core, [*prompt[:150], *text(15, 60)])
    assert following.n_cached == 150 and following.checkpoint.kind == CutKind.STABLE.value


def test_sampling_with_a_seed_gives_the_same_from_kept_logits():
    warm = Sampling(temperature=1.0, seed=7)
    with open_core(n_spares=4) as core:
        first = run(core, text(1, 40), 1, sampling=warm)
        second = run(core, text(1, 40), 1, sampling=warm)
        other = [run(core, text(1, 40), 1, sampling=Sampling(temperature=1.0, seed=s)).tokens for s in range(8)]
    assert second.n_processed == 0 and first.tokens == second.tokens
    assert len(set(other)) > 1  # the control: the seed does decide


def test_a_finished_core_is_empty_of_requests():
    with open_core() as core:
        submit(core, text(1, 10))
        assert core.has_work
        run(core, text(2, 10))
        assert not core.has_work and core.step() == []
        check(core)
