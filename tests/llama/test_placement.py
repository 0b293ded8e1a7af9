"""Where weights lie and how positions are encoded: every option reaches libllama, and a wrong name says what there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from everwarm.config import LoadMode, ModelOptions, RopeOptions
from everwarm.errors import BadRequest, ModelFileError
from everwarm.llama.context import Logits
from everwarm.llama.model import Model
from support.models import tiny_model
from support.steps import SLOT, open_context, say, text

PROMPT = text(40)


def logits(options: ModelOptions | None = None, **context: Any) -> Logits:
    with Model(tiny_model("llama", n_layers=2, width=64), options) as model, open_context(model, **context) as opened:
        return say(opened, SLOT, PROMPT)


@pytest.fixture(scope="module")
def usual() -> Logits:
    return logits()


@pytest.mark.parametrize("mode", get_args(LoadMode))
def test_however_a_file_is_read_the_numbers_are_the_same(mode: LoadMode, usual: Logits) -> None:
    assert np.array_equal(logits(ModelOptions(load_mode=mode)), usual)


def test_tensors_that_are_put_where_they_lie_anyway_change_nothing(usual: Logits) -> None:
    kept = ModelOptions(override_tensors=((r"attn_.*", "CPU"),), n_cpu_ffn=2, check_tensors=True)
    assert np.array_equal(logits(kept), usual)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (ModelOptions(override_tensors=(("attn", "GPU9"),)), "no buffer type 'GPU9'; this build has .*CPU"),
        (ModelOptions(devices=("?",)), r"no device '\?'; this build has"),
        (ModelOptions(override_tensors=(("(", "CPU"),)), "cannot be loaded"),
    ],
)
def test_a_wrong_name_says_what_there_is(options: ModelOptions, sentence: str) -> None:
    with pytest.raises(ModelFileError, match=sentence):
        logits(options)


@pytest.mark.parametrize(
    "rope",
    [
        RopeOptions(freq_base=5000.0),
        RopeOptions(freq_scale=0.5),
        RopeOptions("yarn", freq_scale=0.25, yarn_orig_ctx=256),
        RopeOptions("yarn", freq_scale=0.25, yarn_orig_ctx=256, yarn_ext_factor=0.5),
        RopeOptions("yarn", freq_scale=0.25, yarn_orig_ctx=256, yarn_beta_fast=8.0, yarn_beta_slow=2.0),
        RopeOptions(yarn_attn_factor=1.5),
    ],
    ids=RopeOptions.text,
)
def test_an_option_of_rope_changes_the_numbers_and_the_fingerprint(rope: RopeOptions, usual: Logits) -> None:
    assert not np.array_equal(logits(rope=rope), usual)
    assert rope.text() not in ("", replace(rope, freq_base=1.0).text())


def test_without_options_rope_is_the_files() -> None:
    assert RopeOptions().text() == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"freq_base": 0.0},
        {"freq_scale": -1.0},
        {"freq_base": float("nan")},
        {"yarn_orig_ctx": 0},
        {"yarn_beta_fast": -2.0},
    ],
)
def test_a_bad_value_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="give"):
        RopeOptions(**wrong)
