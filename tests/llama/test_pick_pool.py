"""Tokens of several requests, picked at once on threads: the same as one after the other."""

import numpy as np
import pytest

from everwarm.config import GREEDY, Constraint, ContextOptions, Sampling
from everwarm.errors import DecodeFailed
from everwarm.llama import sampler as sampler_module
from everwarm.llama.constraints.matcher import ConstraintCompiler
from everwarm.llama.context import Context, Feed
from everwarm.llama.model import Model
from everwarm.llama.sampler import PickPool, Sampler
from everwarm.types import SeqId
from support.drive import drain, open_core, submit, text
from support.models import tiny_model

SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.9, seed=1),
    Sampling(temperature=0.7, seed=2, top_k=20, repeat_penalty=1.2),
    Sampling(temperature=1.1, seed=3, logit_bias={5: 2.0}),
]


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are worth it for any number of logits."""
    monkeypatch.setattr(sampler_module, "MANY_LOGITS", 1)


@pytest.fixture(scope="module")
def context():
    with Model(tiny_model("qwen35")) as model:
        options = ContextOptions(n_ctx=512, n_seq_max=5, n_threads=1, n_threads_batch=1)
        with Context(model, options) as context:
            context.decode(
                [Feed(SeqId(i), np.array(text(i, 20 + i), np.int32), context.end(SeqId(i)), True) for i in range(5)]
            )
            yield context


def samplers(context: Context, compiler: ConstraintCompiler) -> list[Sampler]:
    digits = compiler.compile(Constraint(kind="regex", text="[0-9]{24}"))
    free = [Sampler(context.model, sampling, text(1, 20)) for sampling in SAMPLINGS]
    return [*free, Sampler(context.model, GREEDY, text(1, 20), digits.matcher(ignore_eos=False))]


@pytest.mark.usefixtures("many")
def test_what_is_picked_ahead_is_what_would_be_picked(context):
    with ConstraintCompiler(context.model.vocab) as compiler, PickPool(3) as pool:
        alone, together = samplers(context, compiler), samplers(context, compiler)
        for _ in range(6):
            expected = [sampler.pick(context, row) for row, sampler in enumerate(alone)]
            pool.look_ahead(context, [(sampler, row) for row, sampler in enumerate(together)])
            assert [sampler.pick(context, row) for row, sampler in enumerate(together)] == expected
        assert len(set(expected)) > 1  # the control: they are not all alike
        for sampler in (*alone, *together):
            sampler.close()


def test_few_logits_are_left_to_one_thread(context):
    with PickPool(2) as pool, Sampler(context.model, GREEDY) as sampler:
        pool.look_ahead(context, [(sampler, 0)])
        assert not sampler._ahead


def test_a_row_that_is_not_numbers_fails_when_its_token_is_wanted(context):
    row = context.logits(0).copy()
    row[:] = np.nan
    with Sampler(context.model, GREEDY) as sampler:
        sampler.look_ahead(row)
        with pytest.raises(DecodeFailed):
            sampler.pick(context, 0)
        assert sampler.pick(context, 0) == int(context.logits(0).argmax())  # only that pick


@pytest.mark.usefixtures("many")
def test_replies_are_the_same_with_and_without_threads():
    replies = []
    for n_threads in (0, 3):
        with open_core(n_slots=4) as core:
            core.picks = PickPool(n_threads) if n_threads else None
            asked = [submit(core, text(i, 30 + i), 16, sampling=SAMPLINGS[i]) for i in range(4)]
            results = drain(core)
            replies.append([results[request.id].tokens for request in asked])
    assert replies[0] == replies[1]
