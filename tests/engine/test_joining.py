"""Few segments however many turns: what is brought back through joined ones is bit for bit what it was."""

from __future__ import annotations

import pytest

from engine.drive import drain, memory_of, open_core, replay, run, slot_holding, submit, text, tidy
from everwarm.engine import restore
from everwarm.engine.core import Core
from everwarm.state.params import CheckpointParams
from everwarm.state.segment import Segment

EVERY_100 = CheckpointParams(every_n_tokens=100)
LONG = text(1, 600)


def segments(core: Core) -> list[Segment]:
    return list({id(n.segment): n.segment for n in core.tree.nodes() if n.segment is not None}.values())


def move_out(core: Core) -> None:
    core.move_everybody_out()


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
    for is_of, n_cached in ((restore._is_of, 300), (lambda *_: False, 0)):
        monkeypatch.setattr(restore, "_is_of", is_of)
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
