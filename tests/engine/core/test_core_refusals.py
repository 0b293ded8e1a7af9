"""libllama refuses: the entry is quarantined, the next best is used, the request never notices."""

import pytest

from everwarm.engine.core import Core
from everwarm.engine.request import Finish, NewToken
from everwarm.engine.scheduling.scheduler import MAX_ATTEMPTS
from everwarm.errors import ContextFull, DecodeFailed, StateRejected, TrimRefused
from support.campaign import crossed
from support.drive import EVERY_KIND, assert_greedy, check, drain, open_core, run, step_until, submit, text
from support.refusals import Refusals, fail_decodes, refuse_restores, refuse_splices

ALWAYS = 10**9
PROMPT = text(1, 250)
AGAIN = [*PROMPT, *text(2, 20)]
CUTS = (80, 160)


def fill_decodes(core: Core, times: int = 1, skip: int = 0) -> Refusals:
    def refuse(_):
        raise ContextFull("injected")

    return Refusals(core, "decode", refuse, times, skip)


def read_and_lose(core: Core, n_others: int = 2) -> None:
    """Read the prompt with its cuts, then give its slot away."""
    run(core, PROMPT, 4, boundaries=CUTS)
    for other in range(n_others):
        run(core, text(50 + other, 120), 4)


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "mamba2", "gemma3"])
def test_a_state_refused_once_is_quarantined_and_the_next_best_is_used(arch):
    with open_core(arch, n_slots=1) as core:
        read_and_lose(core)
        refused = refuse_restores(core)
        result = run(core, AGAIN)
        assert refused.n_refused == 1 and core.counts.n_quarantined == 1
        assert result.n_cached == 160
        assert_greedy(core, AGAIN, result)
        assert run(core, AGAIN).n_cached >= 266  # and life goes on


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "mamba2", "gemma3"])
def test_states_that_are_always_refused_lead_down_to_a_cold_start(arch):
    with open_core(arch, n_slots=1) as core:
        read_and_lose(core)
        refused = refuse_restores(core, ALWAYS)
        result = run(core, AGAIN)
        assert result.n_cached == 0
        assert refused.n_refused == core.counts.n_quarantined == 3  # 80, 160 and near the end
        assert_greedy(core, AGAIN, result)


def test_a_refused_entry_is_never_offered_again():
    offered: list[int] = []
    with open_core(n_slots=1) as core:
        read_and_lose(core)
        states = {id(n.checkpoint.state): n.n_items for n in core.cache.tree.nodes() if n.checkpoint}
        Refusals(core, "restore", lambda seq, blob, *_: offered.append(states.get(id(blob), 0)), ALWAYS)
        refuse_restores(core)
        run(core, AGAIN)
        run(core, AGAIN)
    assert offered.count(246) == 0 and 160 in offered


@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "gemma3"])
def test_a_state_refused_in_place_costs_that_state_only(arch):
    """The slot still has the conversation; only the state comes from RAM."""
    with open_core(arch, n_slots=1) as core:
        run(core, PROMPT, 4, boundaries=CUTS)
        refuse_restores(core)
        result = run(core, [*PROMPT[:248], *text(2, 20)])
        assert result.n_cached == 160
        assert_greedy(core, [*PROMPT[:248], *text(2, 20)], result)


@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "gemma3"])
def test_a_state_that_was_really_damaged_is_refused_by_libllama_and_survived(arch):
    with open_core(arch, n_slots=1) as core:
        read_and_lose(core)
        damaged = next(n for n in core.cache.tree.nodes() if n.n_items == 246)
        core.cache.tree._add_bytes(damaged, -1)
        damaged.checkpoint.state = damaged.checkpoint.state[:-1].copy()
        check(core)
        result = run(core, AGAIN)
        assert core.counts.n_quarantined == 1 and result.n_cached == 160
        assert_greedy(core, AGAIN, result)


def test_the_control_without_a_refusal_the_deepest_state_is_used():
    with open_core(n_slots=1) as core:
        read_and_lose(core)
        assert run(core, AGAIN).n_cached == 246
        assert core.counts.n_quarantined == 0


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_kv_refused_at_the_beginning_leads_to_a_cold_start(arch):
    with open_core(arch, n_slots=1) as core:
        read_and_lose(core)
        refuse_splices(core)
        result = run(core, AGAIN)
        assert result.n_cached == 0
        assert_greedy(core, AGAIN, result)


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
@pytest.mark.parametrize("skip", [1, 2])
def test_kv_refused_later_on_leads_to_the_point_before_it(arch, skip):
    with open_core(arch, n_slots=1) as core:
        read_and_lose(core)
        refused = refuse_splices(core, skip=skip)
        result = run(core, AGAIN)
        assert refused.n_refused == 1
        assert result.n_cached == CUTS[skip - 1]
        assert_greedy(core, AGAIN, result)


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_kv_that_is_always_refused_leads_to_a_cold_start(arch):
    with open_core(arch, n_slots=1) as core:
        read_and_lose(core)
        refuse_splices(core, ALWAYS)
        result = run(core, AGAIN)
        assert result.n_cached == 0
        assert_greedy(core, AGAIN, result)


