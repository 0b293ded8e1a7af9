"""Draws the numbers of one tensor, the same on every machine.

Knows distributions and the two number formats. Does not know architectures or files. Every value comes from the raw
bits of a PCG64 generator and exactly rounded arithmetic: no normal draws and no exponentials, whose last bit depends on
the machine. An f32 matrix holds exactly the values that its Q8_0 twin stands for.
"""

import hashlib
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from everwarm.demo.tiny.plans import Kind, Tensor
from everwarm.demo.tiny.spec import DType
from everwarm.demo.tiny.vocab import N_BASE_TOKENS

Chunk = npt.NDArray[Any]

_CHUNK_ELEMENTS = 1 << 22
_BLOCK = 32
_Q8_0_BLOCK = np.dtype([("scale", "<f2"), ("quants", "i1", (_BLOCK,))])
_STEPS_PER_DEVIATION = 73.6  # standard deviation of a uniform draw from -127..127
# Output rows of unused tokens are small, so that the most likely next token is always a real one.
_UNUSED_ROW_FACTOR = 0.25

_MATRICES: frozenset[Kind] = frozenset({"embedding", "output", "matrix", "small_matrix"})
_QUANTISED: frozenset[Kind] = frozenset({"embedding", "output", "matrix"})
# The recurrent layers forget at a rate of softplus(step) * decay per token: time constants of about 10 to 1000 tokens.
_RANGES: dict[Kind, tuple[float, float]] = {
    "norm": (0.8, 1.2),
    "conv": (-0.9, 0.9),
    "bias": (-0.1, 0.1),
    "step_bias": (-5.5, -3.0),
    "decay": (-2.0, -0.25),
    "skip": (0.8, 1.2),
    "factors": (1.0, 8.0),
}


def is_quantised(tensor: Tensor, dtype: DType) -> bool:
    """Whether this tensor is stored as Q8_0 in a file of that type; everything else is F32."""
    return dtype == "q8_0" and tensor.kind in _QUANTISED


def size_bytes(tensor: Tensor, dtype: DType) -> int:
    """How many bytes `draw` gives in all."""
    n_elements = prod(tensor.shape)
    if is_quantised(tensor, dtype):
        return n_elements // _BLOCK * _Q8_0_BLOCK.itemsize
    return n_elements * 4


def draw(tensor: Tensor, dtype: DType, seed: int) -> Iterator[Chunk]:
    """The tensor's data, in pieces of bounded size and in file order."""
    digest = hashlib.blake2b(tensor.name.encode(), digest_size=8).digest()
    rng = np.random.Generator(np.random.PCG64([seed, int.from_bytes(digest, "little")]))
    if tensor.kind not in _MATRICES:
        yield _draw_uniform(rng, tensor)
        return
    quantised = is_quantised(tensor, dtype)
    for steps, scales in _draw_rows(rng, tensor):
        yield _as_q8_0(steps, scales) if quantised else _as_f32(steps, scales)


def _draw_uniform(rng: np.random.Generator, tensor: Tensor) -> Chunk:
    low, high = _RANGES[tensor.kind]
    return (low + (high - low) * rng.random(prod(tensor.shape))).astype("<f4")


def _draw_rows(rng: np.random.Generator, tensor: Tensor) -> Iterator[tuple[Chunk, Chunk]]:
    """Whole rows of steps from -127 to 127, and the size of a step in each row."""
    n_in = prod(tensor.shape[:-1])
    n_rows = tensor.shape[-1]
    step_size = _deviation(tensor) / _STEPS_PER_DEVIATION
    rows_per_chunk = max(1, _CHUNK_ELEMENTS // n_in)
    for first in range(0, n_rows, rows_per_chunk):
        rows = np.arange(first, min(first + rows_per_chunk, n_rows))
        words = rng.integers(0, 1 << 64, size=len(rows) * n_in // 8, dtype=np.uint64).astype("<u8", copy=False)
        steps = words.view(np.int8)
        np.maximum(steps, -127, out=steps)
        unused = (rows >= N_BASE_TOKENS) & (tensor.kind == "output")
        scales = np.where(unused, step_size * _UNUSED_ROW_FACTOR, step_size).astype("<f2")
        yield steps.reshape(len(rows), n_in), scales


def _deviation(tensor: Tensor) -> float:
    """Embeddings are unit-sized, and matrices keep a unit-sized input unit-sized."""
    return 1.0 if tensor.kind == "embedding" else float(prod(tensor.shape[:-1]) ** -0.5)


def _as_f32(steps: Chunk, scales: Chunk) -> Chunk:
    values = steps.astype("<f4")
    values *= scales.astype("<f4")[:, None]
    return values


def _as_q8_0(steps: Chunk, scales: Chunk) -> Chunk:
    n_rows, n_in = steps.shape
    blocks = np.empty((n_rows, n_in // _BLOCK), dtype=_Q8_0_BLOCK)
    blocks["scale"] = scales[:, None]
    blocks["quants"] = steps.reshape(n_rows, n_in // _BLOCK, _BLOCK)
    return blocks
