"""Conversations that RAM has no room for are all warm: what it gives up is on disk, or is found on its way there."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.core import Core
from everwarm.engine.process.messages import Reason
from everwarm.engine.request import Ask, Result
from everwarm.engine.tiers import lower_tiers
from everwarm.engine.tiers import tier_writer as writer_module
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.engine.tiers.packing import Job
from everwarm.engine.tiers.tier_writer import TierWriter
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CutKind
from everwarm.state.returns import ReturnOutcome
from everwarm.state.store.arena_file import memory_file
from support.drive import EVERY_KIND, GUARD, check, finish, open_core, run, text, tidy
from support.kept_cores import files, fingerprint_of_slot, kept_core, put_away

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N, LENGTH, STABLE = 10, 300, 290
NEW = text(99, 30)
N_IN_RAM = 3  # conversations that it has room for


def told(i: int) -> list[int]:
    return text(i, LENGTH)


def next_turn(i: int) -> list[int]:
    """The reply is rendered in another way than it was written, as templates do."""
    return [*told(i)[:STABLE], *NEW]


def tell_all(core: Core, n: int = N) -> None:
    """One conversation after the other, with no idle time."""
    for i in range(n):
        finish(core, told(i), 6, stable=STABLE)
        if i == 0:
            core.cache.ram_budget.n_bytes = N_IN_RAM * core.cache.tree.ram_bytes
        check(core)


def ask_all(core: Core, n: int = N) -> dict[int, Result]:
    """The next turns, of the newest conversation first."""
    return {i: run(core, next_turn(i), 2) for i in reversed(range(n))}


def cold(results: dict[int, Result]) -> list[int]:
    return [i for i, result in results.items() if result.n_cached != STABLE]


@contextmanager
def held(tiers: LowerTiers):
    """The disk's thread does nothing inside the block."""
    may_go_on = threading.Event()
    tiers.after_all(may_go_on.wait)
    try:
        yield
    finally:
        may_go_on.set()
        tiers.flush()


@pytest.mark.parametrize("restarts", [True, False], ids=["restart", "stay"])
@pytest.mark.parametrize(("arch", "n_spares"), [*((arch, 0) for arch in EVERY_KIND), ("qwen35", 4), ("mamba2", 4)])
def test_all_conversations_are_warm_though_ram_holds_few(tmp_path, memory, arch, n_spares, restarts):
    settings = {"n_spares": n_spares, "n_slots": 2}
    with kept_core(tmp_path, arch, memory=memory, **settings) as core:
        tell_all(core)
        if restarts:
            put_away(core)
        else:
            results = ask_all(core)
    if restarts:
        with kept_core(tmp_path, arch, **settings) as core:
            results = ask_all(core)
    assert cold(results) == []
    assert all(result.why is not None and result.why.reason is not Reason.EVICTED for result in results.values())


@pytest.mark.parametrize("bytes_per_s", [1.0, 1e15])
def test_a_conversation_leaves_the_device_only_for_a_disk_that_gives_it_back_sooner_than_reading(tmp_path, bytes_per_s):
    with kept_core(tmp_path, policy="auto", idle_cells=0) as core:
        run(core, told(1), stable=STABLE)
        core.cache.ram_budget.n_bytes = core.cache.tree.ram_bytes  # it has the state, and no room for the KV
        core.cache.loader._read_rate = bytes_per_s
        run(core, told(2)[:40], 1)
        assert (max(slot.n_fed for slot in core.slots) >= LENGTH) is (bytes_per_s == 1.0)
        put_away(core)
    with kept_core(tmp_path) as core:
        assert run(core, next_turn(1)).n_cached == STABLE, "it is on disk all the same"


@pytest.mark.parametrize(("n_fit", "n_leave"), [(1.5, 1), (2.5, 2), (0.5, 0)])
def test_no_more_conversations_leave_for_a_disk_than_it_has_room_for(tmp_path, n_fit, n_leave):
    assert how_many_leave(tmp_path, n_fit) == n_leave


def test_the_control_all_leave_for_a_disk_that_forgets_what_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(LowerTiers, "n_waiting_bytes", 0)
    assert how_many_leave(tmp_path, 1.5) == 4


