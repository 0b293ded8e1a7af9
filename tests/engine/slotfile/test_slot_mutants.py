"""Damaged slot files: no change of either file of a pair is taken for what was saved. EVERWARM_CAMPAIGN=1 tries 100,000."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from everwarm.engine.slotfile import slot_io
from everwarm.errors import EverwarmError
from everwarm.state.store.object import Damaged
from everwarm.state.store.slot_names import COMPANION
from support.crash_writer import in_memory
from support.slot_files import MINE, conversation

N_MUTANTS = 100_000 if os.environ.get("EVERWARM_CAMPAIGN") else 300


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as path:
        yield Path(path)


def changed(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at, n = rng.randrange(len(data)), rng.randrange(1, 200)
    match rng.randrange(6):
        case 0:
            mutant = bytearray(data)
            mutant[at] ^= 1 << rng.randrange(8)
            return bytes(mutant)
        case 1:
            return data[:at]
        case 2:
            return data[:at] + rng.choice([bytes(n), b"\xff" * n, rng.randbytes(n)]) + data[at + n :]
        case 3:
            return data[:at] + other[at:]
        case 4:
            return data[:at] + data[at + n :]
        case _:
            return data[:at] + rng.randbytes(n) + data[at:]


def test_no_changed_pair_is_accepted(folder: Path) -> None:
    rng, path = random.Random(3), folder / "a.bin"
    slot_io.write(folder / "b.bin", conversation(seed=4), MINE)
    slot_io.write(path, conversation(), MINE)
    files = (path, path.with_name(path.name + COMPANION))
    others = [(folder / "b.bin").read_bytes(), (folder / f"b.bin{COMPANION}").read_bytes()]
    good = [file.read_bytes() for file in files]
    saved, _ = slot_io.read(path, MINE, 4096)
    assert np.array_equal(saved.state, conversation().state), "the control: unchanged it is read"
    n_refused = 0
    for _ in range(N_MUTANTS):
        which = rng.randrange(2)
        mutant = changed(good[which], rng.choice([others[which], good[1 - which]]), rng)
        if mutant == good[which]:
            continue
        files[which].write_bytes(mutant)
        with pytest.raises((Damaged, EverwarmError)):
            slot_io.read(path, MINE, 4096)
        files[which].write_bytes(good[which])
        n_refused += 1
    assert n_refused > 0.9 * N_MUTANTS
    slot_io.read(path, MINE, 4096)
