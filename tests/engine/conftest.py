"""What many tests of the engine begin with."""

from __future__ import annotations

import itertools
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


_fresh = itertools.count()


@pytest.fixture
def url() -> str:
    """A remote store in this process's memory that only this test uses."""
    return f"memory://shared-{next(_fresh)}"
