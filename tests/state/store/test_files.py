"""Writing files: on several threads the same bytes as on one."""

from __future__ import annotations

import numpy as np
import pytest

from everwarm.state.store import files
from everwarm.state.store.files import Files


@pytest.fixture
def small_shares(monkeypatch):
    monkeypatch.setattr(files, "SHARE", 1000)


@pytest.mark.usefixtures("small_shares")
def test_an_awaited_file_has_the_bytes_of_its_pieces_in_their_order(tmp_path):
    rng = np.random.default_rng(1)
    pieces = [rng.bytes(n) for n in (10, 5000, 1999, 2000, 100_001, 3)]
    with Files().aside(tmp_path / "a", pieces, is_awaited=True) as new:
        assert new.path.read_bytes() == b"".join(pieces)
        assert new.size == sum(map(len, pieces))


@pytest.mark.usefixtures("small_shares")
def test_a_write_that_fails_on_a_thread_leaves_no_file(tmp_path, monkeypatch):
    def full(_fd: int, _data: memoryview, at: int) -> int:
        raise OSError(28, f"no space left at {at}")

    monkeypatch.setattr(files.os, "pwrite", full)
    with pytest.raises(OSError, match="no space"), Files().aside(tmp_path / "a", [bytes(9000)], is_awaited=True):
        pass
    assert list(tmp_path.iterdir()) == []
