"""A bare ctypes look at libllama: `python _raw.py probe MODEL`, `decodes MODEL` or `tokenize MODEL < texts.json`.

A separate process, because libllama aborts on a model it dislikes. Knows only the calls these tests need; the product's
boundary is elsewhere.
"""

import ctypes
import importlib.util
import json
import sys
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PARTIAL = 1
N_CTX = 512

_MODEL_FIELDS = (
    "devices overrides n_gpu_layers:i split_mode:i load_mode:i lazy_mode:i main_gpu:i tensor_split progress "
    "progress_data kv_overrides vocab_only:b check_tensors:b use_extra_bufts:b no_host:b no_alloc:b load_mtp:b"
)
_CONTEXT_FIELDS = (
    "n_ctx:u n_batch:u n_ubatch:u n_seq_max:u n_rs_seq:u n_outputs_max:u n_outputs_max_per_seq:u n_threads:i "
    "n_threads_batch:i ctx_type:i rope_scaling:i pooling:i attention:i flash_attn:i rope_base:f rope_scale:f "
    "yarn_ext:f yarn_attn:f yarn_fast:f yarn_slow:f yarn_orig:u defrag:f cb_eval cb_eval_data type_k:i type_v:i "
    "moe_cache:z abort abort_data embeddings:b offload_kqv:b no_perf:b op_offload:b swa_full:b kv_unified:b "
    "samplers n_samplers:z other"
)
_TYPES = {"p": c_void_p, "i": c_int32, "u": c_uint32, "f": c_float, "b": c_bool, "z": c_size_t}


def _fields(text: str) -> list[tuple[str, Any]]:
    return [(name, _TYPES[kind or "p"]) for name, _, kind in (field.partition(":") for field in text.split())]


class ModelParams(ctypes.Structure):
    _fields_ = _fields(_MODEL_FIELDS)


class ContextParams(ctypes.Structure):
    _fields_ = _fields(_CONTEXT_FIELDS)


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(ctypes.c_int8)),
    ]


LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)


def _on_log(level: int, text: bytes, _: object) -> None:
    if level >= 4:
        sys.stderr.write(text.decode(errors="replace"))


def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None
    return ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))


LIB = _library()


def _declare(name: str, result: object, *arguments: object) -> Any:
    function = getattr(LIB, name)
    function.restype, function.argtypes = result, arguments
    return function


_kept_callback = LogCallback(_on_log)  # libllama calls it for as long as the process lives
_declare("llama_log_set", None, LogCallback, c_void_p)(_kept_callback, None)
model_defaults = _declare("llama_model_default_params", ModelParams)
context_defaults = _declare("llama_context_default_params", ContextParams)
load = _declare("llama_model_load_from_file", c_void_p, c_char_p, ModelParams)
init = _declare("llama_init_from_model", c_void_p, c_void_p, ContextParams)
get_memory = _declare("llama_get_memory", c_void_p, c_void_p)
get_vocab = _declare("llama_model_get_vocab", c_void_p, c_void_p)
vocab_size = _declare("llama_vocab_n_tokens", c_int32, c_void_p)
vocab_eos = _declare("llama_vocab_eos", c_int32, c_void_p)
vocab_eot = _declare("llama_vocab_eot", c_int32, c_void_p)
vocab_add_bos = _declare("llama_vocab_get_add_bos", c_bool, c_void_p)
is_hybrid = _declare("llama_model_is_hybrid", c_bool, c_void_p)
is_recurrent = _declare("llama_model_is_recurrent", c_bool, c_void_p)
n_swa = _declare("llama_model_n_swa", c_int32, c_void_p)
tokenize = _declare("llama_tokenize", c_int32, c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool)
batch_init = _declare("llama_batch_init", Batch, c_int32, c_int32, c_int32)
decode = _declare("llama_decode", c_int32, c_void_p, Batch)
logits_ith = _declare("llama_get_logits_ith", POINTER(c_float), c_void_p, c_int32)
seq_rm = _declare("llama_memory_seq_rm", c_bool, c_void_p, c_int32, c_int32, c_int32)
state_size = _declare("llama_state_seq_get_size_ext", c_size_t, c_void_p, c_int32, c_uint32)
state_get = _declare("llama_state_seq_get_data_ext", c_size_t, c_void_p, c_void_p, c_size_t, c_int32, c_uint32)
state_set = _declare("llama_state_seq_set_data_ext", c_size_t, c_void_p, c_void_p, c_size_t, c_int32, c_uint32)


