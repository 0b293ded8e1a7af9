"""Few segments however many turns: what is brought back through joined ones is bit for bit what it was."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from everwarm.engine.cache import compaction, provenance
from everwarm.engine.core import Core
from everwarm.engine.slots import Slot
from everwarm.engine.tiers.ram import Ram
from everwarm.state.policy import CheckpointParams
from everwarm.state.store.arena_file import memory_file
from everwarm.state.tree import Segment
from support.drive import (
    assert_greedy,
    check,
    drain,
    memory_of,
    open_core,
    replay,
    run,
    slot_holding,
    submit,
    text,
    tidy,
)
from support.kept_cores import files, kept_core, put_away

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
KINDS = ("qwen35", "gemma3", "llama")  # with a recurrent state, with a window, with nothing but attention
EVERY_100 = CheckpointParams(every_n_tokens=100)
LONG = text(1, 600)


def segments(core: Core) -> list[Segment]:
    return list({id(n.segment): n.segment for n in core.cache.tree.nodes() if n.segment is not None}.values())


def move_out(core: Core) -> None:
    core.cache.room.clear()


# what is saved at once


def test_what_was_read_at_once_is_one_segment_and_a_turn_adds_two():
    with open_core(checkpoints=EVERY_100) as core:
        run(core, LONG)
        tidy(core)
        assert [(s.n_start, s.n_stop) for s in segments(core)] == [(0, 596), (596, 603)]
        run(core, [*LONG, *text(2, 100)])
        tidy(core)
        assert len(segments(core)) == 4


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "gemma3"])
@pytest.mark.parametrize("n_kept", [300, 500])
def test_a_state_in_the_middle_of_a_segment_is_exact(arch, n_kept):
    prompt = [*LONG[: n_kept + 50], *text(3, 30)]
    with open_core(arch, checkpoints=EVERY_100) as core:
        run(core, LONG, deterministic=True)
        move_out(core)
        assert any(s.n_start < n_kept < s.n_stop for s in segments(core))
        assert run(core, prompt, deterministic=True).n_cached == n_kept
        slot = slot_holding(core, prompt)
        assert core.context.is_clean(slot.seq) and memory_of(core.context, slot.seq) == replay(core, slot)


def test_a_state_in_the_middle_of_another_reading_is_not_used_by_a_deterministic_request(monkeypatch):
    """The control: what decides it is the comparison of histories."""
    prompt = [*LONG[:350], *text(3, 30)]
    for is_part_of, n_cached in ((provenance.is_part_of, 300), (lambda *_: False, 0)):
        monkeypatch.setattr(provenance, "is_part_of", is_part_of)
        with open_core(checkpoints=EVERY_100) as core:
            run(core, LONG, deterministic=True)
            move_out(core)
            assert run(core, prompt, deterministic=True).n_cached == n_cached
    with open_core(checkpoints=EVERY_100) as core:
        run(core, LONG, deterministic=True)
        move_out(core)
        for segment in segments(core):
            segment.chunks = ((100, 2), (50, 2), *segment.chunks[3:])
        assert run(core, prompt, deterministic=True).n_cached == 0


@pytest.mark.parametrize("can_cut", [True, False])
def test_where_room_is_short_only_the_needed_part_of_a_segment_is_loaded(can_cut):
    """A context that could not hold the whole segment beside what is running."""
    with open_core(n_ctx=1024, checkpoints=EVERY_100, idle_cells=10_000) as core:
        run(core, text(1, 900))
        move_out(core)
        assert max(s.n_stop for s in segments(core)) > 800
        if not can_cut:  # the control
            core.context.cut_segment = lambda blob, _start, _end: blob
        submit(core, text(2, 400), 60)
        for _ in range(4):
            core.step()
        mine = submit(core, [*text(1, 900)[:250], *text(3, 30)], 4)
        result = drain(core)[mine.id]
        assert result.error is None and (result.n_cached == 200) is can_cut


# what is joined when there is time


class Talk:
    """A conversation of many small turns. ``way``: how the client sends a reply back."""

    def __init__(self, core: Core, way: str = "hinted", **more) -> None:
        self.core, self.way, self.more = core, way, more
        self.prompt = text(7, 120)
        self.n_turns = 0

    def turn(self, n_reply: int = 5) -> None:
        hints = {} if self.way == "plain" else {"stable": len(self.prompt) - 3}
        result = run(self.core, self.prompt, n_reply, **hints, **self.more)
        assert self.n_turns == 0 or result.n_processed < 80 + 20 + n_reply
        tidy(self.core)
        self.n_turns += 1
        kept = self.prompt[:-3] if self.way == "stripped" else [*self.prompt, *result.tokens]
        self.prompt = [*kept, *text(1000 + self.n_turns, 80)]

    def turns(self, n: int) -> None:
        for _ in range(n):
            self.turn()

    @property
    def slot(self) -> Slot:
        return max(self.core.slots, key=lambda slot: slot.n_fed)

    def lineage(self) -> list[Segment]:
        """The segments that bringing it back takes."""
        return list({id(n.segment): n.segment for n in self.slot.node.lineage() if n.segment is not None}.values())


def count(core: Core, name: str) -> list[None]:
    """One entry for each call of the context's method from now on."""
    calls, method = [], getattr(core.context, name)

    def counted(*args, **more):
        calls.append(None)
        return method(*args, **more)

    setattr(core.context, name, counted)
    return calls


