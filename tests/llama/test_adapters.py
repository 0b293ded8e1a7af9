"""LoRA adapters: they change what the model says, by their scale, and belong to its fingerprint."""

from pathlib import Path

import numpy as np
import pytest

from everwarm.config import ContextOptions, ModelOptions
from everwarm.errors import BadRequest, ModelFileError
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.types import SeqId
from support.lora import WIDTH, write_lora
from support.models import tiny_model


def logits(*lora: tuple[str, float]) -> np.ndarray:
    options = ModelOptions(lora=lora)
    with (
        Model(tiny_model("qwen35", width=WIDTH), options) as model,
        Context(model, ContextOptions(n_ctx=256)) as context,
    ):
        context.decode([Feed(SeqId(0), np.arange(40, dtype=np.int32), context.end(SeqId(0)), wants_logits=True)])
        return context.logits(0).copy()


def test_an_adapter_changes_the_logits_by_its_scale(tmp_path: Path) -> None:
    path = str(write_lora(tmp_path / "lora.gguf"))
    plain, off, half, whole = logits(), logits((path, 0.0)), logits((path, 0.5)), logits((path, 1.0))
    np.testing.assert_array_equal(plain, off)
    assert np.abs(plain - half).max() > 1e-3
    assert np.abs(half - whole).max() > 1e-3


def test_the_fingerprint_knows_adapters_and_scales(tmp_path: Path) -> None:
    path = str(write_lora(tmp_path / "lora.gguf"))
    prints = set()
    for lora in ((), ((path, 1.0),), ((path, 0.5),)):
        with Model(tiny_model("qwen35", width=WIDTH), ModelOptions(lora=lora)) as model:
            prints.add(model.fingerprint)
    assert len(prints) == 3


def test_an_adapter_for_another_model_is_refused(tmp_path: Path) -> None:
    path = str(write_lora(tmp_path / "lora.gguf", arch="llama"))
    with pytest.raises(ModelFileError, match="is not a LoRA for"):
        Model(tiny_model("qwen35", width=WIDTH), ModelOptions(lora=((path, 1.0),)))


def test_a_missing_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot open"):
        Model(tiny_model("qwen35", width=WIDTH), ModelOptions(lora=((str(tmp_path / "no.gguf"), 1.0),)))


def test_placement_that_makes_no_difference_without_a_gpu_is_accepted() -> None:
    options = ModelOptions(tensor_split=(3.0, 1.0), n_cpu_moe=2)
    with Model(tiny_model("qwen35", width=WIDTH), options) as model:
        assert model.n_layers == 8


def test_bad_scales_and_shares_are_refused() -> None:
    with pytest.raises(BadRequest, match="scale"):
        ModelOptions(lora=(("a.gguf", float("nan")),))
    with pytest.raises(BadRequest, match="tensor_split"):
        ModelOptions(tensor_split=(-1.0,))
