"""The C ABI of exactly one libllama build: struct layouts and function signatures, as data.

Declares; loads and calls nothing. Layouts change between builds, so ``lib`` checks the defaults that the loaded library
returns against ``EXPECTED_*`` before anything else is called.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

BUILD = "b11549"
WHEEL = "xllamacpp==2026.10.11549"

i8p = c.POINTER(c.c_int8)
i32p = c.POINTER(c.c_int32)
f32p = c.POINTER(c.c_float)
handle = c.c_void_p

STATE_FULL = 0
STATE_PARTIAL = 1  # recurrent and sliding-window state only

LOG_CALLBACK = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
PROGRESS_CALLBACK = c.CFUNCTYPE(c.c_bool, c.c_float, c.c_void_p)

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2}
DEVICE_CPU, DEVICE_GPU = 0, 1
CONTEXT_DEFAULT, CONTEXT_MTP = 0, 1
POOLING = {"auto": -1, "none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
POOLING_NAMES = {number: name for name, number in POOLING.items()}
VOCAB_SPM = 1
VOCAB_BPE = 2
GGUF_UINT32 = 4
GGUF_STRING = 8

ATTR_UNKNOWN = 1 << 0
ATTR_UNUSED = 1 << 1
ATTR_CONTROL = 1 << 3
ATTR_USER_DEFINED = 1 << 4


class ModelParams(c.Structure):
    _fields_ = [
        ("devices", handle),
        ("tensor_buft_overrides", handle),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int32),
        ("load_mode", c.c_int32),
        ("lazy_mode", c.c_int32),
        ("main_gpu", c.c_int32),
        ("tensor_split", handle),
        ("progress_callback", PROGRESS_CALLBACK),
        ("progress_callback_user_data", handle),
        ("kv_overrides", handle),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
    ]


class ContextParams(c.Structure):
    _fields_ = [
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int32),
        ("rope_scaling_type", c.c_int32),
        ("pooling_type", c.c_int32),
        ("attention_type", c.c_int32),
        ("flash_attn_type", c.c_int32),
        ("rope_freq_base", c.c_float),
        ("rope_freq_scale", c.c_float),
        ("yarn_ext_factor", c.c_float),
        ("yarn_attn_factor", c.c_float),
        ("yarn_beta_fast", c.c_float),
        ("yarn_beta_slow", c.c_float),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", handle),
        ("cb_eval_user_data", handle),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("moe_cache_size", c.c_size_t),
        ("abort_callback", handle),
        ("abort_callback_data", handle),
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", handle),
        ("n_samplers", c.c_size_t),
        ("ctx_other", handle),
    ]


class Batch(c.Structure):
    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", i32p),
        ("embd", f32p),
        ("pos", i32p),
        ("n_seq_id", i32p),
        ("seq_id", c.POINTER(i32p)),
        ("logits", i8p),
    ]


class TokenData(c.Structure):
    _fields_ = [("id", c.c_int32), ("logit", c.c_float), ("p", c.c_float)]


class TokenDataArray(c.Structure):
    _fields_ = [
        ("data", c.POINTER(TokenData)),
        ("size", c.c_size_t),
        ("selected", c.c_int64),
        ("sorted", c.c_bool),
    ]


class LogitBias(c.Structure):
    _fields_ = [("token", c.c_int32), ("bias", c.c_float)]


class SamplerChainParams(c.Structure):
    _fields_ = [("no_perf", c.c_bool)]


class GgufInitParams(c.Structure):
    _fields_ = [("no_alloc", c.c_bool), ("ctx", handle)]


class BufferOverride(c.Structure):
    _fields_ = [("pattern", c.c_char_p), ("buffer_type", handle)]


# What this build returns by default. A layout that moved by one field shows here.
EXPECTED_MODEL_DEFAULTS = {"n_gpu_layers": -1, "use_extra_bufts": True, "vocab_only": False, "check_tensors": False}
EXPECTED_CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
}

# What the tag's sources are called. Another tag may have the same layouts and other numbers.
EXPECTED_VERSIONS = {"llama_version": "0.6.0", "ggml_version": "0.26.0"}

Signature = tuple[Any, tuple[Any, ...]]

FUNCTIONS: dict[str, Signature] = {
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_sampler_chain_default_params": (SamplerChainParams, ()),
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LOG_CALLBACK, handle)),
    "llama_version": (c.c_char_p, ()),
    "ggml_version": (c.c_char_p, ()),
    # a file's header
    "gguf_init_from_file": (handle, (c.c_char_p, GgufInitParams)),
    "gguf_free": (None, (handle,)),
    "gguf_find_tensor": (c.c_int64, (handle, c.c_char_p)),
    "gguf_find_key": (c.c_int64, (handle, c.c_char_p)),
    "gguf_get_kv_type": (c.c_int32, (handle, c.c_int64)),
    "gguf_get_val_u32": (c.c_uint32, (handle, c.c_int64)),
    "gguf_get_val_str": (handle, (handle, c.c_int64)),
    # model
    "llama_model_load_from_file": (handle, (c.c_char_p, ModelParams)),
    "llama_model_free": (None, (handle,)),
    "llama_model_get_vocab": (handle, (handle,)),
    "llama_model_n_ctx_train": (c.c_int32, (handle,)),
    "llama_model_n_layer": (c.c_int32, (handle,)),
    "llama_model_n_layer_nextn": (c.c_int32, (handle,)),
    "llama_model_n_swa": (c.c_int32, (handle,)),
    "llama_model_n_embd_out": (c.c_int32, (handle,)),
    "llama_model_n_embd_inp": (c.c_int32, (handle,)),
    "llama_model_is_recurrent": (c.c_bool, (handle,)),
    "llama_model_is_hybrid": (c.c_bool, (handle,)),
    "llama_model_is_diffusion": (c.c_bool, (handle,)),
    "llama_model_has_encoder": (c.c_bool, (handle,)),
    "llama_model_has_decoder": (c.c_bool, (handle,)),
    "llama_model_size": (c.c_uint64, (handle,)),
    "llama_model_n_params": (c.c_uint64, (handle,)),
    "llama_model_desc": (c.c_int32, (handle, c.c_char_p, c.c_size_t)),
    "llama_model_meta_val_str": (c.c_int32, (handle, c.c_char_p, c.c_char_p, c.c_size_t)),
    "llama_model_chat_template": (c.c_char_p, (handle, c.c_char_p)),
    "llama_max_devices": (c.c_size_t, ()),
    "ggml_backend_cpu_buffer_type": (handle, ()),
    "llama_adapter_lora_init": (handle, (handle, c.c_char_p)),
    "llama_set_adapters_lora": (c.c_int32, (handle, c.POINTER(handle), c.c_size_t, f32p)),
    # vocabulary
    "llama_vocab_type": (c.c_int32, (handle,)),
    "llama_vocab_n_tokens": (c.c_int32, (handle,)),
    "llama_vocab_get_text": (c.c_char_p, (handle, c.c_int32)),
    "llama_vocab_get_attr": (c.c_int32, (handle, c.c_int32)),
    "llama_vocab_is_eog": (c.c_bool, (handle, c.c_int32)),
    "llama_vocab_bos": (c.c_int32, (handle,)),
    "llama_vocab_eos": (c.c_int32, (handle,)),
    "llama_vocab_sep": (c.c_int32, (handle,)),
    "llama_vocab_fim_pre": (c.c_int32, (handle,)),
    "llama_vocab_fim_suf": (c.c_int32, (handle,)),
    "llama_vocab_fim_mid": (c.c_int32, (handle,)),
    "llama_vocab_fim_rep": (c.c_int32, (handle,)),
    "llama_vocab_fim_sep": (c.c_int32, (handle,)),
    "llama_vocab_get_add_sep": (c.c_bool, (handle,)),
    "llama_vocab_get_add_bos": (c.c_bool, (handle,)),
    "llama_vocab_get_add_eos": (c.c_bool, (handle,)),
    "llama_vocab_get_suppress_tokens": (i32p, (handle, i32p)),
    "llama_tokenize": (c.c_int32, (handle, c.c_char_p, c.c_int32, i32p, c.c_int32, c.c_bool, c.c_bool)),
    "llama_token_to_piece": (c.c_int32, (handle, c.c_int32, c.c_char_p, c.c_int32, c.c_int32, c.c_bool)),
    # context
    "llama_init_from_model": (handle, (handle, ContextParams)),
    "llama_free": (None, (handle,)),
    "llama_n_ctx": (c.c_uint32, (handle,)),
    "llama_n_ctx_seq": (c.c_uint32, (handle,)),
    "llama_n_batch": (c.c_uint32, (handle,)),
    "llama_n_ubatch": (c.c_uint32, (handle,)),
    "llama_n_seq_max": (c.c_uint32, (handle,)),
    "llama_n_rs_seq": (c.c_uint32, (handle,)),
    "llama_get_memory": (handle, (handle,)),
    "llama_get_model": (handle, (handle,)),
    "llama_set_causal_attn": (None, (handle, c.c_bool)),
    "llama_decode": (c.c_int32, (handle, Batch)),
    "llama_get_embeddings_ith": (f32p, (handle, c.c_int32)),
    "llama_get_embeddings_seq": (f32p, (handle, c.c_int32)),
    "llama_pooling_type": (c.c_int32, (handle,)),
    "llama_get_logits_ith": (handle, (handle, c.c_int32)),
    # memory
    "llama_memory_clear": (None, (handle, c.c_bool)),
    "llama_memory_seq_rm": (c.c_bool, (handle, c.c_int32, c.c_int32, c.c_int32)),
    "llama_memory_seq_cp": (None, (handle, c.c_int32, c.c_int32, c.c_int32, c.c_int32)),
    "llama_memory_seq_pos_min": (c.c_int32, (handle, c.c_int32)),
    "llama_memory_seq_pos_max": (c.c_int32, (handle, c.c_int32)),
    "llama_state_seq_get_size_ext": (c.c_size_t, (handle, c.c_int32, c.c_uint32)),
    "llama_state_seq_get_data_ext": (c.c_size_t, (handle, handle, c.c_size_t, c.c_int32, c.c_uint32)),
    "llama_state_seq_set_data_ext": (c.c_size_t, (handle, handle, c.c_size_t, c.c_int32, c.c_uint32)),
    # sampling
    "llama_sampler_chain_init": (handle, (SamplerChainParams,)),
    "llama_sampler_chain_add": (None, (handle, handle)),
    "llama_sampler_clone": (handle, (handle,)),
    "llama_sampler_free": (None, (handle,)),
    "llama_sampler_accept": (None, (handle, c.c_int32)),
    "llama_sampler_apply": (None, (handle, c.POINTER(TokenDataArray))),
    "llama_sampler_sample": (c.c_int32, (handle, handle, c.c_int32)),
    "llama_sampler_init_greedy": (handle, ()),
    "llama_sampler_init_dist": (handle, (c.c_uint32,)),
    "llama_sampler_init_top_k": (handle, (c.c_int32,)),
    "llama_sampler_init_top_p": (handle, (c.c_float, c.c_size_t)),
    "llama_sampler_init_min_p": (handle, (c.c_float, c.c_size_t)),
    "llama_sampler_init_typical": (handle, (c.c_float, c.c_size_t)),
    "llama_sampler_init_top_n_sigma": (handle, (c.c_float,)),
    "llama_sampler_init_xtc": (handle, (c.c_float, c.c_float, c.c_size_t, c.c_uint32)),
    "llama_sampler_init_temp_ext": (handle, (c.c_float, c.c_float, c.c_float)),
    "llama_sampler_init_mirostat": (handle, (c.c_int32, c.c_uint32, c.c_float, c.c_float, c.c_int32)),
    "llama_sampler_init_mirostat_v2": (handle, (c.c_uint32, c.c_float, c.c_float)),
    "llama_sampler_init_adaptive_p": (handle, (c.c_float, c.c_float, c.c_uint32)),
    "llama_sampler_init_infill": (handle, (handle,)),
    "llama_sampler_init_dry": (
        handle,
        (handle, c.c_float, c.c_float, c.c_int32, c.c_int32, c.POINTER(c.c_char_p), c.c_size_t),
    ),
    "llama_sampler_init_penalties": (handle, (c.c_int32, c.c_int32, c.c_float, c.c_float, c.c_float)),
    "llama_sampler_init_logit_bias": (handle, (c.c_int32, c.c_int32, c.POINTER(LogitBias))),
    # devices
    "ggml_backend_dev_count": (c.c_size_t, ()),
    "ggml_backend_dev_get": (handle, (c.c_size_t,)),
    "ggml_backend_dev_type": (c.c_int32, (handle,)),
    "ggml_backend_dev_name": (c.c_char_p, (handle,)),
    "ggml_backend_dev_description": (c.c_char_p, (handle,)),
    "ggml_backend_dev_buffer_type": (handle, (handle,)),
    "ggml_backend_buft_name": (c.c_char_p, (handle,)),
    "ggml_backend_dev_memory": (None, (handle, c.POINTER(c.c_size_t), c.POINTER(c.c_size_t))),
}

# Functions for MTP heads that have no C name yet. A build may lack them: then no head is used.
HEAD_FUNCTIONS: dict[str, tuple[str, Signature]] = {
    "set_embeddings_nextn": (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        (None, (handle, c.c_bool, c.c_bool)),
    ),
    "get_embeddings_nextn": ("_Z26llama_get_embeddings_nextnP13llama_context", (handle, (handle,))),
    "get_embeddings_nextn_ith": ("_Z30llama_get_embeddings_nextn_ithP13llama_contexti", (handle, (handle, c.c_int32))),
}
