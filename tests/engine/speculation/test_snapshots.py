"""Drafts that are cut back to snapshots: the same replies, no token decoded twice, and the cache as it is without."""

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from everwarm.engine.memory_plan import N_SNAPSHOTS, MemoryShape, _snapshots
from everwarm.engine.settings import EngineSettings
from everwarm.engine.speculation.draft_length import (
    ANY_LENGTH,
    CHANGE_AFTER,
    N_LEARN,
    ONE_KIND,
    ONE_LENGTH,
    Pacing,
    Record,
    StepShape,
    best_length,
)
from support.drafts import CODE, STORY, Scripted, always_draft, drafting_core, recorded_drafts, tokens_of
from support.drive import NEAR_TIE, check, drain, regrets, run, submit, text, tidy
from support.models import EMBEDDED

WITH_SNAPSHOTS = ("qwen35", "nemotron_h", "lfm2")
PATTERNS = {"right": [99], "wrong": [0], "mixed": [2, 0, 99, 1, 99, 0]}


def snapshot_core(arch: str = "qwen35", **settings):
    return drafting_core(arch, **{"n_slots": 1, "n_snapshots": 3} | settings)


def plain(arch: str, prompt: list[int], n: int):
    with drafting_core(arch, n_slots=1, speculate="off") as core:
        return run(core, prompt, n)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("arch", WITH_SNAPSHOTS)
def test_a_reply_is_that_of_plain_decoding_and_no_token_is_decoded_twice(arch, pattern):
    prompt, n = text(1, 60), 40
    alone = plain(arch, prompt, n)
    with snapshot_core(arch) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], PATTERNS[pattern], 3))
        feeds = recorded_drafts(core)
        drafted = run(core, prompt, n)
        assert regrets(core, prompt, drafted.tokens).max() < NEAR_TIE
        assert drafted.tokens == alone.tokens and drafted.n_drafted > 0
        assert {len(feed.tokens) - feed.n_draft for feed in feeds} == {
            1
        }  # without snapshots the accepted ones come again after a rejection
        slot = core.slots[0]
        assert slot.resident().codes.tolist() == [*prompt, *alone.tokens[:-1]]
        assert core.context.end(slot.seq).n_tokens == len(prompt) + n - 1


@pytest.mark.parametrize("arch", WITH_SNAPSHOTS)
def test_the_next_turn_continues_from_the_end_of_the_reply(arch):
    """Also where the last draft was taken back in part, and another conversation had the slot in between."""
    prompt = text(1, 60)
    with drafting_core(arch, n_slots=1, speculate="off") as core:
        reply = run(core, prompt, 30).tokens
        following = [*prompt, *reply, *text(2, 10)]
        expected = run(core, following, 12).tokens
    for between in ([], text(5, 80)):
        for n_spares in (0, 4):
            with snapshot_core(arch, n_spares=n_spares) as core:
                always_draft(core, Scripted([[*prompt, *reply], [*following, *expected]], [1, 0, 2], 3))
                run(core, prompt, 30)
                tidy(core)
                if between:
                    run(core, between, 3)
                again = run(core, following, 12)
                assert again.n_cached == len(prompt) + 29
                assert again.tokens == expected
                check(core)


def test_a_draft_that_ends_the_reply_leaves_a_state_that_can_be_kept():
    prompt = text(1, 60)
    with drafting_core(n_slots=1, speculate="off") as core:
        core.model.vocab.eog = frozenset()
        alone = run(core, prompt, 30)
    end = alone.tokens[7]
    at = alone.tokens.index(end)
    with snapshot_core(n_spares=4) as core:
        core.model.vocab.eog = frozenset({end})
        core.speculator.eog = frozenset()
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [99], 3))
        result = run(core, prompt, 30, ignore_eos=False)
        assert result.tokens == alone.tokens[:at]
        assert core.slots[0].resident().codes.tolist() == [*prompt, *alone.tokens[:at]]
        tidy(core)
        following = [*prompt, *alone.tokens[:at], *text(2, 10)]
        again = run(core, following, 8)
        assert again.n_cached == len(prompt) + at
        assert regrets(core, following, again.tokens).max() < NEAR_TIE


