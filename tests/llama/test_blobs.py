"""Whether a blob says that it is the state that is wanted, before libllama is asked."""

import struct
from collections.abc import Callable

import numpy as np
import pytest

from everwarm.llama.blobs import HEADER_BYTES, describes_end, with_header
from everwarm.llama.model import MemoryKind
from support.blob_cases import with_position
from support.steps import KINDS, SLOT, WITH_STATE, WITHOUT_TRIM, mark, open_context, read, text

MAGIC = 0xAF143CD8


def recurrent(magic: int = MAGIC, n_cells: int = 1, position: int = 29, n_seqs: int = 0) -> np.ndarray:
    return np.frombuffer(struct.pack("<IiIiI", magic, 0, n_cells, position, n_seqs) + bytes(80), np.uint8)


def window(magic: int = MAGIC, n_streams: int = 1, n_cells: int = 30, first: int = 0, n_seqs: int = 1) -> np.ndarray:
    cells = b"".join(struct.pack("<iIi", first + i, n_seqs, 0) for i in range(n_cells))
    return np.frombuffer(struct.pack("<IiII", magic, 0, n_streams, n_cells) + cells + bytes(80), np.uint8)


@pytest.mark.parametrize("arch", WITH_STATE)
def test_a_captured_state_describes_its_own_end(arch: str, open_tiny: Callable) -> None:
    for n in (1, 30, 100):
        with open_context(open_tiny(arch)) as context:
            state = read(context, text(100), (n,), SLOT).state
        assert describes_end(state, KINDS[arch], mark(n))


@pytest.mark.parametrize("arch", WITHOUT_TRIM)
def test_a_recurrent_state_describes_no_other_end(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        state = read(context, text(30), (30,), SLOT).state
    assert not describes_end(state, KINDS[arch], mark(29))
    assert not describes_end(state, KINDS[arch], mark(31))
    assert not describes_end(with_position(state, 30), KINDS[arch], mark(30))
    assert not describes_end(np.empty(0, np.uint8), KINDS[arch], mark(30))


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.RECURRENT])
@pytest.mark.parametrize("wrong", [{"magic": 1}, {"n_cells": 0}, {"n_cells": 2}, {"position": 28}, {"n_seqs": 1}])
def test_a_wrong_word_is_seen_in_a_recurrent_state(wrong: dict, kind: MemoryKind) -> None:
    assert describes_end(recurrent(), kind, mark(30))
    assert not describes_end(recurrent(**wrong), kind, mark(30))


@pytest.mark.parametrize(
    "wrong",
    [
        {"magic": 1},
        {"n_streams": 0},
        {"n_streams": 2},
        {"n_cells": 31},
        {"first": -1},
        {"first": -2},
        {"first": 1},
        {"n_seqs": 0},
        {"n_seqs": 2},
    ],
)
def test_a_wrong_word_is_seen_in_a_window(wrong: dict) -> None:
    assert describes_end(window(), MemoryKind.WINDOW, mark(30))
    assert not describes_end(window(**wrong), MemoryKind.WINDOW, mark(30))


@pytest.mark.parametrize("kind", [kind for kind in MemoryKind if kind.needs_checkpoints])
def test_a_blob_too_short_to_say_anything_describes_nothing(kind: MemoryKind) -> None:
    whole = recurrent() if kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT) else window()
    assert describes_end(whole, kind, mark(30))
    for n in range(16):
        assert not describes_end(whole[:n].copy(), kind, mark(30))


@pytest.mark.parametrize("n_behind", [0, 1, 1000])
def test_a_header_is_written_into_the_room_before_the_data_whatever_is_behind_it(n_behind: int) -> None:
    room = np.arange(HEADER_BYTES + 500 + n_behind, dtype=np.uint32).astype(np.uint8)
    whole = room.copy()
    data = whole[HEADER_BYTES:][:500]
    found = with_header(data, 3)
    assert np.shares_memory(found, whole) and found.ctypes.data == whole.ctypes.data
    assert found.tobytes() == struct.pack("<Ii", MAGIC, 3) + room[HEADER_BYTES:][:500].tobytes()
    assert (whole[HEADER_BYTES:] == room[HEADER_BYTES:]).all()


@pytest.mark.parametrize("n_before", [0, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_data_with_another_room_before_it_is_copied(n_before: int) -> None:
    whole = np.ones(n_before + 500, np.uint8)
    for data in (whole[n_before:], whole[n_before:].copy(), np.frombuffer(bytes(HEADER_BYTES + 500), np.uint8)[8:]):
        before = data.tobytes()
        found = with_header(data, 3)
        assert not np.shares_memory(found, data)
        assert found.tobytes() == struct.pack("<Ii", MAGIC, 3) + before
    assert (whole == 1).all()
