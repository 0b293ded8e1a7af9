"""Drafts never change what is written nor what is kept: only how many decodes it takes."""

from functools import cache

import numpy as np
import pytest

from everwarm.config import GREEDY, Constraint, Sampling
from everwarm.engine.core import Core
from everwarm.engine.request import Finish, Finished, NewToken, Result
from everwarm.engine.speculation.draft_length import ONE_KIND, Proposal, Record, StepShape
from everwarm.engine.speculation.step_cost import StepCost
from everwarm.errors import DecodeFailed
from everwarm.llama.constraints.matcher import ConstraintCompiler
from everwarm.llama.sampler import Sampler
from support.drafts import EveryStep, Scripted, always_draft, drafting_core, recorded_drafts
from support.drive import (
    NEAR_TIE,
    STATEFUL,
    check,
    drain,
    memory_of,
    regrets,
    replay,
    run,
    submit,
    text,
    tidy,
)

DRAFTING = [*STATEFUL, "llama"]
PATTERNS = {"right": [99], "wrong": [0], "mixed": [2, 0, 99, 1, 99, 3, 0]}


def plain(arch: str, prompt: list[int], n: int) -> Result:
    return _plain(arch, tuple(prompt), n)


@cache  # many tests compare with the same reply
def _plain(arch: str, prompt: tuple[int, ...], n: int, **more) -> Result:
    with drafting_core(arch, n_slots=1, speculate="off") as core:
        return run(core, prompt, n, **more)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("arch", DRAFTING)
def test_a_greedy_reply_is_that_of_plain_decoding(arch, pattern):
    prompt, n = text(1, 60), 40
    alone = plain(arch, prompt, n)
    with drafting_core(arch, n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], PATTERNS[pattern], 4))
        before = core.context.n_decodes
        drafted = run(core, prompt, n)
        n_decodes = core.context.n_decodes - before
        assert regrets(core, prompt, drafted.tokens).max() < NEAR_TIE
    assert drafted.tokens == alone.tokens
    assert drafted.n_drafted > 0
    if pattern == "right":
        assert n_decodes <= 1 + n / 5 + 2 and drafted.n_draft_accepted == drafted.n_drafted
    if pattern == "wrong":
        assert drafted.n_draft_accepted == 0


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("arch", STATEFUL)
def test_the_state_after_a_reply_is_that_of_its_chunks_without_drafts(arch, pattern):
    prompt = text(1, 60)
    alone = plain(arch, prompt, 40)
    with drafting_core(arch, n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], PATTERNS[pattern], 4))
        run(core, prompt, 40)
        slot = core.slots[0]
        assert slot.n_fed == len(prompt) + 39 and core.context.is_clean(slot.seq)
        assert memory_of(core.context, slot.seq) == replay(core, slot)
        edited = slot.items.codes.copy()
        edited[-1] += 1
        assert memory_of(core.context, slot.seq) != replay(core, slot, edited)  # the control


@pytest.mark.parametrize("arch", DRAFTING)
def test_nothing_of_a_wrong_draft_is_left_in_the_context(arch):
    """After every step the context holds the request's own tokens; the control leaves one wrong token in."""
    prompt = text(1, 60)
    alone = plain(arch, prompt, 24)
    with drafting_core(arch, n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [1, 0, 2], 4))
        run(core, prompt, 24)
        slot = core.slots[0]
        assert slot.resident().codes.tolist() == [*prompt, *alone.tokens[:-1]]
        assert core.context.end(slot.seq).n_tokens == len(prompt) + 23
        assert core.context.cells.used == (len(prompt) + 23 if core.context.kind.has_attention else 0)
    with drafting_core(arch, n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [1], 4))
        core.speculator.rollback.cut = lambda feed, n_kept: len(feed.tokens)  # the control: nothing is taken back
        with pytest.raises(AssertionError):
            run(core, prompt, 24)


@pytest.mark.parametrize("arch", DRAFTING)
def test_plain_attention_is_called_clean_only_where_chunks_tell_how_it_was_decoded(arch):
    prompt = text(1, 60)
    alone = plain(arch, prompt, 20)
    with drafting_core(arch, n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [1, 0], 4))
        run(core, prompt, 20)
        assert core.context.is_clean(0) == (arch != "llama")


@pytest.mark.parametrize("arch", DRAFTING)
def test_the_next_turn_continues_from_the_same_point(arch):
    prompt = text(1, 60)
    with drafting_core(arch, n_slots=1, speculate="off") as core:
        reply = run(core, prompt, 30).tokens
        following = [*prompt, *reply, *text(2, 10)]
        expected = run(core, following, 4).n_cached
    with drafting_core(arch, n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *reply]], [1, 3, 0], 4))
        run(core, prompt, 30)
        assert run(core, following, 4).n_cached == expected == len(prompt) + 29


