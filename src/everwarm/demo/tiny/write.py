"""Writes a planned model to a GGUF file, and a projector beside it, one piece at a time, all or nothing.

Knows the file format (through the gguf package) and the tokenizer keys. Does not choose shapes or numbers of a model.

Every value comes from the raw bits of a PCG64 generator and exactly rounded arithmetic: no normal draws and no
exponentials, whose last bit depends on the machine. An f32 matrix holds exactly the values that its Q8_0 twin stands
for.

A projector turns images and sounds into embeddings for a tiny model; libmtmd loads it. There are two styles for images:
Qwen-VL's (any size, M-RoPE positions) for qwen35, and Gemma 3's (one size, each cell of an image sees all of it) for
gemma3; and one for sounds, Ultravox' (Whisper's encoder, windows of 30 seconds). Random weights, f32 but for the
convolutions of sounds; the same spec gives the same bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFType, GGUFWriter, LlamaFileType

from everwarm.demo.tiny.plans import (
    CHAT_TEMPLATE,
    DEAD_MERGE,
    END_OF_TEXT,
    IM_END,
    N_BASE_TOKENS,
    DType,
    Kind,
    Plan,
    Tensor,
    TinySpec,
    Value,
    plan_tiny,
    vocabulary,
)

Chunk = npt.NDArray[Any]

_CHUNK_ELEMENTS = 1 << 22
_BLOCK = 32
_Q8_0_BLOCK = np.dtype([("scale", "<f2"), ("quants", "i1", (_BLOCK,))])
_STEPS_PER_DEVIATION = 73.6  # standard deviation of a uniform draw from -127..127
# Output rows of unused tokens are small, so that the most likely next token is always a real one.
_UNUSED_ROW_FACTOR = 0.25

_MATRICES: frozenset[Kind] = frozenset({"embedding", "output", "matrix", "small_matrix", "experts"})
_QUANTISED: frozenset[Kind] = frozenset({"embedding", "output", "matrix", "experts"})
# The recurrent layers forget at a rate of softplus(step) * decay per token: time constants of about 10 to 1000 tokens.
_RANGES: dict[Kind, tuple[float, float]] = {
    "norm": (0.8, 1.2),
    "conv": (-0.9, 0.9),
    "half_conv": (-0.9, 0.9),
    "bias": (-0.1, 0.1),
    "step_bias": (-5.5, -3.0),
    "decay": (-2.0, -0.25),
    "skip": (0.8, 1.2),
    "factors": (1.0, 8.0),
}
ALIGNMENT = 32
_FILE_TYPES = {"f32": LlamaFileType.ALL_F32, "q8_0": LlamaFileType.MOSTLY_Q8_0}
_WIDTH = 64
_FEED_FORWARD = 128  # not the width: libmtmd would take up for down and swap them
_N_HEADS = 4
_N_LAYERS = 2
_PATCH = 16
_N_MERGED = 2  # patches per side of what becomes one embedding
_QWEN_SIZE = 224
_GEMMA_SIZE = 192  # of 12 × 12 patches, so 36 embeddings for every image

_PROJECTORS = {"qwen35": "qwen3vl_merger", "gemma3": "gemma3"}

_SOUND = "ultravox"
_N_MEL_BINS = 16
_N_FRAMES = 1500  # of a window, after the convolutions
_N_STACKED = 100  # frames that become one embedding: 15 for a window

_Parts = tuple[tuple[str, tuple[int, ...], Kind], ...]


def is_quantised(tensor: Tensor, dtype: DType) -> bool:
    """Whether this tensor is stored as Q8_0 in a file of that type; everything else but a ``half_conv`` is F32."""
    return dtype == "q8_0" and tensor.kind in _QUANTISED


def size_bytes(tensor: Tensor, dtype: DType) -> int:
    """How many bytes `draw` gives in all."""
    n_elements = prod(tensor.shape)
    if is_quantised(tensor, dtype):
        return n_elements // _BLOCK * _Q8_0_BLOCK.itemsize
    return n_elements * (2 if tensor.kind == "half_conv" else 4)


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
    values = (low + (high - low) * rng.random(prod(tensor.shape))).astype("<f4")
    return values.astype("<f2") if tensor.kind == "half_conv" else values


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
    """Embeddings are unit-sized, and matrices keep a unit-sized input unit-sized. Experts are one matrix each."""
    if tensor.kind == "embedding":
        return 1.0
    return float((tensor.shape[0] if tensor.kind == "experts" else prod(tensor.shape[:-1])) ** -0.5)


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
    writer.add_token_list(list(vocab))
    writer.add_token_types(list(vocab.values()))
    writer.add_token_merges([DEAD_MERGE])
    writer.add_bos_token_id(END_OF_TEXT)  # never added, but without it libllama takes byte 11 for one
    writer.add_eos_token_id(IM_END)
    writer.add_eot_token_id(IM_END)  # without it libllama guesses, and may take <|endoftext|>
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def finish_header(writer: GGUFWriter, tensors: Sequence[Tensor], dtype: DType) -> None:
    for tensor in tensors:
        stored = GGMLQuantizationType.Q8_0 if is_quantised(tensor, dtype) else GGMLQuantizationType.F32
        stored = GGMLQuantizationType.F16 if tensor.kind == "half_conv" else stored
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


def projector_path(model: Path) -> Path:
    """The path of a model's projector: beside the model, with its name."""
    return model.with_name(f"mmproj-{model.name}")


