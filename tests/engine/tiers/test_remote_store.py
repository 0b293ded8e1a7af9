"""What one engine shares through a remote store another one goes on from: the same bytes, and never a wrong one."""

from __future__ import annotations

import pytest

from support.campaign import crossed
from support.drive import EVERY_KIND, GUARD, check, run, submit, text
from support.kept_cores import HISTORY, NEW, STABLE, fingerprint_of_slot, put_away, sharing

NEXT = [*HISTORY[:STABLE], *NEW]


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_another_engine_goes_on_from_the_store_with_the_same_bytes(url, arch):
    with sharing(url, arch) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)
        there = run(core, NEXT)
        expected = fingerprint_of_slot(core, len(NEXT) + 3)
    with sharing(url, arch) as core:
        again = run(core, NEXT, boundaries=(STABLE,))
        found = fingerprint_of_slot(core, len(NEXT) + 3)
        check(core)
        counts = core.cache.tiers.remote.counts
        assert counts.n_hits == 1 and counts.n_bytes_read > 0
    assert again.n_cached == STABLE and again.checkpoint is not None and again.checkpoint.how == "from remote"
    assert again.tokens == there.tokens and found == expected
    with sharing(url + "-elsewhere", arch) as core:
        assert run(core, NEXT, boundaries=(STABLE,)).n_cached == 0, "this test could not fail"
        assert core.cache.tiers.remote.counts.n_misses == 1


def test_a_prompt_without_boundaries_is_found_by_the_grid(url):
    with sharing(url) as core:
        first = run(core, HISTORY, max_tokens=8)
        put_away(core)
    with sharing(url) as core:
        again = run(core, [*HISTORY, *first.tokens, *NEW])
        assert len(HISTORY) + len(first.tokens) - again.n_cached <= GUARD
        assert again.checkpoint is not None and again.checkpoint.how == "from remote"


def test_a_system_prompt_is_shared_before_anybody_parts_there(url):
    with sharing(url) as core:
        run(core, HISTORY, boundaries=(300,), stable=STABLE)
        put_away(core)
    with sharing(url) as core:
        prompt = [*HISTORY[:300], *text(5, 100)]
        assert run(core, prompt, boundaries=(300, 380), stable=380).n_cached == 300


def test_where_conversations_part_is_shared(url):
    with sharing(url) as core:
        run(core, HISTORY, boundaries=(100, 400), stable=STABLE)
        run(core, [*HISTORY[:400], *text(8, 100)], boundaries=(100, 400), stable=480)
        put_away(core)
    with sharing(url) as core:
        assert run(core, [*HISTORY[:400], *text(9, 60)], boundaries=(100, 400)).n_cached == 400


@pytest.mark.parametrize(("arch", "n_spares", "wait_s"), crossed(EVERY_KIND, (0, 4), (0.0, 1e9)))
def test_a_turn_is_shared_while_others_run(url, arch, n_spares, wait_s, monkeypatch):
    monkeypatch.setattr("everwarm.engine.tiers.tier_writer.OVERDUE_S", wait_s)
    with sharing(url, arch, n_spares=n_spares) as core:
        submit(core, text(4, 30), 400)
        mine = submit(core, HISTORY, 4, stable=STABLE)
        while any(slot.request is mine for slot in core.slots) or mine in core.queue:
            core.step()
        for _ in range(4):
            core.step()
            core.tidy_overdue()
            check(core)
        assert core.has_work and core.cache.tiers.remote.flush()
        with sharing(url, arch) as other:
            found = run(other, NEXT, boundaries=(STABLE,)).n_cached
    assert found == (STABLE if wait_s == 0 else 0), "a turn is kept that nobody offered, or this test could not fail"


def test_namespaces_stay_apart(url):
    with sharing(url) as core:
        run(core, HISTORY, stable=STABLE, namespace="mine")
        put_away(core)
    with sharing(url) as core:
        assert run(core, NEXT, boundaries=(STABLE,), namespace="another").n_cached == 0
        assert run(core, NEXT, boundaries=(STABLE,), namespace="mine").n_cached == STABLE


def test_two_keys_in_one_store_share_nothing(tmp_path):
    keys = [tmp_path / name for name in ("one", "two")]
    for i, key in enumerate(keys):
        key.write_bytes(bytes([i]) * 32)
        key.chmod(0o600)
    url = f"file://{tmp_path}/store"
    with sharing(url, key=keys[0]) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)
    with sharing(url, key=keys[1]) as core:
        assert run(core, NEXT, boundaries=(STABLE,)).n_cached == 0
    with sharing(url, key=keys[0]) as core:
        assert run(core, NEXT, boundaries=(STABLE,)).n_cached == STABLE


def test_the_deeper_of_disk_and_store_is_taken_and_what_the_disk_has_is_not_fetched(url, tmp_path):
    with sharing(url, store=tmp_path / "one") as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)
    longer = [*NEXT, *text(6, 200)]
    with sharing(url, store=tmp_path / "two") as core:
        run(core, longer, boundaries=(STABLE,), stable=700)
        put_away(core)
        n_new = core.cache.tiers.remote.counts.n_bytes_written
    with sharing(url, store=tmp_path / "one") as core:
        again = run(core, [*longer[:700], *NEW], boundaries=(STABLE, 700))
        assert again.n_cached == 700 and again.checkpoint is not None and again.checkpoint.how == "from remote"
        assert core.cache.tiers.remote.counts.n_bytes_read == n_new, "what lies on disk was fetched again"
    with sharing(url, store=tmp_path / "one") as core:
        again = run(core, NEXT, boundaries=(STABLE,))
        assert again.n_cached == STABLE and again.checkpoint is not None and again.checkpoint.how == "from disk"


def test_what_is_there_is_not_written_again(url):
    with sharing(url) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)
        n_written = core.cache.tiers.remote.counts.n_bytes_written
        run(core, HISTORY, stable=STABLE)
        put_away(core)
        assert core.cache.tiers.remote.counts.n_bytes_written == n_written > 0
    with sharing(url) as core:
        run(core, HISTORY, stable=STABLE)  # without a hint where to look: it is read, and offered
        put_away(core)
        assert core.cache.tiers.remote.counts.n_bytes_written < n_written / 4, "objects were sent that were there"


def test_what_is_erased_is_taken_away(url):
    with sharing(url) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)
        core.cache.tiers.forget(core.slots[0].content, "", beyond=0)
        assert core.cache.tiers.remote.flush()
    with sharing(url) as core:
        assert run(core, NEXT, boundaries=(STABLE,)).n_cached == 0