def without_joining(core: Core) -> None:
    core.cache.joiner.tidy = lambda _slots: False


@pytest.mark.parametrize("way", ["hinted", "plain", "stripped"])
@pytest.mark.parametrize("arch", KINDS if CAMPAIGN else KINDS[:1])
def test_forty_turns_leave_few_segments(arch, way):
    with open_core(arch, n_ctx=8192) as core:
        talk = Talk(core, way)
        talk.turns(40)
        assert len(talk.lineage()) <= 10
        core.cache.ram.arena.check()


@pytest.mark.parametrize("arch", KINDS if CAMPAIGN else KINDS[:1])
def test_without_joining_they_leave_many(arch):
    """The control."""
    with open_core(arch, n_ctx=8192) as core:
        without_joining(core)
        talk = Talk(core)
        talk.turns(40)
        assert len(talk.lineage()) >= 40


@pytest.mark.parametrize("n_spares", [0, 3])
@pytest.mark.parametrize("arch", [*KINDS, "jamba"])
def test_a_conversation_comes_back_through_joined_segments_with_the_same_bytes(arch, n_spares):
    with open_core(arch, n_slots=1, n_ctx=4096, n_spares=n_spares) as core:
        talk = Talk(core)
        talk.turns(12)
        assert any(s.n_users > 3 for s in talk.lineage())
        node = next(n for n in reversed(talk.slot.node.lineage()) if n.segment is not None)
        kv = core.context.capture_segment(talk.slot.seq, node.root().mark, node.mark).tobytes()
        move_out(core)
        run(core, [*node.path.codes[: node.n_items].tolist(), *text(5, 30)], 1)
        assert core.context.capture_segment(talk.slot.seq, node.root().mark, node.mark).tobytes() == kv


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "gemma3"])
def test_a_deterministic_conversation_is_exact_through_joined_segments(arch):
    with open_core(arch, n_slots=1, n_ctx=4096) as core:
        talk = Talk(core, deterministic=True)
        talk.turns(9)
        assert any(s.n_users > 3 and s.clean for s in talk.lineage())
        move_out(core)
        result = run(core, talk.prompt, 5, deterministic=True)
        assert result.n_cached > len(talk.prompt) - 100
        assert core.context.is_clean(talk.slot.seq)
        assert memory_of(core.context, talk.slot.seq) == replay(core, talk.slot)


@pytest.fixture
def in_pieces(monkeypatch) -> None:
    """Every piece of idle work copies the keys or values of one layer."""
    monkeypatch.setattr(compaction, "STEP_BYTES", 1)