class AtMost(EveryStep):
    """Verifies the first ``n`` tokens of every draft."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._n = n

    def length(self, proposal: Proposal, record: Record, shape: StepShape) -> int:
        return min(self._n, super().length(proposal, record, shape))


def test_as_many_tokens_of_a_draft_are_verified_as_pay():
    prompt, n = text(1, 60), 40
    alone = plain("qwen35", prompt, n)
    with drafting_core(n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], PATTERNS["right"], 4))
        core.speculator.pacing = AtMost(2)
        feeds = recorded_drafts(core)
        assert run(core, prompt, n).tokens == alone.tokens
        assert {feed.n_draft for feed in feeds[:-1]} == {2}


@pytest.mark.parametrize("pattern", ["right", "wrong"])
def test_a_draft_that_is_passed_over_is_learned_from(pattern):
    prompt, n = text(1, 60), 40
    alone = plain("qwen35", prompt, n)
    with drafting_core(n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], PATTERNS[pattern], 4))
        core.speculator.pacing = AtMost(0)
        result = run(core, prompt, n)
        chance = core.speculator.pacing.record.chance("scripted", ONE_KIND, 0.5)
    assert result.tokens == alone.tokens and result.n_drafted == 0
    assert chance > 0.9 if pattern == "right" else chance < 0.1


def test_deterministic_requests_do_not_speculate():
    prompt = text(1, 60)
    alone = plain("qwen35", prompt, 20)
    with drafting_core(n_slots=1) as core:
        drafter = Scripted([[*prompt, *alone.tokens]], [99], 4)
        always_draft(core, drafter)
        assert run(core, prompt, 20, deterministic=True).n_drafted == 0 and drafter.n_made == 0


def test_a_sliding_window_does_not_speculate():
    with drafting_core("gemma3", n_slots=1) as core:
        assert not core.speculator.is_on
        assert run(core, text(1, 60), 8).n_drafted == 0


def test_a_request_may_ask_for_no_drafts_or_fewer():
    prompt = text(1, 60)
    alone = plain("qwen35", prompt, 20)
    for most, n in ((0, 0), (2, 2)):
        with drafting_core(n_slots=1) as core:
            always_draft(core, Scripted([[*prompt, *alone.tokens]], [99], 4))
            feeds = recorded_drafts(core)
            run(core, prompt, 20, max_draft=most)
            assert max((feed.n_draft for feed in feeds), default=0) == n


# where a reply ends


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7])
@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_no_draft_is_longer_than_what_is_left_of_the_reply(arch, n):
    prompt = text(1, 60)
    alone = plain(arch, prompt, 30)
    with drafting_core(arch, n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [99], 4))
        result = run(core, prompt, n)
        assert result.tokens == alone.tokens[:n] and result.finish is Finish.LENGTH
        assert core.slots[0].resident().codes.tolist() == [*prompt, *alone.tokens[: n - 1]]


@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "llama"])
def test_an_end_of_generation_inside_a_draft_ends_the_reply_there(arch):
    prompt = text(1, 60)
    with drafting_core(arch, n_slots=1, speculate="off") as core:
        core.model.vocab.eog = frozenset()
        alone = run(core, prompt, 30)
    end = alone.tokens[7]
    at = alone.tokens.index(end)
    with drafting_core(arch, n_slots=1) as core:
        core.model.vocab.eog = frozenset({end})
        core.speculator.eog = frozenset()  # even of a drafter that proposes it
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [99], 16))
        result = run(core, prompt, 30, ignore_eos=False)
        assert result.tokens == alone.tokens[:at] and result.finish is Finish.STOP
        assert core.slots[0].resident().codes.tolist() == [*prompt, *alone.tokens[:at]]
        tidy(core)
        kept = {tuple(node.path.codes[: node.n_items].tolist()) for node in core.cache.tree.nodes()}
        assert all(list(path) == [*prompt, *alone.tokens][: len(path)] and len(path) <= 60 + at for path in kept)


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_a_stop_string_inside_a_draft_ends_the_reply_there(arch):
    prompt = text(1, 60)
    alone = plain(arch, prompt, 30)
    with drafting_core(arch, n_slots=1) as core:
        vocab = core.model.vocab
        pieces = [vocab.piece(token) for token in alone.tokens[5:25]]
        stop = next(piece.decode() for piece in pieces if len(piece) == 1 and piece.isascii())
        at = next(i for i, token in enumerate(alone.tokens) if vocab.piece(token) == stop.encode())
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [99], 16))
        request = submit(core, prompt, 30, stop=(stop,))
        told: list[int] = []
        while core.has_work:
            told += [event.token for event in core.step() if isinstance(event, NewToken)]
            if told and vocab.piece(told[-1]) == stop.encode():  # what its reader does
                ended = core.stop(request.id)
                assert isinstance(ended[0], Finished)
            core.keep_ends()
            check(core)
        assert tuple(told) == alone.tokens[: at + 1]
        assert core.slots[0].resident().codes.tolist() == [*prompt, *alone.tokens[:at]]


def test_a_cancelled_reply_leaves_no_draft_behind():
    prompt = text(1, 60)
    alone = plain("qwen35", prompt, 30)
    with drafting_core(n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [2], 4))
        request = submit(core, prompt, 30)
        for _ in range(4):
            core.step()
        core.cancel(request.id)
        result = drain(core)[request.id]
        assert result.finish is Finish.CANCELLED
        held = core.slots[0].resident().codes.tolist()
        assert held == [*prompt, *result.tokens][: len(held)]
        assert memory_of(core.context, 0) == replay(core, core.slots[0])


# many at once, and too little room


@pytest.mark.parametrize("arch", DRAFTING)
def test_many_requests_verify_their_drafts_in_one_batch(arch):
    prompts = [text(seed, 40) for seed in (1, 2, 3)]
    alone = [plain(arch, prompt, 24) for prompt in prompts]
    texts = [[*prompt, *result.tokens] for prompt, result in zip(prompts, alone, strict=True)]
    with drafting_core(arch, n_slots=3) as core:
        always_draft(core, Scripted(texts, [2, 99, 0, 1], 4))
        feeds = recorded_drafts(core)
        requests = [submit(core, prompt, 24) for prompt in prompts]
        results = drain(core)
        for request, prompt in zip(requests, prompts, strict=True):
            assert regrets(core, prompt, results[request.id].tokens).max() < NEAR_TIE
        assert core.context.n_decodes < len(feeds) + 20  # several drafts in a decode


def test_a_context_that_is_nearly_full_has_no_cells_for_drafts():
    prompt = text(1, 60)
    alone = plain("qwen35", prompt, 400)
    with drafting_core(n_slots=1, n_ctx=256) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [99, 1], 16))
        result = run(core, prompt, 400)
        assert result.finish is Finish.LENGTH and result.tokens == alone.tokens[: len(result.tokens)]
        assert len(result.tokens) >= 256 - 60
        feeds = recorded_drafts(core)
        assert run(core, prompt, 400).tokens == result.tokens and feeds


def test_suspended_requests_continue_with_what_they_had_written():
    prompts = [text(seed, 60) for seed in (1, 2)]
    alone = [plain("qwen35", prompt, 120) for prompt in prompts]
    texts = [[*prompt, *result.tokens] for prompt, result in zip(prompts, alone, strict=True)]
    with drafting_core(n_slots=2, n_ctx=256) as core:
        always_draft(core, Scripted(texts, [1, 99, 3, 0], 4))
        requests = [submit(core, prompt, 120) for prompt in prompts]
        results = drain(core)
        assert core.counts.n_suspended > 0
        for request, prompt in zip(requests, prompts, strict=True):
            assert len(results[request.id].tokens) == 120
            assert regrets(core, prompt, results[request.id].tokens).max() < NEAR_TIE


def test_a_batch_that_libllama_refuses_is_decoded_without_its_drafts(monkeypatch):
    from everwarm.errors import ContextFull

    prompt = text(1, 60)
    alone = plain("qwen35", prompt, 20)
    with drafting_core(n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [99], 4))
        decode = core.context.decode

        def refuse(feeds):
            if any(feed.n_draft for feed in feeds):
                raise ContextFull("no room for guesses")
            decode(feeds)

        monkeypatch.setattr(core.context, "decode", refuse)
        assert run(core, prompt, 20).tokens == alone.tokens


# sampling


def test_a_sampled_reply_with_a_seed_is_that_of_plain_decoding():
    """One draw for each token, and each from its own row: so even the seed gives the same reply."""
    prompt, sampling = text(1, 60), Sampling(temperature=0.8, seed=7, repeat_penalty=1.3, logit_bias={5: 1.0})
    alone = _plain.__wrapped__("qwen35", tuple(prompt), 30, sampling=sampling)
    with drafting_core(n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [2, 99, 0, 1], 4))
        assert run(core, prompt, 30, sampling=sampling).tokens == alone.tokens


def test_probabilities_come_with_every_accepted_token():
    prompt = text(1, 60)
    with drafting_core(n_slots=1, speculate="off") as core:
        expected = tokens_with_probs(core, prompt)
    with drafting_core(n_slots=1) as core:
        always_draft(core, Scripted([[*prompt, *(token for token, _ in expected)]], [2, 99, 0], 4))
        found = tokens_with_probs(core, prompt)
    assert [token for token, _ in found] == [token for token, _ in expected]
    np.testing.assert_allclose([p.logprob for _, p in found], [p.logprob for _, p in expected], atol=NEAR_TIE)
    assert all(len(p.top) == 3 for _, p in found)


def tokens_with_probs(core: Core, prompt: list[int]) -> list:
    submit(core, prompt, 20, n_probs=3)
    found = []
    while core.has_work:
        found += [(event.token, event.probs) for event in core.step() if isinstance(event, NewToken)]
    return found


def test_a_constraint_binds_drafts():
    """Only what the grammar allows is proposed, and the reply is that of plain decoding."""
    prompt = text(1, 60)
    with drafting_core(n_slots=1, speculate="off") as core, ConstraintCompiler(core.model.vocab) as compiler:
        digits = compiler.compile(Constraint(kind="regex", text="[0-9]{24}"))
        alone = run(core, prompt, 40, constraint=digits)
    with drafting_core(n_slots=1) as core, ConstraintCompiler(core.model.vocab) as compiler:
        digits = compiler.compile(Constraint(kind="regex", text="[0-9]{24}"))
        always_draft(core, Scripted([[*prompt, *alone.tokens]], [2, 99, 0], 4, n_vocab=256))
        allowed = set(core.model.vocab.tokenize("0123456789", add_special=False, parse_special=False).tolist())
        feeds = recorded_drafts(core)
        result = run(core, prompt, 40, constraint=digits)
        drafted = [token for feed in feeds for token in feed.tokens[-feed.n_draft :].tolist()]
        assert result.tokens == alone.tokens and result.n_draft_accepted > 0
        assert drafted and set(drafted) <= allowed


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("is_bound", [True, False])
def test_numbers_that_are_lost_behind_accepted_tokens_cost_no_reply_a_token(whose, is_bound, monkeypatch):
    """The sampler and the constraint have taken note of what was picked before: of this draft, and of the neighbour's."""
    prompts = [text(1, 50), text(2, 60)]
    sampling = GREEDY if is_bound else Sampling(seed=5)
    lost: list[int] = []

    def lose_once(sampler, context, row):
        if sampler is asked[whose].sampler and asked[whose].n_reply >= 6:
            lost.append(row)
            if len(lost) == 3:
                raise DecodeFailed("the model's numbers overflowed (NaN)")
        return picked(sampler, context, row)

    replies: list[list[tuple[int, ...]]] = []
    for speculate in ("off", "auto"):
        with drafting_core(speculate=speculate) as core, ConstraintCompiler(core.model.vocab) as compiler:
            if speculate == "auto":
                known = [[*prompt, *reply] for prompt, reply in zip(prompts, replies[0], strict=True)]
                always_draft(core, Scripted(known, [99], 4, n_vocab=256))
                picked = Sampler.pick
                monkeypatch.setattr(Sampler, "pick", lose_once)
            form = compiler.compile(Constraint(kind="regex", text="[0-9]{5}-[a-z]{6}-[0-9]{9}")) if is_bound else None
            asked = [submit(core, prompt, 20, sampling=sampling, constraint=form) for prompt in prompts]
            results = drain(core)
            replies.append([results[request.id].tokens for request in asked])
    assert len(lost) > 3 and core.counts.n_decode_failures == 1
    assert replies[1] == replies[0]