def write_tiny_projector(path: Path, spec: TinySpec) -> int:
    """Write the projector for the model of this spec and return its size in bytes."""
    if not spec.vision and not spec.audio:
        raise ValueError("the model has no projector; give a spec with vision=True or audio=True")
    tensors = _plan(spec)
    with whole_or_nothing(path) as unfinished:
        _write_header(unfinished, spec, tensors)
        append_tensors(unfinished, tensors, "f32", spec.seed)
        return unfinished.stat().st_size


def _write_header(path: Path, spec: TinySpec, tensors: tuple[Tensor, ...]) -> None:
    with closing(GGUFWriter(path, "clip")) as writer:
        writer.add_type(GGUFType.MMPROJ)
        writer.add_name(f"everwarm-tiny-{spec.arch}-{'vision' if spec.vision else 'audio'}")
        writer.add_file_type(LlamaFileType.ALL_F32)
        if spec.vision:
            _write_vision_keys(writer, spec)
        if spec.audio:
            _write_audio_keys(writer, spec)
        finish_header(writer, tensors, "f32")


def _write_vision_keys(writer: GGUFWriter, spec: TinySpec) -> None:
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.vision.projector_type" if spec.audio else "clip.projector_type", _PROJECTORS[spec.arch])
    writer.add_bool("clip.use_gelu", True)
    for key, value in _numbers(spec).items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", (0.5, 0.5, 0.5))
    writer.add_array("clip.vision.image_std", (0.5, 0.5, 0.5))


def _write_audio_keys(writer: GGUFWriter, spec: TinySpec) -> None:
    writer.add_bool("clip.has_audio_encoder", True)
    writer.add_string("clip.audio.projector_type" if spec.vision else "clip.projector_type", _SOUND)
    for key, value in _shared_numbers(spec).items():
        writer.add_uint32(f"clip.audio.{key}", value)
    writer.add_uint32("clip.audio.num_mel_bins", _N_MEL_BINS)
    writer.add_uint32("clip.audio.projector.stack_factor", _N_STACKED)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)


def _shared_numbers(spec: TinySpec) -> dict[str, int]:
    return {
        "embedding_length": _WIDTH,
        "feed_forward_length": _FEED_FORWARD,
        "block_count": _N_LAYERS,
        "projection_dim": spec.width,
        "attention.head_count": _N_HEADS,
    }


def _numbers(spec: TinySpec) -> dict[str, int]:
    shared = _shared_numbers(spec) | {"patch_size": _PATCH}
    if spec.arch == "qwen35":
        return shared | {"image_size": _QWEN_SIZE, "spatial_merge_size": _N_MERGED}
    return shared | {"image_size": _GEMMA_SIZE, "projector.scale_factor": _N_MERGED}


def _plan(spec: TinySpec) -> tuple[Tensor, ...]:
    outer, block = (_qwen_outer, _qwen_block) if spec.arch == "qwen35" else (_gemma_outer, _gemma_block)
    parts = outer(spec.width) + _blocks("v", block()) if spec.vision else ()
    if spec.audio:
        parts += _sound_outer(spec.width) + _blocks("a", _sound_block())
    return tuple(Tensor(name, shape, kind) for name, shape, kind in parts)