def how_many_leave(directory: Path, n_fit: float) -> int:
    """Of four conversations on the device, where RAM has no room, for a disk that holds so many and does not write yet."""
    with kept_core(directory, policy="auto", idle_cells=8192, n_slots=6, n_ctx=8192, n_spares=0) as core:
        for i in range(4):
            run(core, told(i), stable=STABLE)
        tiers, loader = core.cache.tiers, core.cache.loader
        core.cache.ram_budget.n_bytes = core.cache.tree.ram_bytes
        loader._read_rate = 1e15
        tiers.disk.budget_bytes = int(n_fit * core.cache.ram_writer.whole_bytes(core.slots[0].seq))
        core.cache.room._idle_cells = 0
        with held(tiers):
            run(core, text(50, 40), 1)
            return 4 - sum(slot.n_fed >= LENGTH for slot in core.slots)


@pytest.mark.parametrize("hands_over", [True, False])
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_what_ram_evicts_before_it_was_written_is_written_first(tmp_path, memory, arch, hands_over, monkeypatch):
    monkeypatch.setattr(writer_module, "OVERDUE_S", 1e9)
    with kept_core(tmp_path, arch, memory=memory, n_slots=N, n_ctx=8192, idle_cells=8192) as core:
        if not hands_over:  # the control
            core.cache.ram_budget.save_leaving = lambda _nodes: None
        for i in range(N):
            finish(core, told(i), 6, stable=STABLE)
        core.cache.tiers.flush()
        assert not files(tmp_path), "all of it is in RAM, and nothing is written yet"
        core.cache.ram_budget.n_bytes = core.cache.tree.ram_bytes // 3
        core.cache.ram_budget.enforce()
        for slot in core.slots:
            slot.vacate()
        results = ask_all(core)
    assert (cold(results) == []) is hands_over
    evicted = [result.why is not None and result.why.reason is Reason.EVICTED for result in results.values()]
    assert any(evicted) is not hands_over


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_what_waits_to_be_written_is_found(tmp_path, memory, arch, is_found, monkeypatch):
    """The disk does not answer: nothing is on it, and nothing is lost."""
    if not is_found:  # the control
        monkeypatch.setattr(LowerTiers, "find", lambda self, *asked: self.disk.find(*asked))
    with kept_core(tmp_path, arch, memory=memory) as core, held(core.cache.tiers):
        tell_all(core)
        results = ask_all(core)
        assert not files(tmp_path)
    assert (cold(results) == []) is is_found


Bits = tuple[bytes, bytes]


def bits_in_ram(arch: str, i: int) -> Bits:
    """The memory of the next turn of a conversation that never left RAM."""
    with open_core(arch, n_slots=1) as core:
        run(core, told(i), 6, stable=STABLE)
        core.cache.room.clear()
        return bits_of_next_turn(core, i)


def bits_beyond_ram(tmp_path, memory, arch: str, *, is_held: bool) -> tuple[Bits, int]:
    """The same of one that has left RAM, and which it is. ``is_held``: nothing of it was written."""
    with kept_core(tmp_path, arch, memory=memory, n_slots=1) as core, ExitStack() as meanwhile:
        if is_held:
            meanwhile.enter_context(held(core.cache.tiers))
        tell_all(core)
        if not is_held:
            core.cache.tiers.flush()
        i = next(i for i in range(N) if core.cache.restorer.reach(Prompt.of_tokens(next_turn(i)), "") < STABLE)
        return bits_of_next_turn(core, i), i


def bits_of_next_turn(core: Core, i: int) -> Bits:
    assert run(core, next_turn(i), 2).n_cached == STABLE
    return fingerprint_of_slot(core, len(next_turn(i)) + 1)


@pytest.mark.parametrize("is_held", [True, False], ids=["waits to be written", "on disk"])
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_a_state_that_left_ram_comes_back_bit_for_bit(tmp_path, memory, arch, is_held):
    bits, i = bits_beyond_ram(tmp_path, memory, arch, is_held=is_held)
    assert bits == bits_in_ram(arch, i)


def test_a_wrong_state_in_the_queue_would_be_seen(tmp_path, memory, monkeypatch):
    """The negative control of the test above."""
    real = Job.read

    def lie(job: Job, name: str, *place):
        blob = real(job, name, *place)
        return blob if name != "state" else _with_other_numbers(blob)

    monkeypatch.setattr(Job, "read", lie)
    bits, i = bits_beyond_ram(tmp_path, memory, "qwen35", is_held=True)
    assert bits != bits_in_ram("qwen35", i)


def _with_other_numbers(blob):
    other = blob.copy()
    other[-64:] = other[-128:-64]
    return other