def waiting_to_be_joined(core: Core) -> Talk:
    """A conversation of which everything is done but joining."""
    without_joining(core)
    talk = Talk(core, deterministic=True)
    talk.turns(9)
    del core.cache.joiner.tidy
    return talk


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("arch", KINDS)
def test_a_join_takes_bounded_pieces_and_the_tree_changes_with_the_last(arch):
    with open_core(arch, n_slots=1, n_ctx=4096) as core:
        talk = waiting_to_be_joined(core)
        joining, copied, n_joins, n_pieces = core.context.joining_segments, [], 0, 0

        def noting(blobs):
            steps = joining(blobs)
            while True:
                try:
                    copied.append(next(steps))
                except StopIteration as end:
                    return end.value
                yield copied[-1]

        core.context.joining_segments = noting
        n_segments = core.cache.tree.n_segments
        while core.cache.joiner.tidy(core.slots):
            assert len(copied) <= 1, "one piece between two looks at the inbox"
            is_done = not copied
            assert (core.cache.tree.n_segments < n_segments) is is_done
            n_joins, n_pieces = n_joins + is_done, n_pieces + 1
            n_segments = core.cache.tree.n_segments
            copied.clear()
            check(core)
        assert n_joins >= 1 and n_pieces > 2 and len(talk.lineage()) <= 10
        move_out(core)
        result = run(core, talk.prompt, 5, deterministic=True)
        assert result.n_cached > len(talk.prompt) - 100
        if core.context.kind.needs_checkpoints:
            assert memory_of(core.context, talk.slot.seq) == replay(core, talk.slot)


def test_a_join_that_is_not_bounded_is_one_piece():
    """The control."""
    with open_core(n_slots=1, n_ctx=4096) as core:
        waiting_to_be_joined(core)
        n_segments = core.cache.tree.n_segments
        assert core.cache.joiner.tidy(core.slots) and core.cache.tree.n_segments < n_segments


@pytest.mark.usefixtures("in_pieces")
def test_a_join_is_given_up_if_its_segments_go_meanwhile():
    with open_core(n_slots=1, n_ctx=4096) as core:
        talk = waiting_to_be_joined(core)
        for _ in range(3):
            assert core.cache.joiner.tidy(core.slots)
        dropped = next(node for node in talk.slot.node.lineage() if node.segment is not None)
        core.cache.tree.drop_segment(dropped)
        tidy(core)
        result = run(core, talk.prompt, 5)
        assert_greedy(core, talk.prompt, result)
        tidy(core)
        move_out(core)
        assert run(core, talk.prompt, 5).n_cached > len(talk.prompt) - 100


@pytest.mark.parametrize("piece", [100, 100_000])
def test_idle_work_copies_a_conversation_in_pieces(piece):
    with open_core("llama", n_slots=1) as core:
        core.cache.ram_writer.piece_tokens = piece
        run(core, LONG)
        captured, capture = [], core.context.capture_segment
        core.context.capture_segment = lambda seq, start, stop: (
            captured.append(stop.n_tokens - start.n_tokens) or capture(seq, start, stop)
        )
        n_steps = 0
        while core.tidy():
            n_steps += 1
        assert sum(captured) == 603 and (max(captured) <= piece) and n_steps >= len(captured)
        assert len(captured) == (7 if piece == 100 else 1)
        move_out(core)
        assert run(core, [*LONG, *text(3, 20)]).n_cached >= 600


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_bytes_that_were_joined_in_the_wrong_order_would_be_seen(arch):
    """The control of the two tests above."""
    with open_core(arch, n_slots=1, n_ctx=4096) as core:
        joining = core.context.joining_segments

        def swapping(blobs):
            return _keys_swapped((yield from joining(blobs)))

        core.context.joining_segments = swapping
        talk = Talk(core, deterministic=True)
        talk.turns(9)
        move_out(core)
        run(core, talk.prompt, 5, deterministic=True)
        assert memory_of(core.context, talk.slot.seq) != replay(core, talk.slot)


def _keys_swapped(blob):
    middle = len(blob) // 2
    blob[middle : middle + 256], blob[middle + 256 : middle + 512] = (
        blob[middle + 256 : middle + 512].copy(),
        blob[middle : middle + 256].copy(),
    )
    return blob


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "gemma3", "llama"])
def test_a_branch_and_an_edit_inside_a_joined_segment_are_right(arch):
    with open_core(arch, n_slots=1, n_ctx=4096, checkpoints=EVERY_100) as core:
        talk = Talk(core, deterministic=True)
        talk.turns(9)
        whole = max(talk.lineage(), key=lambda s: s.n_stop - s.n_start)
        at = (whole.n_start + whole.n_stop) // 2
        n_before = core.cache.tree.n_segments
        for seed in (3, 4):
            prompt = [*talk.prompt[:at], *text(seed, 60)]
            result = run(core, prompt, 5, deterministic=True)
            assert whole.n_start < result.n_cached <= at
            slot = slot_holding(core, prompt)
            if core.context.kind.needs_checkpoints:
                assert memory_of(core.context, slot.seq) == replay(core, slot)
            assert_greedy(core, prompt, result)
            tidy(core)
        assert core.cache.tree.n_segments > n_before
        result = run(core, talk.prompt, 5, deterministic=True)
        assert result.n_cached > len(talk.prompt) - 100
        assert_greedy(core, talk.prompt, result)


