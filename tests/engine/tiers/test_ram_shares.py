"""What one client keeps cannot push out what another keeps."""

from __future__ import annotations

import pytest

from everwarm.engine.core import Core
from everwarm.engine.settings import EngineSettings, StoreSettings
from everwarm.errors import BadRequest
from support.drive import check, open_core, run, text, tidy

MIB = 1 << 20
QUIET = text(1, 600)
NEXT = [*QUIET[:580], *text(2, 40)]


def one_turn(core: Core, seed: int, namespace: str) -> None:
    run(core, text(seed, 600), stable=580, namespace=namespace)
    tidy(core)


def kept(core: Core, namespace: str) -> int:
    return core.cache.tree.root(namespace).ram_bytes


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_loud_neighbour_takes_no_more_than_its_share_of_ram(share):
    with open_core(ram_bytes=4 * MIB, namespace_share=share) as core:
        run(core, QUIET, stable=580, namespace="quiet")
        tidy(core)
        for seed in range(10, 24):
            one_turn(core, seed, "loud")
            check(core)
            assert kept(core, "loud") <= share * 4 * MIB and core.cache.tree.ram_bytes <= 4 * MIB
        n_cached = run(core, NEXT, namespace="quiet").n_cached
    assert n_cached == (580 if share < 1 else 0), "with no shares the loud one must win, or this test could not fail"


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_loud_neighbour_takes_no_more_than_its_share_of_the_disk(tmp_path, share):
    store = StoreSettings(str(tmp_path / "states"), 4 * MIB, restore_policy="always")
    with open_core(store=store, namespace_share=share) as core:
        run(core, QUIET, stable=580, namespace="quiet")
        core.put_away()
        for seed in range(10, 24):
            one_turn(core, seed, "loud")
        core.put_away()
        assert core.cache.tiers.disk.is_on
        assert core.cache.tiers.disk.n_bytes <= 4 * MIB
    with open_core(store=store, namespace_share=share) as core:
        n_cached = run(core, NEXT, namespace="quiet").n_cached
    assert n_cached == (580 if share < 1 else 0), "with no shares the loud one must win, or this test could not fail"


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_is_a_share(share):
    with pytest.raises(BadRequest, match="namespace_share"):
        EngineSettings(namespace_share=share)
