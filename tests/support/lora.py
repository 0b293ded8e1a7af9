"""A small LoRA adapter for a tiny model."""

from pathlib import Path

import gguf
import numpy as np

from support.models import tiny_model

WIDTH, RANK = 64, 4


def write_lora(path: Path, arch: str = "qwen35") -> Path:
    """Rank-4 changes to one matrix of the first layer."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    n_ff = ff_width()
    writer.add_tensor("blk.0.ffn_up.weight.lora_a", rng.standard_normal((RANK, WIDTH)).astype(np.float32))
    writer.add_tensor("blk.0.ffn_up.weight.lora_b", rng.standard_normal((n_ff, RANK)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ff_width() -> int:
    reader = gguf.GGUFReader(tiny_model("qwen35", width=WIDTH))
    return int(next(t.shape[1] for t in reader.tensors if t.name == "blk.0.ffn_up.weight"))
