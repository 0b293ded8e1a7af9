"""Calls that nobody waits for: they start last, and what they leave is evicted before any conversation."""

from __future__ import annotations

import pytest

from everwarm.engine.core import Core
from everwarm.engine.request import Started
from everwarm.engine.settings import StoreSettings
from everwarm.state.policy import GUARD, CutKind
from support.drive import check, drain, open_core, run, submit, text, tidy

HISTORY, NEW = text(1, 400), text(2, 30)
N_CALLS = 12


def kinds(core: Core) -> list[CutKind]:
    kept = [(node.n_items, node.checkpoint) for node in core.cache.tree.nodes() if node.checkpoint is not None]
    return [checkpoint.kind for _, checkpoint in sorted(kept, key=lambda each: each[0])]


def conversation_and_calls(core: Core, priority: int, n_calls: int = N_CALLS) -> int:
    """How much of the conversation is cached after many other prompts were answered meanwhile."""
    first = run(core, HISTORY, stable=len(HISTORY) - 1)
    for i in range(n_calls):
        run(core, text(10 + i, 300), 8, priority=priority, stable=280)
        tidy(core)
    again = run(core, [*HISTORY, *first.tokens, *NEW])
    assert again.n_prompt == len(HISTORY) + len(first.tokens) + len(NEW)
    return again.n_cached


@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "gemma3"])
@pytest.mark.parametrize("n_spares", [0, 4])
def test_a_conversation_stays_though_ram_is_full_of_background_calls(arch, n_spares):
    with open_core(arch, n_slots=1, n_spares=n_spares) as core:
        conversation_and_calls(core, 0, 0)
        tidy(core)
        budget = int(core.cache.tree.ram_bytes * 1.4)
    options = {"n_slots": 1, "n_spares": n_spares, "ram_bytes": budget, "idle_cells": 0}
    with open_core(arch, **options) as core:
        kept = conversation_and_calls(core, 1)
        check(core)
    with open_core(arch, **options) as core:
        control = conversation_and_calls(core, 0)
    assert kept >= len(HISTORY) - GUARD
    assert control < len(HISTORY) - GUARD, "the budget was large enough for all of them"


def test_a_background_call_starts_after_those_who_wait():
    with open_core(n_slots=1) as core:
        submit(core, text(1, 40))
        core.step()
        later = submit(core, text(2, 10), priority=1)
        sooner = submit(core, text(3, 200))
        started = []
        while core.has_work:
            started += [event.request_id for event in core.step() if isinstance(event, Started)]
        assert started == [sooner.id, later.id]


def test_its_state_counts_as_any_other_once_a_request_continues_from_it():
    prompt = text(1, 300)
    with open_core() as core:
        run(core, prompt, priority=1, stable=280)
        assert kinds(core) == [CutKind.BACKGROUND]
        again = run(core, [*prompt[:280], *text(2, 40)], priority=1, stable=300)
        assert again.n_cached == 280
        assert kinds(core) == [CutKind.STABLE, CutKind.BACKGROUND]


def test_a_cancelled_one_goes_on_where_it_was():
    prompt = text(1, 1200)
    with open_core(n_ubatch=256) as core:
        request = submit(core, prompt, priority=1)
        core.step()
        core.step()
        core.cancel(request.id)
        drain(core)
        assert run(core, prompt, priority=1).n_cached >= 256


def test_nothing_of_it_is_written_to_disk(tmp_path):
    for priority in (1, 0):
        with open_core(store=StoreSettings(str(tmp_path / str(priority)))) as core:
            core.cache.tiers.wait_open(20)
            run(core, text(1, 400), priority=priority, stable=380)
            core.put_away()
            assert (core.cache.tiers.disk.n_bytes > 0) == (priority == 0)
