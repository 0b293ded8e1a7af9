"""Pins that end by themselves: evicted last until then, never instead of a pin without an end, and bounded."""

from __future__ import annotations

import time

import pytest

from everwarm.engine.core import Core
from everwarm.engine.tiers import pins
from everwarm.state.policy import GUARD
from everwarm.state.tree import Node
from support.drive import check, open_core, run, text, tidy

HISTORY = text(1, 400)


def deepest(core: Core) -> Node:
    kept = [node for node in core.cache.tree.nodes() if node.checkpoint is not None and node.n_items <= len(HISTORY)]
    return max(kept, key=lambda node: node.n_items)


def test_a_pin_ends_in_time():
    with open_core() as core:
        run(core, HISTORY, stable=390)
        node, now = deepest(core), time.monotonic()
        core.cache.timed_pins.hold(node, now + 60)
        core.cache.timed_pins.hold(node, now + 5)
        core.cache.timed_pins.expire(now + 59)
        assert node.is_pinned and node.n_pinned == 1, "the later end holds"
        core.cache.timed_pins.expire(now + 60)
        assert not node.is_pinned and node.n_pinned == 0
        check(core)


def test_a_pin_without_an_end_stays():
    with open_core() as core:
        run(core, HISTORY, stable=390)
        node = deepest(core)
        core.cache.ram.pin(node)
        core.cache.timed_pins.hold(node, time.monotonic() - 1)
        core.cache.timed_pins.expire(time.monotonic())
        assert node.is_pinned


@pytest.mark.parametrize("is_held", [True, False])
def test_what_is_held_is_evicted_last(is_held):
    """The control: without the pin the same prompts evict it."""
    with open_core(n_slots=1) as core:
        run(core, HISTORY, stable=390)
        tidy(core)
        budget = int(core.cache.tree.ram_bytes * 1.6)
    with open_core(n_slots=1, ram_bytes=budget, idle_cells=0) as core:
        run(core, HISTORY, stable=390)
        tidy(core)
        if is_held:
            core.cache.timed_pins.hold(deepest(core), time.monotonic() + 3600)
        for i in range(12):
            run(core, text(10 + i, 400), stable=390)
            tidy(core)
        n_cached = run(core, [*HISTORY, *text(2, 30)]).n_cached
        assert (n_cached >= 390 - GUARD) == is_held


def test_a_dropped_node_is_forgotten_and_their_number_is_bounded(monkeypatch):
    monkeypatch.setattr(pins, "MOST_TIMED", 2)
    with open_core() as core:
        ends = []
        for i in range(3):
            run(core, text(10 + i, 100), stable=90)
            ends.append(max(core.cache.tree.nodes(), key=lambda node: node.id))
            core.cache.timed_pins.hold(ends[-1], time.monotonic() + 60 + i)
        assert [node.is_pinned for node in ends] == [False, True, True]
        core.cache.drop(core.cache.tree.root(""))
        core.cache.timed_pins.expire(time.monotonic() + 1000)
        check(core)
