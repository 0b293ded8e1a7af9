"""Idle conversations leave the device when another one runs. libllama takes its time to empty them: before the first step
of a cold prompt, and one by one after the steps of a conversation that comes back."""

from itertools import pairwise

import pytest

from everwarm.engine.core import Core
from everwarm.engine.request import NewToken
from support.drive import GUARD, drain, finish, open_core, run, submit, text, tidy

OPTIONS = {"n_slots": 2, "idle_cells": 0}
SPARES = pytest.mark.parametrize("n_spares", [0, 4])


def two_conversations(core: Core) -> tuple[list[int], list[int]]:
    """The second one stands on the device, the first one is in RAM."""
    first = text(1, 300)
    second = text(2, 300)
    first += run(core, first, 6).tokens
    second += run(core, second, 6).tokens
    tidy(core)
    return first, second


@SPARES
def test_the_first_token_of_a_conversation_that_comes_back_waits_for_no_other_to_be_emptied(n_spares):
    with open_core(**OPTIONS, n_spares=n_spares) as core:
        first, second = two_conversations(core)
        request = submit(core, [*first, *text(3, 20)], 40)
        events = core.step()
        while not any(isinstance(event, NewToken) for event in events):
            events = core.step()
        waiting = [core.context.n_to_empty]
        assert waiting[0] >= 1
        while core.context.n_to_empty:
            core.keep_ends()
            core.tidy_overdue()
            waiting.append(core.context.n_to_empty)
            core.step()
        n_emptied = [before - after for before, after in pairwise(waiting)]
        assert all(1 <= n <= 2 for n in n_emptied), "one between two steps, and one whose place is taken"
        assert request.n_reply < 40
        drain(core)
        again = run(core, [*second, *text(4, 20)], 4)
        assert again.n_processed <= 20 + 1 + GUARD


@SPARES
def test_a_cold_prompt_has_the_device_for_itself_from_its_first_token_on(n_spares):
    """Only then are its cells clean; also while others are still to be emptied."""
    with open_core(**OPTIONS, n_spares=n_spares) as core:
        first, _ = two_conversations(core)
        finish(core, [*first, *text(3, 20)], 1, n_pieces=0)
        assert core.context.n_to_empty > 0
        submit(core, text(5, 300), 4)
        core.step()
        assert core.context.n_to_empty == 0
        slot = next(slot for slot in core.slots if slot.request is not None)
        assert core.context.is_clean(slot.seq)


def test_a_deterministic_request_finds_an_empty_device():
    with open_core(**OPTIONS, n_spares=4) as core:
        alone = run(core, text(5, 300), 6, deterministic=True).tokens
        first, _ = two_conversations(core)
        finish(core, [*first, *text(3, 20)], 1, n_pieces=0)
        assert core.context.n_to_empty > 0
        submit(core, text(5, 300), 6, deterministic=True, use_cache=False)
        core.step()
        assert core.context.n_to_empty == 0
        (result,) = drain(core).values()
        assert result.tokens == alone