@pytest.mark.parametrize("arch", EVERY_KIND)
@pytest.mark.parametrize("seed", range(12 if CAMPAIGN else 2))
def test_random_conversations_in_little_ram_are_found_as_soon_as_they_have_ended(tmp_path, arch, seed):
    rng = np.random.default_rng(seed)
    ended: list[list[int]] = []  # prompts up to their stable points
    prompts = [text(int(rng.integers(200)), int(rng.integers(40, 300)))]
    for life in range(3):
        shape = {"n_slots": int(rng.integers(1, 4)), "n_spares": int(rng.integers(0, 4))}
        fd = memory_file()
        with kept_core(tmp_path, arch, memory=fd, ram_bytes=int(rng.integers(0, 1 << 20)), **shape) as core:
            for turn in range(8):
                old = prompts[int(rng.integers(len(prompts)))]
                cut = int(rng.integers(1, len(old))) if rng.random() < 0.3 else len(old)
                prompt = [*old[:cut], *text(int(rng.integers(200)), int(rng.integers(1, 120)))]
                promised = max((len(k) for k in ended if k == prompt[: len(k)] and len(k) < len(prompt)), default=0)
                stable = max(1, len(prompt) - int(rng.integers(1, 12)))
                result = finish(core, prompt, int(rng.integers(1, 20)), stable=stable).result
                assert result.n_cached >= promised - GUARD, (life, turn, shape)
                prompts.append(prompt)
                ended.append(prompt[:stable])
                if rng.random() < 0.3:
                    tidy(core)
            put_away(core)
            assert core.cache.tiers.disk.counts.n_damaged == 0
        os.close(fd)


# from the device to the disk


@pytest.mark.parametrize(("arch", "is_copied"), [("qwen35", True), ("qwen35", False), ("mamba2", True)])
def test_a_parked_state_is_written_though_ram_has_no_room_for_any(tmp_path, arch, is_copied, monkeypatch):
    if not is_copied:  # the control
        monkeypatch.setattr(RamWriter, "_copy_point", lambda _writer, _node: None)
    with kept_core(tmp_path, arch, ram_bytes=0, n_spares=8, n_slots=1) as core:
        for i in range(3):
            run(core, told(i), 6, stable=STABLE)
            tidy(core)
            assert core.cache.tree.ram_bytes == 0
        put_away(core)
    with kept_core(tmp_path, arch) as core:
        assert (cold(ask_all(core, 3)) == []) is is_copied


def test_what_the_next_turn_needs_is_written_before_anything_else(tmp_path, memory):
    with kept_core(tmp_path, memory=memory, n_spares=4) as core:
        written: list[tuple[str, int]] = []
        put = core.cache.tiers.disk.put

        def noting(header, parts):
            written.append((header.kind, header.n_items))
            return put(header, parts)

        core.cache.tiers.disk.put = noting
        finish(core, told(0), 6, stable=STABLE, boundaries=(100, 200))
        put_away(core)
        states = [n_items for kind, n_items in written if kind == "state"]
        assert states == [STABLE, 100], "the stable point, then the end of the first message; no end of a reply"


@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "gemma3"])
def test_of_each_turn_one_state_is_written_however_little_ram_there_is(tmp_path, memory, arch):
    with kept_core(tmp_path, arch, memory=memory, n_spares=4 if arch == "qwen35" else 0) as core:
        tell_all(core)
        put_away(core)
        states = [kept.n_items for kept in core.cache.tiers.disk.objects() if kept.kind == "state"]
        assert states == [STABLE] * N


@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize("arch", [arch for arch in EVERY_KIND if arch != "llama"])  # its stable points are not kept
def test_what_a_dead_engine_left_in_ram_is_written_by_the_next(tmp_path, memory, arch, is_noted, monkeypatch):
    if not is_noted:  # the control
        monkeypatch.setattr(TierWriter, "note_adopted", lambda _: None)
    with kept_core(tmp_path, arch, memory=memory) as core:
        finish(core, told(0), 6, stable=STABLE)
        core.cache.ram.flush()
    assert not files(tmp_path)
    with kept_core(tmp_path, arch, memory=memory) as core:
        put_away(core)
    with kept_core(tmp_path, arch) as core:
        assert run(core, next_turn(0)).n_cached == (STABLE if is_noted else 0)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stop_waits_for_a_disk_that_is_behind(tmp_path, memory, waits, monkeypatch):
    monkeypatch.setattr(lower_tiers, "MAX_QUEUED", 0)
    if not waits:  # the control
        monkeypatch.setattr(LowerTiers, "catch_up", lambda _: False)
    with kept_core(tmp_path, memory=memory) as core:
        with held(core.cache.tiers):
            for i in range(3):
                finish(core, told(i), 6, stable=STABLE)
            core.cache.tier_writer.tidy(core.slots)
            assert core.cache.tiers.is_behind and not core.cache.tier_writer.tidy(core.slots)
            if not waits:
                put_away_held(core)
        if waits:
            put_away(core)
    with kept_core(tmp_path) as core:
        assert (cold(ask_all(core, 3)) == []) is waits


