"""Drafts by the model's MTP head: the same replies in fewer decodes, with the cache as it is without them."""

import numpy as np
import pytest

from everwarm.config import Sampling
from everwarm.demo.tiny.plans import WITH_HEADS
from everwarm.engine.core import Core
from everwarm.engine.request import Finish
from everwarm.engine.speculation import draft_length
from everwarm.engine.speculation.lookup import SuffixLookup
from everwarm.engine.verify import compare_with_cold
from everwarm.errors import ModelFileError
from everwarm.llama import blobs
from support.drafts import CODE, STORY, EveryStep, always_draft, drafting_core, recorded_drafts, tokens_of
from support.drive import NEAR_TIE, check, drain, memory_of, regrets, replay, run, submit, text, tidy
from support.image_cores import ask, make_image, seeing_core
from support.models import EMBEDDED, tiny_model


def embedded(**settings):
    return drafting_core(path=EMBEDDED, **{"speculate": "mtp", "n_slots": 1, "n_ctx": 1024} | settings)


def plain(question: str, n: int = 60):
    with embedded(speculate="off") as core:
        assert core.context.head is None
        return run(core, tokens_of(core, question), n)


@pytest.mark.parametrize("question", [STORY, CODE])
def test_a_reply_takes_half_of_the_decodes_and_has_the_same_tokens(question):
    alone = plain(question)
    with embedded() as core:
        always_draft(core)
        prompt = tokens_of(core, question)
        before = core.context.n_decodes
        drafted = run(core, prompt, 60)
        n_decodes = core.context.n_decodes - before
        assert regrets(core, prompt, drafted.tokens).max() < NEAR_TIE
        assert drafted.tokens == alone.tokens
        assert drafted.n_draft_accepted > 0.6 * drafted.n_drafted and n_decodes < 60 / 2
        slot = core.slots[0]
        assert slot.n_fed == len(prompt) + 59 and core.context.is_clean(slot.seq)
        assert memory_of(core.context, slot.seq) == replay(core, slot)
        tidy(core)
        assert compare_with_cold(core).is_exact
        check(core)


def test_two_replies_are_drafted_in_the_same_decodes_of_the_head():
    with embedded(n_slots=2) as core:
        always_draft(core)
        first, second = submit(core, tokens_of(core, STORY), 40), submit(core, tokens_of(core, CODE), 40)
        results = drain(core)
        for request in (first, second):
            result = results[request.id]
            prompt = request.ask.prompt.codes.tolist()
            assert regrets(core, prompt, result.tokens).max() < NEAR_TIE
            assert result.n_draft_accepted > 0.5 * result.n_drafted > 0
        assert core.context.head.n_decodes <= 3 * core.context.n_decodes


def test_a_seed_gives_the_same_reply_with_and_without_drafts():
    sampling = Sampling(temperature=0.7, seed=5)
    replies = []
    for speculate in ("off", "mtp"):
        with embedded(speculate=speculate) as core:
            always_draft(core)
            replies.append(run(core, tokens_of(core, STORY), 40, sampling=sampling))
    assert replies[0].tokens == replies[1].tokens and replies[1].n_draft_accepted > 0


def test_nothing_is_drafted_or_read_by_the_head_for_who_wants_no_drafts():
    for more in ({"deterministic": True}, {"max_draft": 0}):
        with embedded() as core:
            always_draft(core)
            assert run(core, tokens_of(core, STORY), 8, **more).n_drafted == 0
            assert core.context.head.n_decodes == 0
    for speculate in ("lookup", "auto"):  # the embedded model has too few layers
        with embedded(speculate=speculate) as core:
            assert core.context.head is None and not core.model.has_head


