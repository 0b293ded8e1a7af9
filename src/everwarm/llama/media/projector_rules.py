"""What a projector file must have so that libmtmd does not end the process over it.

libmtmd asks for some tensors and uses others without asking, and it insists on the type of every key it reads. Knows all
that the Qwen3-VL and Gemma 3 styles need, and of other styles only what nearly every one does. Reads no files.
"""

from __future__ import annotations

import math

from everwarm.llama.media.projector_file import BOOL, F32, HALF, I32, PLAIN, TEXT, U32, Projector

MAX_PIXELS = 1 << 27  # what a file may ask an image to be scaled to
MAX_PATCH = 256

_EVERYWHERE = (
    "embedding_length feed_forward_length block_count projection_dim "
    "attention.head_count attention.head_count_kv attention.head_dim"
)
_VISION = (
    "image_size image_min_pixels image_max_pixels preproc_min_tiles preproc_max_tiles preproc_image_size patch_size "
    "projector.scale_factor projector.query_side projector.window_side spatial_merge_size n_wa_pattern window_size "
    "sam.head_count sam.block_count sam.embedding_length expert_used_count"
)
_AUDIO = (
    "num_mel_bins projector.stack_factor chunk_size conv_kernel_size max_pos_emb projector.window_size "
    "projector.downsample_rate projector.head_count rvq.num_quantizers window_size local_block_count local_group_size "
    "subsampling_factor"
)
_TEXTS = (
    "general.name general.description clip.projector_type clip.vision.projector_type clip.audio.projector_type "
    "clip.vision.image_resize_algo clip.vision.mm_patch_merge_type"
)
_FLAGS = "clip.has_vision_encoder clip.has_audio_encoder clip.has_gen_audio_encoder clip.use_gelu clip.use_silu"
_FRACTIONS = "clip.vision.attention.layer_norm_epsilon clip.audio.attention.layer_norm_epsilon clip.vision.swiglu_clamp"
_KINDS: dict[str, int] = {
    "general.alignment": U32,
    "clip.minicpmv_version": I32,
    "clip.minicpmv_query_num": U32,
    **dict.fromkeys((f"clip.vision.{key}" for key in f"{_EVERYWHERE} {_VISION}".split()), U32),
    **dict.fromkeys((f"clip.audio.{key}" for key in f"{_EVERYWHERE} {_AUDIO}".split()), U32),
    **dict.fromkeys(_TEXTS.split(), TEXT),
    **dict.fromkeys(_FLAGS.split(), BOOL),
    **dict.fromkeys(_FRACTIONS.split(), F32),
}
_NAMES = {U32: "an unsigned number", I32: "a number", F32: "a fraction", BOOL: "true or false", TEXT: "a text"}

_OTHER_STEMS = frozenset({"gemma3nv", "yasa2", "deepseekocr", "deepseekocr2"})  # begin otherwise than with patches
_FLOATS = frozenset({PLAIN, HALF})
# Used by libmtmd's common transformer if they are there, and by no Gemma 3.
_STRANGERS = "attn_q_norm attn_k_norm ls1 ls2 out_scale attn_post_norm ffn_post_norm ffn_gate_exps ffn_gate attn_sinks"


def check(file: Projector) -> None:
    """Raise ``ModelFileError`` for what would end the process, as far as it is known."""
    arch = file.values.get("general.architecture")
    if arch != "clip":
        raise file.bad(f"is not a projector but a model of its own ({arch}); a projector is often called mmproj-….gguf")
    for key, kind in file.kinds.items():
        wanted = _KINDS.get(key, kind)
        if kind != wanted:
            raise file.bad(f"has {key} as another type of value; {_NAMES[wanted]} is needed")
    if file.values.get("clip.has_vision_encoder") is not True:
        raise file.bad("has no vision encoder; images need one")
    _check_numbers(file)
    if file.style == "qwen3vl_merger":
        _check_qwen3vl(file)
    elif file.style == "gemma3":
        _check_gemma3(file)
    elif file.style not in _OTHER_STEMS:
        _check_any(file)


def _check_numbers(file: Projector) -> None:
    n_blocks, patch = file.number("block_count"), file.number("patch_size")
    if not 1 <= n_blocks <= len(file.tensors):
        raise file.bad(f"claims {n_blocks} blocks, with {len(file.tensors)} tensors in all")
    if not 1 <= patch <= MAX_PATCH:
        raise file.bad(f"has patches of {patch} pixels; 1 to {MAX_PATCH} are believed")
    for key in ("image_min_pixels", "image_max_pixels"):
        if not 1 <= file.number(key, 1) <= MAX_PIXELS:
            raise file.bad(f"has {key} {file.number(key)}; 1 to {MAX_PIXELS} are believed")
    for key in ("image_mean", "image_std"):
        numbers = file.values.get(f"clip.vision.{key}", ())
        if not isinstance(numbers, tuple) or not all(math.isfinite(x) for x in numbers):
            raise file.bad(f"has {key} {numbers}; three numbers are needed")


def _check_any(file: Projector) -> None:
    if "v.patch_embd.weight" not in file.tensors:
        raise file.bad("lacks the tensor v.patch_embd.weight")
    for i in range(file.number("block_count")):
        names = [f"v.blk.{i}.attn_{part}.weight" for part in ("q", "k", "v")]
        if f"v.blk.{i}.attn_qkv.weight" not in file.tensors and not all(name in file.tensors for name in names):
            raise file.bad(f"lacks the tensor v.blk.{i}.attn_qkv.weight, or one of {', '.join(names)}")


