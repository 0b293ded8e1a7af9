"""Drafts by a second model: only of the same vocabulary, and only what the large one would have written."""

from collections.abc import Iterator

import numpy as np
import pytest

from everwarm.config import ContextOptions, ModelOptions
from everwarm.engine.speculation.model_drafter import REST, ModelDrafter
from everwarm.errors import BadRequest, DecodeFailed, ModelFileError
from everwarm.llama.batch import DraftRequest
from everwarm.llama.model import Model
from everwarm.types import SeqId
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


N_CTX, N_UBATCH, N_DRAFT = 512, 64, 3
LONG, SHORT = 400, 20


class Watched:
    """A drafter whose batches are written down: what a step read, and the length of its drafts."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.drafter = drafter
        self.context = drafter._context
        self._decode = self.context.decode
        self.batches: list[int] = []
        self.faulty: SeqId | None = None
        self.context.decode = self._watched_decode
        self.texts = {SeqId(seq): text(seq + 1, 1000) for seq in range(3)}

    def _watched_decode(self, feeds) -> None:
        self.batches.append(sum(len(feed.tokens) for feed in feeds))
        if any(feed.seq == self.faulty for feed in feeds):
            self.context.drop(self.faulty)
            raise DecodeFailed("for a test")
        self._decode(feeds)

    def step(self, **lengths: int) -> tuple[list[int], dict[SeqId, int]]:
        """For texts of these lengths in sequences s0, s1, …: the batches that were read, and what was drafted."""
        wanted = []
        for name, n in lengths.items():
            seq = SeqId(int(name[1:]))
            wanted.append(DraftRequest(seq, np.array(self.texts[seq][:n], np.int32), 1, N_DRAFT))
        self.batches.clear()
        self.drafter.read(wanted)
        read = list(self.batches)
        return read, {seq: len(tokens) for seq, tokens in self.drafter.draft(wanted).items()}


@pytest.fixture(params=["llama", "lfm2"])
def watched(request) -> Iterator[Watched]:
    model = Model(tiny_model(request.param, width=64), ModelOptions())
    options = ContextOptions(n_ctx=N_CTX, n_batch=N_UBATCH, n_ubatch=N_UBATCH, n_threads=2, n_threads_batch=2)
    with ModelDrafter(model, options, 3, model.vocab.n_tokens) as drafter:
        yield Watched(drafter)


def test_a_long_text_is_read_in_batches_while_another_reply_is_drafted(watched):
    for i in range(LONG // N_UBATCH):
        read, drafted = watched.step(s0=LONG + i, s1=SHORT + i)
        assert sum(read) <= N_UBATCH and drafted == {1: N_DRAFT}
    for i in range(LONG // N_UBATCH, LONG // N_UBATCH + 3):
        read, drafted = watched.step(s0=LONG + i, s1=SHORT + i)
        assert sum(read) <= N_UBATCH
    assert drafted == {0: N_DRAFT, 1: N_DRAFT}


def test_of_two_long_texts_that_do_not_fit_together_one_is_drafted(watched):
    """The other one is tried again now and then, and nothing is read for it where it cannot fit."""
    drafted, n_read = [], 0
    for i in range(3 * REST // 2):
        read, found = watched.step(s0=LONG + i // 4, s1=LONG + 1 + i // 4)
        assert len(read) <= 2 and sum(read) <= N_UBATCH
        n_read += sum(read)
        drafted.append(found)
    n_catching_up = 2 * LONG // N_UBATCH + 1
    assert all(found == {0: N_DRAFT} for found in drafted[n_catching_up:])
    assert n_read < 2 * N_CTX


def test_a_text_that_nobody_asks_about_makes_room_in_the_end(watched):
    for _ in range(LONG // N_UBATCH + 1):
        _, drafted = watched.step(s0=LONG)
    assert drafted == {0: N_DRAFT}
    for _ in range(REST + LONG // N_UBATCH + 2):
        _, drafted = watched.step(s1=LONG)
    assert drafted == {1: N_DRAFT}


def test_a_sequence_that_cannot_be_read_is_dropped_and_rests(watched):
    watched.step(s0=SHORT, s1=LONG)
    watched.faulty = SeqId(1)
    assert len(watched.step(s0=SHORT, s1=LONG)[0]) == 1
    assert watched.context.cells.count(1) == 0 < watched.context.cells.count(0)
    watched.faulty = None
    for _ in range(REST - 1):
        assert watched.step(s0=SHORT, s1=LONG) == ([], {0: N_DRAFT})
    assert watched.step(s0=SHORT, s1=LONG)[0] == [N_UBATCH]


def test_nothing_stays_of_a_half_read_text_that_was_erased(watched):
    watched.step(s0=LONG)
    assert watched.context.cells.used > 0
    watched.drafter.forget()
    assert watched.context.cells.used == 0
