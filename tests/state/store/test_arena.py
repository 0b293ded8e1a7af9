"""Memory that outlives its process: what was kept is found again whole, what was let go is not, and nothing is believed."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from everwarm.state.store import arena as module
from everwarm.state.store import arena_file
from everwarm.state.store.arena import ALIGN, Arena
from everwarm.state.store.arena_file import N_ROWS, PAGE, memory_file

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[int]:
    fd = memory_file()
    yield fd
    os.close(fd)


def opened(fd: int, owner: str = "me", budget: int | None = 4 * MIB) -> Arena:
    arena = Arena(fd, owner, budget, MIB)
    arena.check()
    return arena


def filled(arena: Arena, seed: int, n: int = 5000) -> np.ndarray:
    blob = arena.place(n)
    blob[:] = np.random.default_rng(seed).integers(0, 256, n, np.uint8)
    return blob


def left(fd: int, owner: str = "me", budget: int | None = 4 * MIB) -> dict[bytes, bytes]:
    """What a next process finds and may believe."""
    arena = opened(fd, owner, budget)
    found = list(arena.found())
    arena.check()
    believed = {about: blob.tobytes() for about, blob in found if arena.is_sound(blob)}
    arena.close()  # before anything is let go: so it is still there for the next look
    return believed


def test_the_next_process_finds_what_was_kept_with_its_bytes(memory):
    arena = opened(memory)
    blobs = [filled(arena, seed, 1000 + 777 * seed) for seed in range(5)]
    for i, blob in enumerate(blobs):
        assert arena.keep(blob, b"about %d" % i)
    filled(arena, 9)  # never kept
    assert left(memory) == {b"about %d" % i: blob.tobytes() for i, blob in enumerate(blobs)}


def test_what_was_let_go_is_not_found_and_its_room_is_used_again(memory):
    arena = opened(memory)
    one, two = filled(arena, 1), filled(arena, 2)
    assert arena.keep(one, b"one") and arena.keep(two, b"two")
    used, where = arena.n_used, one.ctypes.data
    del one
    gc.collect()
    three = arena.place(5000)
    assert three.ctypes.data == where and arena.n_used < used + ALIGN
    arena.check()
    assert left(memory) == {b"two": two.tobytes()}


def test_a_slice_holds_on_to_all_of_it(memory):
    arena = opened(memory)
    blob = filled(arena, 1)
    assert arena.keep(blob, b"kept")
    part = blob[100:200].view(np.uint32)
    whole = blob.tobytes()
    del blob
    gc.collect()
    assert left(memory) == {b"kept": whole}
    del part
    gc.collect()
    assert left(memory) == {}


@pytest.mark.parametrize("what", ["owner", "budget", "version"])
def test_an_arena_of_something_else_is_emptied(memory, what, monkeypatch):
    arena = opened(memory)
    blob = filled(arena, 1)
    assert arena.keep(blob, b"kept")
    if what == "version":
        monkeypatch.setattr(arena_file, "VERSION", 2)
    found = left(memory, "you" if what == "owner" else "me", 8 * MIB if what == "budget" else 4 * MIB)
    assert found == {}


def test_without_a_budget_of_its_own_the_next_process_keeps_the_old_one(memory):
    first = Arena(memory, "me", None, 7 * MIB)
    blob = first.place(100)
    blob[:] = 1
    assert first.keep(blob, b"kept")
    second = Arena(memory, "me", None, 2 * MIB)
    assert second.budget_bytes == 7 * MIB and len(list(second.found())) == 1


def test_with_a_smaller_budget_what_lies_in_the_rest_of_the_file_is_found(memory, monkeypatch):
    monkeypatch.setattr(module, "SLACK", 0)
    arena = opened(memory, budget=8 * MIB)
    blobs = [filled(arena, seed, 2 * MIB - 5000) for seed in range(6)]
    for i, blob in enumerate(blobs):
        assert arena.keep(blob, b"about %d" % i)
    whole = {b"about %d" % i: blob.tobytes() for i, blob in enumerate(blobs)}
    size = os.fstat(memory).st_size
    assert arena_file.budget_in(memory) == 8 * MIB
    arena.close()
    found = left(memory, budget=4 * MIB)
    assert found and found.items() < whole.items()
    assert arena_file.budget_in(memory) == 4 * MIB and os.fstat(memory).st_size < size


def test_trimming_gives_back_what_an_earlier_process_left_lying(memory):
    arena = opened(memory, budget=16 * MIB)
    kept, gone = filled(arena, 1), arena.place(8 * MIB)
    gone[:] = 1
    assert arena.keep(kept, b"kept")
    second = opened(memory, budget=16 * MIB)
    ((_, found),) = second.found()
    assert os.fstat(memory).st_blocks * 512 > 8 * MIB + 4 * MIB, "this test could not fail"
    second.trim()
    assert os.fstat(memory).st_blocks * 512 < 5 * MIB  # most of it the rows
    assert second.is_sound(found) and found.tobytes() == kept.tobytes()


def test_a_full_arena_hands_out_ordinary_memory_instead(memory, monkeypatch):
    monkeypatch.setattr(module, "SLACK", 0)
    arena = opened(memory, budget=MIB)
    inside = [arena.place(900_000) for _ in range(2)]
    outside = arena.place(900_000)
    assert arena.n_outside == 1 and len(outside) == 900_000
    assert not arena.keep(outside, b"outside") and arena.keep(inside[0], b"inside")
    arena.check()


def test_more_objects_than_rows_are_not_kept_but_do_no_harm(memory):
    arena = opened(memory)
    arena._empty_rows.clear()
    blob = filled(arena, 1)
    assert not arena.keep(blob, b"kept")
    arena._empty_rows.append(7)
    assert arena.keep(blob, b"kept")


def test_memory_over_the_budget_goes_back_to_the_system(memory):
    arena = opened(memory, budget=4 * MIB)
    for _ in range(8):  # side by side, then all let go
        blobs = [arena.place(MIB) for _ in range(6)]
        for blob in blobs:
            blob[:] = 1
        del blobs, blob
        arena.check()
        assert os.fstat(memory).st_blocks * 512 <= 4 * MIB + MIB


def test_any_order_of_taking_keeping_and_letting_go_leaves_every_byte_with_one_owner(memory):
    rng = random.Random(1)
    arena = opened(memory)
    held: dict[bytes, np.ndarray] = {}
    for i in range(3000 if CAMPAIGN else 600):
        if held and rng.random() < 0.45:
            del held[rng.choice(list(held))]
        else:
            name = b"%d" % i
            held[name] = filled(arena, i, rng.choice([1, 255, 256, 257, 4096, 30_000, 200_000]))
            arena.keep(held[name], name)
        if i % 50 == 0:
            arena.check()
    expected = {name: blob.tobytes() for name, blob in held.items() if arena.is_kept(blob)}
    assert len(expected) > 20 and left(memory) == expected


def test_a_flipped_bit_is_found_by_the_digest(memory):
    arena = opened(memory)
    blob = filled(arena, 1)
    assert arena.keep(blob, b"kept")
    assert left(memory) == {b"kept": blob.tobytes()}, "this test could not fail"
    blob[1234] ^= 4
    assert left(memory) == {}


def test_damage_anywhere_in_what_is_said_is_a_miss_and_never_a_lie(memory):
    arena = opened(memory)
    blobs = {b"about %d" % i: filled(arena, i, 300 + i) for i in range(4)}
    for about, blob in blobs.items():
        assert arena.keep(blob, about)
    truth = {about: blob.tobytes() for about, blob in blobs.items()}
    end = PAGE + 4 * 128
    good = os.pread(memory, end, 0)
    rng = random.Random(2)
    n_lost, first = 0, PAGE + N_ROWS * 128
    copy = memory_file()
    for _ in range(100_000 if CAMPAIGN else 300):
        bad = bytearray(good)
        at = rng.choice([rng.randrange(64), PAGE + rng.randrange(4 * 128)])
        wide = rng.choice([1, 1, 8])
        bad[at : at + wide] = rng.choice([rng.randbytes(wide), b"\xff" * wide, b"\0" * wide])
        os.ftruncate(copy, 0)  # what the one before has left
        os.ftruncate(copy, os.fstat(memory).st_size)
        os.pwrite(copy, bad[:end], 0)
        os.pwrite(copy, os.pread(memory, 16_384, first), first)
        found = left(copy)
        assert found.items() <= truth.items()
        n_lost += len(truth) - len(found)
    os.close(copy)
    assert n_lost > 100, "this test could not fail"


def test_rows_that_claim_the_same_bytes_are_not_both_believed(memory):
    arena = opened(memory)
    blob = filled(arena, 1)
    assert arena.keep(blob, b"kept")
    row = os.pread(memory, 128, PAGE)
    os.pwrite(memory, row, PAGE + 128)
    found = opened(memory)
    assert len(list(found.found())) == 1
    found.check()


_WRITER = """
import sys
import numpy as np
from everwarm.state.store.arena import Arena
arena = Arena(int(sys.argv[1]), "me", 4 << 20, 1 << 20)
held, seed = {}, 0
while True:
    rng = np.random.default_rng(seed)
    blob = arena.place(int(rng.integers(1, 60_000)))
    blob[:] = rng.integers(0, 256, len(blob), np.uint8)
    if arena.keep(blob, b"%d" % seed):
        print(seed, flush=True)
    held[seed % 20] = blob
    seed += 1