def test_a_head_that_does_not_pay_reads_nothing_more(monkeypatch):
    """Every row costs as much as a decode here: nothing can be gained. After a while it is tried again."""
    soon = draft_length.ANY_LENGTH._replace(sleep_after=20, first_sleep=40, longest_sleep=40)
    monkeypatch.setattr(draft_length, "ANY_LENGTH", soon)
    with embedded(n_spares=4) as core:
        for n_rows in (1, 2, 3, 4, 8):
            for _ in range(8):
                core.speculator.pacing.cost.learn(n_rows, 0.01 * n_rows)
        monkeypatch.setattr(core.speculator.pacing.cost, "learn", lambda n_rows, seconds: None)
        prompt = tokens_of(core, STORY)
        run(core, prompt, 30)
        assert not core.speculator.pacing.is_computing
        n_decodes = core.context.head.n_decodes
        run(core, [*prompt, *prompt], 20)
        assert core.context.head.n_decodes == n_decodes and not core.speculator.pacing.is_computing
        run(core, [*prompt, *prompt, *prompt], 30)
        assert core.speculator.pacing.is_computing
        check(core)


def test_a_head_that_is_left_alone_does_not_hear_of_drafts_that_are_found(monkeypatch):
    """Having the model's rows takes time, and so does every change of that."""
    with embedded(n_spares=4) as core:
        always_draft(core)
        core.speculator.drafters = [SuffixLookup()]
        monkeypatch.setattr(EveryStep, "computed_length", lambda *_: 0)
        monkeypatch.setattr(EveryStep, "is_computing", False)
        feeds = recorded_drafts(core)
        assert run(core, tokens_of(core, CODE), 40).n_drafted > 0
        assert feeds and not any(feed.is_for_head for feed in feeds)
        assert core.context.head.n_decodes == 0


def test_an_end_of_generation_ends_the_draft():
    with embedded() as core:
        always_draft(core)
        prompt = tokens_of(core, "Hello!")
        result = run(core, prompt, 200, ignore_eos=False)
        slot = core.slots[0]
        assert result.finish is Finish.STOP and result.n_drafted > 0
        assert slot.resident().codes.tolist() == [*prompt, *result.tokens]
        assert core.context.cells.used == slot.n_fed == core.context.end(slot.seq).n_tokens
        check(core)


def test_the_last_tokens_are_drafted_no_further_than_they_may_be():
    for n in (1, 2, 3, 5):
        with embedded() as core:
            always_draft(core)
            assert len(run(core, tokens_of(core, STORY), n).tokens) == n
    with embedded(n_ctx=256) as core:
        always_draft(core)
        prompt = tokens_of(core, STORY)
        assert len(run(core, prompt, 400).tokens) == core.context.n_ctx - len(prompt)


def test_a_cancelled_request_leaves_only_its_own_tokens():
    with embedded() as core:
        always_draft(core)
        request = submit(core, tokens_of(core, STORY), 60)
        while request.n_reply < 12:
            core.step()
        core.cancel(request.id)
        drain(core)
        slot = core.slots[0]
        assert slot.resident().codes.tolist() == request.tokens(0, slot.n_fed).tolist()
        following = [*request.tokens(0, request.n_items).tolist(), *tokens_of(core, "Hello!")]
        again = run(core, following, 20)
        assert regrets(core, following, again.tokens).max() < NEAR_TIE


def test_a_suspended_request_continues_with_its_head():
    with embedded(n_slots=2, n_ctx=256) as core:
        always_draft(core)
        asked = [submit(core, tokens_of(core, question), 140) for question in (STORY, CODE)]
        results = drain(core, after_step=check)
        assert core.counts.n_suspended > 0
        assert all(len(results[request.id].tokens) == 140 for request in asked)


def test_lookup_and_head_are_combined():
    with embedded() as core:
        core.speculator.drafters = [SuffixLookup()]
        sources: list[str] = []
        always_draft(core)
        core.speculator.pacing.judge = lambda proposal, *_: sources.append(proposal.source)
        run(core, tokens_of(core, CODE), 60)
        assert {"mtp", "lookup"} <= set(sources)


def test_a_model_without_a_head_cannot_be_told_to_use_it():
    with pytest.raises(ModelFileError, match="has no MTP head"), drafting_core(speculate="mtp"):
        pass
    with drafting_core(path=tiny_model("qwen35", width=64), speculate="auto") as core:
        assert core.speculator.computing is None and core.speculator.is_on


