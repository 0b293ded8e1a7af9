"""A folder for a disk tier, and what opens one there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.crash_writer import in_memory
from support.disks import OpenDisk


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory() as path:
        yield Path(path) / "model"


@pytest.fixture
def open_disk(place: Path) -> Iterator[OpenDisk]:
    opener = OpenDisk(place)
    yield opener
    opener.close()
