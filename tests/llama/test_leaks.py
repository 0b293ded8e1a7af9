"""Opening and closing gives everything back: over many cycles the process does not grow."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from everwarm.config import Sampling
from everwarm.llama.model import Model
from everwarm.llama.sampler import Sampler
from support.models import tiny_model
from support.steps import SLOT, mark, open_context, read_to, say, text

N_CYCLES = 1000
SMALL = {"n_layers": 4, "width": 64}
OPTIONS = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32, "n_seq_max": 2}
LIMIT_BYTES = 8 << 20  # one of these contexts takes more than a hundredth of this


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def growth_of(cycle: Callable[[], None], n_warm_up: int = 100) -> Iterator[list[int]]:
    """How much the process grows while the block runs, once the allocator has what it wants."""
    for _ in range(n_warm_up):
        cycle()
    grown: list[int] = []
    before = resident_bytes()
    yield grown
    grown.append(resident_bytes() - before)


@pytest.fixture(params=["qwen35", "gemma3"])
def model(request: pytest.FixtureRequest, open_tiny: Callable) -> Model:
    return open_tiny(request.param, **SMALL)


def test_contexts_give_everything_back(model: Model) -> None:
    def cycle() -> None:
        with open_context(model, **OPTIONS) as context:
            say(context, SLOT, text(2))

    with growth_of(cycle) as grown:
        for _ in range(N_CYCLES):
            cycle()
    assert grown[0] < LIMIT_BYTES


def test_contexts_that_stay_open_show(model: Model) -> None:
    """A negative control: a tenth of the cycles without closing is well over the limit."""
    with ExitStack() as stack:

        def cycle() -> None:
            say(stack.enter_context(open_context(model, **OPTIONS)), SLOT, text(2))

        with growth_of(cycle, n_warm_up=1) as grown:
            for _ in range(N_CYCLES // 10):
                cycle()
        assert grown[0] > LIMIT_BYTES


def test_states_and_segments_give_everything_back(model: Model) -> None:
    with open_context(model, **OPTIONS) as context:
        read_to(context, SLOT, text(32), 32)

        def cycle() -> None:
            state = context.capture(SLOT)
            context.capture_segment(SLOT, mark(0), mark(32))
            context.restore(SLOT, state, mark(32), clean=True)

        with growth_of(cycle) as grown:
            for _ in range(N_CYCLES):
                cycle()
        assert grown[0] < LIMIT_BYTES


def test_models_give_everything_back() -> None:
    path = tiny_model("qwen35", **SMALL)

    def cycle() -> None:
        with Model(path) as model:
            assert model.vocab.eog

    with growth_of(cycle, n_warm_up=20) as grown:
        for _ in range(N_CYCLES // 5):
            cycle()
    assert grown[0] < LIMIT_BYTES


def test_samplers_give_everything_back(open_tiny: Callable) -> None:
    model = open_tiny("qwen35", **SMALL)
    sampling = Sampling(seed=1, repeat_penalty=1.2, logit_bias={1: 1.0})

    def cycle() -> None:
        with Sampler(model, sampling, text(64)):
            pass

    with growth_of(cycle) as grown:
        for _ in range(N_CYCLES):
            cycle()
    assert grown[0] < LIMIT_BYTES
