"""Making a C context out of options, with the model's adapters applied."""

from __future__ import annotations

import ctypes

from everwarm.config import ContextOptions
from everwarm.errors import ContextTooBig
from everwarm.llama import abi
from everwarm.llama.model import Model


def open_context(model: Model, options: ContextOptions, n_seqs: int) -> int:
    """A C context with unified KV, or a clear refusal."""
    assert n_seqs <= 256, "one of libllama's 256 sequences is needed inside"
    params = model.lib.context_default_params()
    params.n_ctx = options.n_ctx
    params.n_batch = max(options.n_batch, n_seqs)  # libllama asserts room for one output per sequence
    params.n_ubatch = max(options.n_ubatch, n_seqs)
    params.n_seq_max = n_seqs
    params.n_threads = options.n_threads
    params.n_threads_batch = options.n_threads_batch
    params.type_k = abi.GGML_TYPES[options.cache_type_k]
    params.type_v = abi.GGML_TYPES[options.cache_type_v]
    params.flash_attn_type = abi.FLASH_ATTENTION[options.flash_attention]
    params.kv_unified = True
    params.swa_full = False
    model.lib.forget_log()
    ptr: int | None = model.lib.init_from_model(model.ptr, params)
    if not ptr:
        raise ContextTooBig(
            f"a context of {options.n_ctx} tokens and {n_seqs} sequences could not be made "
            f"({model.lib.last_words()}); give fewer tokens, slots or spares"
        )
    n_cells = int(model.lib.n_ctx_seq(ptr))
    assert n_cells == options.n_cells, f"libllama made {n_cells} cells of {options.n_ctx}, not {options.n_cells}"
    _apply_adapters(model, ptr)
    return ptr


def _apply_adapters(model: Model, ptr: int) -> None:
    if model.adapters:
        n = len(model.adapters)
        adapters = (ctypes.c_void_p * n)(*(adapter for adapter, _ in model.adapters))
        scales = (ctypes.c_float * n)(*(scale for _, scale in model.adapters))
        if int(model.lib.set_adapters_lora(ptr, adapters, n, scales)) != 0:
            model.lib.free(ptr)
            raise ContextTooBig(f"the LoRA adapters could not be applied: {model.lib.last_words()}")
