"""A sliding window is cut back in place while it still reaches back far enough: raw prompts that share a beginning are
reused without a checkpoint there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from everwarm.demo.tiny import TinySpec, plans, write_tiny
from support.drive import checkpoints, open_core, record_logits, run, text

N_SHARED = 200
NEAR = 0.02  # KV is f16, and what was read in other chunks differs in its last places


def prompts(n_shared: int = N_SHARED) -> tuple[list[int], list[int]]:
    shared = text(1, n_shared)
    return [*shared, *text(2, 30)], [*shared, *text(3, 40)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A model whose window holds a whole prompt, as those of real models do; the tiny one has 64 tokens."""
    path = tmp_path_factory.mktemp("wide") / "gemma3.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "SLIDING_WINDOW", 512)
        write_tiny(path, TinySpec(arch="gemma3", n_layers=8, width=64))
    return path


def cold_logits(prompt: list[int], path: Path | None) -> np.ndarray:
    with open_core("gemma3", path=path) as core:
        rows = record_logits(core)
        run(core, prompt, 4, use_cache=False)
        return np.array(rows)


def test_a_shared_beginning_is_reused_where_prompts_part(wide):
    first, second = prompts()
    with open_core("gemma3", path=wide) as core:
        assert core.model.n_swa == 512
        run(core, first)
        rows = record_logits(core)
        result = run(core, second)
        assert result.n_cached == N_SHARED and result.why.reason == "edited_at"
        assert N_SHARED in checkpoints(core), "the next one needs no window"
        cold = cold_logits(second, wide)
        assert np.abs(np.array(rows) - cold).max() < NEAR
        assert np.abs(np.array(rows) - cold_logits(first, wide)).max() > 10 * NEAR, "another prompt has other numbers"
        third = run(core, [*second[:N_SHARED], 9, 9, 9])
        assert third.n_cached == N_SHARED


def test_what_the_window_has_left_behind_is_read_again():
    """The control: a window that is cut where it does not reach back would answer from other tokens."""
    with open_core("gemma3") as core:
        n_shared = 100
        first, second = prompts(n_shared)
        long = [*first, *text(4, 4 * core.model.n_swa)][:1800]
        run(core, long)
        rows = record_logits(core)
        result = run(core, second)
        assert result.n_cached < n_shared
        assert np.abs(np.array(rows) - cold_logits(second, None)).max() < NEAR


def test_a_clean_checkpoint_a_few_tokens_before_is_better(wide):
    first, _ = prompts()
    with open_core("gemma3", path=wide) as core:
        run(core, first)
        again = run(core, first)
        assert again.checkpoint.kind == "near-end" and len(first) - 16 <= again.n_cached < len(first) - 1


@pytest.mark.parametrize("more", [{"deterministic": True}, {"namespace": "other"}])
def test_nobody_gets_what_must_be_read_cold_or_is_anothers(wide, more):
    first, second = prompts()
    with open_core("gemma3", path=wide) as core:
        run(core, first)
        assert run(core, second, **more).n_cached == 0
