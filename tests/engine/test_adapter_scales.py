"""Scales of LoRA adapters per request: each reply is as if the model had been opened with them, also beside others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from everwarm.config import ModelOptions
from everwarm.engine.core import Core
from everwarm.engine.scheduling.scheduler import ADAPTERS_S, AdapterTurns
from everwarm.errors import BadRequest
from everwarm.state.lineage import adapted, is_volatile, owner_of, unverified
from support.drive import check, drain, open_core, run, submit, text, tidy
from support.lora import WIDTH, write_lora

PROMPT = text(7, 120)
N = 12


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_lora(tmp_path_factory.mktemp("lora") / "lora.gguf"))


def opened(lora: str, scale: float, **more: object) -> Iterator[Core]:
    return open_core(width=WIDTH, model=ModelOptions(lora=((lora, scale),)), **more)  # type: ignore[return-value]


def first_row(core: Core, **more: object) -> np.ndarray:
    """The logits after the prompt, whole."""
    request = submit(core, PROMPT, 1, deterministic=True, **more)  # alone in the context: the same bits
    rows: list[np.ndarray] = []
    while core.has_work:
        core.step()
        rows += [logits.copy() for _, logits in core.keeper.ends.values()]
        core.keep_ends()
        check(core)
    assert request.n_reply == 1
    return rows[0]


@pytest.mark.parametrize("scale", [1.0, 0.5, -0.7])
def test_a_requests_scale_gives_the_very_numbers_of_a_model_opened_with_it(lora: str, scale: float) -> None:
    with opened(lora, scale) as core:
        wanted = first_row(core)
    for start in (0.0, 0.25):
        with opened(lora, start) as core:
            plain = first_row(core)
            assert np.array_equal(first_row(core, lora=(scale,)), wanted)
            assert not np.array_equal(plain, wanted), "the adapter changes nothing: this test could not fail"
            assert np.array_equal(first_row(core, use_cache=False), plain)  # and back again


def test_nothing_is_reused_across_scales_and_all_within_one(lora: str) -> None:
    with opened(lora, 1.0, n_spares=4) as core:
        assert run(core, PROMPT, N).n_cached == 0
        assert run(core, PROMPT, N, lora=(0.5,)).n_cached == 0
        assert run(core, PROMPT, N, lora=(0.25,)).n_cached == 0
        for same in ({}, {"lora": (1.0,)}, {"lora": (0.5,)}, {"lora": (0.25,)}):
            assert run(core, PROMPT, N, **same).n_cached >= len(PROMPT) - 16, same


def test_requests_with_other_scales_at_once_answer_as_each_does_alone(lora: str) -> None:
    every = (None, (0.0,), (0.5,), (1.0,))
    with opened(lora, 0.25, n_slots=4) as core:
        alone = [run(core, PROMPT, N, lora=scales, use_cache=False).tokens for scales in every]
        requests = [submit(core, PROMPT, N, lora=scales, use_cache=False) for scales in every]
        together = drain(core)
        assert [together[request.id].tokens for request in requests] == alone
    assert len(set(alone)) > 1, "the scales change nothing: this test could not fail"


def test_what_is_read_with_other_scales_is_never_written(lora: str, tmp_path: Path) -> None:
    from everwarm.engine.settings import StoreSettings

    with opened(lora, 1.0, store=StoreSettings(str(tmp_path))) as core:
        run(core, PROMPT, N, lora=(0.5,), namespace="n")
        tidy(core)
        assert core.cache.tree.root(adapted("n", (0.5,))).is_volatile
        core.put_away()
        assert not list(tmp_path.rglob("*.ew"))
        run(core, PROMPT, N, namespace="n")
        tidy(core)
        core.put_away()
        assert list(tmp_path.rglob("*.ew")), "this test could not fail"


def test_as_many_scales_as_adapters(lora: str) -> None:
    with opened(lora, 1.0) as core, pytest.raises(BadRequest, match="lora has 2 scales; this model has 1 adapters"):
        submit(core, PROMPT, lora=(1.0, 2.0))
    with opened(lora, 1.0) as core, pytest.raises(BadRequest, match="not within"):
        submit(core, PROMPT, lora=(float("nan"),))
    with open_core(width=WIDTH) as core, pytest.raises(BadRequest, match="0 adapters"):
        submit(core, PROMPT, lora=(1.0,))


def test_a_namespace_of_scales_belongs_to_its_owner() -> None:
    for name in (adapted("n", (0.5,)), unverified("n", "d")):
        assert owner_of(name) == "n" and is_volatile(name)
    assert not is_volatile("n") and adapted("n", (0.5,)) != adapted("n", (0.25,))


# turns


def test_a_group_runs_on_until_its_turn_is_over_and_every_group_has_one() -> None:
    turns = AdapterTurns()
    running = [None, (0.5,), (0.0,)]
    seen = [turns.choose(running, i * ADAPTERS_S / 4) for i in range(1, 60)]
    changes = [scales for scales, _ in itertools.groupby(seen)]
    assert set(changes[:3]) == set(running) and changes[:3] == changes[3:6]  # in rotation
    assert all(n >= 4 for n in [len(list(group)) for _, group in itertools.groupby(seen)][1:-1])


def test_one_group_alone_needs_no_turns() -> None:
    turns = AdapterTurns()
    assert [turns.choose([(0.5,)], float(now)) for now in range(5)] == [(0.5,)] * 5
    assert turns.choose([], 9.0) == (0.5,)
    assert turns.choose([None], 9.1) is None