def test_replies_with_drafts_are_not_called_clean():
    prompt = text(1, 60)
    alone = plain("qwen35", prompt, 20)
    for n_drafted, is_clean in ((0, True), (3, False)):
        with snapshot_core() as core:
            always_draft(core, Scripted([[*prompt, *alone.tokens]], [1, 0], n_drafted))
            run(core, prompt, 20)
            assert core.context.is_clean(0) == is_clean


def test_many_requests_are_cut_in_one_step():
    prompts = [text(seed, 40) for seed in (1, 2, 3)]
    alone = [plain("qwen35", prompt, 24) for prompt in prompts]
    texts = [[*prompt, *result.tokens] for prompt, result in zip(prompts, alone, strict=True)]
    with snapshot_core(n_slots=3) as core:
        always_draft(core, Scripted(texts, [2, 99, 0, 1], 3))
        requests = [submit(core, prompt, 24) for prompt in prompts]
        results = drain(core)
        for request, prompt in zip(requests, prompts, strict=True):
            assert regrets(core, prompt, results[request.id].tokens).max() < NEAR_TIE


def test_replies_with_and_without_drafts_in_one_step_are_right():
    """Steps of unequal parts: what libllama moves between them has no snapshots, so states are held there."""
    prompts = [text(seed, 30 + seed) for seed in (1, 2, 3)]
    texts = [[*prompt, *plain("qwen35", prompt, 30).tokens] for prompt in prompts]
    for known in ([texts[1]], [texts[0], texts[2]], texts[:2]):
        with snapshot_core(n_slots=3) as core:
            always_draft(core, Scripted(known, [0, 1, 2, 99], 3))
            requests = [submit(core, prompt, 30) for prompt in (prompts[1], prompts[0], prompts[2])]
            results = drain(core)
            for request in requests:
                prompt = request.ask.prompt.codes.tolist()
                assert regrets(core, prompt, results[request.id].tokens).max() < NEAR_TIE
            assert core.speculator.counts.n_drafted > core.speculator.counts.n_draft_accepted > 0


def test_a_draft_longer_than_the_snapshots_is_taken_back_as_without_them():
    prompt = text(1, 60)
    alone = plain("qwen35", prompt, 40)
    with snapshot_core() as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [5, 1, 99, 2], 8))
        feeds = recorded_drafts(core)
        result = run(core, prompt, 40)
        assert result.tokens == alone.tokens and max(feed.n_draft for feed in feeds) == 8
        check(core)


def test_a_suspended_request_continues_from_a_state_that_was_taken_back():
    prompts = [text(seed, 60) for seed in (1, 2)]
    alone = [plain("qwen35", prompt, 120) for prompt in prompts]
    texts = [[*prompt, *result.tokens] for prompt, result in zip(prompts, alone, strict=True)]
    with snapshot_core(n_slots=2, n_ctx=256) as core:
        always_draft(core, Scripted(texts, [1, 99, 0], 3))
        requests = [submit(core, prompt, 120) for prompt in prompts]
        results = drain(core)
        assert core.counts.n_suspended > 0
        for request, prompt in zip(requests, prompts, strict=True):
            assert len(results[request.id].tokens) == 120
            assert regrets(core, prompt, results[request.id].tokens).max() < NEAR_TIE


@pytest.mark.parametrize("question", [STORY, CODE])
def test_a_head_drafts_with_snapshots(question):
    settings = {"path": EMBEDDED, "n_ctx": 1024, "n_slots": 1}
    with drafting_core(**settings, speculate="off") as core:
        alone = run(core, tokens_of(core, question), 60)
    with drafting_core(**settings, speculate="mtp", n_snapshots=3) as core:
        always_draft(core)
        prompt = tokens_of(core, question)
        drafted = run(core, prompt, 60)
        assert regrets(core, prompt, drafted.tokens).max() < NEAR_TIE
        assert drafted.tokens == alone.tokens
        assert drafted.n_draft_accepted > 0.6 * drafted.n_drafted > 0
        tidy(core)
        check(core)


