"""What a new process finds of an old one's conversations: as much as was kept, the same bytes, and never a wrong one."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from everwarm.engine import core as core_module
from everwarm.engine.core import Core
from everwarm.engine.settings import StoreSettings
from everwarm.engine.tiers import loader as fetch_module
from everwarm.engine.tiers import lower_tiers
from everwarm.engine.tiers.lower_tiers import LowerTiers
from support.drive import EVERY_KIND, GUARD, HYBRIDS, check, open_core, run, text
from support.kept_cores import HISTORY, NEW, STABLE, files, fingerprint_of_slot, kept_core, put_away

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
ARCHITECTURES = tuple(dict.fromkeys((*HYBRIDS, *EVERY_KIND)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_new_process_goes_on_where_the_old_one_stopped_with_the_same_bytes(tmp_path, arch):
    with kept_core(tmp_path, arch) as core:
        first = run(core, HISTORY, stable=STABLE)
        put_away(core)
        next_prompt = [*HISTORY[:STABLE], *NEW]
        there = run(core, next_prompt)
        expected = fingerprint_of_slot(core, len(next_prompt) + 3)
    with kept_core(tmp_path, arch) as core:
        again = run(core, next_prompt)
        found = fingerprint_of_slot(core, len(next_prompt) + 3)
        check(core)
    assert again.n_cached == STABLE and again.checkpoint is not None and again.checkpoint.how == "from disk"
    assert first.n_cached == 0 and again.tokens == there.tokens
    assert found == expected
    with kept_core(tmp_path / "elsewhere", arch) as core:
        assert run(core, next_prompt).n_cached == 0, "this test could not fail"


def test_a_wrong_state_on_disk_would_be_seen(tmp_path):
    """The negative control of the test above: bytes that pass every check but belong to another prompt."""
    with kept_core(tmp_path) as core:
        run(core, HISTORY, stable=STABLE)
        run(core, text(9, 600), stable=STABLE)
        mine = next(n for n in core.cache.tree.nodes() if n.n_items == STABLE and n.path.codes[0] == HISTORY[0])
        other = next(n for n in core.cache.tree.nodes() if n.n_items == STABLE and n.path.codes[0] != HISTORY[0])
        put_away(core)
        prompt = [*HISTORY[:STABLE], *NEW]
        run(core, prompt)
        right = fingerprint_of_slot(core, len(prompt) + 3)
        assert mine.checkpoint is not None and other.checkpoint is not None
        other_state = other.checkpoint.state
    with kept_core(tmp_path) as core:
        kept = core.cache.tiers.disk.reading

        class Liar:
            def __init__(self, reader):
                self.header, self._reader = reader.header, reader

            def read(self, name, *_place):
                return other_state if name == "state" else self._reader.read(name)

        @contextmanager
        def lying(name):
            with kept(name) as reader:
                yield Liar(reader)

        core.cache.tiers.disk.reading = lying
        assert run(core, prompt).n_cached == STABLE
        assert fingerprint_of_slot(core, len(prompt) + 3) != right


@pytest.mark.parametrize("arch", HYBRIDS)
@pytest.mark.parametrize("knows_where_it_ends", [True, False])
def test_another_conversation_goes_on_from_the_system_prompt_after_a_restart(tmp_path, arch, knows_where_it_ends):
    """The end of the first message is kept once, though no turn of the conversation itself will go on from there."""
    system, boundaries = HISTORY[:400], (400,) if knows_where_it_ends else ()
    with kept_core(tmp_path, arch) as core:
        run(core, HISTORY, stable=STABLE, boundaries=boundaries)
        put_away(core)
        run(core, [*HISTORY, *NEW], stable=len(HISTORY), boundaries=boundaries)
        put_away(core)
    assert len(files(tmp_path, "state")) == 2 + knows_where_it_ends, "once, not with every turn"
    with kept_core(tmp_path, arch) as core:
        n_cached = run(core, [*system, *text(9, 100)], boundaries=boundaries).n_cached
        check(core)
    assert n_cached == (400 if knows_where_it_ends else 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_where_conversations_parted_another_one_goes_on_after_a_restart(tmp_path, arch):
    document = HISTORY[:500]
    with kept_core(tmp_path, arch) as core:
        for seed in (11, 12, 13):  # the second one has its state taken where it parts from the first
            run(core, [*document, *text(seed, 60)], stable=555)
            put_away(core)
    with kept_core(tmp_path, arch) as core:
        assert run(core, [*document, *text(14, 60)]).n_cached == 500
        check(core)


@pytest.mark.parametrize("is_hinted", [True, False])
def test_a_turn_writes_the_new_kv_and_one_state(tmp_path, is_hinted):
    """Also where nobody says what is stable: a reply that was left aside is no other conversation."""
    sizes = []
    with kept_core(tmp_path, n_ctx=4096, n_spares=4) as core:
        prompt = list(HISTORY)
        for turn in range(5):
            run(core, prompt, stable=len(prompt) - 20 if is_hinted else None)
            put_away(core)
            sizes.append(core.cache.tiers.disk.counts.n_bytes_written)
            prompt += text(100 + turn, 200)
        states = files(tmp_path, "state")
        shape = core.sizes.shape
    assert len(states) == 5
    per_turn = np.diff(sizes)
    new_kv, state = 200 * shape.kv_bytes_per_token, shape.state_bytes
    pages = 64 << 10  # headers, padding and the items themselves
    assert (per_turn <= 1.1 * (new_kv + state) + pages).all(), (per_turn.tolist(), new_kv, state)


def test_nothing_is_written_twice(tmp_path):
    with kept_core(tmp_path) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)
        n = core.cache.tiers.disk.counts.n_written
        put_away(core)
        run(core, HISTORY, stable=STABLE)
        put_away(core)
        assert core.cache.tiers.disk.counts.n_written == n > 0


def test_a_conversation_that_lost_its_slot_before_idle_work_is_kept_too(tmp_path):
    with kept_core(tmp_path, n_slots=1) as core:
        run(core, HISTORY, stable=STABLE)
        run(core, text(5, 300))
        core.cache.tiers.flush()
    with kept_core(tmp_path) as core:
        assert run(core, [*HISTORY[:STABLE], *NEW]).n_cached == STABLE


def test_two_branches_share_what_they_have_in_common(tmp_path):
    kv_bytes = []
    with kept_core(tmp_path) as core:
        for seed in (21, 22):
            prompt = [*HISTORY[:STABLE], *text(seed, 100)]
            run(core, prompt, boundaries=(STABLE,), stable=len(prompt) - 5)
            put_away(core)
            kv_bytes.append(sum(path.stat().st_size for path in files(tmp_path, "kv")))
    with kept_core(tmp_path, n_slots=1) as core:
        for seed in (21, 22):
            prompt = [*HISTORY[:STABLE], *text(seed, 100)]
            assert run(core, [*prompt[:-5], *NEW]).n_cached == len(prompt) - 5
    assert kv_bytes[1] < 1.5 * kv_bytes[0]


@pytest.mark.parametrize("kind", ["state", "kv"])
def test_a_damaged_object_is_a_miss_and_goes(tmp_path, kind):
    with kept_core(tmp_path) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)
        expected = run(core, [*HISTORY[:STABLE], *NEW], use_cache=False).tokens
    victim = files(tmp_path, kind)[0]
    data = bytearray(victim.read_bytes())
    data[-5000] ^= 1
    victim.write_bytes(data)
    with kept_core(tmp_path) as core:
        result = run(core, [*HISTORY[:STABLE], *NEW])
        assert core.cache.tiers.disk.counts.n_damaged == 1
        assert not victim.exists()
    assert result.n_cached == 0 and result.tokens == expected


def test_other_settings_and_other_namespaces_are_misses(tmp_path):
    with kept_core(tmp_path) as core:
        run(core, HISTORY, stable=STABLE, namespace="a")
        put_away(core)
    prompt = [*HISTORY[:STABLE], *NEW]
    with kept_core(tmp_path, cache_type_k="q8_0") as core:
        assert run(core, prompt, namespace="a").n_cached == 0
    with kept_core(tmp_path) as core:
        assert run(core, prompt, namespace="b").n_cached == 0
        assert run(core, prompt, namespace="a").n_cached == STABLE


def test_where_reading_again_is_faster_it_is_read_again(tmp_path):
    with kept_core(tmp_path) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)
    for policy, n_cached in (("auto", 0), ("always", STABLE)):
        with kept_core(tmp_path, policy=policy) as core:
            core.speed.seconds_per_token = 1e-12
            assert run(core, [*HISTORY[:STABLE], *NEW]).n_cached == n_cached
    with kept_core(tmp_path, policy="auto") as core:
        core.speed.seconds_per_token = 10.0
        assert run(core, [*HISTORY[:STABLE], *NEW]).n_cached == STABLE


def test_a_directory_that_another_engine_holds_is_left_alone(tmp_path):
    with kept_core(tmp_path) as core:
        store = StoreSettings(str(tmp_path / "states"))
        with open_core(store=store) as second:
            assert not second.cache.tiers.disk.is_on
            run(second, HISTORY, stable=STABLE)
            second.put_away()
        run(core, HISTORY, stable=STABLE)
        put_away(core)
        assert files(tmp_path)


def idle_until(core: Core, condition) -> None:
    for _ in range(6000):
        if condition():
            return
        assert core.nap_s is not None, "it would sleep until somebody asks"
        while core.tidy():
            pass
        time.sleep(0.01)
    raise AssertionError("it did not come about")


def test_a_directory_is_taken_as_soon_as_the_other_engine_has_gone_and_the_turn_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(lower_tiers, "RETRY_S", (0.02, 0.05))
    store = StoreSettings(str(tmp_path / "states"), restore_policy="always")
    with open_core(store=store) as second:
        with kept_core(tmp_path / "other"):
            pass
        assert second.cache.tiers.degraded is None
    with contextlib.ExitStack() as first:
        first.enter_context(kept_core(tmp_path))
        with open_core(store=store) as second:
            assert (
                "another Everwarm" in second.cache.tiers.degraded
                and second.cache.tier_writer.stats()["disk_is_degraded"] == 1
            )
            run(second, HISTORY, stable=STABLE)
            while second.tidy():
                pass
            assert not files(tmp_path)
            first.close()
            idle_until(second, lambda: second.cache.tiers.degraded is None and second.nap_s is None)
            assert second.cache.tier_writer.stats()["disk_is_degraded"] == 0
            put_away(second)
    assert files(tmp_path, "state")
    with kept_core(tmp_path) as core:
        assert run(core, [*HISTORY[:STABLE], *NEW]).n_cached == STABLE


def test_a_disk_that_refused_something_heals_although_nobody_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(lower_tiers, "RETRY_S", (0.02, 0.05))
    with kept_core(tmp_path) as core:
        core.cache.tiers.disk._fail("written", OSError("for a test"))
        core.cache.tiers.after_all(lambda: None)  # whatever comes next
        assert core.cache.tiers.degraded
        idle_until(core, lambda: core.cache.tiers.degraded is None)


@pytest.mark.parametrize("most", [256, 0])
def test_many_states_on_disk_are_searched_away_from_the_steps(tmp_path, monkeypatch, most):
    monkeypatch.setattr(fetch_module, "MAX_LENGTHS_HERE", most)
    with kept_core(tmp_path) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)
    with kept_core(tmp_path) as core:
        disk, threads = core.cache.tiers.disk, []
        real = disk.find
        disk.find = lambda *asked: threads.append(threading.current_thread()) or real(*asked)
        assert run(core, [*HISTORY[:STABLE], *NEW]).n_cached == STABLE
        assert [thread is threading.main_thread() for thread in threads] == [most == 256]


def test_a_small_disk_keeps_within_its_budget_and_what_is_left_is_right(tmp_path):
    with kept_core(tmp_path, disk_bytes=1 << 20) as core:
        for seed in range(8):
            run(core, text(seed, 400), stable=380)
            put_away(core)
            disk = core.cache.tiers.disk
            assert disk.n_bytes == sum(path.stat().st_size for path in files(tmp_path)) <= 1 << 20
        assert disk.counts.n_evicted > 0
    with kept_core(tmp_path, n_slots=1) as core:
        warm = [run(core, [*text(seed, 400)[:380], *NEW]).n_cached for seed in range(8)]
    assert set(warm) <= {0, 380} and 380 in warm


def test_a_branch_inside_an_older_segment_uses_only_its_part_of_it(tmp_path):
    branch = [*HISTORY[:590], *text(31, 60)]
    with kept_core(tmp_path) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)
        run(core, branch, stable=640)
        put_away(core)
    with kept_core(tmp_path) as core:
        assert run(core, [*branch[:640], *NEW]).n_cached == 640
        assert core.cache.tiers.disk.counts.n_damaged == 0


@pytest.mark.parametrize("arch", EVERY_KIND)
@pytest.mark.parametrize("seed", range(12 if CAMPAIGN else 2))
def test_random_conversations_with_restarts_are_found_as_far_as_they_were_kept(tmp_path, arch, seed):
    rng = np.random.default_rng(seed)
    kept: list[list[int]] = []  # what was promised: prompts up to their stable points
    prompts = [text(int(rng.integers(200)), int(rng.integers(40, 300)))]
    for life in range(3):
        with kept_core(tmp_path, arch, n_slots=int(rng.integers(1, 3)), n_spares=int(rng.integers(0, 3))) as core:
            for turn in range(4):
                old = prompts[int(rng.integers(len(prompts)))]
                cut = int(rng.integers(1, len(old))) if rng.random() < 0.4 else len(old)
                prompt = [*old[:cut], *text(int(rng.integers(200)), int(rng.integers(1, 120)))]
                promised = max((len(k) for k in kept if k == prompt[: len(k)] and len(k) < len(prompt)), default=0)
                stable = max(1, len(prompt) - int(rng.integers(1, 12)))
                result = run(core, prompt, max_tokens=int(rng.integers(1, 6)), stable=stable)
                assert result.n_cached >= promised - GUARD, (life, turn)
                prompts.append(prompt)
                if rng.random() < 0.7:
                    put_away(core)
                    kept.append(prompt[:stable])
            put_away(core)
            kept.append(prompt[:stable])
            assert core.cache.tiers.disk.counts.n_damaged == 0


@pytest.mark.parametrize("opens", [True, False])
def test_a_turn_that_ends_before_the_disk_has_opened_is_written_all_the_same(tmp_path, monkeypatch, opens):
    """The digest of a large model takes its time; whoever stops right after the first answer loses nothing."""
    may_open, real = threading.Event(), LowerTiers._open
    monkeypatch.setattr(lower_tiers, "OPEN_S", 0.01)
    monkeypatch.setattr(core_module, "OPEN_WAIT_S", 5.0 if opens else 0.01)

    def late(self: LowerTiers, fingerprint: str) -> None:
        may_open.wait(20)
        real(self, fingerprint)

    monkeypatch.setattr(LowerTiers, "_open", late)
    store = StoreSettings(str(tmp_path / "states"), restore_policy="always")
    with open_core(store=store) as core:
        run(core, HISTORY, stable=STABLE)
        while core.tidy():
            pass
        assert core.nap_s, "it waits for the disk, and looks again"
        if opens:
            threading.Timer(0.2, may_open.set).start()
        core.put_away() if opens else core.cache.ram.flush()
        may_open.set()
    assert bool(files(tmp_path, "state")) is opens
