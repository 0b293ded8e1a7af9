"""Registering memory with the CUDA runtime: what is asked of it, and that a refusal changes nothing."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

from everwarm.llama.system.pinned_memory import Pinned, loaded_runtime, runtime_of
from support.fake_cuda import FakeCuda

SIZE = 4 * mmap.PAGESIZE


@pytest.fixture
def memory() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)


def test_memory_is_registered_once_for_every_device_and_let_go(memory):
    cuda = FakeCuda()
    pinned = Pinned(cuda.runtime(), memory)
    assert cuda.registered == {memory.ctypes.data: (SIZE, 1)}, "portable, and not read-only"
    assert pinned.size_bytes == SIZE
    pinned.close()
    assert cuda.registered == {}
    pinned.close()
    assert cuda.last == 0, "nothing was unregistered twice"


def test_committing_changes_no_byte(memory):
    memory[:] = np.arange(SIZE) % 251
    before = memory.copy()
    Pinned(FakeCuda().runtime(), memory).close()
    assert np.array_equal(memory, before)


def test_a_refusal_says_why_and_leaves_no_error_behind(memory):
    cuda = FakeCuda(refusal=2)
    with pytest.raises(OSError, match=r"error 2"):
        Pinned(cuda.runtime(), memory)
    assert cuda.registered == {} and cuda.last == 0


def test_whoever_is_told_to_stop_registers_nothing(memory):
    cuda = FakeCuda()
    with pytest.raises(OSError, match="not needed"):
        Pinned(cuda.runtime(), memory, lambda: True)
    assert cuda.registered == {}


def test_there_is_no_runtime_in_a_process_without_one(tmp_path):
    assert loaded_runtime(tmp_path / "missing") is None
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 00:00 1  /usr/lib/libc.so.6\n")
    assert loaded_runtime(maps) is None


@pytest.mark.parametrize("name", ["libcudart.so.13", "libcudart.so.12.4.127", "libcudart-9f8c.so.12"])
def test_the_runtime_that_is_mapped_is_the_one_that_is_opened(tmp_path, monkeypatch, name):
    opened: list[str] = []

    def cdll(path: str) -> ctypes.CDLL:
        opened.append(path)
        raise OSError("not here")

    monkeypatch.setattr(ctypes, "CDLL", cdll)
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f00-7f01 r-xp 0 00:00 1  /opt/cuda/lib64/libcudart_static_note.txt\n7f r-xp 0 0 2  /opt/cuda/{name}\n"
    )
    assert loaded_runtime(maps) is None
    assert opened == [f"/opt/cuda/{name}"]


def test_a_library_without_the_functions_is_none(tmp_path):
    with pytest.raises(AttributeError):
        runtime_of(ctypes.CDLL(None))
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    link = tmp_path / "libcudart.so.13"
    link.symlink_to(libc)
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 0 00:00 1  {link}\n")
    assert loaded_runtime(maps) is None
