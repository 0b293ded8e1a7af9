"""What every test may use: `models` on the import path, and models that are opened once per session."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from everwarm.llama.model import Model
from support.models import EMBEDDED, tiny_model

settings.register_profile("untimed", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("untimed")

OpenTiny = Callable[..., Model]

LONGEST = tuple(
    f"tests/{name}.py"
    for name in (
        "simulate/test_memory_traces",
        "page/test_page",
        "router/supervise/test_supervisor",
        "engine/tiers/test_beyond_ram",
        "serving/test_hostile_blobs",
        "engine/cache/test_compaction",
        "page/test_looks",
        "cli/test_cli",
        "serving/test_router_errors",
        "page/test_conversations",
        "serving/test_router",
    )
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take one file after the other in this order: the longest come first, so that none of them is the last."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    """Thousands of collected tests live to the end: no collection of garbage looks at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def open_tiny() -> Iterator[OpenTiny]:
    """``open_tiny(arch, **spec)``: that tiny model, open. The same question gives the same model."""
    with ExitStack() as stack:

        @cache
        def open_once(arch: str, **spec: Any) -> Model:
            return stack.enter_context(Model(tiny_model(arch, **spec)))

        yield open_once


@pytest.fixture(scope="session")
def embedded_model() -> Iterator[Model]:
    with Model(EMBEDDED) as model:
        yield model