def _check_qwen3vl(file: Projector) -> None:
    width, patch = file.number("embedding_length"), file.number("patch_size")
    _check_heads(file, width, step=4)
    if file.number("spatial_merge_size", 2) != 2:
        raise file.bad(f"merges {file.number('spatial_merge_size')} patches per side; this style merges 2")
    if "v.class_embd" in file.tensors:
        raise file.bad("has the tensor v.class_embd, which this style has not")
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        file.need(name, (patch, patch, 3, width), _FLOATS)
    file.need("v.patch_embd.bias", (width,))
    side = math.isqrt(_second(file, "v.position_embd.weight"))
    file.need("v.position_embd.weight", (width, side * side), frozenset({PLAIN}))
    _check_norm(file, "v.pre_ln", width)
    _check_norm(file, "v.post_ln", width)
    n_out = _check_merger(file, "mm.0", "mm.2", width)
    for i in range(file.number("block_count")):
        block, deep = f"v.blk.{i}", f"v.deepstack.{i}"
        file.need(f"{block}.attn_qkv.weight", (width, 3 * width))
        file.need(f"{block}.attn_qkv.bias", (3 * width,))
        _check_block(file, block, width, f"{block}.ffn_up", f"{block}.ffn_down")
        if f"{deep}.fc1.weight" in file.tensors:
            _check_norm(file, f"{deep}.norm", 4 * width)
            if _check_merger(file, f"{deep}.fc1", f"{deep}.fc2", width) != n_out:
                raise file.bad(f"has {deep}.fc2.weight of another width than mm.2.weight")


def _check_gemma3(file: Projector) -> None:
    width, patch, image = file.number("embedding_length"), file.number("patch_size"), file.number("image_size")
    merged = file.number("projector.scale_factor", 4)
    _check_heads(file, width, step=1)
    if merged < 1 or image < 1 or image % (patch * merged):
        raise file.bad(f"has images of {image} pixels, which patches of {patch} merged by {merged} do not divide")
    file.need("v.patch_embd.weight", (patch, patch, 3, width), _FLOATS)
    file.may("v.patch_embd.bias", (width,))
    file.need("v.position_embd.weight", (width, (image // patch) ** 2), frozenset({PLAIN}))
    _check_norm(file, "v.pre_ln", width)
    _check_norm(file, "v.post_ln", width)
    for i in range(file.number("block_count")):
        block = f"v.blk.{i}"
        _check_attention(file, block, width)
        up, down = f"{block}.ffn_up", f"{block}.ffn_down"
        if _first(file, f"{down}.weight") == width:  # named the wrong way round by an old converter: libmtmd swaps them
            up, down = down, up
        _check_block(file, block, width, up, down)
        for name in _STRANGERS.split():
            if f"{block}.{name}.weight" in file.tensors:
                raise file.bad(f"has the tensor {block}.{name}.weight, which this style has not")
    file.need("mm.soft_emb_norm.weight", (width,))
    file.need("mm.input_projection.weight", (_first(file, "mm.input_projection.weight"), width), _FLOATS)


def _check_heads(file: Projector, width: int, step: int) -> None:
    n_heads = file.number("attention.head_count")
    n_kv_heads = file.number("attention.head_count_kv", n_heads)
    size = file.number("attention.head_dim", 0) or width // max(1, n_heads)
    if n_heads < 1 or n_heads * size != width or n_kv_heads != n_heads or size % step:
        raise file.bad(f"has {n_heads} heads ({n_kv_heads} for KV) of {size} numbers in a width of {width}")


def _check_attention(file: Projector, block: str, width: int) -> None:
    if f"{block}.attn_qkv.weight" in file.tensors:
        file.need(f"{block}.attn_qkv.weight", (width, 3 * width))
        return file.may(f"{block}.attn_qkv.bias", (3 * width,))
    for part in ("attn_q", "attn_k", "attn_v"):
        file.need(f"{block}.{part}.weight", (width, width))
        file.may(f"{block}.{part}.bias", (width,))


def _check_block(file: Projector, block: str, width: int, up: str, down: str) -> None:
    _check_norm(file, f"{block}.ln1", width)
    _check_norm(file, f"{block}.ln2", width)
    file.need(f"{block}.attn_out.weight", (width, width))
    file.may(f"{block}.attn_out.bias", (width,))
    inner = _second(file, f"{up}.weight")
    file.need(f"{up}.weight", (width, inner))
    file.may(f"{up}.bias", (inner,))
    file.may(f"{block}.ffn_gate.weight", (width, inner))
    file.may(f"{block}.ffn_gate.bias", (inner,))
    file.need(f"{down}.weight", (inner, width))
    file.may(f"{down}.bias", (width,))


def _check_merger(file: Projector, first: str, second: str, width: int) -> int:
    """Two matrices behind four patches side by side; returns the width of what comes out."""
    inner, n_out = _second(file, f"{first}.weight"), _second(file, f"{second}.weight")
    file.need(f"{first}.weight", (4 * width, inner))
    file.may(f"{first}.bias", (inner,))
    file.need(f"{second}.weight", (inner, n_out))
    file.may(f"{second}.bias", (n_out,))
    return n_out


def _check_norm(file: Projector, name: str, width: int) -> None:
    file.may(f"{name}.weight", (width,))
    file.may(f"{name}.bias", (width,))


def _first(file: Projector, name: str) -> int:
    tensor = file.tensors.get(name)
    return 0 if tensor is None else tensor.shape[0]


def _second(file: Projector, name: str) -> int:
    tensor = file.tensors.get(name)
    return 0 if tensor is None else math.prod(tensor.shape[1:])
