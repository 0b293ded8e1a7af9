"""A turn read before anybody asks: the next request reads only what is new, and reading ahead gives way at once."""

from __future__ import annotations

import pytest

from everwarm.engine.core import Core
from everwarm.engine.request import Ask
from everwarm.engine.settings import StoreSettings
from everwarm.engine.slotfile import slot_io
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import GUARD, CutKind, Entry, victims
from support.drive import EVERY_KIND, HYBRIDS, check, drain, open_core, run, submit, text, with_hints

HISTORY, THINKING, ANSWER, NEW = text(1, 300), text(2, 60), text(3, 80), text(4, 20)
SHOWN = [*HISTORY, *ANSWER]  # what the next request begins with: thinking is stripped
NEXT = [*SHOWN, *NEW]


def talk(core: Core, **more) -> None:
    """A turn whose thinking will be stripped: the model's own text is of no use to the next turn."""
    run(core, [*HISTORY, *THINKING], stable=len(HISTORY), **more)


def offer(core: Core, tokens: list[int] = SHOWN, **more) -> None:
    core.prewarm.offer(Ask(Prompt.of_tokens(tokens), max_tokens=0, ahead=True, **with_hints(more)))


def idle(core: Core) -> None:
    """What the loop does while nobody asks."""
    for _ in range(1000):
        if core.has_work:
            core.step()
            check(core)
        elif not core.tidy():
            return
    raise AssertionError("idle work without end")


def begin(core: Core) -> None:
    while not core.has_work:
        assert core.tidy()


@pytest.mark.parametrize("arch", tuple(dict.fromkeys((*HYBRIDS, *EVERY_KIND))))
@pytest.mark.parametrize("n_spares", [0, 4])
def test_the_next_request_reads_only_what_is_new(arch, n_spares):
    with open_core(arch, n_spares=n_spares) as core:
        talk(core)
        idle(core)
        without = run(core, NEXT)
    with open_core(arch, n_spares=n_spares) as core:
        talk(core)
        offer(core)
        idle(core)
        result = run(core, NEXT)
        assert core.counts.n_prewarms == 1 and core.counts.n_prewarm_tokens >= len(ANSWER)
    assert result.n_processed <= len(NEW) + GUARD
    assert without.n_processed >= len(ANSWER), "this test could not fail"
    assert result.tokens == without.tokens


@pytest.mark.parametrize("arch", HYBRIDS)
def test_where_a_guess_begins_is_kept_as_well(arch):
    """So a wrong guess costs idle time alone. A recurrent state exists only where it was kept."""
    guess = [*SHOWN, *text(5, 120)]
    read = {}
    for stable in (len(SHOWN), None):
        with open_core(arch) as core:
            talk(core)
            offer(core, guess, stable=stable)
            idle(core)
            assert core.counts.n_prewarms == 1
            wrong = run(core, NEXT)
            right = run(core, [*guess, *NEW])
            assert right.n_processed <= len(NEW) + GUARD
            read[stable] = wrong.n_processed
    assert read[len(SHOWN)] <= len(NEW) + GUARD
    assert read[None] >= len(ANSWER), "this test could not fail"


def test_it_is_counted_apart_and_counts_as_used_once_it_was():
    with open_core() as core:
        talk(core)
        before = core.counts.n_requests, core.counts.n_prompt, core.counts.n_avoidable
        offer(core)
        idle(core)
        assert before == (core.counts.n_requests, core.counts.n_prompt, core.counts.n_avoidable)
        assert core.counts.n_prewarms_used == 0
        run(core, NEXT)
        assert core.counts.n_prewarms_used == 1


def test_nothing_is_read_when_the_next_request_goes_on_from_what_is_there():
    with open_core() as core:
        talk(core)
        offer(core, [*HISTORY, *THINKING])
        idle(core)
        assert core.counts.n_prewarm_tokens == 0


def test_it_gives_way_at_once_and_goes_on_later():
    with open_core(prefill_beside_decode=16) as core:
        talk(core)
        offer(core)
        begin(core)
        core.step()
        reading = next(slot for slot in core.slots if slot.request)
        assert reading.request.ask.ahead and reading.n_fed < len(SHOWN)
        request = submit(core, text(9, 50))
        core.step()
        running = [slot.request for slot in core.slots if slot.request]
        assert running == [request], "one step, and only the real request runs"
        drain(core)
        assert core.counts.n_prewarms_interrupted == 1 and core.counts.n_prewarms == 0
        idle(core)
        assert core.counts.n_prewarms == 1
        assert run(core, NEXT).n_processed <= len(NEW) + GUARD