# how many, and how long drafts are


def test_snapshots_are_taken_only_where_memory_is_plenty():
    shape, settings = MemoryShape(kv_bytes_per_token=1, state_bytes=100), EngineSettings(n_slots=4)
    needed = N_SNAPSHOTS * 5 * 100
    assert _snapshots(settings, shape, 4 * needed, is_wanted=True) == N_SNAPSHOTS
    assert _snapshots(settings, shape, 4 * needed - 4, is_wanted=True) == 0
    assert _snapshots(settings, shape, 4 * needed, is_wanted=False) == 0
    told = EngineSettings(n_slots=4, n_snapshots=2)
    assert _snapshots(told, shape, 0, is_wanted=False) == 2


class Head:
    source, confidence, n_most = "mtp", 0.75, 8


def decided(pacing: Pacing, n_most: int, record: Record, shape: StepShape) -> int:
    """What is computed for the only reply of a new step."""
    pacing.begin_step()
    return pacing.computed_length(Head(), n_most, record, shape)


def test_computed_drafts_are_alike_where_steps_should_be():
    pacing, shape = Pacing(n_even=3), StepShape(n_rows=1, n_replies=1, n_cut=3, overhead_s=0.0)
    for n_rows, seconds in ((1, 1.0), (4, 1.2)):
        for _ in range(20):
            pacing.cost.learn(n_rows, seconds)
    lengths = {decided(pacing, n_most, Record(), shape) for n_most in (3, 5, 20)}
    assert lengths == {3}
    assert decided(pacing, 2, Record(), shape) == 2  # the end of a reply
    for _ in range(N_LEARN):
        pacing.has_computed(0.1, 3)
    hopeless = Record()
    for _ in range(40):
        hopeless.above = pacing.record
        hopeless.note(Head.source, [ONE_KIND], 0)
    assert decided(pacing, 20, hopeless, shape) == 0


def test_a_slow_first_draft_is_not_held_against_the_drafter():
    """A GPU takes long for what it does for the first time."""
    pacing, shape = Pacing(n_even=3), StepShape(n_rows=1, n_replies=1, n_cut=3, overhead_s=0.0)
    for _ in range(6):
        pacing.cost.learn(1, 1.0)
    record = Record()
    for seconds in (30.0, 9.0, 0.3, 0.3, 0.3, 0.3):
        assert decided(pacing, 20, record, shape) == 3
        pacing.has_computed(seconds, 3)
        pacing.cost.learn(4, 1.2)
        record.note(Head.source, [ONE_KIND] * 2, 1)
    assert decided(pacing, 20, record, shape) == 3
    dear = Pacing(n_even=3)
    for _ in range(6):
        dear.cost.learn(1, 1.0)
    for _ in range(N_LEARN):
        decided(dear, 20, Record(), shape)
        dear.has_computed(30.0, 3)
    assert decided(dear, 20, Record(), shape) == 0  # the control: it is always so slow


def test_a_drafter_that_does_not_pay_is_asked_again_ever_more_seldom():
    pacing, shape = Pacing(), StepShape(n_rows=1, n_replies=1, n_cut=0, overhead_s=0.0)
    for n_rows in (1, 2, 3, 4, 8):
        for _ in range(8):
            pacing.cost.learn(n_rows, float(n_rows))
    awake = []
    for i in range(8000):
        if pacing.is_computing:
            awake.append(i)
        assert decided(pacing, 8, Record(), shape) == 0
    gaps = [gap for gap in np.diff(awake).tolist() if gap > 1]
    assert awake[: ANY_LENGTH.sleep_after] == list(range(ANY_LENGTH.sleep_after))
    assert gaps == [ANY_LENGTH.first_sleep * 2**i + 1 for i in range(len(gaps))] and len(gaps) >= 3
    for _ in range(400):
        pacing.cost.learn(2, 1.0)
        pacing.cost.learn(3, 1.0)
    assert any(decided(pacing, 8, Record(), shape) for _ in range(12_000))  # rows are cheap now


