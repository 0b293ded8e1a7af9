"""Which kept states an engine may use: the fingerprint, and for every parameter whether it is in it and why. Pure.

A state may be used where the model would compute the same numbers from the same tokens. Every parameter of libllama and
libmtmd is classified here, once: a test fails on one that is missing, and ``docs/reference/fingerprint.md`` shows the
tables. The disk tier, the RAM tier, slot files, the remote store and bundles all compare this one text.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from everwarm.config import ContextOptions

Decision = Literal["in the fingerprint", "last bits", "harmless", "fixed"]


class ParameterRow(NamedTuple):
    decision: Decision
    why: str


_IN: Final = "in the fingerprint"
_BITS: Final = "last bits"  # the same sums in another order, or by other kernels: another reading of the same state
_NONE: Final = "harmless"
_FIXED: Final = "fixed"  # it cannot be set: Everwarm always gives the same value
_DEFAULT = ParameterRow(_FIXED, "left at libllama's default")
_FROM_FILE = ParameterRow(
    _FIXED, "left unset: libllama takes the model file's own, and the file's digest is in the fingerprint"
)
_ROPE = ParameterRow(_IN, "`--rope-…`, `--yarn-…`; where they are not given, the model file's own")
_CALLBACK = ParameterRow(_NONE, "a callback; it sees progress or timing, no numbers")

MODEL_PARAMS: Mapping[str, ParameterRow] = {
    "devices": ParameterRow(_BITS, "all of the build's devices, or `--device`; another device runs other kernels"),
    "tensor_buft_overrides": ParameterRow(
        _BITS, "`--cpu-moe`, `--override-tensor`: where tensors lie, and so which kernels run"
    ),
    "n_gpu_layers": ParameterRow(_BITS, "where layers lie, and so which kernels run"),
    "split_mode": ParameterRow(_BITS, "how GPUs share a model: the order of sums"),
    "load_mode": ParameterRow(_NONE, "`--load-mode`: the same bytes, mapped, read or locked"),
    "lazy_mode": _DEFAULT,
    "main_gpu": ParameterRow(_BITS, "which GPU computes"),
    "tensor_split": ParameterRow(_BITS, "which GPU has which layers"),
    "progress_callback": _CALLBACK,
    "progress_callback_user_data": _CALLBACK,
    "kv_overrides": ParameterRow(_FIXED, "refused: there is no option that overrides a model's metadata"),
    "vocab_only": ParameterRow(_NONE, "such a model has no weights and computes nothing"),
    "check_tensors": ParameterRow(_NONE, "looks at the weights and changes none"),
    "use_extra_bufts": ParameterRow(_BITS, "`--no-repack`: other kernels for the same sums"),
    "no_host": ParameterRow(_BITS, "which buffers, and so which kernels"),
    "no_alloc": _DEFAULT,
    "load_mtp": ParameterRow(_NONE, "`--speculate`: the head only guesses, and what the model computes stays the same"),
}

CONTEXT_PARAMS: Mapping[str, ParameterRow] = {
    "n_ctx": ParameterRow(
        _IN,
        "only what libllama chooses by it: long or short RoPE factors, of models that have both (longrope). "
        "Everything else uses it as room",
    ),
    "n_batch": ParameterRow(_BITS, "how a prompt may be cut into chunks; the chunks of a state are recorded in it"),
    "n_ubatch": ParameterRow(_BITS, "the same, and the size of a window's ring"),
    "n_seq_max": ParameterRow(
        _BITS, "the number of slots and spares: where cells lie, and the size of a window's ring"
    ),
    "n_rs_seq": ParameterRow(_BITS, "earlier states of a sequence, kept by another form of the same kernels"),
    "n_outputs_max": _DEFAULT,
    "n_outputs_max_per_seq": _DEFAULT,
    "n_threads": ParameterRow(_BITS, "the order of sums"),
    "n_threads_batch": ParameterRow(_BITS, "the order of sums"),
    "ctx_type": _DEFAULT,
    "rope_scaling_type": _ROPE,
    "pooling_type": _FROM_FILE,
    "attention_type": _FROM_FILE,
    "flash_attn_type": ParameterRow(_IN, "other kernels, and another layout of V"),
    "rope_freq_base": _ROPE,
    "rope_freq_scale": _ROPE,
    "yarn_ext_factor": _ROPE,
    "yarn_attn_factor": _ROPE,
    "yarn_beta_fast": _ROPE,
    "yarn_beta_slow": _ROPE,
    "yarn_orig_ctx": _ROPE,
    "defrag_thold": _DEFAULT,
    "cb_eval": _CALLBACK,
    "cb_eval_user_data": _CALLBACK,
    "type_k": ParameterRow(_IN, "the number format of K"),
    "type_v": ParameterRow(_IN, "the number format of V"),
    "moe_cache_size": _DEFAULT,
    "abort_callback": _CALLBACK,
    "abort_callback_data": _CALLBACK,
    "embeddings": _DEFAULT,
    "offload_kqv": ParameterRow(_BITS, "`--no-kv-offload`: where KV lies, and so which kernels run"),
    "no_perf": _DEFAULT,
    "op_offload": ParameterRow(_BITS, "which device computes"),
    "swa_full": ParameterRow(_FIXED, "always false: a window's state holds the window only"),
    "kv_unified": ParameterRow(_FIXED, "always true, and named in the fingerprint"),
    "samplers": _DEFAULT,
    "n_samplers": _DEFAULT,
    "ctx_other": _DEFAULT,
}

MEDIA_PARAMS: Mapping[str, ParameterRow] = {
    "use_gpu": ParameterRow(_BITS, "which kernels encode an image"),
    "device": _DEFAULT,
    "print_timings": ParameterRow(_NONE, "prints"),
    "n_threads": ParameterRow(_BITS, "the order of sums"),
    "image_marker": _DEFAULT,
    "media_marker": _DEFAULT,
    "flash_attn_type": _DEFAULT,
    "warmup": _DEFAULT,
    "image_min_tokens": _DEFAULT,
    "image_max_tokens": _DEFAULT,
    "cb_eval": _CALLBACK,
    "cb_eval_user_data": _CALLBACK,
    "batch_max_tokens": _DEFAULT,
    "progress_callback": _CALLBACK,
    "progress_callback_user_data": _CALLBACK,
}

# What else reaches the numbers and is no field of those structs.
OTHERS: Mapping[str, ParameterRow] = {
    "model file": ParameterRow(_IN, "the digest of every part: weights, metadata, vocabulary"),
    "LoRA adapters": ParameterRow(
        _IN,
        "the digest and the scale of each, in their order; a request with other scales has a namespace of its own, which "
        "is never written",
    ),
    "projector": ParameterRow(
        _IN, "its digest is part of an image's identity in the prompt, not of the model's fingerprint"
    ),
    "control vectors": ParameterRow(_FIXED, "refused: there is no option for them"),
    "build": ParameterRow(
        _IN,
        "the tag that this version is made for; a library whose versions, functions or defaults are another's is refused",
    ),
    "backend, device": ParameterRow(_BITS, "CPU, GPU and their kinds: other kernels for the same sums"),
    "state type": ParameterRow(_IN, "`--state-type`: copies of recurrent states in fewer bytes are other numbers"),
    "namespace": ParameterRow(_IN, "in the name of every lineage, beside the fingerprint"),
}

# Variables that libllama's own code reads, by pattern; the first that fits decides. The library of the same build may have
# other backends: what begins with GGML_ or LLAMA_ and is not named here is taken to matter.
ENVIRONMENT: Mapping[str, ParameterRow] = {
    "LLAMA_ATTN_ROT_DISABLE": ParameterRow(_IN, "with a quantized KV type: K and V are kept rotated, or as they are"),
    "GGML_CUDA_CUBLAS_COMPUTE_TYPE": ParameterRow(_IN, "the precision of matrix products"),
    "GGML_CUDA_MMQ_PREC": ParameterRow(_IN, "the precision of matrix products"),
    "LLAMA_ARG_*": ParameterRow(_NONE, "read by llama.cpp's programs, not by the library"),
    "LLAMA_LOG_*": ParameterRow(_NONE, "read by llama.cpp's programs, not by the library"),
    "LLAMA_API_KEY": ParameterRow(_NONE, "read by llama.cpp's programs, not by the library"),
    "LLAMA_CACHE": ParameterRow(_NONE, "read by llama.cpp's programs, not by the library"),
    "LLAMA_OFFLINE": ParameterRow(_NONE, "read by llama.cpp's programs, not by the library"),
    "LLAMA_TRACE": ParameterRow(_NONE, "prints"),
    "LLAMA_*_DEBUG": ParameterRow(_NONE, "prints"),
    "LLAMA_GRAPH_REUSE_DISABLE": ParameterRow(_NONE, "builds the same graph again"),
    "GGML_*_DEBUG": ParameterRow(_NONE, "prints"),
    "GGML_SCHED_DEBUG_REALLOC": ParameterRow(_NONE, "prints"),
    "GGML_*BACKTRACE*": ParameterRow(_NONE, "what an abort does"),
    "GGML_BACKEND_PATH": ParameterRow(_BITS, "adds a backend: other kernels for the same sums"),
    "GGML_DISABLE_VULKAN": ParameterRow(_BITS, "leaves a backend out"),
    "GGML_*_DEVICES": ParameterRow(_BITS, "which devices are used"),
    "GGML_*_DISABLE_FUSION": ParameterRow(_BITS, "other kernels for the same sums"),
    "GGML_CPU_TILED_MM*": ParameterRow(_BITS, "other kernels for the same sums"),
    "GGML_OP_OFFLOAD_MIN_BATCH": ParameterRow(_BITS, "which device computes"),
    "GGML_CUDA_DISABLE_GRAPHS": ParameterRow(_NONE, "how kernels are launched"),
    "GGML_CUDA_GRAPH_OPT": ParameterRow(_NONE, "how kernels are launched"),
    "GGML_CUDA_PDL": ParameterRow(_NONE, "how kernels are launched"),
    "GGML_CUDA_P2P": ParameterRow(_NONE, "how memory is copied"),
    "GGML_CUDA_ALLREDUCE": ParameterRow(_BITS, "the order of sums over GPUs"),
    "GGML_*_NO_PINNED": ParameterRow(_NONE, "how memory is allocated"),
    "GGML_CUDA_REGISTER_HOST": ParameterRow(_NONE, "how memory is allocated"),
    "GGML_CUDA_ENABLE_UNIFIED_MEMORY": ParameterRow(_NONE, "how memory is allocated"),
    "GGML_*": ParameterRow(_IN, "not known here, and so taken to matter"),
    "LLAMA_*": ParameterRow(_IN, "not known here, and so taken to matter"),
}

# Our own options that become parameters above, by the names they have there.
MODEL_OPTIONS: Mapping[str, ParameterRow] = {
    "n_gpu_layers": MODEL_PARAMS["n_gpu_layers"],
    "load_mode": MODEL_PARAMS["load_mode"],
    "tensor_split": MODEL_PARAMS["tensor_split"],
    "n_cpu_moe": MODEL_PARAMS["tensor_buft_overrides"],
    "lora": OTHERS["LoRA adapters"],
    "split_mode": MODEL_PARAMS["split_mode"],
    "main_gpu": MODEL_PARAMS["main_gpu"],
    "devices": MODEL_PARAMS["devices"],
    "override_tensors": MODEL_PARAMS["tensor_buft_overrides"],
    "n_cpu_ffn": MODEL_PARAMS["tensor_buft_overrides"],
    "repack": MODEL_PARAMS["use_extra_bufts"],
    "no_host": MODEL_PARAMS["no_host"],
    "check_tensors": MODEL_PARAMS["check_tensors"],
}
CONTEXT_OPTIONS: Mapping[str, ParameterRow] = {
    "n_ctx": CONTEXT_PARAMS["n_ctx"],
    "n_batch": CONTEXT_PARAMS["n_batch"],
    "n_ubatch": CONTEXT_PARAMS["n_ubatch"],
    "n_seq_max": CONTEXT_PARAMS["n_seq_max"],
    "n_snapshots": CONTEXT_PARAMS["n_rs_seq"],
    "n_threads": CONTEXT_PARAMS["n_threads"],
    "n_threads_batch": CONTEXT_PARAMS["n_threads_batch"],
    "cache_type_k": CONTEXT_PARAMS["type_k"],
    "cache_type_v": CONTEXT_PARAMS["type_v"],
    "flash_attention": CONTEXT_PARAMS["flash_attn_type"],
    "rope": _ROPE,
    "kv_offload": CONTEXT_PARAMS["offload_kqv"],
    "op_offload": CONTEXT_PARAMS["op_offload"],
    "state_type": OTHERS["state type"],
}
# The rest of what an engine is started with, beside the fields that it hands on under the names above.
ENGINE_SETTINGS: Mapping[str, ParameterRow] = {
    "model": ParameterRow(_IN, "the options of the model, each by itself"),
    "mmproj": OTHERS["projector"],
    "n_slots": CONTEXT_PARAMS["n_seq_max"],
    "n_spares": CONTEXT_PARAMS["n_seq_max"],
    "checkpoints": ParameterRow(_BITS, "where a prompt is cut into chunks; the chunks of a state are recorded in it"),
    "prefill_beside_decode": ParameterRow(_BITS, "how many tokens of a prompt go into a step beside others"),
    "finish_prefill_s": ParameterRow(_NONE, "what is read in idle time"),
    "max_step_ms": ParameterRow(_BITS, "how many tokens of a prompt go into a step beside others, by their speed"),
    "speculate": ParameterRow(_BITS, "how many tokens of a reply are decoded together; the chunks are recorded"),
    "kv_unified": ParameterRow(_NONE, "how many tokens a request may have; the context is the same"),
    "draft_model": ParameterRow(_BITS, "it only guesses: how many tokens of a reply are decoded together"),
    "max_draft": ParameterRow(_BITS, "how many tokens of a reply are decoded together; the chunks are recorded"),
    "idle_cells": ParameterRow(_BITS, "whose cells lie beside a running sequence's"),
    "ram_bytes": ParameterRow(_NONE, "how much is kept"),
    "pin_ram": ParameterRow(_NONE, "how fast it is copied"),
    "namespace_share": ParameterRow(_NONE, "how much is kept, of whom"),
    "embedding": ParameterRow(_NONE, "such an engine keeps no states"),
    "store": ParameterRow(_NONE, "where it is kept"),
    "remote": ParameterRow(_NONE, "where it is kept"),
}


N_ALWAYS = 5  # parts that every fingerprint has
STATE_PREFIX = "state-"  # of the part that follows them where states are kept in another type


def state_fingerprint(
    model: str, options: ContextOptions, rope_limit: int | None, environment: Mapping[str, str]
) -> str:
    """``model`` stands for the files and the build, ``rope_limit`` is the file's (see ``llama.model``). Rare properties
    are added at the end, only where a model or environment has them, so that other fingerprints stay the same."""
    always = (model, options.cache_type_k, options.cache_type_v, options.flash_attention, "unified")
    states = () if options.state_type == "f32" else (STATE_PREFIX + options.state_type,)
    return "|".join((*always, *states, *_rope(options, rope_limit), *_switches(options, environment)))


def _rope(options: ContextOptions, rope_limit: int | None) -> list[str]:
    given = options.rope.text()
    found = [f"rope:{given}"] if given else []
    if rope_limit is not None:
        found.append("rope-long" if options.n_cells > rope_limit else "rope-short")
    return found


def _switches(options: ContextOptions, environment: Mapping[str, str]) -> list[str]:
    return [
        f"{name}={_short(environment[name])}" for name in sorted(environment) if _matters(name, environment, options)
    ]


def _matters(name: str, environment: Mapping[str, str], options: ContextOptions) -> bool:
    row = decided(name)
    if row is None or row.decision != _IN:
        return False
    if name == "LLAMA_ATTN_ROT_DISABLE":
        is_quantized = any(kind.startswith("q") for kind in (options.cache_type_k, options.cache_type_v))
        return is_quantized and _is_true(environment[name])
    return True


def _short(value: str) -> str:
    """Not the value itself: a fingerprint travels with exported states, and some values are paths."""
    return hashlib.blake2b(value.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()


def decided(name: str) -> ParameterRow | None:
    """The row of an environment variable; None: libllama does not read it."""
    return next((row for pattern, row in ENVIRONMENT.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _is_true(text: str) -> bool:
    """As C's ``atoi`` reads it: another number than 0."""
    found = re.match(r"\s*[+-]?(\d+)", text, re.ASCII)
    return found is not None and found[1].strip("0") != ""