def test_the_same_conversation_goes_on_from_where_it_was_interrupted():
    with open_core(prefill_beside_decode=16) as core:
        talk(core)
        offer(core)
        begin(core)
        for _ in range(3):
            core.step()
        result = run(core, NEXT)
        assert len(HISTORY) < result.n_cached < len(SHOWN)


def test_one_for_each_conversation_and_not_too_many():
    with open_core() as core:
        offer(core, [*SHOWN, *text(5, 40)])
        offer(core, [*SHOWN, *text(6, 40)])
        assert len(core.prewarm.waiting) == 1
        offer(core, SHOWN, namespace="another")
        assert len(core.prewarm.waiting) == 2
        for seed in range(20, 60):
            offer(core, text(seed, 100))
        assert len(core.prewarm.waiting) == 8


def test_it_moves_nobody_out_of_the_context():
    with open_core(n_ctx=1024) as core:
        talk(core, slot=0)
        run(core, text(8, 500), slot=1)
        held = [slot.n_fed for slot in core.slots]
        offer(core, [*HISTORY, *text(3, 400)])
        idle(core)
        assert core.counts.n_prewarms == 0 and [slot.n_fed for slot in core.slots] == held


def test_what_nobody_used_yet_is_evicted_first():
    usual = Entry(1, 100, 5.0, 0.5)
    ahead = Entry(2, 100, 500.0, 1.0, is_ahead=True)
    stranded = Entry(3, 100, 500.0, 1.0, stranded=True)
    assert victims([usual, ahead, stranded], 300) == [3, 2, 1]


def test_a_slots_content_stays_the_conversation_that_ran_in_it(tmp_path):
    with open_core() as core:
        talk(core, slot=0)
        content = core.slots[0].content.codes.tolist()
        offer(core)
        idle(core)
        assert core.slots[0].resident().codes.tolist() == SHOWN, "it was read somewhere else"
        saved = slot_io.capture(core, core.slots[0], "")
        assert saved.prompt.codes.tolist() == content
        check(core)


def test_erasing_a_slot_forgets_what_was_read_ahead_as_well():
    with open_core() as core:
        talk(core, slot=0)
        offer(core)
        idle(core)
        slot_io.erase(core, core.slots[0], "")
        check(core)
        kinds = [node.checkpoint.kind for node in core.cache.tree.nodes() if node.checkpoint]
        assert CutKind.PREWARM not in kinds
        assert run(core, NEXT).n_cached == 0


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_nothing_that_was_only_read_ahead_is_written_to_disk(arch, tmp_path):
    with open_core(arch, store=StoreSettings(str(tmp_path), restore_policy="always")) as core:
        core.cache.tiers.wait_open(20)
        talk(core)
        idle(core)
        core.cache.tiers.flush()
        before = core.cache.tiers.disk.names()
        offer(core)
        idle(core)
        assert core.counts.n_prewarm_tokens >= len(ANSWER)
        core.cache.tiers.flush()
        assert before and core.cache.tiers.disk.names() == before
        run(core, NEXT, stable=len(NEXT))
        idle(core)
        core.cache.tiers.flush()
        assert core.cache.tiers.disk.names() > before, "this test could not fail"


def test_stopping_while_it_reads_loses_nothing(tmp_path):
    """A conversation whose slot is being read ahead is as durable as any other."""
    store = StoreSettings(str(tmp_path), restore_policy="always")
    with open_core(store=store, prefill_beside_decode=16) as core:
        talk(core)
        offer(core)
        begin(core)
        core.step()
        assert any(slot.request for slot in core.slots)
        core.put_away()
    with open_core(store=store) as core:
        assert run(core, NEXT).n_cached >= len(HISTORY)


def test_stopping_while_a_prompt_is_read_keeps_what_was_read(tmp_path):
    store = StoreSettings(str(tmp_path), restore_policy="always")
    with open_core(store=store, n_batch=64, n_ubatch=64) as core:
        submit(core, HISTORY)
        for _ in range(3):
            core.step()
        core.put_away()
    with open_core(store=store) as core:
        assert run(core, HISTORY).n_cached >= 128


# a reply that the next turn leaves aside


