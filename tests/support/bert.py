"""Tiny BERT files with random weights: one that makes embeddings, and one that ranks."""

from pathlib import Path

import gguf
import numpy as np

WIDTH, N_LAYERS, N_FF, N_CTX = 32, 2, 64, 128
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "a", "river", "stone", "lamp", "garden", "machine", "learning", "paris", "city", "is", "of", "and")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
TOKENS = (*SPECIAL, *(f"▁{word}" for word in (*WORDS, *LETTERS[1:])), *LETTERS)


def write_bert(
    path: Path, *, ranks: bool = False, pooling: gguf.PoolingType = gguf.PoolingType.MEAN, n_ctx: int = N_CTX
) -> Path:
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if ranks else pooling)
    _add_vocabulary(writer)

    def add(name: str, *shape: int, mean: float = 0.0) -> None:
        writer.add_tensor(name, (mean + 0.2 * rng.standard_normal(shape)).astype(np.float32))

    add("token_embd.weight", len(TOKENS), WIDTH)
    add("token_types.weight", 2, WIDTH)
    add("position_embd.weight", n_ctx, WIDTH)
    norms = ["token_embd_norm"]
    for i in range(N_LAYERS):
        for name, rows, columns in (
            *((f"attn_{part}", WIDTH, WIDTH) for part in ("q", "k", "v", "output")),
            ("ffn_up", N_FF, WIDTH),
            ("ffn_down", WIDTH, N_FF),
        ):
            add(f"blk.{i}.{name}.weight", rows, columns)
            add(f"blk.{i}.{name}.bias", rows)
        norms += [f"blk.{i}.attn_output_norm", f"blk.{i}.layer_output_norm"]
    for norm in norms:
        add(f"{norm}.weight", WIDTH, mean=1.0)
        add(f"{norm}.bias", WIDTH)
    if ranks:
        add("cls.weight", WIDTH, WIDTH)
        add("cls.bias", WIDTH)
        add("cls.output.weight", 1, WIDTH)
        add("cls.output.bias", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_token_list(list(TOKENS))
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))
    writer.add_token_types(kinds)
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)
