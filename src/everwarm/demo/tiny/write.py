"""Writes a planned model to a GGUF file, one piece at a time, all or nothing.

Knows the file format (through the gguf package) and the tokenizer keys. Does not choose shapes or numbers.
"""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

from everwarm.demo.tiny.plans import Plan, Value, plan_tiny
from everwarm.demo.tiny.spec import DType, TinySpec
from everwarm.demo.tiny.vocab import CHAT_TEMPLATE, END_OF_TEXT, IM_END, vocabulary
from everwarm.demo.tiny.weights import draw, is_quantised, size_bytes

_ALIGNMENT = 32
_FILE_TYPES = {"f32": LlamaFileType.ALL_F32, "q8_0": LlamaFileType.MOSTLY_Q8_0}


def write_tiny(path: Path, spec: TinySpec, progress: Callable[[int, int], None] | None = None) -> int:
    """Write the model and return its size in bytes. `progress` is told the bytes of tensor data done and in all.

    The file appears under its name only when complete; a failure leaves whatever was there before.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    plan = plan_tiny(spec)
    try:
        _write_header(unfinished, plan, spec)
        _append_tensors(unfinished, plan, spec, progress)
        n_bytes = unfinished.stat().st_size
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return n_bytes


def _write_header(path: Path, plan: Plan, spec: TinySpec) -> None:
    with closing(GGUFWriter(path, plan.arch)) as writer:
        writer.add_name(f"everwarm-tiny-{plan.arch}")
        writer.add_file_type(_FILE_TYPES[spec.dtype])
        for key, value in plan.hyper.items():
            _add_value(writer, f"{plan.arch}.{key}", value)
        _add_tokenizer(writer, spec.n_tokens)
        _add_tensor_infos(writer, plan, spec.dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()


def _add_value(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, tuple):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _add_tokenizer(writer: GGUFWriter, n_tokens: int) -> None:
    vocab = vocabulary(n_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_token_merges(vocab.merges)
    writer.add_bos_token_id(END_OF_TEXT)  # never added, but without it libllama takes byte 11 for one
    writer.add_eos_token_id(IM_END)
    writer.add_eot_token_id(IM_END)  # without it libllama guesses, and may take <|endoftext|>
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensor_infos(writer: GGUFWriter, plan: Plan, dtype: DType) -> None:
    for tensor in plan.tensors:
        stored = GGMLQuantizationType.Q8_0 if is_quantised(tensor, dtype) else GGMLQuantizationType.F32
        shape = tuple(reversed(tensor.shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size_bytes(tensor, dtype), raw_dtype=stored)


def _append_tensors(path: Path, plan: Plan, spec: TinySpec, progress: Callable[[int, int], None] | None) -> None:
    n_total, n_done = sum(size_bytes(tensor, spec.dtype) for tensor in plan.tensors), 0
    with path.open("ab") as file:
        for tensor in plan.tensors:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            for chunk in draw(tensor, spec.dtype, spec.seed):
                file.write(chunk.data)
                n_done += chunk.nbytes
                if progress is not None:
                    progress(n_done, n_total)
        file.write(bytes(-file.tell() % _ALIGNMENT))
