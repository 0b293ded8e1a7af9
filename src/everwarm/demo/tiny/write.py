"""Writes a planned model to a GGUF file, one piece at a time, all or nothing.

Knows the file format (through the gguf package) and the tokenizer keys. Does not choose shapes or numbers.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

from everwarm.demo.tiny.plans import Plan, Tensor, Value, plan_tiny
from everwarm.demo.tiny.spec import DType, TinySpec
from everwarm.demo.tiny.vocab import CHAT_TEMPLATE, END_OF_TEXT, IM_END, vocabulary
from everwarm.demo.tiny.weights import draw, is_quantised, size_bytes

ALIGNMENT = 32
_FILE_TYPES = {"f32": LlamaFileType.ALL_F32, "q8_0": LlamaFileType.MOSTLY_Q8_0}


Progress = Callable[[int, int], None]


def write_tiny(path: Path, spec: TinySpec, progress: Progress | None = None) -> int:
    """Write the model and return its size in bytes. `progress` gets the bytes of tensor data written and in all.

    The file appears under its name only when complete; a failure leaves the file that was there before.
    """
    plan = plan_tiny(spec)
    with whole_or_nothing(path) as unfinished:
        write_header(unfinished, plan, spec)
        append_tensors(unfinished, plan.tensors, spec.dtype, spec.seed, progress)
        return unfinished.stat().st_size


@contextmanager
def whole_or_nothing(path: Path) -> Iterator[Path]:
    """A file beside it to write to, which takes its name if nothing is raised."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_header(path: Path, plan: Plan, spec: TinySpec) -> None:
    with closing(GGUFWriter(path, plan.arch)) as writer:
        writer.add_name(f"everwarm-tiny-{plan.arch}")
        writer.add_file_type(_FILE_TYPES[spec.dtype])
        for key, value in plan.hyper.items():
            add_value(writer, f"{plan.arch}.{key}", value)
        _add_tokenizer(writer, spec)
        finish_header(writer, plan.tensors, spec.dtype)


def add_value(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, tuple):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint32(key, value)


def _add_tokenizer(writer: GGUFWriter, spec: TinySpec) -> None:
    vocab = vocabulary(spec.n_tokens, spec.markers)
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


def finish_header(writer: GGUFWriter, tensors: Sequence[Tensor], dtype: DType) -> None:
    for tensor in tensors:
        stored = GGMLQuantizationType.Q8_0 if is_quantised(tensor, dtype) else GGMLQuantizationType.F32
        shape = tuple(reversed(tensor.shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size_bytes(tensor, dtype), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def append_tensors(
    path: Path, tensors: Sequence[Tensor], dtype: DType, seed: int, progress: Progress | None = None
) -> None:
    n_total = sum(size_bytes(tensor, dtype) for tensor in tensors)
    n_done = 0
    with path.open("ab") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            for chunk in draw(tensor, dtype, seed):
                file.write(chunk.data)
                n_done += chunk.nbytes
                if progress is not None:
                    progress(n_done, n_total)
        file.write(bytes(-file.tell() % ALIGNMENT))
