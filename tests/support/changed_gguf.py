"""GGUF files with another file's vocabulary, or with the tokens of fill-in-the-middle in the place of the last words."""

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

FILL_IN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def write_changed(
    path: Path, weights: Path, words: Path | None = None, *, fills_in: bool = False, n_silent: int = 0
) -> Path:
    """The model of one file with the vocabulary of another; the chat template stays. The first ``n_silent`` are never
    likely tokens. Appears when it is complete."""
    source = gguf.GGUFReader(weights)
    fields = {name: field for name, field in source.fields.items() if not name.startswith("GGUF.")}
    if words is not None:
        kept = {name: field for name, field in fields.items() if not name.startswith("tokenizer.ggml.")}
        other = gguf.GGUFReader(words).fields.items()
        fields = kept | {name: field for name, field in other if name.startswith("tokenizer.ggml.")}
    unfinished = path.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(unfinished, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        part = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        value = _with_fill_in(name, field.contents()) if fills_in else field.contents()
        writer.add_key_value(name, value, field.types[0], part)
    for tensor in source.tensors:
        data = tensor.data
        if tensor.name == "output.weight" and n_silent:
            data = np.concatenate([0.01 * data[:n_silent], data[n_silent:]])
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
    return path


def _with_fill_in(name: str, value: Any) -> Any:
    n = len(FILL_IN)
    if name == "tokenizer.ggml.tokens":
        return [*value[:-n], *FILL_IN]
    if name == "tokenizer.ggml.token_type":
        return [*value[:-n], *[int(gguf.TokenType.CONTROL)] * n]
    return value