@pytest.mark.parametrize("speculate", ["auto", "off"])
def test_what_reading_costs_is_learned_from_prompts_and_what_writing_costs_from_replies(speculate, monkeypatch):
    """Without drafts, the control, nothing is learned."""
    seen: dict[str, list[int]] = {"learn_reading": [], "learn": []}
    for name, rows in seen.items():
        monkeypatch.setattr(StepCost, name, lambda _cost, n_rows, _seconds, rows=rows: rows.append(n_rows))
    with drafting_core("qwen35", n_slots=1, speculate=speculate) as core:
        run(core, text(1, 100), 5)
    assert sum(seen["learn_reading"]) == (100 if speculate == "auto" else 0)
    assert sum(seen["learn"]) == (4 if speculate == "auto" else 0), "the first token comes from the prompt"


def test_steps_that_read_and_write_are_passed(monkeypatch):
    """What they take teaches nothing, but the next step is not like the one before them."""
    passed: list[int] = []
    monkeypatch.setattr(StepCost, "passed", lambda _cost, n_rows: passed.append(n_rows))
    with drafting_core("qwen35", n_slots=2) as core:
        submit(core, text(1, 20), 12)
        while not any(slot.request is not None and slot.n_fed > 20 for slot in core.slots):
            core.step()
        assert not passed
        submit(core, text(2, 30), 2)
        drain(core)
    assert passed and max(passed) > 1
