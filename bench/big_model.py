"""A model with the shape of Qwen3.5-27B and random Q8_0 weights, written in seconds: for measuring on a GPU.

Same layers, widths, heads and vocabulary, hence the same work, the same KV (64 KiB per token) and the same recurrent state
(149.6 MiB); what it writes means nothing. ``python -m bench.big_model PATH [LAYERS] [--mtp]``; with
``--mtp`` it has an MTP head as well.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from everwarm.demo.tiny import TinySpec
from everwarm.demo.tiny.plans import Hyper, Kind, Plan, Tensor, mtp_tensors
from everwarm.demo.tiny.write import ALIGNMENT, draw, size_bytes, write_header

WIDTH, N_LAYERS, N_VOCAB, FEED_FORWARD = 5120, 64, 248_320, 17_408
HEAD, N_HEADS, N_KV_HEADS = 256, 24, 4
STATE, N_VALUES, N_KEYS, CONV = 128, 48, 16, 4
INNER, N_CONV = N_VALUES * STATE, (N_VALUES + 2 * N_KEYS) * STATE
PERIOD = 4  # every fourth layer attends


@dataclass(frozen=True, slots=True)
class Place:
    tensor: Tensor
    at: int


def write(path: Path, n_layers: int = N_LAYERS, *, mtp: bool = False) -> int:
    """All cores draw; returns the size in bytes."""
    plan = _plan(n_layers, mtp=mtp)
    spec = TinySpec(arch="qwen35", n_layers=n_layers, width=WIDTH, n_vocab=N_VOCAB, dtype="q8_0", mtp=mtp)
    unfinished = path.with_suffix(".unfinished")
    write_header(unfinished, plan, spec)
    at, places = unfinished.stat().st_size, []
    for tensor in plan.tensors:
        at += -at % ALIGNMENT
        places.append(Place(tensor, at))
        at += size_bytes(tensor, "q8_0")
    os.truncate(unfinished, at + -at % ALIGNMENT)
    largest_first = sorted(places, key=lambda place: -size_bytes(place.tensor, "q8_0"))
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(_fill, unfinished), largest_first))
    unfinished.replace(path)
    return path.stat().st_size


def _fill(path: Path, place: Place) -> None:
    with path.open("r+b") as file:
        file.seek(place.at)
        for chunk in draw(place.tensor, "q8_0", 0):
            file.write(chunk.data)


def _plan(n_layers: int, *, mtp: bool) -> Plan:
    blocks = [_attention(i) if (i + 1) % PERIOD == 0 else _delta_net(i) for i in range(n_layers)]
    outer: tuple[Tensor, ...] = (
        Tensor("token_embd.weight", (WIDTH, N_VOCAB), "embedding"),
        Tensor("output.weight", (WIDTH, N_VOCAB), "output"),
        Tensor("output_norm.weight", (WIDTH,), "norm"),
    )
    hyper = _hyper(n_layers)
    if mtp:
        blocks.append([*_attention(n_layers), *mtp_tensors(n_layers, WIDTH)])
        hyper |= {"block_count": n_layers + 1, "nextn_predict_layers": 1}
    tensors = outer + tuple(tensor for block in blocks for tensor in block)
    return Plan("qwen35", hyper, tensors)


def _hyper(n_layers: int) -> Hyper:
    return {
        "context_length": 262_144,
        "embedding_length": WIDTH,
        "block_count": n_layers,
        "feed_forward_length": FEED_FORWARD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD // 4,
        "rope.dimension_sections": (11, 11, 10, 0),
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": CONV,
        "ssm.inner_size": INNER,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": N_VALUES,
        "ssm.group_count": N_KEYS,
        "full_attention_interval": PERIOD,
    }


def _layer(i: int, *parts: tuple[str, tuple[int, ...], Kind]) -> list[Tensor]:
    outer: tuple[tuple[str, tuple[int, ...], Kind], ...] = (
        ("attn_norm.weight", (WIDTH,), "norm"),
        ("post_attention_norm.weight", (WIDTH,), "norm"),
        ("ffn_gate.weight", (WIDTH, FEED_FORWARD), "matrix"),
        ("ffn_up.weight", (WIDTH, FEED_FORWARD), "matrix"),
        ("ffn_down.weight", (FEED_FORWARD, WIDTH), "matrix"),
    )
    return [Tensor(f"blk.{i}.{name}", shape, kind) for name, shape, kind in (*outer, *parts)]


def _attention(i: int) -> list[Tensor]:
    return _layer(
        i,
        ("attn_q.weight", (WIDTH, 2 * N_HEADS * HEAD), "matrix"),
        ("attn_k.weight", (WIDTH, N_KV_HEADS * HEAD), "matrix"),
        ("attn_v.weight", (WIDTH, N_KV_HEADS * HEAD), "matrix"),
        ("attn_output.weight", (N_HEADS * HEAD, WIDTH), "matrix"),
        ("attn_q_norm.weight", (HEAD,), "norm"),
        ("attn_k_norm.weight", (HEAD,), "norm"),
    )


def _delta_net(i: int) -> list[Tensor]:
    return _layer(
        i,
        ("attn_qkv.weight", (WIDTH, N_CONV), "matrix"),
        ("attn_gate.weight", (WIDTH, INNER), "matrix"),
        ("ssm_conv1d.weight", (CONV, N_CONV), "conv"),
        ("ssm_dt.bias", (N_VALUES,), "step_bias"),
        ("ssm_a", (N_VALUES,), "decay"),
        ("ssm_beta.weight", (WIDTH, N_VALUES), "matrix"),
        ("ssm_alpha.weight", (WIDTH, N_VALUES), "matrix"),
        ("ssm_norm.weight", (STATE,), "norm"),
        ("ssm_out.weight", (INNER, WIDTH), "matrix"),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.big_model")
    parser.add_argument("path", type=Path, help="the file to write: 28.6 GB with all layers")
    parser.add_argument("n_layers", type=int, nargs="?", default=N_LAYERS)
    parser.add_argument("--mtp", action="store_true", help="with an MTP head")
    given = parser.parse_args()
    began = time.monotonic()
    n_bytes = write(given.path, given.n_layers, mtp=given.mtp)
    print(f"{n_bytes / 1e9:.1f} GB in {time.monotonic() - began:.0f} s")
