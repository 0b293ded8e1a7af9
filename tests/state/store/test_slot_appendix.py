"""What llama-server appends to a state is found wherever it lies, and a file that was made to be slow is not."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from everwarm.state.store import slot_file
from everwarm.state.store.slot_file import MAX_MARKS, MAX_POINTS, Appended, encode_main, split_appendix

MARK = slot_file._APPENDIX.pack(slot_file._APPENDIX_MAGIC, slot_file._APPENDIX_VERSION)
POINTS = tuple(Appended(n, np.full(n, n, np.uint8)) for n in (3, 50))


def blob(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def with_appendix(state: bytes, points: tuple[Appended, ...] = POINTS) -> np.ndarray:
    tokens = np.array([1], np.int32)
    return blob(b"".join(encode_main(tokens, blob(state), points))[12 + 4 :])


def found_in(data: np.ndarray) -> tuple[bytes, list[tuple[int, bytes]]]:
    state, points = split_appendix(data)
    return state.tobytes(), [(point.n_tokens, point.state.tobytes()) for point in points]


@pytest.mark.parametrize("n", range(60, 130))
def test_an_appendix_is_found_across_the_pieces_that_are_searched(monkeypatch, n):
    monkeypatch.setattr(slot_file, "SEARCHED_BYTES", 32)
    state = bytes(n)
    assert found_in(with_appendix(state)) == (state, [(p.n_tokens, p.state.tobytes()) for p in POINTS])
    assert found_in(blob(state)) == (state, [])


def test_a_state_with_the_mark_in_it_is_told_from_an_appendix():
    state = (bytes(20) + MARK) * (MAX_MARKS - 1) + bytes(9)
    assert found_in(with_appendix(state))[0] == state


class Counting:
    """A format that counts what is read with it."""

    def __init__(self, form: struct.Struct) -> None:
        self.size = form.size
        self._form = form
        self.n_read = 0

    def unpack_from(self, *data):
        self.n_read += 1
        return self._form.unpack_from(*data)


@pytest.mark.parametrize("n_marks", [100, 2000])
def test_a_file_of_many_marks_is_given_up_after_a_few_of_them(monkeypatch, n_marks):
    """Each of them begins a list of points that goes on to the end of the file, where it turns out to be none."""
    count, point = Counting(slot_file._COUNT), Counting(slot_file._POINT)
    monkeypatch.setattr(slot_file, "_COUNT", count)
    monkeypatch.setattr(slot_file, "_POINT", point)
    tiny = struct.pack("<qii", 1, 0, 0) + struct.pack("<Q", 1) + b"s" + 2 * struct.pack("<Q", 0)
    many = struct.pack("<I", 1 << 31)
    hostile = blob((MARK + many) * n_marks + tiny * 20_000)
    assert found_in(hostile) == (hostile.tobytes(), [])
    assert count.n_read == MAX_MARKS and point.n_read == 0

    most = struct.pack("<I", MAX_POINTS)
    inner = struct.pack("<qii", 1, 0, 0) + struct.pack("<Q", len(MARK) + 4) + MARK + most + 2 * struct.pack("<Q", 0)
    hostile = blob(MARK + most + inner * n_marks + tiny * (2 * MAX_POINTS))
    assert found_in(hostile) == (hostile.tobytes(), [])
    assert count.n_read == 2 * MAX_MARKS and point.n_read <= MAX_MARKS * MAX_POINTS
