"""Pinning the RAM tier: when, with what, and that nothing else changes; with a CUDA runtime that only remembers."""

from __future__ import annotations

import logging
import os
import threading

import numpy as np
import pytest

from everwarm.engine import build as assembly
from everwarm.engine.settings import EngineSettings
from everwarm.engine.tiers import ram as module
from everwarm.engine.tiers.ram import Pinning, why_not_pinned
from everwarm.errors import BadRequest
from everwarm.llama.system.pinned_memory import Runtime
from everwarm.state.store.arena import Arena
from everwarm.state.store.arena_file import memory_file
from support.drive import open_core, run, text, tidy
from support.fake_cuda import FakeCuda

MIB = 1 << 20
FACTS = {"is_on_gpu": True, "n_bytes": 8 * MIB, "free_bytes": 16 * MIB}


@pytest.mark.parametrize(
    ("wanted", "facts", "reason"),
    [
        ("auto", {}, None),
        ("on", {}, None),
        ("off", {}, "is off"),
        ("auto", {"is_on_gpu": False}, "not on a GPU"),
        ("on", {"is_on_gpu": False}, "not on a GPU"),
        ("auto", {"n_bytes": 0}, "no RAM tier"),
        ("auto", {"free_bytes": 16 * MIB - 1}, "more than half"),
        ("on", {"free_bytes": 1}, None),
    ],
)
def test_what_is_pinned(wanted, facts, reason):
    found = why_not_pinned(wanted, **(FACTS | facts))
    assert (found is None) if reason is None else (reason in (found or ""))


def arena_with(n_bytes: int) -> tuple[Arena, np.ndarray]:
    fd = memory_file()
    arena = Arena(fd, "me", 4 * MIB, 0)
    os.close(fd)
    return arena, arena.place(n_bytes)


def wait_for(pinning: Pinning) -> None:
    assert pinning._thread is not None
    pinning._thread.join(10)


def test_memory_is_pinned_when_enough_lies_in_it(monkeypatch):
    monkeypatch.setattr(module, "WORTH_BYTES", MIB)
    arena, kept = arena_with(1000)
    cuda = FakeCuda()
    pinning = Pinning(arena, cuda.runtime)
    assert pinning._thread is None and not cuda.registered
    more = arena.place(2 * MIB)
    pinning.start_if_worth_it()
    wait_for(pinning)
    [(address, (size, _))] = cuda.registered.items()
    assert pinning.n_bytes == size >= arena.budget_bytes
    for blob in (kept, more):
        assert address <= blob.ctypes.data and blob.ctypes.data + blob.nbytes <= address + size
    pinning.close()
    assert not cuda.registered and pinning.n_bytes == 0


def test_a_refusal_is_said_and_the_arena_gives_pages_back_as_before(caplog):
    arena, _ = arena_with(1000)
    with caplog.at_level(logging.WARNING, "everwarm.ram"):
        pinning = Pinning(arena, FakeCuda(refusal=2).runtime, at_once=True)
        wait_for(pinning)
    assert "error 2" in caplog.text and pinning.n_bytes == 0
    assert not arena._is_held
    pinning.close()


def test_without_a_runtime_nothing_happens():
    arena, blob = arena_with(1000)
    pinning = Pinning(arena, lambda: None, at_once=True)
    wait_for(pinning)
    assert pinning.n_bytes == 0 and not arena._is_held
    blob[:] = 7
    pinning.close()


def test_closing_while_it_is_being_pinned_leaves_nothing_registered():
    arena, _ = arena_with(1000)
    cuda, reached, go_on = FakeCuda(), threading.Event(), threading.Event()

    def runtime() -> Runtime:
        reached.set()
        go_on.wait(10)
        return cuda.runtime()

    pinning = Pinning(arena, runtime, at_once=True)
    reached.wait(10)
    threading.Timer(0.05, go_on.set).start()
    pinning.close()
    assert not cuda.registered and not arena._is_held


def test_what_an_engine_kept_comes_back_the_same_with_its_memory_pinned(monkeypatch):
    """A whole engine with a GPU that is none: pinned from the first byte on, restarted on the same memory, still warm."""
    cuda = FakeCuda()
    monkeypatch.setattr(assembly, "loaded_runtime", cuda.runtime)
    monkeypatch.setattr(assembly, "gpu_free_bytes", lambda lib, options: 1)
    monkeypatch.setattr(assembly, "is_on_gpu", lambda model: True)
    monkeypatch.setattr(module, "WORTH_BYTES", 1)
    prompt, fd = text(1, 300), memory_file()
    replies = []
    for _ in range(2):
        with open_core(n_spares=1, ram_bytes=32 * MIB, memory=fd) as core:
            replies.append(run(core, prompt))
            tidy(core)
            core.cache.ram.flush()
            pinning = core.cache.ram._pinning
            assert pinning is not None
            wait_for(pinning)
            assert len(cuda.registered) == 1 and core.cache.ram.stats()["ram_pinned_bytes"] >= 32 * MIB
            core.cache.ram.arena.check()
        assert not cuda.registered, "unregistered before it is unmapped"
    os.close(fd)
    assert replies[0].n_cached == 0 and replies[1].n_cached > 250
    assert replies[0].tokens == replies[1].tokens


def test_a_model_on_the_cpu_is_never_pinned(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(assembly, "loaded_runtime", cuda.runtime)
    with open_core(n_spares=1, pin_ram="on") as core:
        run(core, text(1, 100))
        tidy(core)
        core.cache.ram.flush()
        assert core.cache.ram._pinning is None and core.cache.ram.stats()["ram_pinned_bytes"] == 0
    assert not cuda.registered


def test_the_flag_has_three_values():
    with pytest.raises(BadRequest, match="pin_ram"):
        EngineSettings(pin_ram="always")  # type: ignore[arg-type]
