"""The estimate of what a model takes, beside what libllama is measured to take."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everwarm.demo.tiny import ARCHITECTURES
from everwarm.engine import memory_plan
from everwarm.engine.memory_plan import measure
from everwarm.engine.settings import EngineSettings
from everwarm.router.catalog import memory_estimate
from everwarm.router.catalog.gguf_header import GgufHeader, read_header
from everwarm.router.catalog.memory_estimate import ModelShape, loaded_bytes, n_sequences, shape_of
from everwarm.state.policy import CheckpointParams
from support import ggufs
from support.models import tiny_model

MIB = 1 << 20
SETTINGS = EngineSettings(n_slots=4, n_ctx=65536, n_spares=0)


def header(**values: Any) -> GgufHeader:
    """Of an architecture called ``x``; two underscores are a dot."""
    named = {f"x.{key.replace('__', '.')}": value for key, value in values.items()}
    return GgufHeader({"general.architecture": "x"} | named, {}, 1)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_context_of_every_architecture_is_estimated_within_a_fifth(
    arch: str, kv_type: Any, open_tiny: Callable
) -> None:
    settings = replace(SETTINGS, cache_type_k=kv_type, cache_type_v=kv_type, flash_attention="on")
    n_seqs = settings.n_slots + 1
    measured = measure(open_tiny(arch, width=128), settings.context(0)).context_bytes(settings.n_ctx, n_seqs)
    shape = shape_of(read_header(tiny_model(arch, width=128)), 0, settings)
    assert measured > 5 * MIB
    assert 0.8 * measured < shape.context_bytes(settings.n_ctx, n_seqs, settings.n_ubatch) < 1.2 * measured


def test_weights_context_and_buffers_are_added_up() -> None:
    path = tiny_model("qwen35")
    found, n_file = read_header(path), path.stat().st_size
    shape = shape_of(found, n_file, SETTINGS)
    context = shape.context_bytes(SETTINGS.n_ctx, 5, SETTINGS.n_ubatch)
    assert n_file + context < loaded_bytes(found, n_file, SETTINGS) < n_file + context + 200 * MIB
    assert loaded_bytes(found, n_file, replace(SETTINGS, n_ctx=131072)) > loaded_bytes(found, n_file, SETTINGS)
    without = loaded_bytes(found, n_file, replace(SETTINGS, flash_attention="off"))
    assert without - loaded_bytes(found, n_file, SETTINGS) == shape.n_heads * 4 * 65536 * 512  # the scores


def test_spares_are_counted_as_the_engine_takes_them() -> None:
    hybrid, window, attention = ModelShape(10, state_bytes=100), ModelShape(10, 10, 64), ModelShape(10)
    auto = replace(SETTINGS, n_spares=None)
    assert memory_estimate.MAX_SPARES == memory_plan.MAX_SPARES
    assert [n_sequences(shape, auto) for shape in (hybrid, window, attention)] == [21, 5, 5]
    assert n_sequences(hybrid, replace(auto, n_spares=3)) == 8
    assert n_sequences(hybrid, replace(auto, checkpoints=CheckpointParams(max_checkpoints=0))) == 5


def test_layers_that_are_not_known_count_as_everything_they_could_be() -> None:
    common = {"block_count": 10, "embedding_length": 64, "attention__head_count": 4, "attention__head_count_kv": 2}
    state = {"ssm__inner_size": 128, "ssm__state_size": 16, "ssm__conv_kernel": 4, "ssm__group_count": 1}
    both = shape_of(header(**common, **state), 0, SETTINGS)
    assert both.kv_bytes_per_token == 10 * 2 * 2 * 16 * 2 and both.state_bytes == 10 * 4 * (3 * (128 + 32) + 128 * 16)
    sorted_out = shape_of(header(**common, **state, full_attention_interval=5), 0, SETTINGS)
    assert sorted_out.kv_bytes_per_token == both.kv_bytes_per_token // 5
    assert sorted_out.state_bytes == both.state_bytes * 4 // 5
    listed = shape_of(header(**common, **state, attention__recurrent_layers=(1, 0) * 5), 0, SETTINGS)
    assert (listed.kv_bytes_per_token, listed.state_bytes) == (both.kv_bytes_per_token // 2, both.state_bytes // 2)


def test_other_kinds_of_recurrence() -> None:
    common = {"block_count": 2, "embedding_length": 64, "attention__head_count": 4, "attention__head_count_kv": 0}
    assert shape_of(header(**common, wkv__head_size=16), 0, SETTINGS).state_bytes == 2 * 4 * 64 * (16 + 2)
    assert shape_of(header(**common, kda__head_dim=8), 0, SETTINGS).state_bytes == 2 * 4 * (3 * 3 * 4 * 8 + 8 * 8 * 4)
    assert shape_of(header(**common, shortconv__l_cache=3), 0, SETTINGS).state_bytes == 2 * 4 * 64 * 2


def test_windows_hold_a_window_per_sequence() -> None:
    common = {"block_count": 6, "embedding_length": 64, "attention__head_count": 4, "attention__sliding_window": 512}
    listed = shape_of(header(**common, attention__sliding_window_pattern=(True,) * 5 + (False,)), 0, SETTINGS)
    period = shape_of(header(**common, attention__sliding_window_pattern=6), 0, SETTINGS)
    assert listed == period and (listed.n_window, listed.window_bytes_per_token) == (512, 5 * 256)
    assert listed.context_bytes(65536, 5, 512) == 65536 * 256 + 5 * 256 * 3072
    unknown = shape_of(header(**common), 0, SETTINGS)  # without a pattern: everything, to be safe
    assert (unknown.n_window, unknown.kv_bytes_per_token) == (0, 6 * 256)


def test_layers_for_drafting_keep_nothing() -> None:
    common = {"embedding_length": 64, "attention__head_count": 4}
    assert shape_of(header(block_count=5, nextn_predict_layers=1, **common), 0, SETTINGS) == shape_of(
        header(block_count=4, **common), 0, SETTINGS
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"block_count": 4},
        {"embedding_length": 64},
        {"block_count": -1, "embedding_length": 64},
        {"block_count": 2**31, "embedding_length": 64},
        {"block_count": "many", "embedding_length": 64},
        {"block_count": 4, "embedding_length": (1, 2)},
    ],
)
def test_without_layers_the_estimate_is_cautious(values: dict) -> None:
    gib = 1 << 30
    taken = loaded_bytes(header(**values), 8 * gib, SETTINGS)
    assert taken == 8 * gib + 65536 * (memory_estimate.UNKNOWN_TOKEN_BYTES + 4 * 512) + 5 * gib


def test_absurd_numbers_give_a_number() -> None:
    absurd = header(
        block_count=1024,
        embedding_length=1 << 24,
        attention__head_count=(1 << 60,) * 3,
        attention__head_count_kv=1 << 24,
        attention__key_length=1 << 24,
        feed_forward_length=1 << 62,
        ssm__inner_size=1 << 24,
        ssm__state_size=1 << 24,
    )
    assert loaded_bytes(absurd, 0, SETTINGS) > 1 << 60


def test_a_large_header_is_read_in_a_moment(tmp_path: Path) -> None:
    """151k tokens and as many merges, as real files have: well under the time a request can wait."""
    tokens = [f"token {i}" for i in range(151_000)]
    values = ggufs.LLAMA | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": tokens}
    path = ggufs.write(tmp_path / "m.gguf", values)
    began = time.process_time()
    assert loaded_bytes(read_header(path), 0, SETTINGS) > 4 * 151_000 * 512
    assert time.process_time() - began < 2