def put_away_held(core: Core) -> None:
    """All of ``put_away`` but the last wait."""
    while core.tidy() or core.cache.tiers.catch_up():
        pass


@pytest.mark.parametrize("waits", [True, False])
def test_ram_waits_a_moment_for_a_disk_that_is_behind(tmp_path, memory, waits, monkeypatch):
    monkeypatch.setattr(lower_tiers, "MAX_QUEUED", 0)
    monkeypatch.setattr(writer_module, "CATCH_UP_S", 10.0 if waits else 0.0)
    monkeypatch.setattr(writer_module, "OVERDUE_S", 1e9)
    with kept_core(tmp_path, memory=memory, idle_cells=8192) as core:
        for i in range(2):
            finish(core, told(i), 6, stable=STABLE)
        may_go_on = threading.Event()
        core.cache.tiers.after_all(may_go_on.wait)
        core.cache.tier_writer.tidy(core.slots)
        assert core.cache.tiers.is_behind
        if waits:
            threading.Timer(0.05, may_go_on.set).start()
        evict_all(core)
        may_go_on.set()
        core.cache.tiers.flush()
        assert len(cold(ask_all(core, 2))) == (0 if waits else 1)


def test_a_turn_is_written_though_the_end_of_its_reply_was_dropped(tmp_path, memory):
    with kept_core(tmp_path, memory=memory, n_slots=1) as core:
        finish(core, told(0), 6, stable=STABLE)
        end = core.slots[0].node
        assert end.n_items > LENGTH
        core.cache.room.clear = lambda: None
        core.slots[0].vacate()
        core.cache.checkpointer.drop(end, "for a test")
        core.cache.tree.drop_segment(end)
        core.cache.returns.forget([end])
        assert not core.cache.tree.has(end)
        put_away(core)
    with kept_core(tmp_path) as core:
        assert run(core, next_turn(0)).n_cached == STABLE


# a disk that is off or full


def test_without_a_disk_ram_evicts_as_its_policy_says(memory):
    with open_core(memory=memory) as core:
        tell_all(core)
        results = ask_all(core)
    assert cold(results)


def test_a_disk_without_room_takes_no_more_than_its_budget(tmp_path, memory):
    with kept_core(tmp_path, memory=memory, disk_bytes=1 << 20) as core:
        tell_all(core)
        results = ask_all(core)
        put_away(core)
        assert core.cache.tiers.disk.n_bytes <= 1 << 20 and core.cache.tiers.disk.counts.n_evicted > 0
    assert len(cold(results)) < N


def n_states(core: Core, kinds: Sequence[str]) -> int:
    kept = (node.checkpoint for node in core.cache.tree.nodes() if node.checkpoint is not None)
    return sum(checkpoint.state is not None and checkpoint.kind.value in kinds for checkpoint in kept)


def test_the_end_of_a_prompt_stays_on_the_device(tmp_path):
    """An identical prompt decodes nothing while it is there, and a few items afterwards."""
    with kept_core(tmp_path, n_spares=4) as core:
        run(core, told(0), 6, stable=STABLE)
        tidy(core)
        assert n_states(core, ["prompt-end"]) == 0 < n_states(core, ["stable"])
        assert run(core, told(0), 6, stable=STABLE).n_processed == 0
        core.cache.room.clear()
        assert n_states(core, ["prompt-end"]) == 0
        assert 0 < run(core, told(0), 6, stable=STABLE).n_processed <= GUARD


def test_a_stable_point_that_is_evicted_while_its_reply_is_written_is_not_lost(tmp_path, memory):
    with kept_core(tmp_path, memory=memory, n_slots=1) as core:
        finish(core, told(5), 2, stable=STABLE)
        core.cache.ram_budget.n_bytes = 0  # from here on nothing stays
        finish(core, told(0), 40, stable=STABLE)
        put_away(core)
    with kept_core(tmp_path) as core:
        assert run(core, next_turn(0)).n_cached == STABLE
        assert core.cache.tree.match("", Prompt.of_tokens(next_turn(0)), 0).n_shared >= STABLE


