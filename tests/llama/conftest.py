"""Models that see, opened once per module of tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from everwarm.llama.media.media_model import MediaModel
from everwarm.llama.model import Model
from support.models import tiny_vision

Sight = tuple[Model, MediaModel]


@pytest.fixture(scope="session")
def sight() -> Iterator[Callable[[str], Sight]]:
    """``sight(arch)``: that tiny model and its projector, open."""
    with ExitStack() as stack:
        opened: dict[str, Sight] = {}

        def open_once(arch: str) -> Sight:
            if arch not in opened:
                model_path, path = tiny_vision(arch)
                model = stack.enter_context(Model(model_path))
                opened[arch] = model, stack.enter_context(MediaModel(path, model, n_threads=1, use_gpu=False))
            return opened[arch]

        yield open_once


@pytest.fixture(params=("qwen35", "gemma3"))
def both(request: pytest.FixtureRequest, sight: Callable[[str], Sight]) -> Sight:
    return sight(request.param)


@pytest.fixture
def qwen(sight: Callable[[str], Sight]) -> Sight:
    return sight("qwen35")


@pytest.fixture
def gemma(sight: Callable[[str], Sight]) -> Sight:
    return sight("gemma3")
