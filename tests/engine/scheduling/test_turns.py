"""A deterministic request runs alone, but only for a turn at a time, and what it says does not change by it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.engine.core import Core
from everwarm.engine.request import Finish, Finished, Request
from everwarm.engine.scheduling import admission
from everwarm.engine.scheduling.admission import TurnTaking, next_side
from everwarm.state.lineage import chunk_at, is_begun_by, is_seated_at
from support.drive import EVERY_KIND, drain, open_core, record_logits, run, submit, text

LONG = text(7, 150)
SMALL = {"n_ctx": 512, "n_slots": 3, "n_batch": 64, "n_ubatch": 64, "width": 64}
N_REPLY = 24


def alone_rows(core: Core) -> list[np.ndarray]:
    """The logits of every step in which a deterministic request ran."""
    rows, own, decode = record_logits(core), [], core.context.decode

    def sorting(feeds):
        n = len(rows)
        decode(feeds)
        if core.admission.turns.is_alone:
            own.extend(rows[n:])

    core.context.decode = sorting
    return own


def in_turns(core: Core, prompt: list[int], n_beside: int = 2, **more) -> tuple[Request, list[np.ndarray], dict]:
    """A deterministic request beside others, with turns of a single step."""
    core.admission.turns.turn_s = 0.0
    rows = alone_rows(core)
    others = [submit(core, text(20 + i, 30), N_REPLY) for i in range(n_beside)]
    asked = submit(core, prompt, N_REPLY, deterministic=True, boundaries=(100,), **more)
    results = drain(core)
    assert all(len(results[other.id].tokens) == N_REPLY for other in others)
    return asked, rows, results


def uninterrupted(arch: str) -> tuple[tuple[int, ...], list[np.ndarray]]:
    with open_core(arch, **SMALL) as core:
        rows = record_logits(core)
        return run(core, LONG, N_REPLY, deterministic=True, boundaries=(100,)).tokens, rows


@pytest.mark.parametrize("ram_bytes", [64 << 20, 0])
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_a_request_that_is_suspended_at_every_turn_says_the_same_to_the_bit(arch, ram_bytes, monkeypatch):
    """Also if what it was suspended with is lost, and it has to read everything again."""
    monkeypatch.setattr(admission, "SEAT_EVERY", 8)
    tokens, expected = uninterrupted(arch)
    with open_core(arch, ram_bytes=ram_bytes, **SMALL) as core:
        asked, rows, results = in_turns(core, LONG)
        assert core.counts.n_turns >= 4 and core.counts.n_decode_failures == 0
        assert results[asked.id].tokens == tokens
    assert {row.tobytes() for row in rows} == {row.tobytes() for row in expected}  # also of what was read again


@pytest.mark.parametrize("arch", ["qwen35", "gemma3", "llama"])
def test_the_control_beside_others_the_numbers_differ(arch):
    _, expected = uninterrupted(arch)
    with open_core(arch, **SMALL) as core:
        rows = record_logits(core)
        for i in range(2):
            submit(core, text(20 + i, 30), N_REPLY)
        submit(core, LONG, N_REPLY, boundaries=(100,))
        drain(core)
    assert {row.tobytes() for row in expected} - {row.tobytes() for row in rows}


def test_the_control_a_window_that_is_seated_only_when_somebody_waits_gives_other_numbers(monkeypatch):
    """What fixed seats are for: once the ring is full, it matters whether the window was seated anew."""
    monkeypatch.setattr(admission, "SEAT_EVERY", 1 << 30)
    one = SMALL | {"n_slots": 1}
    with open_core("gemma3", **one) as core:
        expected = record_logits(core)
        run(core, LONG, 250, deterministic=True, boundaries=(100,))
    monkeypatch.setattr(admission, "can_pause", lambda slot: slot.n_fed % 37 == 0)
    with open_core("gemma3", **one) as core:
        core.admission.turns.turn_s = 0.0
        rows = alone_rows(core)
        submit(core, LONG, 250, deterministic=True, boundaries=(100,))
        submit(core, text(2, 36), 4)
        drain(core)
        assert core.counts.n_turns
    assert {row.tobytes() for row in rows} - {row.tobytes() for row in expected}


@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "llama"])
def test_others_are_answered_while_a_deterministic_request_goes_on(arch):
    with open_core(arch, **SMALL) as core:
        core.admission.turns.turn_s = 0.0
        long = submit(core, text(1, 20), 300, deterministic=True)
        for _ in range(5):
            core.step()
        short = submit(core, text(2, 20), 3)
        ends = [e.request_id for _ in range(12) for e in core.step() if isinstance(e, Finished)]
        assert ends == [short.id] and long in [slot.request for slot in core.slots] + list(core.queue)
        assert len(drain(core)[long.id].tokens) == 300


def test_the_control_without_an_end_of_its_turn_it_keeps_everybody_waiting():
    with open_core(**SMALL) as core:
        core.admission.turns.turn_s = float("inf")
        long = submit(core, text(1, 20), 300, deterministic=True)
        core.step()
        short = submit(core, text(2, 20), 3)
        ends = [e.request_id for _ in range(2000) if core.has_work for e in core.step() if isinstance(e, Finished)]
        assert ends == [long.id, short.id]


def test_deterministic_requests_take_turns_with_each_other_and_no_stream_of_them_keeps_the_others_out():
    with open_core(**SMALL) as core:
        core.admission.turns.turn_s = 0.0
        alone = [submit(core, text(1 + i, 20), 30, deterministic=True) for i in range(5)]
        crowd = [submit(core, text(40 + i, 20), 10) for i in range(2)]
        ran: list[int] = []
        ended: list[int] = []

        def note(core: Core) -> None:
            ran.extend(slot.request.id for slot in core.slots if slot.request and slot.request.ask.deterministic)
            n_rotating = sum(r.admitted is not None for r in core.queue if r.ask.deterministic)
            assert n_rotating <= len(core.slots)

        while core.has_work:
            ended += [e.request_id for e in core.step() if isinstance(e, Finished)]
            core.keep_ends()
            note(core)
        assert ended[:2] == [request.id for request in crowd] and sorted(ended[2:]) == [r.id for r in alone]
        assert {*ran[:6]} > {ran[0]}  # the first one did not run to its end first


def test_one_that_waits_to_run_alone_is_dropped_when_it_is_cancelled():
    with open_core(**SMALL) as core:
        core.admission.turns.turn_s = 0.0
        alone = submit(core, LONG, 100, deterministic=True)
        beside = submit(core, text(2, 20), 30)
        for _ in range(8):
            core.step()
        core.cancel(alone.id)
        results = drain(core)
        assert results[alone.id].finish is Finish.CANCELLED and len(results[beside.id].tokens) == 30


# the rules by themselves

times = st.floats(0, 100)


@given(st.booleans(), times, times, times, st.booleans(), st.booleans())
def test_a_turn_ends_only_if_somebody_waits_and_this_side_got_further(is_alone, began, waited, more, waits, advanced):
    turns = TurnTaking(turn_s=3.0)
    turns.begin(is_alone=is_alone, now=began)
    turns.note_waiting([not is_alone] if waits else [is_alone], began + waited)
    over = turns.is_over(began + waited + more, has_advanced=advanced)
    assert over == (waits and advanced and began + waited + more - (began + waited) >= 3.0)


@given(st.booleans(), st.lists(st.booleans(), min_size=1))
def test_when_nobody_runs_the_other_side_comes_first(was_alone, waiting):
    side = next_side(was_alone, waiting)
    assert side in waiting and (side != was_alone or (not was_alone) not in waiting)


CHUNKS = ((64, 2), (0, 1), (22, 1), (1, 9))


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ((), True),
        (((64, 1),), True),
        (((64, 2), (0, 1)), True),
        (((64, 2), (0, 2), (22, 1)), True),  # seated twice
        (((64, 2), (22, 1)), False),
        (((64, 3),), False),
        ((*CHUNKS, (5, 1)), False),
        (CHUNKS, True),
    ],
)
def test_a_reading_is_recognised_by_its_chunks(first, expected):
    assert is_begun_by(CHUNKS, first) is expected


def test_the_next_chunk_is_the_one_that_was():
    starts = {0: 64, 64: 64, 128: 22, 150: 1, 158: 1, 159: None, 3: None, 130: None}
    assert {at: chunk_at(CHUNKS, at) for at in starts} == starts
    assert [n for n in range(160) if is_seated_at(CHUNKS, n)] == [128]