def test_plain_attention_survives_refused_kv():
    with open_core("llama", n_slots=1) as core:
        read_and_lose(core)
        refuse_splices(core)
        result = run(core, AGAIN)
        assert result.n_cached == 0
        assert_greedy(core, AGAIN, result)


def test_plain_attention_survives_a_refused_trim():
    def refuse(*_):
        raise TrimRefused("injected")

    with open_core("llama", n_slots=1) as core:
        run(core, PROMPT, 4)
        refused = Refusals(core, "trim", refuse)
        edited = [*PROMPT[:80], *text(2, 30)]
        result = run(core, edited)
        assert refused.n_refused == 1 and result.n_cached == 0
        assert_greedy(core, edited, result)
        assert_greedy(core, PROMPT, run(core, PROMPT))  # and what it had is not remembered wrongly


def test_a_window_that_cannot_be_seated_anew_does_not_stop_the_engine():
    with open_core("gemma3") as core:

        def refuse(seq):
            core.context.drop(seq)
            raise StateRejected("injected")

        Refusals(core, "capture", refuse)
        result = run(core, PROMPT, boundaries=CUTS)
        assert_greedy(core, PROMPT, result)


# decoding


@pytest.mark.parametrize(("arch", "skip", "n_spares"), crossed(EVERY_KIND, (0, 1, 2, 4), (0, 4)))
def test_a_batch_that_fails_once_is_started_over(arch, skip, n_spares):
    with open_core(arch, n_spares=n_spares) as core:
        failed = fail_decodes(core, skip=skip)
        result = run(core, PROMPT, 6, boundaries=CUTS)
        assert failed.n_refused == core.counts.n_decode_failures == 1
        assert result.finish is Finish.LENGTH and len(result.tokens) == 6
        assert_greedy(core, PROMPT, result)


def test_a_batch_that_fails_again_and_again_fails_its_request_and_nobody_else():
    with open_core() as core:
        fail_decodes(core, MAX_ATTEMPTS)
        request = submit(core, PROMPT)
        result = drain(core)[request.id]
        assert result.finish is Finish.ERROR and isinstance(result.error, DecodeFailed)
        after = run(core, PROMPT)
        assert_greedy(core, PROMPT, after)


def test_two_requests_in_a_batch_that_fails_both_recover():
    with open_core() as core:
        prompts = [PROMPT, text(9, 80)]
        asked = [submit(core, prompt, 12) for prompt in prompts]
        step_until(core, NewToken)
        fail_decodes(core)
        results = drain(core)
        for request, prompt in zip(asked, prompts, strict=True):
            assert len(results[request.id].tokens) == 12
            assert_greedy(core, prompt, results[request.id])


@pytest.mark.parametrize("n_spares", [0, 4])
def test_a_failed_batch_distrusts_the_state_it_started_from_only(n_spares):
    with open_core(n_slots=1, n_spares=n_spares) as core:
        read_and_lose(core)
        fail_decodes(core)
        result = run(core, AGAIN)
        assert core.counts.n_quarantined == 1
        assert_greedy(core, AGAIN, result)


@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "gemma3", "llama"])
@pytest.mark.parametrize("skip", [0, 1, 3, 6])
def test_a_full_context_among_two_makes_the_younger_wait(arch, skip):
    prompts = [PROMPT, text(9, 80)]
    with open_core(arch) as core:
        fill_decodes(core, skip=skip)
        asked = [submit(core, prompt, 12, boundaries=(60,)) for prompt in prompts]
        results = drain(core)
        assert core.counts.n_suspended == 1
        for request, prompt in zip(asked, prompts, strict=True):
            assert len(results[request.id].tokens) == 12
            assert_greedy(core, prompt, results[request.id])


def test_a_full_context_of_a_lone_request_ends_it_with_what_it_has():
    with open_core() as core:
        fill_decodes(core, skip=4)
        result = run(core, PROMPT, 12)
        assert result.finish is Finish.LENGTH and 0 < len(result.tokens) < 12
        assert_greedy(core, PROMPT, result)