"""


def test_a_killed_process_leaves_whole_objects_and_all_that_it_held():
    rng = random.Random(3)
    for _ in range(60 if CAMPAIGN else 4):
        fd = memory_file()
        command = [sys.executable, "-c", _WRITER, str(fd)]
        process = subprocess.Popen(command, pass_fds=(fd,), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        numbers = [int(process.stdout.readline()) for _ in range(rng.randrange(25, 200))]
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        numbers += [int(line) for line in rest.splitlines()]
        found = left(fd)
        for about, data in found.items():
            seeded = np.random.default_rng(int(about))
            n = int(seeded.integers(1, 60_000))
            assert data == seeded.integers(0, 256, n, np.uint8).tobytes()
        assert {int(about) for about in found} >= set(numbers[-19:]), "something it held is lost"
        os.close(fd)


def test_no_array_lies_across_the_fence_and_what_is_held_keeps_its_pages(memory):
    """The first part may be copied from by physical address: its pages stay, those beyond go back."""
    arena = opened(memory, budget=4 * MIB)
    fence = arena._fence
    blobs = [arena.place(MIB + 4096) for _ in range(7)]
    starts = [blob.ctypes.data - arena._base for blob in blobs]
    assert any(at < fence for at in starts) and any(at >= fence for at in starts)
    assert not any(at < fence < at + blob.nbytes for at, blob in zip(starts, blobs, strict=True))
    for blob in blobs:
        blob[:] = 1
    assert arena.hold().nbytes == fence
    taken = os.fstat(memory).st_blocks
    inside, beyond = blobs[0], blobs[-1]
    del blobs, blob
    del beyond
    gc.collect()
    arena.check()
    assert os.fstat(memory).st_blocks < taken, "beyond the fence pages went back"
    n_now = os.fstat(memory).st_blocks
    del inside
    gc.collect()
    arena.check()
    assert os.fstat(memory).st_blocks == n_now, "before it they stayed"
    arena.release()
    assert os.fstat(memory).st_blocks < n_now, "until they were released"
    arena.check()


def test_spans_are_not_joined_across_the_fence(memory):
    arena = opened(memory, budget=4 * MIB)
    rng = random.Random(3)
    held: list[np.ndarray] = []
    for _ in range(300):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held)))
        else:
            held.append(arena.place(rng.randrange(1, MIB)))
        arena.check()
    held.clear()
    gc.collect()
    arena.check()
    assert len(arena._free) == 2, "all of it is free again, in two parts"


def test_what_is_found_can_be_looked_at_before_it_is_taken_up(memory):
    arena = opened(memory)
    blobs = [filled(arena, seed) for seed in range(3)]
    assert all(arena.keep(blob, b"about") for blob in blobs)
    offset = blobs[0].ctypes.data - arena._base
    arena.close()
    os.pwrite(memory, b"\xff\x00\xff", offset)
    assert Arena.is_left(memory, "me", 4 * MIB) and Arena.is_left(memory, "me", None)
    assert not Arena.is_left(memory, "you", None) and not Arena.is_left(memory, "me", 5 * MIB)
    again = opened(memory)
    again.look_at_found(lambda: False)
    doubts = [again._extent(blob).doubt for _, blob in again._found]  # type: ignore[union-attr]
    assert sorted(doubt is None for doubt in doubts) == [False, True, True], "the damaged one is still in doubt"
    assert sum(again.is_sound(blob) for _, blob in again.found()) == 2
    again.close()


def test_what_passes_through_is_lent_of_the_held_part_or_not_of_the_arena_at_all(memory):
    arena = opened(memory, budget=4 * MIB)
    assert arena._extent(arena.lend(1000)) is None, "nothing is held"
    arena.hold()
    inside = arena.lend(3 * MIB)
    extent = arena._extent(inside)
    assert extent is not None and extent.at + extent.room <= arena._fence
    assert arena._extent(arena.lend(3 * MIB)) is None, "there is no room for another before the fence"
    assert arena._extent(arena.place(3 * MIB)) is not None, "though there is beyond it"
    del inside, extent
    gc.collect()
    assert arena._extent(arena.lend(3 * MIB)) is not None
    arena.check()


def test_room_is_looked_for_in_the_held_part_alone_if_some_is_held(memory):
    arena = opened(memory, budget=4 * MIB)
    inside = arena.place(3 * MIB)
    assert arena.has_room(3 * MIB), "beyond the fence there is room"
    arena.hold()
    assert not arena.has_room(3 * MIB)
    assert arena.has_room(1000)
    del inside
    gc.collect()
    assert arena.has_room(3 * MIB)


def test_in_the_held_part_small_arrays_leave_large_holes_large(memory):
    arena = opened(memory, budget=8 * MIB)
    large, between, small, last = (arena.place(n) for n in (2 * MIB, MIB, MIB, MIB))
    holes = [blob.ctypes.data for blob in (large, small)]
    arena.hold()
    del large, small
    gc.collect()
    tight = arena.place(MIB)
    again = arena.place(2 * MIB)
    assert [again.ctypes.data, tight.ctypes.data] == holes, "the first that fits would have been the large one"
    arena.check()
    del between, last