class Session:
    """One model, one context, sequence 0."""

    def __init__(self, model: int) -> None:
        params = context_defaults()
        params.n_ctx, params.n_ubatch, params.n_seq_max, params.kv_unified = N_CTX, 128, 1, True
        params.n_threads = params.n_threads_batch = 1
        self.ctx = init(model, params)
        assert self.ctx, "no context"
        self.memory, self.batch = get_memory(self.ctx), batch_init(N_CTX, 0, 1)
        self.n_vocab = vocab_size(get_vocab(model))

    def feed(self, tokens: list[int], start: int) -> npt.NDArray[Any]:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for j, token in enumerate(tokens):
            batch.token[j], batch.pos[j], batch.n_seq_id[j], batch.seq_id[j][0] = token, start + j, 1, 0
            batch.logits[j] = j == len(tokens) - 1
        assert decode(self.ctx, batch) == 0, "decode failed"
        return np.ctypeslib.as_array(logits_ith(self.ctx, -1), (self.n_vocab,)).copy()

    def cold(self, tokens: list[int]) -> npt.NDArray[Any]:
        """The logits after the prompt, whose last token is decoded on its own."""
        seq_rm(self.memory, 0, -1, -1)
        self.feed(tokens[:-1], 0)
        return self.feed(tokens[-1:], len(tokens) - 1)

    def partial_state(self) -> npt.NDArray[Any]:
        blob = np.empty(state_size(self.ctx, 0, PARTIAL), np.uint8)
        assert state_get(self.ctx, blob.ctypes.data, blob.nbytes, 0, PARTIAL) == blob.nbytes
        return blob

    def crossed(self, recurrent_from: list[int], attention_from: list[int]) -> npt.NDArray[Any]:
        """The logits when the recurrent state comes from one prompt and the attention state from the other."""
        n_past = len(attention_from) - 1
        seq_rm(self.memory, 0, -1, -1)
        self.feed(recurrent_from[:-1], 0)
        blob = self.partial_state()
        seq_rm(self.memory, 0, -1, -1)
        self.feed(attention_from[:-1], 0)
        assert state_set(self.ctx, blob.ctypes.data, blob.nbytes, 0, PARTIAL) == blob.nbytes
        assert seq_rm(self.memory, 0, n_past, -1)
        return self.feed(attention_from[-1:], n_past)


def probe(path: str) -> dict[str, object]:
    model = load(path.encode(), model_defaults())
    assert model, f"{path} does not load"
    vocab, session = get_vocab(model), Session(model)
    prompt = np.random.default_rng(3).integers(0, 256, 200).tolist()
    other = [prompt[0] ^ 1, *prompt[1:]]
    base, changed = session.cold(prompt), session.cold(other)
    report: dict[str, object] = {
        "hybrid": is_hybrid(model),
        "recurrent": is_recurrent(model),
        "n_swa": n_swa(model),
        "n_vocab": vocab_size(vocab),
        "eos": vocab_eos(vocab),
        "eot": vocab_eot(vocab),
        "add_bos": vocab_add_bos(vocab),
        "finite": bool(np.isfinite(base).all() and np.isfinite(changed).all()),
        "spread": float(base.std()),
        "first_token_reach": _distance(base, changed),
        "state_bytes": state_size(session.ctx, 0, 0),
        "partial_bytes": state_size(session.ctx, 0, PARTIAL),
        "top": int(base.argmax()),
        "logits": base[:264].tolist(),
    }
    if is_hybrid(model):
        crossed = session.crossed(recurrent_from=other, attention_from=prompt)
        report["recurrent_reach"] = _distance(crossed, base)
        report["attention_reach"] = _distance(crossed, changed)
    return report


def decodes(path: str) -> bool:
    """Whether it loads and gives numbers."""
    model = load(path.encode(), model_defaults())
    assert model, f"{path} does not load"
    return bool(np.isfinite(Session(model).cold(list(range(20)))).all())


def _distance(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    return float(np.abs(a - b).max())


def tokenize_all(path: str, texts: list[str], parse_special: bool) -> list[list[int]]:
    params = model_defaults()
    params.vocab_only = True
    vocab = get_vocab(load(path.encode(), params))
    found = []
    for text in texts:
        data = text.encode()
        buffer = (c_int32 * (len(data) + 8))()
        n_tokens = tokenize(vocab, data, len(data), buffer, len(buffer), True, parse_special)
        assert n_tokens >= 0, f"{text!r} needs {-n_tokens} tokens for {len(data)} bytes"
        found.append(list(buffer[:n_tokens]))
    return found


def main() -> None:
    command, path = sys.argv[1:]
    if command == "probe":
        print(json.dumps(probe(path)))
    elif command == "decodes":
        print(json.dumps(decodes(path)))
    else:
        print(json.dumps(tokenize_all(path, json.load(sys.stdin), parse_special=command == "tokenize-special")))


if __name__ == "__main__":
    main()