@pytest.mark.parametrize("arch", KINDS)
def test_of_a_turn_that_was_left_in_the_middle_both_sides_go_on(arch):
    """The client sends only half of the reply back; the other half stays, by itself."""
    with open_core(arch, n_slots=1, n_ctx=4096) as core:
        prompt, replies = text(7, 200), []
        for turn in range(6):
            reply = run(core, prompt, 60, boundaries=(len(prompt) - 40,)).tokens
            tidy(core)
            replies.append([*prompt, *reply])
            prompt = [*prompt, *reply[:30], *text(100 + turn, 60)]
        sizes = [s.n_stop - s.n_start for s in segments(core)]
        assert sum(sizes) <= len(prompt) + 6 * 60, "nothing is kept twice"
        move_out(core)
        for whole in replies:
            again = [*whole, *text(9, 20)]
            result = run(core, again, 4)
            assert result.n_cached >= len(whole) - 1
            assert_greedy(core, again, result)


# with other tiers


@pytest.fixture
def memory() -> Iterator[int]:
    fd = memory_file()
    yield fd
    os.close(fd)


@pytest.mark.parametrize("arch", KINDS)
def test_a_new_engine_finds_the_joined_segments(memory, arch):
    with open_core(arch, n_ctx=4096, memory=memory) as core:
        talk = Talk(core)
        talk.turns(12)
        spans = sorted((s.n_start, s.n_stop) for s in talk.lineage())
        core.cache.ram.flush()
        core.cache.ram.arena.check()
    with open_core(arch, n_ctx=4096) as core:
        golden = run(core, talk.prompt, 8).tokens
    with open_core(arch, n_ctx=4096, memory=memory) as core:
        assert set(spans) <= {(s.n_start, s.n_stop) for s in segments(core)}
        result = run(core, talk.prompt, 8)
        assert result.n_cached > len(talk.prompt) - 100 and result.tokens == golden
        tidy(core)
        core.cache.ram.flush()
        core.cache.ram.arena.check()


@pytest.mark.parametrize("is_held", [True, False])
def test_an_engine_killed_while_it_joins_loses_nothing(memory, monkeypatch, is_held):
    """What was joined is given up only when the next engine would find the whole."""
    if not is_held:  # the control
        monkeypatch.setattr(Ram, "keep_meanwhile", lambda _ram, blobs: blobs.clear())
    with open_core(n_ctx=4096, memory=memory, ram_bytes=16 << 20) as core:
        without_joining(core)
        talk = Talk(core)
        talk.turns(6)
        core.cache.ram.flush()
        del core.cache.joiner.tidy
        may_go_on = threading.Event()
        core.cache.ram._notes.put(may_go_on.wait)  # its thread gets no further
        n = core.cache.tree.n_segments
        tidy(core)
        assert core.cache.tree.n_segments < n
        left = copy_of(memory)
        may_go_on.set()
    with open_core(n_ctx=4096, memory=left, ram_bytes=16 << 20) as core:
        assert (run(core, talk.prompt).n_cached > len(talk.prompt) - 100) is is_held
    os.close(left)


def copy_of(memory: int) -> int:
    fd, size = memory_file(), os.fstat(memory).st_size
    os.ftruncate(fd, size)
    for at in range(0, size, 1 << 20):
        os.pwrite(fd, os.pread(memory, 1 << 20, at), at)
    return fd