def _blocks(prefix: str, block: _Parts) -> _Parts:
    return tuple((f"{prefix}.blk.{i}.{name}", shape, kind) for i in range(_N_LAYERS) for name, shape, kind in block)


def _qwen_outer(text_width: int) -> _Parts:
    """Two patch matrices, one for each of two frames (a still image is both), and four neighbours merged into one."""
    merged = _WIDTH * _N_MERGED**2
    return (
        *_patches(_QWEN_SIZE),
        ("v.patch_embd.weight.1", (_PATCH, _PATCH, 3, _WIDTH), "matrix"),
        *_affine("mm.0", merged, merged),
        *_affine("mm.2", merged, text_width),
    )


def _gemma_outer(text_width: int) -> _Parts:
    """The last matrix is stored the other way round: libmtmd transposes it."""
    return (
        *_patches(_GEMMA_SIZE),
        ("mm.soft_emb_norm.weight", (_WIDTH,), "norm"),
        ("mm.input_projection.weight", (text_width, _WIDTH), "matrix"),
    )


def _patches(image_size: int) -> _Parts:
    return (
        ("v.patch_embd.weight", (_PATCH, _PATCH, 3, _WIDTH), "matrix"),
        ("v.patch_embd.bias", (_WIDTH,), "bias"),
        ("v.position_embd.weight", (_WIDTH, (image_size // _PATCH) ** 2), "embedding"),
        *_norm("v.post_ln"),
    )


def _sound_outer(text_width: int) -> _Parts:
    """Two convolutions over the spectrum, of which the second halves the frames; many frames merged into one."""
    stacked = _WIDTH * _N_STACKED
    return (
        ("a.conv1d.1.weight", (3, _N_MEL_BINS, _WIDTH), "half_conv"),
        ("a.conv1d.1.bias", (1, _WIDTH), "bias"),
        ("a.conv1d.2.weight", (3, _WIDTH, _WIDTH), "half_conv"),
        ("a.conv1d.2.bias", (1, _WIDTH), "bias"),
        ("a.position_embd.weight", (_WIDTH, _N_FRAMES), "embedding"),
        *_norm("a.post_ln"),
        ("mm.a.norm_pre.weight", (stacked,), "norm"),
        ("mm.a.mlp.1.weight", (stacked, 2 * _WIDTH), "matrix"),
        ("mm.a.norm_mid.weight", (_WIDTH,), "norm"),
        ("mm.a.mlp.2.weight", (_WIDTH, text_width), "matrix"),
    )


def _sound_block() -> _Parts:
    """Whisper's keys have no bias."""
    return (
        *_affine("attn_q", _WIDTH, _WIDTH),
        ("attn_k.weight", (_WIDTH, _WIDTH), "matrix"),
        *_affine("attn_v", _WIDTH, _WIDTH),
        *_rest_of_block(),
    )


def _qwen_block() -> _Parts:
    return (*_affine("attn_qkv", _WIDTH, 3 * _WIDTH), *_rest_of_block())


def _gemma_block() -> _Parts:
    return (
        *_affine("attn_q", _WIDTH, _WIDTH),
        *_affine("attn_k", _WIDTH, _WIDTH),
        *_affine("attn_v", _WIDTH, _WIDTH),
        *_rest_of_block(),
    )


def _rest_of_block() -> _Parts:
    return (
        *_norm("ln1"),
        *_norm("ln2"),
        *_affine("attn_out", _WIDTH, _WIDTH),
        *_affine("ffn_up", _WIDTH, _FEED_FORWARD),
        *_affine("ffn_down", _FEED_FORWARD, _WIDTH),
    )


def _affine(name: str, n_in: int, n_out: int) -> _Parts:
    return ((f"{name}.weight", (n_in, n_out), "matrix"), (f"{name}.bias", (n_out,), "bias"))


def _norm(name: str) -> _Parts:
    return ((f"{name}.weight", (_WIDTH,), "norm"), (f"{name}.bias", (_WIDTH,), "bias"))
