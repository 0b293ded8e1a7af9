"""Picking tokens: reproducible per seed, every knob does what its name says, and bad values are refused."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from everwarm.config import GREEDY, Sampling
from everwarm.errors import BadRequest
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context, Logits
from everwarm.llama.model import Model
from everwarm.llama.sampler import Sampler
from everwarm.types import START, SeqId
from support.steps import SLOT, open_context, say, text

OPEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # nothing cut off: only the temperature shapes the draw
N_VOCAB = 264
BAN = -math.inf


@pytest.fixture(scope="module")
def model(open_tiny: Callable) -> Model:
    return open_tiny("llama", n_layers=2, width=64)


@pytest.fixture(scope="module")
def context(model: Model) -> Iterator[Context]:
    with open_context(model) as context:
        say(context, SLOT, text(20))
        yield context


@pytest.fixture
def row(context: Context) -> Logits:
    return context.logits(0).copy()


def flat(**logits: float) -> Logits:
    """A row of zeroes but for these tokens: ``flat(t5=2.0)``."""
    row = np.zeros(N_VOCAB, np.float32)
    for name, value in logits.items():
        row[int(name.removeprefix("t"))] = value
    return row


def draws(model: Model, sampling: Sampling, row: Logits, n: int = 200, history: tuple[int, ...] = ()) -> list[int]:
    with Sampler(model, sampling, history) as sampler:
        return [sampler.pick_from(row) for _ in range(n)]


# greedy


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=1), Sampling(temperature=0.0, top_k=40, top_p=0.5)])
def test_greedy_is_the_largest_logit(sampling: Sampling, model: Model, context: Context, row: Logits) -> None:
    with Sampler(model, sampling) as sampler:
        assert sampler.pick(context, 0) == sampler.pick_from(row) == int(row.argmax())


def test_greedy_takes_the_first_of_equals(model: Model) -> None:
    for sampling in (GREEDY, Sampling(temperature=0.0, logit_bias={200: -1.0})):
        assert draws(model, sampling, flat(t7=1.0, t9=1.0), 3) == [7, 7, 7]


def test_top_k_one_needs_no_seed(model: Model, row: Logits) -> None:
    assert set(draws(model, Sampling(top_k=1, temperature=5.0), row, 50)) == {int(row.argmax())}


# seeds


@pytest.mark.parametrize("seed", [0, 1, 12345, (1 << 32) - 1])
def test_the_same_seed_gives_the_same_tokens(seed: int, model: Model, row: Logits) -> None:
    sampling = Sampling(seed=seed, temperature=2.0, **OPEN)
    assert draws(model, sampling, row) == draws(model, sampling, row)


def test_another_seed_gives_others(model: Model, row: Logits) -> None:
    seen = {tuple(draws(model, Sampling(seed=seed, temperature=2.0, **OPEN), row, 50)) for seed in range(20)}
    assert len(seen) == 20


def test_without_a_seed_every_sampler_has_its_own_and_tells_it(model: Model, row: Logits) -> None:
    with Sampler(model, Sampling(temperature=2.0, **OPEN)) as one, Sampler(model, Sampling()) as two:
        assert one.seed != two.seed
        drawn = [one.pick_from(row) for _ in range(50)]
    assert drawn == draws(model, Sampling(seed=one.seed, temperature=2.0, **OPEN), row, 50)


# the knobs


def test_draws_follow_the_softmax(model: Model) -> None:
    row = np.full(N_VOCAB, -50.0, np.float32)
    row[:3] = np.log([0.6, 0.3, 0.1])
    found = Counter(draws(model, Sampling(seed=3, temperature=1.0, **OPEN), row, 4000))
    assert set(found) == {0, 1, 2}
    for token, share in enumerate((0.6, 0.3, 0.1)):
        assert abs(found[token] / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000), "beyond four deviations"


def test_temperature_flattens(model: Model, row: Logits) -> None:
    n_distinct = [len(set(draws(model, Sampling(seed=1, temperature=t, **OPEN), row))) for t in (0.05, 0.5, 5.0)]
    assert n_distinct[0] < n_distinct[1] < n_distinct[2]


def test_top_k_keeps_the_k_largest(model: Model, row: Logits) -> None:
    best = np.argsort(row)[::-1]
    found = set(draws(model, Sampling(seed=1, temperature=50.0, top_k=3, top_p=1.0, min_p=0.0), row))
    assert found == set(best[:3].tolist())


def test_a_tiny_top_p_is_greedy(model: Model, row: Logits) -> None:
    for top_p in (0.0, 1e-6):
        sampling = Sampling(seed=1, temperature=50.0, top_k=0, top_p=top_p, min_p=0.0)
        assert set(draws(model, sampling, row, 50)) == {int(row.argmax())}


def test_top_p_keeps_the_smallest_set_that_reaches_it(model: Model) -> None:
    row = np.full(N_VOCAB, -50.0, np.float32)
    row[:4] = np.log([0.5, 0.3, 0.15, 0.05])
    found = set(draws(model, Sampling(seed=1, temperature=1.0, top_k=0, top_p=0.7, min_p=0.0), row, 500))
    assert found == {0, 1}


def test_min_p_keeps_what_is_likely_enough_beside_the_best(model: Model) -> None:
    row = np.full(N_VOCAB, -50.0, np.float32)
    row[:4] = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(draws(model, Sampling(seed=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.4), row, 500)) == {0, 1}
    assert set(draws(model, Sampling(seed=1, temperature=1.0, top_k=0, top_p=1.0, min_p=1.0), row, 500)) == {0}


@pytest.mark.parametrize(
    ("penalty", "history", "picked"),
    [
        ({"repeat_penalty": 1.5}, (), 5),
        ({"repeat_penalty": 1.5}, (5,), 6),
        ({"repeat_penalty": 1.01}, (5,), 5),
        ({"repeat_penalty": 1.5}, (5, 6), 5),
        ({"frequency_penalty": 0.06}, (5,), 5),
        ({"frequency_penalty": 0.06}, (5, 5), 6),
        ({"frequency_penalty": -0.2}, (6,), 6),
        ({"presence_penalty": 0.06}, (5, 5, 5, 5), 5),
        ({"presence_penalty": 0.2}, (5,), 6),
    ],
    ids=str,
)
def test_penalties_look_back_on_the_history(penalty: dict, history: tuple, picked: int, model: Model) -> None:
    row = flat(t5=2.0, t6=1.9)
    assert draws(model, Sampling(temperature=0.0, **penalty), row, 1, history) == [picked]


def test_penalties_forget_what_is_further_back_than_last_n(model: Model) -> None:
    row = flat(t5=2.0, t6=1.9)
    for last_n, picked in ((4, 6), (3, 5), (0, 5)):
        sampling = Sampling(temperature=0.0, presence_penalty=1.0, penalty_last_n=last_n)
        assert draws(model, sampling, row, 1, (5, 100, 101, 102)) == [picked]


def test_what_was_picked_counts_as_history(model: Model) -> None:
    row = flat(t5=2.0, t6=1.9, t7=1.8)
    sampling = Sampling(temperature=0.0, presence_penalty=5.0)
    assert draws(model, sampling, row, 4) == [5, 6, 7, 0]


def test_a_bias_forces_or_bans(model: Model, row: Logits) -> None:
    worst, best = int(row.argmin()), int(row.argmax())
    for rest in ({"temperature": 0.0}, {"seed": 1}, {"seed": 1, "temperature": 2.0, **OPEN}):
        assert set(draws(model, Sampling(logit_bias={worst: 100.0}, **rest), row, 50)) == {worst}
        for ban in (-100.0, BAN):
            assert best not in draws(model, Sampling(logit_bias={best: ban}, **rest), row)


def test_a_bias_comes_before_the_penalties(model: Model) -> None:
    sampling = Sampling(temperature=0.0, logit_bias={6: 0.05}, presence_penalty=0.06)
    assert draws(model, sampling, flat(t5=2.0, t6=1.9), 1, (5,)) == [6]
    assert draws(model, sampling, flat(t5=2.0, t6=1.9), 1, ()) == [5]


# pick and pick_from


SAMPLINGS = [
    GREEDY,
    Sampling(seed=5),
    Sampling(seed=5, temperature=3.0, **OPEN),
    Sampling(seed=5, temperature=3.0, top_k=7, top_p=0.9, min_p=0.1),
    Sampling(seed=5, repeat_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5, penalty_last_n=8),
    Sampling(seed=5, temperature=2.0, logit_bias={3: 5.0, 4: BAN}, repeat_penalty=1.1),
    Sampling(temperature=0.0, logit_bias={3: 1.0}, frequency_penalty=0.3),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_picking_from_a_kept_row_is_picking_from_the_live_one(
    sampling: Sampling, model: Model, context: Context, row: Logits
) -> None:
    history = text(30)
    with Sampler(model, sampling, history) as live, Sampler(model, sampling, history) as kept:
        picked = [live.pick(context, 0) for _ in range(60)]
        assert picked == [kept.pick_from(row) for _ in range(60)]
    assert context.logits(0).tobytes() == row.tobytes(), "picking changed the row"


def test_the_live_row_may_be_masked_in_place(model: Model, context: Context, row: Logits) -> None:
    context.logits(0)[:] = BAN
    context.logits(0)[[17, 18]] = 0.0
    try:
        with Sampler(model, Sampling(seed=1, **OPEN)) as sampler:
            assert {sampler.pick(context, 0) for _ in range(50)} == {17, 18}
    finally:
        context.logits(0)[:] = row


def test_each_feed_has_its_own_row(model: Model) -> None:
    with open_context(model) as context, Sampler(model, GREEDY) as greedy, Sampler(model, Sampling(seed=1)) as drawn:
        feeds = [Feed(SeqId(i), text(5, seed=i), START, wants_logits=i != 1) for i in range(3)]
        context.decode(feeds)
        rows = [context.logits(i).copy() for i in range(2)]
        assert [greedy.pick(context, i) for i in range(2)] == [int(row.argmax()) for row in rows]
        assert rows[0].tobytes() != rows[1].tobytes()
        with pytest.raises(IndexError):
            context.logits(2)
        with Sampler(model, Sampling(seed=1)) as again:
            assert [drawn.pick(context, i) for i in range(2)] == [again.pick_from(row) for row in rows]


# strange rows


def test_a_row_with_infinities_picks_the_infinite_one(model: Model, row: Logits) -> None:
    row[3] = np.inf
    assert set(draws(model, GREEDY, row, 5)) == {3}
    assert set(draws(model, Sampling(seed=1), row, 5)) == {3}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_a_row_that_is_not_a_number_still_gives_a_token(sampling: Sampling, model: Model) -> None:
    for row in (np.full(N_VOCAB, np.nan, np.float32), np.full(N_VOCAB, BAN, np.float32), flat(t3=math.nan)):
        assert all(0 <= token < N_VOCAB for token in draws(model, sampling, row, 20))


def test_a_temperature_next_to_nothing_is_greedy(model: Model, row: Logits) -> None:
    assert set(draws(model, Sampling(seed=1, temperature=1e-45, **OPEN), row, 20)) == {int(row.argmax())}


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_a_very_low_temperature_is_greedy(temperature: float, model: Model, row: Logits) -> None:
    assert set(draws(model, Sampling(seed=1, temperature=temperature, **OPEN), row, 20)) == {int(row.argmax())}


# refusals


@pytest.mark.parametrize("token", [-1, N_VOCAB, 1 << 40])
def test_a_bias_outside_the_vocabulary_is_refused(token: int, model: Model) -> None:
    with pytest.raises(BadRequest, match=f"logit_bias names token {token}; this model has tokens 0 to 263"):
        Sampler(model, Sampling(logit_bias={token: 1.0}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; give a number from 0.0 to 100.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1; give a number from 0 to"),
        ({"top_p": 1.1}, "top_p is 1.1; give a number from 0.0 to 1.0"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.5}, "min_p is -0.5"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"repeat_penalty": 0.0}, "repeat_penalty is 0.0; give 0 < p <= 100"),
        ({"repeat_penalty": math.nan}, "repeat_penalty is nan"),
        ({"repeat_penalty": math.inf}, "repeat_penalty is inf"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"presence_penalty": -101.0}, "presence_penalty is -101.0"),
        ({"penalty_last_n": -1}, "penalty_last_n is -1; give a number from 0 to 65536"),
        ({"seed": -1}, "seed is -1; give 0 to 4294967295"),
        ({"seed": 1 << 32}, "seed is 4294967296"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 is nan; give -1,000,000 to 1,000,000"),
        ({"logit_bias": {1: 1e300}}, "logit_bias of token 1 is 1e\\+300"),
        ({"logit_bias": {1: -2e6}}, "logit_bias of token 1 is -2000000.0"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 is inf"),
        ({"logit_bias": dict.fromkeys(range(4097), 0.0)}, "logit_bias has 4097 entries; give at most 4096"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_value_is_refused_and_says_what_would_be_right(wrong: dict, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Sampling(**wrong)


def test_closing_twice_is_fine(model: Model) -> None:
    sampler = Sampler(model, Sampling(seed=1))
    sampler.close()
    sampler.close()
