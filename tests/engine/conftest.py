"""What many tests of the engine begin with."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from everwarm.state.store.arena_file import memory_file


@pytest.fixture
def memory() -> Iterator[int]:
    """The RAM tier's file, which outlives an engine."""
    fd = memory_file()
    yield fd
    os.close(fd)
