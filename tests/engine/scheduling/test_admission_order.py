"""Who starts next: short prompts before long ones, few long ones at a time, namespaces in turn; nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from everwarm.engine.core import Core
from everwarm.engine.request import Finished, Request, Started
from everwarm.engine.scheduling import admission
from everwarm.engine.scheduling.admission import MAX_READING, Shares
from support.drive import check, open_core, submit, text

LONG, SHORT = 1400, 24


def crowd(core: Core, sizes: list[int], **more) -> list[Request]:
    return [submit(core, text(10 + i, n), 2, **more) for i, n in enumerate(sizes)]


def firsts(core: Core) -> tuple[list[int], list[int]]:
    """The ids of requests in the order in which they started, and in which they ended."""
    started, ended = [], []
    while core.has_work:
        for event in core.step():
            if isinstance(event, Started):
                started.append(event.request_id)
            elif isinstance(event, Finished):
                assert event.result.error is None
                ended.append(event.request_id)
        core.keep_ends()
    return started, ended


@pytest.fixture
def core():
    with open_core("qwen35", width=64, n_ctx=16384, n_slots=6, n_spares=4) as core:
        yield core
        check(core)


def test_a_short_prompt_never_queues_behind_long_ones(core):
    long = crowd(core, [LONG] * 8)
    core.step()
    short = submit(core, text(99, SHORT), 2)
    _, ended = firsts(core)
    assert ended[0] == short.id
    assert ended[1:] == [request.id for request in long], "long ones in the order in which they came"


def test_few_long_prompts_are_read_at_a_time(core):
    crowd(core, [LONG] * 6)
    most = 0
    while core.has_work:
        core.step()
        core.keep_ends()
        reading = [s for s in core.slots if s.request is not None and s.request.n_prompt - s.n_fed > 512]
        most = max(most, len(reading))
    assert most == MAX_READING


def test_the_control_without_a_bound_all_slots_hold_long_prompts(core, monkeypatch):
    monkeypatch.setattr(admission, "MAX_READING", 99)
    crowd(core, [LONG] * 6)
    core.step()
    assert all(slot.request is not None for slot in core.slots)


def test_namespaces_take_turns(core):
    """One asks for much more than the other: they start alternately, not in the order of asking."""
    with_slots = [submit(core, text(10 + i, 900), 1, namespace="greedy") for i in range(6)]
    modest = [submit(core, text(50 + i, 900), 1, namespace="modest") for i in range(2)]
    started, _ = firsts(core)
    places = sorted(started.index(request.id) for request in modest)
    assert places[0] <= 2 and places[1] <= 4
    assert [id for id in started if id in {r.id for r in with_slots}] == [r.id for r in with_slots]


def test_a_later_priority_comes_last(core):
    background = [submit(core, text(20 + i, 700), 1, priority=1) for i in range(2)]
    usual = [submit(core, text(30 + i, 900), 1) for i in range(4)]
    started, _ = firsts(core)
    assert set(started[-2:]) == {request.id for request in background} and set(started[:4]) == {r.id for r in usual}


def test_whoever_has_waited_long_enough_is_next(core, monkeypatch):
    monkeypatch.setattr(admission, "PATIENCE_S", 0.0)
    monkeypatch.setattr(admission, "PATIENCE", 0.0)
    asked = crowd(core, [LONG, SHORT, 700, SHORT, LONG])
    assert core.admission.in_order(core.queue, asked[-1].submitted_at + 1) == asked
    monkeypatch.setattr(admission, "PATIENCE_S", 100.0)
    order = core.admission.in_order(core.queue, asked[-1].submitted_at + 1)
    assert [request.n_prompt for request in order] == [SHORT, SHORT, 700, LONG, LONG]


def test_one_that_was_away_brings_no_credit():
    shares = Shares()
    for _ in range(10):
        shares.charge("busy", 100)
    assert shares.start("busy") == 1000 and shares.start("new") == 900
    shares.charge("new", 100)
    shares.charge("new", 100)
    assert shares.start("new") > shares.start("busy")


@pytest.mark.parametrize("seed", range(3))
def test_a_random_crowd_ends(seed):
    rng = random.Random(seed)
    with open_core("qwen35", width=64, n_ctx=2048, n_slots=4, n_spares=2) as core:
        asked = []
        for _ in range(14):
            n = rng.choice([SHORT, 100, 700, LONG])
            more = {"namespace": rng.choice(["", "a", "b"]), "priority": rng.choice([0, 0, 3])}
            asked.append(submit(core, text(rng.randrange(40), n), rng.randint(0, 6), **more))
            for _ in range(rng.choice([0, 1, 5])):
                core.step()
                core.keep_ends()
            if rng.random() < 0.1:
                core.cancel(rng.choice(asked).id)
        firsts(core)
        assert core.counts.n_stalls == 0 and not core.queue and not core.admission._estimates
        check(core)
