"""The disk of the simulated cache: what it holds is loaded where that is faster than reading. Token counts, no clocks."""

from __future__ import annotations

import math
from functools import cache

import pytest
from bench.policy import whole_bytes
from bench.workload.memory import trace

from everwarm.cli.simulate import simulate
from everwarm.errors import BadRequest
from everwarm.simulate.oracle import unavoidable_tokens
from everwarm.simulate.policies import OURS
from everwarm.simulate.replay import Cost, replay
from everwarm.simulate.simulated_cache import SimulatedCache
from everwarm.simulate.simulated_machine import LARGE, MachineSize
from everwarm.state.policy import Entry, choose
from everwarm.state.store import disk_eviction
from everwarm.state.store.disk_eviction import WeighedState

RAM = 2 << 30
FAST, SLOW = 2e9, 1e7
LARGE_DISK = 1 << 40
SMALL_CELLS = 16_384  # in which the six conversations do not stay


@cache
def cost(disk_bytes: int, bytes_per_s: float = FAST, ram: int = RAM) -> Cost:
    turns = trace("in turn", "hinted", 1)[:60]
    machine = MachineSize(n_cells=SMALL_CELLS, disk_bytes=disk_bytes, disk_bytes_per_s=bytes_per_s)
    return replay(turns, "ours", LARGE, ram, machine)


def test_what_ram_cannot_hold_is_loaded_from_disk():
    with_disk, without, enough = cost(LARGE_DISK), cost(0), cost(0, ram=LARGE_DISK)
    assert with_disk.n_read <= enough.n_read + 16 * with_disk.n_requests < without.n_read
    assert with_disk.disk_read_bytes > 0 and with_disk.disk_written_bytes > 0
    assert enough.seconds < with_disk.seconds < without.seconds


def test_a_disk_that_is_slower_than_reading_is_written_but_not_read():
    """What it holds has no place by that: the device and RAM keep what they would keep without it."""
    slow = cost(LARGE_DISK, SLOW)
    assert slow.disk_read_bytes == 0 and slow.disk_written_bytes > 0 and slow.n_read == cost(0).n_read


def test_a_disk_that_is_little_faster_than_reading_costs_little_time():
    """What is on the device need not be loaded at all."""
    assert cost(LARGE_DISK, 6e8).seconds < cost(0).seconds


@pytest.mark.parametrize("n_bytes", [1 << 30, 4 << 30])
def test_a_disk_never_holds_more_than_it_can(n_bytes):
    store = SimulatedCache(OURS, LARGE, RAM, MachineSize(disk_bytes=n_bytes, disk_bytes_per_s=FAST))
    for turn in trace("in turn", "hinted", 1)[:40]:
        store.serve(turn)
        disk = store._disk
        assert disk is not None and disk._tree.ram_bytes == disk._objects.total_bytes <= n_bytes
        disk._objects.check()
        disk._tree.check()
        store.tree.check()
    assert store.disk_written > n_bytes, "the control: it was full"


def test_a_larger_disk_reads_less():
    reads = [cost(n_bytes).n_read for n_bytes in (0, 4 << 30, LARGE_DISK)]
    assert reads == sorted(reads, reverse=True) and reads[0] > reads[-1]


def n_regret_with_a_small_disk(name: str) -> int:
    turns = trace(name, "plain", 1)
    n_new = unavoidable_tokens(turns)
    whole = whole_bytes(turns, n_new, LARGE)
    machine = MachineSize(disk_bytes=int(0.4 * whole), disk_bytes_per_s=FAST)
    return replay(turns, "ours", LARGE, int(0.1 * whole), machine, n_new).n_regret


@pytest.mark.parametrize("name", ["shifts", "popular"])
def test_a_full_disk_loses_what_conversations_left_behind_and_not_those_that_rest(name, monkeypatch):
    """States of earlier turns filled it, each as if the next turn could continue from it, and conversations that had
    rested for a while were lost."""
    n_regret = n_regret_with_a_small_disk(name)
    monkeypatch.setattr(disk_eviction, "weigh", lambda _, kept: WeighedState(kept, kept.n_items, kept.size))
    assert n_regret < 0.25 * n_regret_with_a_small_disk(name), "the control: each saves its whole prompt"


def test_only_what_is_loaded_from_disk_counts_as_used_there():
    """A prompt that RAM or the device serves says nothing of the state on disk that it begins with, too."""
    turns, machine = trace("in turn", "hinted", 1)[:40], MachineSize(disk_bytes=LARGE_DISK, disk_bytes_per_s=FAST)
    n_loads, hits = {}, {}
    for ram in (RAM, LARGE_DISK):
        store = SimulatedCache(OURS, LARGE, ram, machine)
        n_loads[ram] = sum(store.serve(turn).disk_bytes > 0 for turn in turns)
        assert store._disk is not None
        hits[ram] = sum(kept.hits for kept in store._disk._objects.values())
    assert hits == n_loads and n_loads[RAM] > 0 == n_loads[LARGE_DISK]


def test_what_the_disk_holds_costs_only_its_loading_to_lose():
    read, loaded = Entry(1, 1000, 10.0, 0.1), Entry(2, 1000, 20.0, 0.1, load_s=1.0)
    assert choose([read, loaded], 1).keys == (2,), "it would take longer to read, but not to load"
    assert choose([read, loaded._replace(load_s=math.inf)], 1).keys == (1,), "the control"
    slow = loaded._replace(load_s=30.0)
    assert choose([read, slow], 1).keys == (1,), "reading is faster than loading"


def test_returns_to_what_the_disk_holds_do_not_flow_to_the_point_above():
    upper, other = Entry(1, 1000, 1.0, 0.1), Entry(3, 1000, 2.0, 0.1)
    for load_s, first in ((0.1, 1), (math.inf, 3)):
        lower = Entry(2, 1000, 0.1, 0.9, above=1, load_s=load_s)
        assert choose([upper, lower, other], 2000).keys == (2, first)
    slow = Entry(2, 1000, 0.1, 0.9, above=1, load_s=0.2)
    assert choose([upper, slow, other], 2000).keys == (2, 3), "reading on from the point above is faster than loading"


def test_a_speed_that_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(BadRequest, match=r"disk-gbps is 0\.0; give 0\.001 to 10000"):
        simulate(tmp_path / "none.jsonl", disk_gbps=0.0)
