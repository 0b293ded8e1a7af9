"""Whose states an engine may use: every parameter is decided, and what is decided is what happens."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from everwarm.config import ContextOptions, ModelOptions, RopeOptions
from everwarm.engine import fingerprint as table
from everwarm.engine.fingerprint import ParameterRow, decided, state_fingerprint
from everwarm.engine.settings import EngineSettings
from everwarm.engine.verify import find_model, replay_states
from everwarm.errors import ContextTooBig, ModelFileError
from everwarm.llama import abi
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context, open_context
from everwarm.llama.media import mtmd_abi
from everwarm.llama.model import Model, fingerprint_of, rope_limit_of
from everwarm.state.tools.inventory import folders, read_folder
from support.drive import open_core, run, text
from support.kept_cores import kept_core, put_away
from support.models import tiny_model

LIMIT = 1024
PROMPT = text(5, 300)


def long_rope() -> Path:
    return tiny_model("llama", long_rope=LIMIT)


# every parameter is decided


def names(struct: type[ctypes.Structure]) -> set[str]:
    return {field[0] for field in struct._fields_}


@pytest.mark.parametrize(
    ("decisions", "fields"),
    [
        pytest.param(table.MODEL_PARAMS, names(abi.ModelParams), id="llama_model_params"),
        pytest.param(table.CONTEXT_PARAMS, names(abi.ContextParams), id="llama_context_params"),
        pytest.param(table.MEDIA_PARAMS, names(mtmd_abi.MediaParams), id="mtmd_context_params"),
        pytest.param(table.MODEL_OPTIONS, {f.name for f in dataclasses.fields(ModelOptions)}, id="ModelOptions"),
        pytest.param(table.CONTEXT_OPTIONS, {f.name for f in dataclasses.fields(ContextOptions)}, id="ContextOptions"),
        pytest.param(
            table.ENGINE_SETTINGS,
            {f.name for f in dataclasses.fields(EngineSettings)} - table.CONTEXT_OPTIONS.keys(),
            id="EngineSettings",
        ),
    ],
)
def test_every_parameter_is_decided_and_nothing_else_is(
    decisions: Mapping[str, ParameterRow], fields: set[str]
) -> None:
    assert decisions.keys() - fields == set(), "decided, and not there any more"
    assert fields - decisions.keys() == set(), "there, and not decided: say in engine/fingerprint.py what it changes"
    assert all(row.why for row in decisions.values())


# what is decided is what happens

OTHER_MODEL = ModelOptions(
    n_gpu_layers=3,
    load_mode="none",
    tensor_split=(1.0, 2.0),
    n_cpu_moe=2,
    split_mode="row",
    main_gpu=1,
    devices=("GPU1",),
    override_tensors=(("attn_q", "CPU"),),
    n_cpu_ffn=1,
    repack=False,
    no_host=True,
    check_tensors=True,
)
OTHER_CONTEXT = ContextOptions(
    2048, 512, 128, 3, 2, 2, 1, "q8_0", "f32", "off", RopeOptions("linear", freq_scale=0.5), False, False, "q8_0"
)


def handed_over(monkeypatch: pytest.MonkeyPatch, model: Model, function: str, act: object) -> ctypes.Structure:
    """The struct that libllama would have got."""
    taken: list[ctypes.Structure] = []

    def take(_first: object, params: ctypes.Structure) -> None:
        taken.append(type(params).from_buffer_copy(params))

    with monkeypatch.context() as patch:
        patch.setattr(model.lib, function, take)
        with pytest.raises((ModelFileError, ContextTooBig)):
            act()
    return taken[0]


def changed(found: ctypes.Structure, default: ctypes.Structure) -> set[str]:
    def plain(value: object) -> object:
        return ctypes.cast(value, ctypes.c_void_p).value if isinstance(value, abi.PROGRESS_CALLBACK) else value

    fields = names(type(found))
    return {name for name in fields if plain(getattr(found, name)) != plain(getattr(default, name))}


def free(decisions: Mapping[str, ParameterRow]) -> set[str]:
    return {name for name, row in decisions.items() if row.decision != "fixed"}


def test_a_fixed_parameter_of_the_model_is_libllamas_default_whatever_is_asked(open_tiny, monkeypatch) -> None:
    model = open_tiny("qwen35")
    found = handed_over(
        monkeypatch,
        model,
        "model_load_from_file",
        lambda: Model(model.path, dataclasses.replace(OTHER_MODEL, devices=())),
    )
    differ = changed(found, model.lib.model_default_params())
    assert differ <= free(table.MODEL_PARAMS)
    assert {"n_gpu_layers", "load_mode", "tensor_split", "tensor_buft_overrides"} <= differ, "this test could not fail"


def test_a_fixed_parameter_of_the_context_has_one_value_whatever_is_asked(open_tiny, monkeypatch) -> None:
    model = open_tiny("qwen35")
    found = handed_over(monkeypatch, model, "init_from_model", lambda: open_context(model, OTHER_CONTEXT, 4))
    differ = changed(found, model.lib.context_default_params())
    assert differ - free(table.CONTEXT_PARAMS) == {"swa_full", "kv_unified"}
    assert (found.swa_full, found.kv_unified) == (False, True)
    assert {"n_ctx", "n_threads", "type_k", "flash_attn_type"} <= differ, "this test could not fail"


@pytest.mark.parametrize("rope_limit", [None, LIMIT])
@pytest.mark.parametrize("name", sorted(table.CONTEXT_OPTIONS))
def test_an_option_of_the_context_changes_the_fingerprint_where_it_matters_only(name: str, rope_limit: int | None):
    options = ContextOptions(n_ctx=512, n_threads=1, n_threads_batch=2)
    other = dataclasses.replace(options, **{name: getattr(OTHER_CONTEXT, name)})
    assert other != options
    differs = state_fingerprint("m", options, rope_limit, {}) != state_fingerprint("m", other, rope_limit, {})
    is_in = table.CONTEXT_OPTIONS[name].decision == "in the fingerprint"
    assert differs is (is_in and (name != "n_ctx" or rope_limit is not None))


@pytest.mark.parametrize("name", sorted(table.MODEL_OPTIONS.keys() - {"lora"}))
def test_where_weights_lie_is_not_in_the_fingerprint(name: str) -> None:
    path, other = tiny_model("qwen35"), ModelOptions(**{name: getattr(OTHER_MODEL, name)})
    assert other != ModelOptions()
    assert table.MODEL_OPTIONS[name].decision != "in the fingerprint"
    assert fingerprint_of(path, other) == fingerprint_of(path, ModelOptions())


def test_adapters_their_scales_and_their_order_are_in_the_fingerprint(tmp_path: Path) -> None:
    path = tiny_model("qwen35")
    a, b = (str(tmp_path / name) for name in "ab")
    for file in (a, b):
        Path(file).write_text(file)
    every = [
        (),
        ((a, 1.0),),
        ((b, 1.0),),
        ((a, 0.5),),
        ((a, 1.0), (b, 1.0)),
        ((b, 1.0), (a, 1.0)),
        ((a, 1.0), (a, 1.0)),
    ]
    assert len({fingerprint_of(path, ModelOptions(lora=lora)) for lora in every}) == len(every)


def test_an_ordinary_engine_is_recognised_by_the_text_it_always_had() -> None:
    """Folders that were written before are found again."""
    assert (
        state_fingerprint("m", ContextOptions(), None, {"HOME": "/", "OMP_NUM_THREADS": "2"})
        == "m|f16|f16|auto|unified"
    )


# the environment


@pytest.mark.parametrize(
    ("variable", "value", "cache_type", "matters"),
    [
        ("LLAMA_ATTN_ROT_DISABLE", "1", "q8_0", True),
        ("LLAMA_ATTN_ROT_DISABLE", " 12x", "q8_0", True),
        ("LLAMA_ATTN_ROT_DISABLE", "0", "q8_0", False),
        ("LLAMA_ATTN_ROT_DISABLE", "yes", "q8_0", False),
        ("LLAMA_ATTN_ROT_DISABLE", "1", "f16", False),
        ("GGML_CUDA_MMQ_PREC", "f16", "f16", True),
        ("GGML_OF_ANOTHER_BACKEND", "1", "f16", True),
        ("LLAMA_NEW_SWITCH", "1", "f16", True),
        ("LLAMA_ARG_CTX_SIZE", "1", "f16", False),
        ("GGML_NO_BACKTRACE", "1", "f16", False),
        ("GGML_SCHED_DEBUG", "2", "f16", False),
        ("PATH", "/bin", "f16", False),
    ],
)
def test_a_variable_is_in_the_fingerprint_if_it_matters_or_is_not_known(variable, value, cache_type, matters) -> None:
    options = ContextOptions(cache_type_k=cache_type, flash_attention="on")
    without = state_fingerprint("m", options, None, {})
    found = state_fingerprint("m", options, None, {variable: value})
    assert (found != without) is matters
    assert value not in found.split("|")[-1].partition("=")[2], "values may be paths, and fingerprints travel"


def test_every_variable_that_the_library_knows_by_name_is_decided() -> None:
    assert decided("GGML_ANYTHING") is not None and decided("LLAMA_ANYTHING") is not None
    assert decided("GGMLX") is None and decided("HOME") is None


QUANTIZED = {"width": 256, "cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attention": "on"}


def test_rotated_kv_is_not_offered_where_kv_is_not_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libllama rotates quantized K and V unless a variable says otherwise, and refuses what was kept the other way."""
    prompt = [*PROMPT, *text(6, 20)]
    for value, n_cached in (("0", 0), ("1", 0), ("0", len(PROMPT))):
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", value)
        with kept_core(tmp_path, "llama", **QUANTIZED) as core:
            found = run(core, prompt, stable=len(PROMPT))
            assert found.n_cached == n_cached
            put_away(core)


