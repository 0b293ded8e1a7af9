"""Tiny projectors: what turns images and sounds into embeddings for a tiny model, as a second GGUF file that libmtmd loads.

Knows the keys and tensor shapes of two styles for images: Qwen-VL's (any size, M-RoPE positions) for qwen35, and Gemma 3's
(one size, each cell of an image sees all of it) for gemma3; and of one for sounds, Ultravox' (Whisper's encoder, windows of
30 seconds). Random weights, f32 but for the convolutions of sounds; the same spec gives the same bytes.
"""

from contextlib import closing
from pathlib import Path

from gguf import GGUFType, GGUFWriter, LlamaFileType

from everwarm.demo.tiny.plans import Kind, Tensor, TinySpec
from everwarm.demo.tiny.write import append_tensors, finish_header, whole_or_nothing

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