@pytest.mark.parametrize("arch", KINDS)
def test_on_disk_nothing_is_written_again_because_it_was_joined(tmp_path: Path, arch):
    with kept_core(tmp_path, arch, n_ctx=4096) as core:
        talk, written = Talk(core), []
        for _ in range(12):
            talk.turn()
            put_away(core)
            written.append(core.cache.tiers.disk.counts.n_bytes_written)
        assert any(len(s.pieces) > 3 for s in talk.lineage())
        shape = core.sizes.shape
        new = 85 * shape.kv_bytes_per_token + shape.state_bytes
        assert (np.diff(written) <= 1.1 * new + (64 << 10)).all(), np.diff(written).tolist()
        ends = [kept.n_items for kept in core.cache.tiers.disk.objects() if kept.kind == "kv"]
        assert len(ends) == len(set(ends)), "two objects end at one place"
        golden = run(core, talk.prompt, 8, use_cache=False).tokens
    with kept_core(tmp_path, arch, n_ctx=4096) as core:
        spliced = count(core, "splice_segment")
        result = run(core, talk.prompt, 8)
        assert result.n_cached > len(talk.prompt) - 100 and result.tokens == golden
        assert result.checkpoint.how == "from disk" and len(spliced) < 8 < len(files(tmp_path, "kv"))
        tidy(core)
        assert len(Talk(core).lineage()) < 10
        put_away(core)
        assert core.cache.tiers.disk.counts.n_damaged == 0


def test_a_new_engine_does_not_write_joined_segments_again(tmp_path: Path, memory):
    with kept_core(tmp_path, n_ctx=4096, memory=memory) as core:
        talk = Talk(core)
        talk.turns(12)
        put_away(core)
        n_kv = len(files(tmp_path, "kv"))
        assert any(len(s.pieces) > 3 for s in talk.lineage())
    with kept_core(tmp_path, n_ctx=4096, memory=memory) as core:
        talk.core = core
        talk.turn()
        put_away(core)
        assert len(files(tmp_path, "kv")) <= n_kv + 2


def test_an_object_that_the_disk_gave_up_is_written_again_by_itself(tmp_path: Path):
    with kept_core(tmp_path, n_ctx=4096) as core:
        talk = Talk(core)
        talk.turns(12)
        put_away(core)
        whole = max(talk.lineage(), key=lambda s: len(s.pieces))
        lost = whole.pieces[len(whole.pieces) // 2]
        before = {path.name: path.read_bytes() for path in files(tmp_path, "kv")}
        core.cache.tiers.disk.drop(lost.name)
        talk.turn()
        put_away(core)
        after = {path.name: path.read_bytes() for path in files(tmp_path, "kv")}
        assert after[lost.name] == before[lost.name], "the very same object"
        assert len(after) <= len(before) + 2
    with kept_core(tmp_path, n_ctx=4096) as core:
        assert run(core, talk.prompt).n_cached > len(talk.prompt) - 100


@pytest.mark.parametrize("kib", [0, 150, 450, 1250] if CAMPAIGN else [150, 450])
@pytest.mark.parametrize("arch", KINDS)
def test_within_a_small_budget_every_byte_is_accounted_for(arch, kib):
    with open_core(arch, n_slots=2, n_ctx=2048, ram_bytes=kib << 10) as core:
        core.cache.ram_writer.most_joined = core.cache.joiner.most_joined = 400  # more than so little memory would get
        prompts = [text(seed, 100) for seed in (1, 2, 3)]
        for turn in range(8):
            for i, prompt in enumerate(prompts):
                result = run(core, prompt, 5, stable=len(prompt) - 3)
                assert_greedy(core, prompt, result)
                tidy(core)
                prompts[i] = [*prompt, *result.tokens, *text(50 + 10 * turn + i, 40)]
        check(core)
        core.cache.ram.flush()
        core.cache.ram.arena.check()
        assert any(s.n_users > 3 for s in segments(core)) or kib < 1250


def test_where_the_arena_is_full_nothing_is_joined(monkeypatch):
    with open_core(n_ctx=4096) as core:
        without_joining(core)
        talk = Talk(core)
        talk.turns(6)
        del core.cache.joiner.tidy
        n = core.cache.tree.n_segments
        monkeypatch.setattr(core.cache.ram.arena, "_take", lambda _n: None)
        tidy(core)
        assert core.cache.tree.n_segments == n
        monkeypatch.undo()
        talk.turn()
        assert core.cache.tree.n_segments < n  # the control
