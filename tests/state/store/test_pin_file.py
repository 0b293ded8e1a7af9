"""Pins of the disk tier: what is pinned goes last, and what was pinned is known to the next process whatever becomes of the
index."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from everwarm.state.lineage import point_of
from everwarm.state.store.disk import MAX_PINS, PINS, Disk, Pins
from everwarm.state.store.index import INDEX
from everwarm.state.tier import Pin
from support.crash_writer import STEP, Thing, state
from support.disks import Failing, OpenDisk, check, put_all, replace_index


def pin_of(thing: Thing, *above: Thing) -> Pin:
    head, ways = thing.header, tuple(point_of(each.header.key, each.header.n_items) for each in above)
    return Pin(head.key, head.n_items, head.space, ways)


def fill(disk: Disk) -> None:
    """More than fits, each of it worth more than a short state."""
    for i in range(10, 30):
        assert state(i, 50 * STEP).put(disk)
    check(disk)


@pytest.mark.parametrize("again", ["the same process", "the next", "the index is lost", "the index is damaged"])
def test_a_pinned_state_and_those_above_it_outlive_better_ones(open_disk: OpenDisk, place: Path, again):
    pinned, above, other = state(1), state(2), state(3)
    budget = 6 * state(10, 50 * STEP).size
    disk = open_disk(budget)
    put_all(disk, pinned, above, other)
    disk.pin(pin_of(pinned, above))
    if again != "the same process":
        open_disk.close()
        if again != "the next":
            replace_index(place, None if again == "the index is lost" else b"nonsense" * 1000)
        disk = open_disk(budget)
    fill(disk)
    assert {pinned.name, above.name} <= disk.names() and other.name not in disk.names()
    disk.unpin([pinned.header.key])
    fill(disk)
    disk = open_disk(budget)
    for i in range(30, 50):
        assert state(i, 50 * STEP).put(disk)
    assert not {pinned.name, above.name} & disk.names(), "this test could not fail"


def test_what_is_pinned_goes_when_nothing_else_can(open_disk: OpenDisk):
    pinned, new = state(1), state(2)
    disk = open_disk(pinned.size)
    put_all(disk, pinned)
    disk.pin(pin_of(pinned))
    put_all(disk, new)
    assert disk.names() == {new.name}
    assert [pin.key for pin in disk.pins] == [pinned.header.key], "the wish stays"


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"[{}]", b"\xff" * 99, b'[{"key":1,"n_items":"x","space":""}]'])
def test_a_file_that_cannot_be_understood_holds_none(open_disk: OpenDisk, place: Path, data):
    disk = open_disk()
    disk.pin(pin_of(state(1)))
    assert stat.S_IMODE((place / PINS).stat().st_mode) == 0o600
    open_disk.close()
    (place / PINS).write_bytes(data)
    disk = open_disk()
    assert disk.pins == () and disk.degraded is None
    disk.pin(pin_of(state(2)))
    assert len(open_disk().pins) == 1


@pytest.mark.parametrize("operation", [("create", 1), ("append", 1), ("sync", 1), ("rename", 1), ("rename", 2)])
def test_a_disk_that_refuses_keeps_the_pins_it_has(open_disk: OpenDisk, operation):
    files = Failing()
    disk = open_disk(files=files)
    disk.pin(pin_of(state(1)))
    files.fail(*operation, errno.ENOSPC)
    before = disk.version
    disk.pin(pin_of(state(2)))
    assert files.has_failed and disk.degraded is not None and len(disk.pins) == 2 and disk.version > before
    put_all(disk, state(5))
    assert disk.degraded is None
    disk = open_disk()
    assert [pin.key for pin in disk.pins] == [state(1).header.key]
    check(disk)


def test_pins_that_could_not_be_read_are_not_written_over(open_disk: OpenDisk):
    open_disk().pin(pin_of(state(1)))
    open_disk.close()
    files = Failing()
    files.fail("open", 1, errno.EIO)
    disk = open_disk(files=files)
    assert files.has_failed and disk.pins == () and disk.counts.n_failures == 1
    disk.pin(pin_of(state(2)))
    assert len(disk.pins) == len(open_disk().pins) == 2


def test_the_same_pin_is_written_once_and_there_is_an_end_to_them(tmp_path: Path):
    class Counting(Failing):
        n_written = 0

        def create(self, path: Path) -> int:
            self.n_written += 1
            return super().create(path)

    files = Counting()
    pins = Pins(tmp_path / PINS, files)
    assert pins.put(pin_of(state(1))) and not pins.put(pin_of(state(1))) and not pins.remove(["another"])
    assert files.n_written == 1 and INDEX != PINS
    pins._by_key |= {str(i): Pin(str(i), 1, "") for i in range(MAX_PINS - 1)}
    assert not pins.put(pin_of(state(2))) and pins.remove(["0"]) and pins.put(pin_of(state(2)))
