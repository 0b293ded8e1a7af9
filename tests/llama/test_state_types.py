"""Packed states: what comes back is close, what cannot be packed is exact, and no blob of bytes breaks anything."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.errors import StateRejected
from everwarm.llama.blobs import is_packed, pack, unpack
from support.campaign import by_chance


def blob_of(*rows: np.ndarray, number: int = 0) -> np.ndarray:
    """As libllama writes a state: a head of seven numbers, then type, bytes and numbers of every row."""
    parts = [struct.pack("<7I", 0xAF143CD8, 0, 1, 9, 0, 0, len(rows))]
    for row in rows:
        parts += [struct.pack("<iQ", number, row.nbytes), row.astype("<f4").tobytes()]
    return np.frombuffer(b"".join(parts), np.uint8)


def numbers(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, n).astype("<f4")


@pytest.mark.parametrize(("kind", "share", "error"), [("f16", 0.51, 1e-3), ("q8_0", 0.28, 0.005)])
def test_a_packed_state_is_smaller_and_close(kind, share, error):
    rows = numbers(1, 4096), numbers(2, 1000)
    blob = blob_of(*rows)
    packed = pack(blob, kind)
    assert is_packed(packed) and not is_packed(blob)
    assert packed.nbytes < share * blob.nbytes
    again = unpack(packed)
    assert again.nbytes == blob.nbytes
    assert not np.array_equal(again, blob)
    differs = np.abs(again[40:].view("<f4")[:4096] - blob[40:].view("<f4")[:4096])
    assert differs.max() <= error * np.abs(rows[0]).max()


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3e38])
def test_a_row_with_a_number_that_cannot_be_packed_stays_as_it_is(kind, odd):
    odd_row = numbers(3, 640)
    odd_row[17] = odd
    blob = blob_of(odd_row, np.zeros(2048, "<f4"))
    assert np.array_equal(unpack(pack(blob, kind)), blob)


def test_f32_and_other_forms_are_not_packed():
    blob = blob_of(numbers(1, 64))
    assert pack(blob, "f32") is blob
    assert pack(blob[:-1], "q8_0") is not None and not is_packed(pack(blob[:-1], "q8_0"))
    half = blob_of(numbers(1, 64), number=1)  # another type than floats
    assert np.array_equal(half, pack(half, "q8_0"))


@by_chance(100, 5000)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_damaged_packed_states_are_refused_or_read(more, n_cut):
    packed = pack(blob_of(numbers(1, 64), numbers(2, 96)), "q8_0")
    damaged = np.frombuffer(packed.tobytes()[: len(packed) - n_cut] + more, np.uint8)
    with contextlib.suppress(StateRejected):
        unpack(damaged)


def test_a_record_that_claims_more_than_there_is_is_refused():
    packed = bytearray(pack(blob_of(numbers(1, 64)), "f16").tobytes())
    struct.pack_into("<Q", packed, 4 + 28 + 5, 1 << 50)
    with pytest.raises(StateRejected):
        unpack(np.frombuffer(bytes(packed), np.uint8))
