"""Drafts by a second model: only of the same vocabulary, and only what the large one would have written."""

import pytest

from everwarm.errors import BadRequest, ModelFileError
from support.drafts import CODE, STORY, always_draft, drafting_core, tokens_of
from support.drive import NEAR_TIE, check, drain, regrets, run, submit, text
from support.models import EMBEDDED, tiny_model


def drafting_with(small, arch="qwen35", **more):
    return drafting_core(arch, draft_model=str(small), **{"n_slots": 1, "speculate": "draft"} | more)


def test_a_model_drafts_best_for_itself():
    with drafting_with(EMBEDDED, path=EMBEDDED, n_slots=2, n_ctx=1024) as core:
        always_draft(core)
        asked = [submit(core, tokens_of(core, question), 40) for question in (STORY, CODE)]
        results = drain(core)
        for request in asked:
            result = results[request.id]
            assert regrets(core, request.ask.prompt.codes.tolist(), result.tokens).max() < NEAR_TIE
            assert result.n_draft_accepted >= 0.9 * result.n_drafted > 0
        assert core.context.n_decodes < 40


@pytest.mark.parametrize("small", ["llama", "mamba2", "lfm2"])
def test_a_draft_model_of_any_memory_changes_no_token(small):
    """Random models agree on nothing: every draft is taken back, in both contexts."""
    prompt = text(1, 60)
    with drafting_core(n_slots=1, speculate="off") as core:
        alone = run(core, prompt, 24).tokens
        following = [*prompt, *alone[:10], *text(2, 20)]
        again = run(core, following, 12).tokens
    with drafting_with(tiny_model(small, width=64)) as core:
        always_draft(core)
        drafted = run(core, prompt, 24)
        assert drafted.tokens == alone and drafted.n_drafted > 0
        assert run(core, following, 12).tokens == again  # its text parts from what was read
        check(core)


def test_a_draft_model_with_another_vocabulary_is_refused():
    with pytest.raises(ModelFileError, match="its vocabulary has 2048 tokens, not"), drafting_with(EMBEDDED):
        pass
    with pytest.raises(ModelFileError, match="sliding window"), drafting_with(tiny_model("gemma3", width=64)):
        pass


def test_drafting_by_a_model_needs_one():
    with pytest.raises(BadRequest, match="give a model-draft"), drafting_core(speculate="draft"):
        pass