def drafts_made(n_decisions: int, n_accepted: int) -> list[bool]:
    """By decision, where of every draft so many tokens are accepted and a row costs little."""
    pacing, record, shape = Pacing(n_even=3), Record(), StepShape(n_rows=1, n_replies=1, n_cut=3, overhead_s=0.0)
    made = []
    for _ in range(n_decisions):
        pacing.begin_step()
        n = 0 if pacing.is_plain() else pacing.computed_length(Head(), 20, record, shape)
        if n:
            pacing.has_computed(0.28, n)
            record.note(Head.source, [ONE_KIND] * min(3, n_accepted + 1), n_accepted)
        pacing.cost.learn(1 + n, 1.0 + 0.07 * n)
        made.append(n > 0)
    return made


def test_a_head_that_guesses_wrong_is_left_alone_soon_and_asked_again():
    """Four vain drafts at first, three when it is asked again; one that guesses right is used throughout."""
    wrong = drafts_made(800, n_accepted=0)
    first = ONE_LENGTH.n_plain_first
    assert wrong[first : first + 4] == [True] * 4 and sum(wrong) <= 4 + 3 * 3
    assert any(wrong[128:200]) and not any(wrong[first + 6 : 128])
    right = drafts_made(800, n_accepted=3)
    assert all(right[first:])


@pytest.mark.parametrize("n_replies", [1, 8, 32])
def test_a_head_is_left_alone_as_long_with_many_replies(n_replies):
    """Steps count, not replies; and a step has drafts for all replies or for none."""
    pacing, records = Pacing(n_even=3), [Record() for _ in range(n_replies)]
    shape = StepShape(n_replies, n_replies, n_cut=3, overhead_s=0.0)
    drafted_at = []
    for step in range(1200):
        drafted = 0
        pacing.begin_step()
        if not pacing.is_plain():
            lengths = [pacing.computed_length(Head(), 20, record, shape) for record in records]
            assert len(set(lengths)) == 1
            drafted = lengths[0]
        if drafted:
            drafted_at.append(step)
            pacing.has_computed(0.28, drafted)
            for record in records:
                record.note(Head.source, [ONE_KIND], 0)
        pacing.cost.learn(n_replies * (1 + drafted), 1.0 + 0.07 * n_replies * drafted)
    pauses = [b - a - 1 for a, b in pairwise(drafted_at) if b - a > ONE_LENGTH.n_plain + 1]
    assert len(pauses) >= 2 and all(pause >= ONE_LENGTH.first_sleep for pause in pauses)
    assert len(drafted_at) <= 4 + 3 * (len(pauses) + 1)


def lengths_made(chances: Sequence[float]) -> list[int]:
    """By decision, on a machine where a drafted token takes a quarter of a plain step."""
    pacing, record, shape = Pacing(n_even=3), Record(), StepShape(n_rows=1, n_replies=1, n_cut=3, overhead_s=0.0)
    rng, made = random.Random(0), []
    for chance in chances:
        pacing.begin_step()
        n = 0 if pacing.is_plain() else pacing.computed_length(Head(), 20, record, shape)
        if n:
            n_right = next((i for i in range(n) if rng.random() >= chance), n)
            pacing.has_computed(0.15 * n, n)
            record.note(Head.source, [ONE_KIND] * min(n, n_right + 1), n_right)
        pacing.cost.learn(1 + n, 1.0 + 0.1 * n)
        made.append(n)
    return made


def test_all_drafts_become_shorter_where_half_are_right_and_longer_again():
    made = lengths_made([0.5] * 1000 + [0.95] * 1000)
    half, often = made[200:1000], made[1200:]
    assert half.count(1) > 0.8 * len(half) and often.count(3) > 0.95 * len(often)
    drafts = [n for n in made if n]
    assert sum(a != b for a, b in pairwise(drafts)) <= 12, "a change takes as long as one or two steps"


def known_rows(*costs: tuple[int, float]) -> Pacing:
    pacing = Pacing(n_even=3)
    for n_rows, seconds in costs:
        for _ in range(20):
            pacing.cost.learn(n_rows, seconds)
    return pacing


