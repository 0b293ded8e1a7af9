"""Sampled replies: with drafts they have the distribution of the model, whatever was drafted."""

from collections import Counter

import numpy as np

from everwarm.config import Sampling
from everwarm.engine import core as core_module
from everwarm.engine.core import Core
from everwarm.engine.request import Result
from everwarm.engine.speculation.speculator import pick
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from support.drafts import Scripted, always_draft, drafting_core
from support.drive import drain, submit, text

PROMPT = text(1, 40)
TOP = 3
N = 300
LIMIT = 27.9  # of chi square with 8 degrees of freedom: passed once in 2,000 by chance, and the seeds are fixed


class Stubborn:
    """Proposes the same two tokens after anything."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def propose(self, history, n, namespace):
        return Scripted([[*history.tolist(), *self._tokens]], [99], 2).propose(history, n, namespace)


def sampling(seed: int) -> Sampling:
    return Sampling(temperature=1.0, top_k=TOP, top_p=1.0, min_p=0.0, seed=seed)


def expected(core: Core) -> dict[tuple[int, int], float]:
    """The exact chance of every pair of first tokens."""
    chances = {}
    with Context(core.model, core.settings.context(0)) as context:
        for first, p in top_chances(context, PROMPT).items():
            for second, q in top_chances(context, [*PROMPT, first]).items():
                chances[first, second] = p * q
    return chances


def top_chances(context: Context, tokens: list[int]) -> dict[int, float]:
    context.drop(0)
    context.decode([Feed(0, np.array(tokens, np.int32), context.end(0), wants_logits=True)])
    logits = context.logits(0).astype(np.float64)
    top = np.argsort(-logits)[:TOP]
    weights = np.exp(logits[top] - logits[top].max())
    return dict(zip(top.tolist(), (weights / weights.sum()).tolist(), strict=True))


def chi_square(found: Counter, chances: dict[tuple[int, int], float]) -> float:
    outside = N - sum(found[pair] for pair in chances)
    return sum((found[pair] - N * p) ** 2 / (N * p) for pair, p in chances.items()) + (1e9 if outside else 0.0)


def sampled(core: Core, seed: int) -> Result:
    request = submit(core, PROMPT, 3, sampling=sampling(seed))
    return drain(core, after_step=lambda _: None)[request.id]


def sampled_pairs(core: Core) -> Counter:
    results = [sampled(core, seed) for seed in range(N)]
    assert sum(result.n_drafted for result in results) >= N
    return Counter(result.tokens[:2] for result in results)


def test_a_sampled_reply_has_the_distribution_of_the_model():
    with drafting_core(n_slots=1, n_spares=2) as core:
        chances = expected(core)
        second = max(chances, key=chances.__getitem__)[1]
        always_draft(core, Stubborn([second, second]))
        found = sampled_pairs(core)
        assert core.speculator.counts.n_draft_accepted > N / 10
        assert chi_square(found, chances) < LIMIT


def test_a_draft_that_is_accepted_too_often_is_noticed(monkeypatch):
    """The control: where drafts are taken unseen, the pairs have another distribution."""
    with drafting_core(n_slots=1, n_spares=2) as core:
        chances = expected(core)
        second = max(chances, key=chances.__getitem__)[1]
        always_draft(core, Stubborn([second, second]))

        def trusting(context, request, draft, row):
            picked, error = pick(context, request, draft, row)
            return [(token, None) for token in draft.tokens.tolist()] + picked[-1:], error

        monkeypatch.setattr(core_module, "pick", trusting)
        assert chi_square(sampled_pairs(core), chances) > LIMIT