# what follows the stable point


def evict_all(core: Core) -> None:
    for slot in core.slots:
        slot.vacate()
    core.cache.ram_budget.n_bytes = 0
    core.cache.ram_budget.enforce()
    core.cache.ram_budget.n_bytes = 256 << 20
    assert core.cache.tree.ram_bytes == 0


def read_ahead(core: Core, tokens: list[int]) -> None:
    core.prewarm.offer(Ask(Prompt.of_tokens(tokens), max_tokens=0, ahead=True))
    while core.has_work or core.tidy():
        if core.has_work:
            core.step()


@pytest.mark.parametrize("is_needed", [True, False])
def test_what_was_read_ahead_is_written_when_ram_gives_it_up(tmp_path, memory, is_needed, monkeypatch):
    if not is_needed:  # the control
        monkeypatch.setattr(TierWriter, "_is_needed_next", lambda _self, _node: False)
    following = [*told(0)[:STABLE], *text(50, 80)]
    with kept_core(tmp_path, memory=memory, n_slots=1) as core:
        finish(core, told(0), 6, stable=STABLE)
        read_ahead(core, following)
        evict_all(core)
        result = run(core, [*following, *NEW])
        assert result.n_cached == (len(following) if is_needed else STABLE)
        assert result.why is not None and (result.why.reason is not Reason.EVICTED) is is_needed


@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "gemma3"])
@pytest.mark.parametrize("is_likely", [True, False])
def test_the_end_of_a_reply_is_written_when_ram_gives_it_up_if_turns_continue_from_replies(
    tmp_path, memory, arch, is_likely
):
    with kept_core(tmp_path, arch, memory=memory, n_slots=1) as core:
        if is_likely:
            core.cache.returns.outcomes.append(ReturnOutcome.REPLY)
        reply = finish(core, told(0), 60, stable=STABLE).result.tokens
        evict_all(core)
        result = run(core, [*told(0), *reply, *NEW])
        assert result.n_cached == (LENGTH + len(reply) - 1 if is_likely else STABLE)


@pytest.mark.parametrize("leaves", [True, False])
def test_the_end_of_a_reply_is_not_kept_where_no_turn_continues_from_one(leaves):
    with open_core(n_slots=1) as core:
        for _ in range(60):
            core.cache.returns.outcomes.append(ReturnOutcome.ELSEWHERE if leaves else ReturnOutcome.REPLY)
        reply = run(core, told(0), 20, stable=STABLE).tokens
        kinds = {node.checkpoint.kind for node in core.cache.tree.nodes() if node.checkpoint is not None}
        assert (CutKind.REPLY in kinds) is not leaves and CutKind.STABLE in kinds
        assert run(core, [*told(0), *reply, *NEW]).n_cached == LENGTH + len(reply) - 1, "the slot still stands there"


def test_eviction_knows_what_the_disk_has(tmp_path, memory):
    with kept_core(tmp_path, "qwen35", memory=memory, n_slots=1) as core:
        finish(core, told(0), 20, stable=STABLE)
        put_away(core)
        stable = next(n for n in core.cache.tree.nodes() if n.checkpoint and n.checkpoint.kind is CutKind.STABLE)
        assert core.cache.loader.load_s(stable, 1 << 20) is not None
        others = [n for n in core.cache.tree.nodes() if n.checkpoint and n.n_items < STABLE]
        assert all(core.cache.loader.load_s(node, 1 << 20) is None for node in others), (
            "the control: they were not written"
        )


def test_how_turns_go_on_after_replies_is_counted():
    with open_core(n_slots=1) as core:
        returns, prompt = core.cache.returns, told(0)
        reply = run(core, prompt, 20, stable=STABLE).tokens
        assert not returns.continues_replies
        run(core, [*prompt, *reply, *NEW], 20, stable=LENGTH + 25)
        assert returns.continues_replies and returns.outcomes.count(ReturnOutcome.REPLY) == 1
        for _ in range(2):
            run(core, [*prompt, *reply, *NEW][: LENGTH + 25] + text(60, 30), 20, stable=LENGTH + 50)
        assert returns.outcomes.count(ReturnOutcome.ELSEWHERE) >= 1 and not returns.continues_replies