def test_a_draft_that_cannot_be_as_long_as_the_others_changes_nothing_for_them():
    """At a reply's end, or of a request that limits its drafts."""
    shape = StepShape(n_rows=1, n_replies=1, n_cut=3, overhead_s=0.0)
    pacing = known_rows((1, 1.0), (2, 1.2), (3, 3.0), (4, 1.5))
    for _ in range(50):
        assert decided(pacing, 2, Record(), shape) == 1, "two tokens do not pay, one does"
        assert decided(pacing, 1, Record(), shape) == 1
    assert decided(pacing, 3, Record(), shape) == 3


def test_another_length_is_taken_once_it_would_have_saved_a_change_and_at_once_where_this_one_does_not_pay():
    shape = StepShape(n_rows=1, n_replies=1, n_cut=3, overhead_s=0.0)
    pacing = known_rows((1, 1.0), (2, 1.2), (3, 1.6), (4, 2.2))
    lengths = [decided(pacing, 3, Record(), shape) for _ in range(60)]
    first = lengths.index(1)
    assert lengths == [3] * first + [1] * (60 - first)
    a_step = (1 + 0.75) / 1.2 / ((1 + 0.75 + 0.75**2 + 0.75**3) / 2.2) - 1
    assert first == pytest.approx(CHANGE_AFTER / a_step, abs=1.5)
    pacing = known_rows((1, 1.0), (2, 1.2), (3, 1.6), (4, 3.0))
    assert decided(pacing, 3, Record(), shape) == 1


def test_drafts_begin_only_where_they_clearly_pay_and_go_on_while_they_pay_at_all():
    pacing = known_rows((1, 1.0), (2, 1.7), (3, 2.2), (4, 2.48))
    for _ in range(ONE_LENGTH.n_forced):
        pacing.has_computed(0.0, 3)
    clear, slight = (StepShape(n_rows=1, n_replies=1, n_cut=3, overhead_s=overhead_s) for overhead_s in (0.0, 0.17))
    lengths = [decided(pacing, 3, Record(), shape) for shape in (slight, clear, slight, slight)]
    assert lengths == [0, 3, 3, 3]  # 1.10 and 1.03 times as many tokens per second


def test_a_step_unlike_the_two_before_teaches_nothing():
    even, uneven = Pacing(n_even=3), Pacing()
    for pacing in (even, uneven):
        for n_rows, seconds in ((1, 1.4), (1, 2.0), (1, 1.0), (4, 9.0), (4, 9.0), (1, 9.0), (4, 9.0)):
            pacing.cost.learn(n_rows, seconds)
    assert even.cost.seconds(1) == 1.0 and even.cost.seconds(4) < 2.0
    assert uneven.cost.seconds(1) > 1.0


def test_plain_steps_come_several_in_a_row():
    pacing = Pacing(n_even=3)
    plain_steps = []
    for i in range(2400):
        pacing.begin_step()
        if pacing.is_plain():
            plain_steps.append(i)
    n_first = ONE_LENGTH.n_plain_first
    later = [i for i in plain_steps if i >= n_first]
    assert plain_steps[:n_first] == list(range(n_first))
    assert later and len(later) % ONE_LENGTH.n_plain == 0 and np.diff(later).min() == 1 and len(later) < 2400 / 256


def test_what_can_be_cut_costs_nothing_again():
    cost = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}
    seconds = lambda n: cost.get(int(n), 0.9 + 0.1 * n)  # noqa: E731
    with_snapshots = StepShape(1, 1, n_cut=3, overhead_s=0.0)
    assert best_length([0.6] * 8, with_snapshots, seconds) >= 3
    dear = {1: 1.0, 2: 1.5, 3: 1.9, 4: 2.2}
    steep = lambda n: dear.get(int(n), 1.0 + 0.4 * n)  # noqa: E731
    without = StepShape(1, 1, n_cut=0, overhead_s=0.0)
    assert best_length([0.75] * 3, without, steep) <= best_length([0.75] * 3, with_snapshots, steep)