@pytest.mark.parametrize(("arch", "state_type"), [("qwen35", "q8_0"), *((arch, "f32") for arch in WITH_HEADS)])
def test_a_head_that_guesses_at_random_changes_nothing(arch, state_type):
    """Nearly every draft is taken back."""
    path, prompt = tiny_model(arch, mtp=True, n_layers=16), text(1, 60)
    replies = []
    for speculate in ("off", "auto"):
        with drafting_core(path=path, n_slots=1, speculate=speculate, state_type=state_type) as core:
            always_draft(core)
            core.speculator.drafters = []
            replies.append(run(core, prompt, 30))
            following = [*prompt, *replies[-1].tokens, *text(2, 10)]
            replies.append(run(core, following, 10))
            slot = core.slots[0]
            assert replies[-1].n_cached == len(prompt) + 29
            assert state_type != "f32" or memory_of(core.context, slot.seq) == replay(core, slot)
            check(core)
    assert [reply.tokens for reply in replies[:2]] == [reply.tokens for reply in replies[2:]]
    assert replies[2].n_drafted > 0 == replies[0].n_drafted


def test_after_an_image_the_head_begins_anew():
    """It reads no images; before and after them it guesses, and what is kept can be restored."""
    parts = [text(1, 40), make_image(1), text(2, 40)]
    replies = []
    for speculate in ("off", "mtp"):
        with seeing_core(mtp=True, speculate=speculate, n_slots=1) as core:
            always_draft(core)
            for more in ([], [text(3, 20)]):
                request = ask(core, [*parts, *more], max_tokens=12)
                replies.append(drain(core)[request.id])
            tidy(core)
            core.cache.room.clear()
            request = ask(core, [*parts, text(4, 20)], max_tokens=12)
            replies.append(drain(core)[request.id])
            check(core)
    assert [reply.tokens for reply in replies[:3]] == [reply.tokens for reply in replies[3:]]
    assert all(reply.n_drafted > 0 for reply in replies[3:])


# what is kept


def restored_reply(core: Core, prompt: list[int], n: int):
    """The same prompt in the same engine, after everything has left the device."""
    tidy(core)
    core.cache.room.clear()
    core.context.clear()
    return run(core, prompt, n)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_restored_conversation_drafts_as_well_as_before(is_kept, monkeypatch):
    """The control keeps states and segments without the head's part."""
    if not is_kept:
        monkeypatch.setattr(
            blobs.Room,
            "__init__",
            lambda self, place, _: setattr(self, "_place", place) or setattr(self, "_tail", None),
        )
    question = "My secret code is 48213. " + STORY
    with embedded(n_slots=1, n_ctx=2048) as core:
        always_draft(core)
        prompt = [*tokens_of(core, question)]
        reply = run(core, prompt, 60)
        following = [*prompt, *reply.tokens, *tokens_of(core, CODE)]
        warm = run(core, following, 40)
        fresh = restored_reply(core, following, 40)
        track = core.context.head._tracks[core.slots[0].seq]
        assert fresh.tokens == warm.tokens and fresh.n_cached >= len(prompt)
        assert (track.start == 0) is is_kept
        check(core)


def test_kept_blobs_have_the_part_of_the_head_and_can_be_read_without_it():
    with embedded() as core:
        always_draft(core)
        prompt = tokens_of(core, STORY)
        run(core, prompt, 60)
        tidy(core)
        nodes = list(core.cache.tree.nodes())
        segments = [node.segment.blob for node in nodes if node.segment is not None]
        states = [node.checkpoint.state for node in nodes if node.checkpoint and node.checkpoint.state is not None]
        assert segments and states and all(blobs.split(blob)[1] is not None for blob in (*segments, *states))
        for blob in (*segments, *states):
            whole, of_head = blobs.split(blob)
            assert len(whole) + blobs.tail_bytes(len(of_head)) == len(blob)
            assert blobs.split(whole) == (whole, None) or np.array_equal(blobs.split(whole)[0], whole)