def kinds_in_ram(core: Core) -> set[CutKind]:
    kept = (node.checkpoint for node in core.cache.tree.nodes() if node.checkpoint is not None)
    return {checkpoint.kind for checkpoint in kept if checkpoint.state is not None}


@pytest.mark.parametrize("n_spares", [0, 4])
@pytest.mark.parametrize("way", ["rendered anew", "as it was"])
def test_the_end_of_a_reply_goes_if_the_next_turn_will_not_continue_it(way, n_spares):
    prompt = [*HISTORY, *text(7, 6)]  # the last few begin the reply, and may be rendered in another way
    with open_core(n_spares=n_spares) as core:
        reply = run(core, prompt, 40, stable=len(HISTORY)).tokens
        idle(core)
        assert CutKind.REPLY in kinds_in_ram(core)
        n_bytes = core.cache.tree.ram_bytes
        is_continued = way == "as it was"
        following = [*prompt, *reply, *ANSWER] if is_continued else SHOWN
        offer(core, following)
        idle(core)
        assert (CutKind.REPLY in kinds_in_ram(core)) is is_continued
        assert CutKind.STABLE in kinds_in_ram(core) or n_spares == 0
        if n_spares:
            assert run(core, prompt, 2).n_processed == 0, "an identical prompt is still parked"
        result = run(core, [*following, *NEW])
        assert result.n_processed <= len(NEW) + GUARD
        assert core.cache.tree.ram_bytes > n_bytes - n_bytes // 2


def test_of_another_conversation_nothing_goes():
    with open_core(n_spares=4) as core:
        prompt = [*HISTORY, *text(7, 6)]
        reply = run(core, prompt, 40, stable=len(HISTORY)).tokens
        run(core, [*HISTORY, *text(8, 60)], 40, stable=len(HISTORY) + 50)  # goes on from the same point
        idle(core)
        before = kinds_in_ram(core)
        offer(core, [*HISTORY[:200], *ANSWER])
        idle(core)
        assert before <= kinds_in_ram(core)
        assert run(core, [*prompt, *reply, *NEW]).n_processed <= len(NEW) + 1


# a client that goes away


def leave(core: Core, tokens: list[int], n_steps: int = 1, **more) -> int:
    """Asks, and goes away after so many steps; returns how much was read."""
    request = submit(core, tokens, **more)
    for _ in range(n_steps):
        core.step()
    slot = next(slot for slot in core.slots if slot.request is request)
    core.cancel(request.id)
    n_fed = slot.n_fed
    core.step()
    assert not any(slot.request for slot in core.slots)
    return n_fed


ABANDONED = text(77, 1800)


def test_a_prompt_that_was_abandoned_is_read_on_in_idle_time():
    with open_core(n_ctx=4096, finish_prefill_s=60.0) as core:
        n_fed = leave(core, ABANDONED)
        assert 0 < n_fed < 600
        idle(core)
        assert run(core, ABANDONED).n_processed <= GUARD


def test_the_same_request_again_goes_on_from_where_it_is():
    with open_core(n_ctx=4096, finish_prefill_s=60.0, prefill_beside_decode=64) as core:
        n_fed = leave(core, ABANDONED)
        begin(core)
        for _ in range(4):
            core.step()
        again = run(core, ABANDONED)
        assert n_fed < again.n_cached < len(ABANDONED), "what was read in between is kept"


@pytest.mark.parametrize(
    "more", [{"finish_prefill_s": 0.0}, {"use_cache": False}, {"n_left": 100}], ids=["off", "no cache", "little left"]
)
def test_others_are_not_read_on(more):
    seconds, n_left = more.pop("finish_prefill_s", 60.0), more.pop("n_left", 0)
    with open_core(n_ctx=4096, finish_prefill_s=seconds) as core:
        leave(core, ABANDONED[: 512 + n_left] if n_left else ABANDONED, **more)
        idle(core)
        assert core.counts.n_prewarm_tokens == 0


def test_after_its_time_it_is_not_begun():
    with open_core(n_ctx=4096, finish_prefill_s=60.0) as core:
        leave(core, ABANDONED)
        (waiting,) = core.prewarm.waiting
        assert list(core.prewarm.take_newest(waiting.until + 1)) == [] and not core.prewarm.waiting


def test_a_stop_reads_nothing_on():
    with open_core(n_ctx=4096, finish_prefill_s=60.0) as core:
        submit(core, ABANDONED)
        core.step()
        core.put_away()
        assert core.counts.n_prewarm_tokens == 0 and not core.prewarm.waiting