# the factors of long contexts


def test_only_a_model_with_two_sets_of_factors_has_a_limit() -> None:
    assert rope_limit_of(long_rope()) == LIMIT
    assert rope_limit_of(tiny_model("llama")) is None and rope_limit_of(tiny_model("qwen35")) is None


@pytest.mark.parametrize(("n_ctx", "marker"), [(1, "short"), (1024, "short"), (1025, "long"), (4096, "long")])
def test_the_fingerprint_says_which_factors_and_not_how_many_cells(n_ctx: int, marker: str) -> None:
    assert state_fingerprint("m", ContextOptions(n_ctx=n_ctx), LIMIT, {}).endswith(f"|rope-{marker}")


def test_libllama_rounds_up_before_it_compares() -> None:
    """1,000 cells become 1,024, and of those it says that they are more than 1,000."""
    assert state_fingerprint("m", ContextOptions(n_ctx=1000), 1000, {}).endswith("|rope-long")
    assert state_fingerprint("m", ContextOptions(n_ctx=1000), 1024, {}).endswith("|rope-short")


def kv_of(model: Model, n_ctx: int) -> bytes:
    with Context(model, ContextOptions(n_ctx=n_ctx, n_threads=1, n_threads_batch=1)) as context:
        context.decode([Feed(0, np.array(PROMPT[:64], np.int32), context.end(0), wants_logits=False)])
        return context.capture_sequence(0).tobytes()


