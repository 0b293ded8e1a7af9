"""Idle conversations leave the device when another one runs: at once for a cold prompt, later for one that comes back."""

import pytest

from everwarm.engine.core import Core
from everwarm.engine.request import NewToken
from support.drive import GUARD, drain, open_core, run, submit, text, tidy

OPTIONS = {"n_slots": 2, "idle_cells": 0}
SPARES = pytest.mark.parametrize("n_spares", [0, 4])


def n_idle_cells(core: Core) -> int:
    """Cells that no running request uses."""
    running = [slot.seq for slot in core.slots if slot.request is not None]
    return core.context.cells.used - core.context.cells.used_by(running)


def two_conversations(core: Core) -> tuple[list[int], list[int]]:
    """The second one stands on the device, the first one is in RAM."""
    first = text(1, 300)
    second = text(2, 300)
    first += run(core, first, 6).tokens
    second += run(core, second, 6).tokens
    tidy(core)
    return first, second


@SPARES
def test_the_first_token_of_a_conversation_that_comes_back_waits_for_no_other_to_leave(n_spares):
    with open_core(**OPTIONS, n_spares=n_spares) as core:
        first, second = two_conversations(core)
        request = submit(core, [*first, *text(3, 20)], 40)
        events = core.step()
        while not any(isinstance(event, NewToken) for event in events):
            events = core.step()
        assert n_idle_cells(core) >= len(second) - GUARD
        n_before = n_idle_cells(core)
        core.keep_ends()
        core.tidy_overdue()
        assert n_idle_cells(core) <= n_before, "at most one sequence leaves between two steps"
        for _ in range(12):
            core.step()
            core.keep_ends()
            core.tidy_overdue()
        assert request.n_reply < 40 and n_idle_cells(core) == 0
        drain(core)
        again = run(core, [*second, *text(4, 20)], 4)
        assert again.n_processed <= 20 + 1 + GUARD


@SPARES
def test_a_cold_prompt_has_the_device_for_itself_from_its_first_token_on(n_spares):
    """Only then are its cells clean."""
    with open_core(**OPTIONS, n_spares=n_spares) as core:
        two_conversations(core)
        submit(core, text(5, 300), 4)
        core.step()
        assert n_idle_cells(core) == 0
        slot = next(slot for slot in core.slots if slot.request is not None)
        assert core.context.is_clean(slot.seq)


@SPARES
def test_nothing_leaves_when_the_request_has_ended_before(n_spares):
    with open_core(**OPTIONS, n_spares=n_spares) as core:
        first, _ = two_conversations(core)
        submit(core, [*first, *text(3, 20)], 1)
        drain(core)
        n_idle = n_idle_cells(core)
        core.tidy_overdue()
        assert n_idle_cells(core) == n_idle > len(first)
