"""How much the RAM tier gets under a memory limit."""

from __future__ import annotations

import logging

import pytest

from everwarm.config import ModelOptions
from everwarm.engine import build
from everwarm.engine.build import assemble
from everwarm.engine.memory_plan import MAX_RAM_BYTES, SLACK_BYTES, decide_sizes, ram_room
from everwarm.engine.settings import EngineSettings
from everwarm.llama.model import Model
from support.models import tiny_model

MIB = 1 << 20


def test_what_a_limit_leaves_is_what_nobody_needs_more():
    assert ram_room(None, 500 * MIB, 0) > 1 << 60
    assert ram_room(300 * MIB, 100 * MIB, 0) == 200 * MIB - SLACK_BYTES
    assert ram_room(300 * MIB, 100 * MIB, 50 * MIB) == 250 * MIB - SLACK_BYTES, "what it holds itself is in use already"
    assert ram_room(50 * MIB, 100 * MIB, 0) == 0


def test_the_default_counts_weights_and_context_against_the_limit() -> None:
    path, settings = tiny_model("qwen35", width=128), EngineSettings(n_slots=2, n_ctx=2048, n_spares=0, n_threads=1)
    with Model(path) as model:
        free = decide_sizes(model, settings, None)
        limited = decide_sizes(model, settings, 100 * MIB)
        needed = free.shape.context_bytes(2048, 3 + free.n_rollback) + model.size_bytes
        assert limited.ram_room == 100 * MIB - needed - SLACK_BYTES and limited.ram_bytes == limited.ram_room // 4
        assert limited.ram_bytes < free.ram_bytes <= MAX_RAM_BYTES
    with Model(path, ModelOptions(load_mode="none")) as copied:
        assert decide_sizes(copied, settings, 100 * MIB).ram_room == limited.ram_room + copied.size_bytes, (
            "they are counted already"
        )


def test_more_than_the_limit_leaves_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "limited_bytes", lambda: 100 * MIB)
    for n_mib, warns in ((512, True), (1, False)):
        caplog.clear()
        settings = EngineSettings(n_slots=1, n_ctx=256, n_spares=0, n_threads=1, ram_bytes=n_mib * MIB)
        with caplog.at_level(logging.WARNING):
            core = assemble(tiny_model("llama", width=64), settings)
        core.close()
        assert ("--cache-ram is 512 MiB, but the memory limit" in caplog.text) is warns