def test_the_factors_change_where_the_fingerprint_says_and_nowhere_else() -> None:
    with Model(long_rope()) as model:
        assert model.rope_limit == LIMIT
        short, long = kv_of(model, 512), kv_of(model, 2048)
        assert kv_of(model, 1024) == short and kv_of(model, 1025) == long and kv_of(model, 4096) == long
        assert short != long, "this test could not fail"
    with Model(tiny_model("llama")) as model:
        assert kv_of(model, 512) == kv_of(model, 2048)


def test_another_context_size_keeps_the_cache_unless_it_chooses_other_factors(tmp_path: Path) -> None:
    prompt = [*PROMPT, *text(6, 20)]
    with kept_core(tmp_path, path=long_rope(), n_ctx=1024) as core:
        run(core, PROMPT, stable=len(PROMPT))
        put_away(core)
    with kept_core(tmp_path, path=long_rope(), n_ctx=512) as core:
        assert run(core, prompt).n_cached == len(PROMPT)
    with kept_core(tmp_path, path=long_rope(), n_ctx=2048) as core:
        assert run(core, prompt).n_cached == 0
    with kept_core(tmp_path, "llama", n_ctx=1024) as core:
        run(core, PROMPT, stable=len(PROMPT))
        put_away(core)
    with kept_core(tmp_path, "llama", n_ctx=2048) as core:
        assert run(core, prompt).n_cached == len(PROMPT), "an ordinary model keeps its cache"


def test_a_state_with_other_factors_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with the fingerprint blind to the factors the wrong KV is accepted and the reply is another."""
    prompt = [*PROMPT, *text(6, 20)]
    with open_core(path=long_rope(), n_ctx=2048) as core:
        right = run(core, prompt, max_tokens=16).tokens
    monkeypatch.setattr(Model, "rope_limit", property(lambda _: None, lambda _self, _value: None), raising=False)
    with kept_core(tmp_path, path=long_rope(), n_ctx=1024) as core:
        run(core, PROMPT, stable=len(PROMPT))
        put_away(core)
    with kept_core(tmp_path, path=long_rope(), n_ctx=2048) as core:
        wrong = run(core, prompt, max_tokens=16)
    assert wrong.n_cached == len(PROMPT) and wrong.tokens != right


def test_the_ram_of_other_factors_is_not_taken_up() -> None:
    memory = os.memfd_create("test")
    try:
        for n_ctx, n_cached in ((1024, 0), (768, len(PROMPT) + 19), (2048, 0)):
            with open_core(path=long_rope(), n_ctx=n_ctx, memory=memory) as core:
                assert run(core, [*PROMPT, *text(6, 20)]).n_cached == n_cached
                core.put_away()
                assert core.cache.ram.arena.n_used > 0
    finally:
        os.close(memory)


@pytest.mark.parametrize("knows_how", [True, False])
def test_verify_reads_long_contexts_again_with_the_long_factors(tmp_path: Path, knows_how: bool) -> None:
    with kept_core(tmp_path, path=long_rope(), n_ctx=2048) as core:
        run(core, PROMPT, stable=len(PROMPT))
        put_away(core)
    (found,) = map(read_folder, folders(tmp_path / "states"))
    if not knows_how:
        found = dataclasses.replace(found, about=None)
    opening = find_model(found, long_rope())
    findings = replay_states(opening, found.lineages(), lambda _: None)
    assert {finding.verdict for finding in findings} == {"exact"}
