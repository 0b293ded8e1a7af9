"""A finished turn is in the memory that outlives the engine when its last frame may leave, and no sooner does it leave."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from everwarm.engine.cache.offload import Offload, Where
from everwarm.engine.core import Core
from everwarm.engine.loop import Loop
from everwarm.engine.process import messages as m
from everwarm.engine.process.request_handler import RequestHandler
from everwarm.engine.request import Event, Finish, Finished, NewToken
from everwarm.engine.settings import StoreSettings
from everwarm.state.lineage import unverified
from everwarm.state.store.arena_file import memory_file
from support.drive import EVERY_KIND, GUARD, check, finish, open_core, record_logits, run, submit, text

HISTORY, NEW, STABLE = text(1, 600), text(2, 40), 590
NEXT = [*HISTORY[:STABLE], *NEW]


@contextlib.contextmanager
def as_it_is(memory: int) -> Iterator[int]:
    """The memory as a process that dies right now leaves it."""
    copy = memory_file()
    try:
        size, at = os.fstat(memory).st_size, 0
        os.ftruncate(copy, size)
        with contextlib.suppress(OSError):  # nothing but holes follows
            while at < size:
                at = os.lseek(memory, at, os.SEEK_DATA)
                at += os.pwrite(copy, os.pread(memory, os.lseek(memory, at, os.SEEK_HOLE) - at, at), at)
        yield copy
    finally:
        os.close(copy)


def captures(core: Core) -> list[int]:
    """What is copied from now on: the tokens of a segment, 0 for a state."""
    seen: list[int] = []
    segment, state = core.context.capture_segment, core.context.capture

    def capture_segment(seq, start, stop):
        seen.append(stop.n_tokens - start.n_tokens)
        return segment(seq, start, stop)

    def capture(seq):
        seen.append(0)
        return state(seq)

    core.context.capture_segment, core.context.capture = capture_segment, capture
    return seen


def where(core: Core, finished: Finished) -> Where:
    """What the last frame will say, once it may leave."""
    seen: list[Where] = []
    told = threading.Event()

    def tell(where: Where) -> None:
        seen.append(where)
        told.set()

    assert finished.receipt is not None
    core.cache.offload.when_safe(finished.receipt, tell)
    assert told.wait(30) and len(seen) == 1
    return seen[0]


@pytest.mark.parametrize("namespace", ["mine", unverified("mine", "digest")], ids=["verified", "unverified"])
def test_what_stems_from_a_file_of_unknown_origin_is_left_to_nobody(memory, namespace):
    with open_core(memory=memory) as core:
        ended = finish(core, HISTORY, 4, stable=STABLE, namespace=namespace)
        is_mine = namespace == "mine"
        assert where(core, ended) == ("ram" if is_mine else "none")
        with as_it_is(memory) as left, open_core(memory=left) as after:
            assert bool(after.cache.tree.ram_bytes) is is_mine


@pytest.mark.parametrize("n_pieces", [0, 1000], ids=["all at the end", "beside the steps"])
@pytest.mark.parametrize(
    ("arch", "n_spares"), [("qwen35", 0), ("qwen35", 3), ("mamba2", 3), ("gemma3", 0), ("llama", 0)]
)
def test_an_engine_that_dies_when_the_last_frame_leaves_has_lost_nothing(memory, arch, n_spares, n_pieces):
    with open_core(arch, memory=memory, n_spares=n_spares) as core:
        ended = finish(core, HISTORY, 30, stable=STABLE, boundaries=(200,), n_pieces=n_pieces)
        assert where(core, ended) == "ram"
        reply = ended.result.tokens
        with as_it_is(memory) as left, open_core(arch, memory=left, n_spares=n_spares) as after:
            assert run(after, HISTORY).n_processed <= GUARD, "an identical retry"
        with as_it_is(memory) as left, open_core(arch, memory=left, n_spares=n_spares) as after:
            assert run(after, NEXT).n_cached == STABLE, "the next turn, without the reply as it was"
            assert run(after, [*HISTORY, *reply, *NEW]).n_processed <= len(NEW) + 1, "the next turn, with it"


def test_without_waiting_the_whole_prompt_would_be_read_again(memory):
    """The control: what the tests above see is not there a moment before."""
    with open_core(memory=memory, n_spares=3) as core:
        may_go_on = threading.Event()
        for notes in (core.cache.ram._notes, core.cache.ram._awaited):
            notes.put(may_go_on.wait)
        ended = finish(core, HISTORY, 30, stable=STABLE)
        seen: list[Where] = []
        core.cache.offload.when_safe(ended.receipt, seen.append)
        with as_it_is(memory) as left, open_core(memory=left, n_spares=3) as after:
            assert not seen and run(after, HISTORY).n_cached == 0
        may_go_on.set()
        core.cache.ram.flush()
        assert seen == ["ram"]
        with as_it_is(memory) as left, open_core(memory=left, n_spares=3) as after:
            assert run(after, HISTORY).n_processed <= GUARD


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_what_is_left_for_the_end_is_the_reply_and_one_state(memory, arch, monkeypatch):
    with open_core(arch, memory=memory, n_spares=3) as core:
        captured = captures(core)
        at_end: list[int] = []
        copy_rest = Offload._copy_rest

        def noted(offload, slot, n_prompt):
            captured.clear()
            points = copy_rest(offload, slot, n_prompt)
            at_end.extend(captured)
            return points

        monkeypatch.setattr(Offload, "_copy_rest", noted)
        finish(core, HISTORY, 30, stable=STABLE)
        n_after = 29 + len(HISTORY) - (STABLE if arch == "qwen35" else len(HISTORY))
        assert at_end.count(0) == (arch == "qwen35") and sum(at_end) == n_after


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_copying_beside_the_steps_changes_no_bit_of_a_reply(memory, arch):
    with open_core(arch, memory=memory) as core:
        copied, beside = captures(core), record_logits(core)
        finish(core, HISTORY, 40, stable=STABLE, deterministic=True)
        assert len(copied) > 0
    with open_core(arch) as core:
        alone = record_logits(core)
        run(core, HISTORY, 40, stable=STABLE, deterministic=True)
    assert len(alone) == len(beside) == 40 and all(map(np.array_equal, alone, beside))


def test_a_piece_is_bounded_and_pieces_take_a_share_of_the_time(memory):
    with open_core("llama", memory=memory) as core:
        core.cache.ram_writer.piece_tokens = 100
        sizes = captures(core)
        submit(core, HISTORY, 30)
        while not any(isinstance(event, NewToken) for event in core.step()):
            pass
        assert core.cache.offload.copy_piece(core.slots) and sizes == [100]
        assert core.cache.offload.not_before > 0 and not core.cache.offload.copy_piece(core.slots), "the next one waits"
        for _ in range(8):
            core.cache.offload.not_before = 0.0
            core.cache.offload.copy_piece(core.slots)
        assert sizes == [100] * 6 and core.slots[0].is_offloaded | core.slots[1].is_offloaded
        check(core)


def test_a_request_that_is_cancelled_leaves_what_it_has_read(memory):
    with open_core(memory=memory, n_spares=3) as core:
        request = submit(core, HISTORY, 30, stable=STABLE)
        ended: list[Event] = []
        while not ended:
            events = core.step()
            if any(isinstance(event, NewToken) for event in events):
                core.cancel(request.id)
            ended = [event for event in events if isinstance(event, Finished)]
        assert ended[0].result.finish is Finish.CANCELLED and where(core, ended[0]) == "ram"
        with as_it_is(memory) as left, open_core(memory=left, n_spares=3) as after:
            assert run(after, HISTORY).n_processed <= GUARD


@pytest.mark.parametrize("n_reply", [0, 1])
def test_a_turn_that_ends_with_its_prompt_is_kept_as_well(memory, n_reply):
    with open_core(memory=memory, n_spares=3) as core:
        assert where(core, finish(core, HISTORY, n_reply, stable=STABLE)) == "ram"
        with as_it_is(memory) as left, open_core(memory=left, n_spares=3) as after:
            assert run(after, HISTORY).n_processed <= GUARD


def in_full_ram(core: Core, n_requests: int) -> Finished:
    """A turn that ends when RAM has room for one and a half, and holds one that was left so many requests ago."""
    finish(core, text(20, 600), 30, stable=STABLE)
    core.cache.ram_budget.n_bytes = 3 * core.cache.tree.ram_bytes // 2
    core.cache.returns.n_requests += n_requests
    ended = finish(core, HISTORY, 30, stable=STABLE)
    assert core.cache.tree.ram_bytes <= core.cache.ram_budget.n_bytes
    return ended


def test_a_turn_that_ends_is_kept_although_ram_is_full_of_what_nobody_comes_back_to(memory):
    with open_core(memory=memory, n_spares=3) as core:
        assert where(core, in_full_ram(core, 8000)) == "ram"
        with as_it_is(memory) as left, open_core(memory=left, n_spares=3) as after:
            assert run(after, HISTORY).n_processed <= GUARD


def test_a_turn_that_is_on_the_device_evicts_nobody_who_may_come_back(memory):
    """Its copy would help only if the engine died."""
    with open_core(memory=memory, n_spares=3) as core:
        assert where(core, in_full_ram(core, 1)) == "none"
        assert run(core, HISTORY).n_processed <= GUARD and run(core, text(20, 600)).n_processed <= GUARD


def test_a_turn_for_which_ram_is_too_good_is_on_disk_before_the_last_frame_leaves(memory, tmp_path):
    store = on(tmp_path / "states")
    with open_core(memory=memory, n_spares=3, store=store) as core:
        core.cache.tiers.wait_open(30)
        assert where(core, in_full_ram(core, 1)) == "disk"
    with open_core(n_spares=3, store=store) as core:
        core.cache.tiers.wait_open(30)
        assert run(core, HISTORY).n_processed <= GUARD and run(core, text(20, 600)).n_processed <= GUARD


def without_room(core: Core) -> None:
    core.cache.ram.arena._take = lambda _n, _stop=None: None


def on(directory) -> StoreSettings:
    return StoreSettings(str(directory), restore_policy="always")


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_where_the_arena_has_no_room_the_turn_is_on_disk_before_the_last_frame_leaves(memory, tmp_path, arch):
    store = on(tmp_path / "states")
    with open_core(arch, memory=memory, n_spares=3, store=store) as core:
        core.cache.tiers.wait_open(30)
        without_room(core)
        assert where(core, finish(core, HISTORY, 30, stable=STABLE)) == "disk"
        disk = core.cache.tiers.disk
        assert any(name.startswith("state-") and disk.has(name) for name in disk.names())
    with open_core(arch, n_spares=3, store=store) as core:
        core.cache.tiers.wait_open(30)
        assert run(core, HISTORY).n_processed <= GUARD


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_without_any_ram_the_disk_has_it(memory, tmp_path, arch):
    store = on(tmp_path / "states")
    with open_core(arch, memory=memory, n_spares=3, ram_bytes=0, store=store) as core:
        core.cache.tiers.wait_open(30)
        assert where(core, finish(core, HISTORY, 30, stable=STABLE)) == "disk"
    with open_core(arch, n_spares=3, store=store) as core:
        core.cache.tiers.wait_open(30)
        assert run(core, HISTORY).n_processed <= GUARD


@pytest.mark.parametrize("arch", ["mamba2", "gemma3"])
def test_without_any_ram_and_without_spares_nothing_is_promised(memory, tmp_path, arch):
    with open_core(arch, memory=memory, ram_bytes=0, store=on(tmp_path / "states")) as core:
        core.cache.tiers.wait_open(30)
        assert where(core, finish(core, HISTORY, 30, stable=STABLE)) == "none"


def test_what_is_kept_nowhere_is_said_to_be(memory):
    with open_core(memory=memory, n_spares=3) as core:
        without_room(core)
        assert where(core, finish(core, HISTORY, 30, stable=STABLE)) == "none"
        with as_it_is(memory) as left, open_core(memory=left, n_spares=3) as after:
            assert run(after, HISTORY).n_cached == 0, "and it is true"


def test_a_disk_that_does_not_answer_holds_up_no_reply_for_ever(memory, tmp_path, monkeypatch):
    monkeypatch.setattr("everwarm.engine.cache.offload.DISK_WAIT_S", 0.05)
    with open_core(memory=memory, store=on(tmp_path / "states")) as core:
        core.cache.tiers.wait_open(30)
        without_room(core)
        hangs = threading.Event()
        core.cache.tiers.after_all(hangs.wait)
        assert where(core, finish(core, HISTORY, 4, stable=STABLE)) == "none"
        hangs.set()
        core.cache.tiers.flush()


def test_a_disk_that_refuses_is_not_said_to_have_it(memory, tmp_path):
    with open_core(memory=memory, store=on(tmp_path / "states")) as core:
        core.cache.tiers.wait_open(30)
        without_room(core)
        core.cache.tiers.disk.put = lambda _header, _parts: False
        assert where(core, finish(core, HISTORY, 4, stable=STABLE)) == "none"


# frames


def test_the_last_frame_leaves_after_the_row_and_others_do_not_wait(memory):
    """Two requests; the memory's thread is held: tokens of both come, the end of neither, and both end when it goes on."""
    with open_core(memory=memory) as core:
        sent: list[m.Message] = []
        conversation = RequestHandler(core, sent.append)
        loop = Loop(core, conversation.deliver)
        may_go_on = threading.Event()
        core.cache.ram._awaited.put(may_go_on.wait)
        for id, seed in ((1, 5), (2, 6)):
            conversation.handle(m.Submit(id=id, tokens=text(seed, 100), max_tokens=5, ignore_eos=True), loop)
        loop.stop()
        while loop._take_jobs():
            pass
        while core.has_work:
            conversation.deliver(core.step())
            core.keep_ends()
        assert sum(len(piece.tokens) for piece in sent if isinstance(piece, m.TextPiece)) == 10
        assert not any(isinstance(message, m.Done) for message in sent)
        may_go_on.set()
        core.cache.ram.flush()
        done = [message for message in sent if isinstance(message, m.Done)]
        assert [d.id for d in done] == [1, 2] and {d.kept for d in done} == {"ram"} and all(d.keep_s > 0 for d in done)


