"""Tokens of several replies, picked at once on threads: the same as one after the other."""

import numpy as np
import pytest

from everwarm.config import GREEDY, Constraint, ContextOptions, Sampling, ThinkingBudget
from everwarm.engine.core import Core
from everwarm.errors import DecodeFailed, StateRejected
from everwarm.llama import sampler as sampler_module
from everwarm.llama.batch import Feed
from everwarm.llama.constraints.matcher import ConstraintCompiler
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.llama.sampler import PickPool, Sampler, ThinkingLimit
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
        options = ContextOptions(n_ctx=512, n_seq_max=6, n_threads=1, n_threads_batch=1)
        with Context(model, options) as context:
            context.decode(
                [Feed(SeqId(i), np.array(text(i, 20 + i), np.int32), context.end(SeqId(i)), True) for i in range(6)]
            )
            yield context


def samplers(context: Context, compiler: ConstraintCompiler) -> list[Sampler]:
    """Four that may pick ahead, and two that may not: one is kept to a form, one is told when to stop thinking."""
    digits = compiler.compile(Constraint(kind="regex", text="[0-9]{24}"))
    limit = ThinkingLimit(context.model.vocab, ThinkingBudget(3, opening="", closing="</think>"))
    free = [Sampler(context.model, sampling, text(1, 20)) for sampling in SAMPLINGS]
    bound = Sampler(context.model, GREEDY, text(1, 20), digits.matcher(ignore_eos=False))
    return [*free, bound, Sampler(context.model, Sampling(seed=4), text(1, 20), limit=limit)]


@pytest.mark.usefixtures("many")
def test_what_is_picked_ahead_is_what_would_be_picked(context):
    with ConstraintCompiler(context.model.vocab) as compiler, PickPool(3) as pool:
        alone, together = samplers(context, compiler), samplers(context, compiler)
        for _ in range(6):
            expected = [sampler.pick(context, row) for row, sampler in enumerate(alone)]
            pool.pick_ahead(context, [(sampler, row) for row, sampler in enumerate(together)])
            assert [sampler._ahead is not None for sampler in together] == [True] * 4 + [False] * 2
            assert [sampler.pick(context, row) for row, sampler in enumerate(together)] == expected
        assert len(set(expected)) > 1  # the control: they are not all alike
        for sampler in (*alone, *together):
            sampler.close()


def test_few_logits_are_left_to_one_thread(context):
    with PickPool(2) as pool, Sampler(context.model, GREEDY) as one, Sampler(context.model, GREEDY) as other:
        pool.pick_ahead(context, [(one, 0), (other, 1)])
        assert one._ahead is None


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_greedy_replies_share_a_walk_over_their_rows(context, n_threads):
    """Also where rows between them are others', and where the end of a reply, which has the largest logit, is banned."""
    expected = [int(context.logits(row).argmax()) for row in range(6)]
    assert context.largest([0, 1, 2, 3, 4, 5]) == expected
    assert context.largest([1, 2, 5]) == [expected[row] for row in (1, 2, 5)]
    with PickPool(n_threads + 1) as pool:
        alone = [Sampler(context.model, GREEDY, ignore_eos=True) for _ in range(6)]
        together = [Sampler(context.model, GREEDY, ignore_eos=True) for _ in range(6)]
        for sampler in (alone[2], together[2]):
            sampler._banned = frozenset({expected[2]})
        pool.pick_ahead(context, [(sampler, row) for row, sampler in enumerate(together)])
        assert all(sampler._ahead is not None for sampler in together)
        picked = [sampler.pick(context, row) for row, sampler in enumerate(together)]
        assert picked == [sampler.pick(context, row) for row, sampler in enumerate(alone)]
        assert picked[2] != expected[2] and picked[:2] == expected[:2]


@pytest.mark.usefixtures("many")
def test_a_row_that_is_not_numbers_fails_when_its_token_is_wanted(context):
    row = context.logits(0)
    held = row.copy()
    with PickPool(2) as pool, Sampler(context.model, GREEDY) as sampler, Sampler(context.model, GREEDY) as other:
        row[:] = np.nan
        try:
            pool.pick_ahead(context, [(sampler, 0), (other, 1)])
            with pytest.raises(DecodeFailed):
                sampler.pick(context, 0)
        finally:
            row[:] = held
        assert other.pick(context, 1) == int(context.logits(1).argmax())
        assert sampler.pick(context, 0) == int(context.logits(0).argmax())  # only that pick failed


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("speculate", ["off", "lookup"])
def test_replies_are_the_same_with_and_without_threads(speculate):
    replies = []
    for n_threads in (0, 3):
        with open_core(n_slots=4, speculate=speculate) as core:
            core.picks = PickPool(n_threads) if n_threads else None
            asked = [submit(core, text(i, 30 + i), 16, sampling=SAMPLINGS[i]) for i in range(4)]
            results = drain(core)
            replies.append([results[request.id].tokens for request in asked])
    assert replies[0] == replies[1]


@pytest.mark.usefixtures("many")
def test_a_token_that_was_picked_from_a_lost_state_is_picked_again(monkeypatch):
    """Its seed says the same as if it had not been picked: the sampler is as it was before."""
    lost: list[int] = []
    moved_on = Core.move_on

    def lose_once(core, slot, request, n_items, row, events):
        if request.sampler._ahead is None or lost:
            return moved_on(core, slot, request, n_items, row, events)
        lost.append(request.id)
        slot.advance(n_items)
        return core._start_over([slot], StateRejected("lost"), events)

    replies = []
    for loses in (False, True):
        with monkeypatch.context() as patched, open_core(n_slots=2) as core:
            if loses:
                patched.setattr(Core, "move_on", lose_once)
            core.picks = PickPool(2)
            asked = [submit(core, text(i, 40), 12, sampling=Sampling(seed=i)) for i in range(2)]
            results = drain(core)
            replies.append([results[request.id].tokens for request in asked])
    assert lost and replies[0] == replies[1]