# the disk follows


def test_a_turn_is_handed_to_the_disk_in_time_although_its_slot_is_busy_again(memory, tmp_path):
    with open_core(memory=memory, n_slots=1, store=on(tmp_path / "states")) as core:
        core.cache.tiers.wait_open(30)
        ended = finish(core, HISTORY, 4, stable=STABLE)
        assert (
            core.cache.tiers.disk.names() == frozenset()
            and core.cache.tier_writer.lag_s(ended.receipt.ended_at + 3) == 3
        )
        submit(core, [*HISTORY, *ended.result.tokens, *NEW], 30)
        core.step()
        assert not core.slots[0].is_idle
        core.cache.tier_writer.tidy_overdue(core.slots, ended.receipt.ended_at + 0.9)
        core.cache.tiers.flush()
        assert core.cache.tiers.disk.names() == frozenset(), "not yet"
        core.cache.tier_writer.tidy_overdue(core.slots, ended.receipt.ended_at + 1.1)
        core.cache.tiers.flush()
        assert any(
            name.startswith("state-")
            for name in {name for name in core.cache.tiers.disk.names() if core.cache.tiers.disk.has(name)}
        )
        assert core.cache.tier_writer.lag_s(ended.receipt.ended_at + 9) == 0


def test_turns_wait_in_ram_while_the_disk_is_behind_and_follow_later(memory, tmp_path, monkeypatch):
    monkeypatch.setattr("everwarm.engine.tiers.lower_tiers.MAX_QUEUED", -1)
    with open_core(memory=memory, store=on(tmp_path / "states")) as core:
        core.cache.tiers.wait_open(30)
        ended = finish(core, HISTORY, 4, stable=STABLE)
        core.cache.tier_writer.tidy_overdue(core.slots, ended.receipt.ended_at + 5)
        assert not core.cache.tier_writer.tidy(core.slots) and core.nap_s is not None
        core.cache.tiers.flush()
        assert core.cache.tiers.disk.names() == frozenset()
        monkeypatch.setattr("everwarm.engine.tiers.lower_tiers.MAX_QUEUED", 1 << 30)
        core.cache.tier_writer.tidy_overdue(core.slots, ended.receipt.ended_at + 6)
        core.cache.tiers.flush()
        assert core.cache.tiers.disk.names()


def test_what_is_dropped_right_after_its_last_frame_is_left_to_nobody(memory):
    with open_core(memory=memory) as core:
        ended = finish(core, HISTORY, 4, stable=STABLE)
        assert where(core, ended) == "ram"
        with as_it_is(memory) as left, open_core(memory=left) as after:
            assert after.cache.tree.ram_bytes, "this test could not fail"
        del ended
        core.cache.drop(core.cache.tree.root(""))
        with as_it_is(memory) as left, open_core(memory=left) as after:
            assert not after.cache.tree.ram_bytes
