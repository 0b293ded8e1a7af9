"""Checks a projector file (an *mmproj*) before libmtmd opens it: first its header, then what its kind of projector needs.

``Projector`` reads keys and tensors with bounds; afterwards every tensor is known to lie inside the file. It reads no
tensor's numbers.

``check`` has the rules. libmtmd tests for some tensors and uses others unchecked, and it aborts where a key has another
type than it expects. The rules cover all that the Qwen3-VL and Gemma 3 styles need for images and the styles of Whisper's
encoder (Ultravox, Voxtral, Qwen2-Audio) for sounds, and what nearly all others need.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

from everwarm.errors import ModelFileError
from everwarm.llama.model import GGUF_MAGIC

MAX_HEADER_BYTES = 1 << 24
MAX_KEYS = 1 << 12
MAX_TENSORS = 1 << 14
MAX_REASON = 300

U32, I32, F32, BOOL, TEXT, LIST = 4, 5, 6, 7, 8, 9  # GGUF's types of values
PLAIN, HALF = 0, 1  # ggml's number formats f32 and f16
NO_WEIGHTS = frozenset({9, 15, 24, 25, 26, 27, 28})  # integers, f64 and formats of intermediate results

SizeOf = Callable[[int], tuple[int, int]]  # of a number format: elements and bytes of a block
Value = int | float | bool | str | tuple[int | float | bool, ...]

_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_N_FORMATS = 43  # ggml's number formats in this build
_ALIGNMENT = 32
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
# Sounds behind Whisper's encoder, and whether frames are merged side by side, and then by two
_WHISPERS = {"ultravox": (True, False), "voxtral": (True, True), "qwen2a": (False, True)}
_N_FRAMES = 3000  # of a window of 30 s, before the convolutions
_MAX_MEL_BINS = 256
_OTHER_STEMS = frozenset({"gemma3nv", "yasa2", "deepseekocr", "deepseekocr2"})  # begin otherwise than with patches
_FLOATS = frozenset({PLAIN, HALF})
# Used by libmtmd's common transformer if they are there, and by no Gemma 3.
_STRANGERS = "attn_q_norm attn_k_norm ls1 ls2 out_scale attn_post_norm ffn_post_norm ffn_gate_exps ffn_gate attn_sinks"


Shape = tuple[int, ...]  # in ggml's order, without trailing ones


class Projector:
    """Raises ``ModelFileError`` for a file that is none, or not whole."""

    def __init__(self, path: Path, size_of: SizeOf) -> None:
        self.path = path
        self.kinds: dict[str, int] = {}
        self.values: dict[str, Value] = {}
        self.tensors: dict[str, tuple[Shape, int]] = {}  # with their number formats
        self._size_of = size_of
        try:
            with path.open("rb") as file:
                self._n_bytes = path.stat().st_size
                self._data = file.read(MAX_HEADER_BYTES)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ModelFileError(f"cannot open projector {path}: {reason}; give the path of a GGUF file") from None
        self._at = 0
        self._read()
        self._data = b""

    # questions

    def bad(self, why: str) -> ModelFileError:
        """Names and values come from the file: one line of what can be printed, and not too long."""
        printable = "".join(letter if letter.isprintable() else "?" for letter in why[:MAX_REASON])
        return ModelFileError(f"{self.path.name} {printable}")

    @property
    def style(self) -> str:
        """Of its images."""
        return self._style("vision") if self.has("vision") else ""

    @property
    def sound_style(self) -> str:
        return self._style("audio") if self.has("audio") else ""

    def _style(self, what: str) -> str:
        found = self.values.get("clip.projector_type") or self.values.get(f"clip.{what}.projector_type")
        if found == "qwen2.5o":  # as libmtmd reads it
            return {"vision": "qwen2.5vl_merger", "audio": "qwen2a"}[what]
        return found if isinstance(found, str) else ""

    def has(self, what: str) -> bool:
        return self.values.get(f"clip.has_{what}_encoder") is True

    def number(self, key: str, default: int | None = None, *, of: str = "vision") -> int:
        found = self.values.get(f"clip.{of}.{key}", default)
        if not isinstance(found, int):
            raise self.bad(f"lacks the number clip.{of}.{key}")
        return found

    def need(self, name: str, shape: tuple[int, ...], formats: frozenset[int] | None = None) -> None:
        """A tensor of this shape: a vector in f32 and a matrix in any format of weights, unless a type is given."""
        shape = _trimmed(shape)
        if name not in self.tensors:
            raise self.bad(f"lacks the tensor {name}")
        own, number_format = self.tensors[name]
        if own != shape:
            raise self.bad(f"has {name} with the shape {own} where {shape} is needed")
        if formats is None and len(shape) == 1:
            formats = frozenset({PLAIN})
        if number_format in NO_WEIGHTS if formats is None else number_format not in formats:
            raise self.bad(f"has {name} in the number format {number_format}, which cannot be used there")

    def may(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self.tensors:
            self.need(name, shape)

    # reading

    def _read(self) -> None:
        magic = self._data[:4]
        if magic != GGUF_MAGIC:
            raise self.bad(f"is not a GGUF file (it starts with {magic!r}, a GGUF starts with {GGUF_MAGIC!r})")
        self._at = 4
        version = self._one("I")
        if version not in (2, 3):
            raise self.bad(f"has GGUF version {version}; versions 2 and 3 can be read")
        n_tensors = self._one("Q")
        n_keys = self._one("Q")
        if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
            raise self.bad(f"claims {n_tensors} tensors and {n_keys} keys; {MAX_TENSORS} and {MAX_KEYS} are believed")
        for _ in range(n_keys):
            self._read_pair()
        places = [self._read_tensor() for _ in range(n_tensors)]
        self._check_places(places)

    def _read_pair(self) -> None:
        key = self._text()
        kind = self._one("I")
        if key in self.kinds:
            raise self.bad(f"has the key {key} twice")
        self.kinds[key] = kind
        if kind == TEXT:
            self.values[key] = self._text()
        elif kind == LIST:
            self.values[key] = self._list(self._one("I"), self._one("Q"))
        else:
            self.values[key] = self._unpack(self._letter(kind), 1)[0]

    def _list(self, kind: int, length: int) -> tuple[int | float | bool, ...]:
        """Texts are only walked over."""
        if kind != TEXT:
            return self._unpack(self._letter(kind), length)
        for _ in range(length):  # ends with the data, if not before
            self._take(self._one("Q"))
        return ()

    def _read_tensor(self) -> tuple[str, int, int]:
        """Its name, where it lies and how many bytes it has."""
        name = self._text()
        n_dimensions = self._one("I")
        if name in self.tensors:
            raise self.bad(f"has the tensor {name} twice")
        if not 1 <= n_dimensions <= 4:
            raise self.bad(f"has {name} with {n_dimensions} dimensions; 1 to 4 exist")
        shape = tuple(int(n) for n in self._unpack("Q", n_dimensions))
        number_format = self._one("i")
        offset = self._one("Q")
        n_per_block, n_bytes = self._size_of(number_format) if 0 <= number_format < _N_FORMATS else (0, 0)
        if n_per_block < 1 or min(shape) < 1 or shape[0] % n_per_block:
            raise self.bad(f"has {name} with the shape {shape} in the number format {number_format}: there is no such")
        self.tensors[name] = (_trimmed(shape), number_format)
        return name, offset, math.prod(shape) // n_per_block * n_bytes

    def _check_places(self, places: list[tuple[str, int, int]]) -> None:
        step = self.values.get("general.alignment", _ALIGNMENT)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise self.bad(f"has the alignment {step}; it must be a power of two")
        begin = _rounded_up(self._at, step)
        expected = 0
        for name, offset, n_bytes in places:
            if offset != expected:
                raise self.bad(f"has {name} at {offset} of its data, where {expected} is next")
            if begin + offset + n_bytes > self._n_bytes:
                raise self.bad(f"ends inside {name}, after {self._n_bytes} bytes; copy or download it again")
            expected += _rounded_up(n_bytes, step)

    def _letter(self, kind: int) -> str:
        found = _LETTERS.get(kind)
        if found is None:
            raise self.bad(f"has metadata of the unknown type {kind}")
        return found

    def _text(self) -> str:
        return self._take(self._one("Q")).decode("utf-8", "replace")

    def _one(self, letter: str) -> int:
        return int(self._unpack(letter, 1)[0])

    def _unpack(self, letter: str, n: int) -> tuple[int | float | bool, ...]:
        taken = self._take(n * struct.calcsize(f"<{letter}"))
        return struct.unpack(f"<{n}{letter}", taken)

    def _take(self, n: int) -> bytes:
        if self._at + n > len(self._data):
            if self._n_bytes > len(self._data):
                raise self.bad(f"has a header of more than {MAX_HEADER_BYTES} bytes")
            raise self.bad(f"ends inside its header, after {self._n_bytes} bytes; copy or download it again")
        self._at += n
        return self._data[self._at - n : self._at]


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _rounded_up(n: int, step: int) -> int:
    return -(-n // step) * step


def check(file: Projector) -> None:
    """Raise ``ModelFileError`` for what would end the process, as far as it is known."""
    arch = file.values.get("general.architecture")
    if arch != "clip":
        raise file.bad(f"is not a projector but a model of its own ({arch}); a projector is often called mmproj-….gguf")
    for key, kind in file.kinds.items():
        wanted = _KINDS.get(key, kind)
        if kind != wanted:
            raise file.bad(f"has {key} as another type of value; {_NAMES[wanted]} is needed")
    if not file.has("vision") and not file.has("audio"):
        raise file.bad("has neither a vision encoder, which images need, nor an audio encoder, which sounds need")
    if file.has("vision"):
        _check_images(file)
    if file.has("audio"):
        _check_sounds(file)


def _check_images(file: Projector) -> None:
    _check_numbers(file)
    if file.style == "qwen3vl_merger":
        _check_qwen3vl(file)
    elif file.style == "gemma3":
        _check_gemma3(file)
    elif file.style not in _OTHER_STEMS:
        _check_any(file)


def _check_numbers(file: Projector) -> None:
    n_blocks = file.number("block_count")
    patch = file.number("patch_size")
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


def _check_sounds(file: Projector) -> None:
    n_blocks, n_bins = file.number("block_count", of="audio"), file.number("num_mel_bins", of="audio")
    if not 0 <= n_blocks <= len(file.tensors):
        raise file.bad(f"claims {n_blocks} blocks for sounds, with {len(file.tensors)} tensors in all")
    if not 1 <= n_bins <= 1024 or (file.sound_style in _WHISPERS and n_bins > _MAX_MEL_BINS):
        raise file.bad(f"has {n_bins} mel bins; 1 to {_MAX_MEL_BINS} are believed")
    if file.sound_style in _WHISPERS:
        _check_whisper(file, n_blocks, n_bins)


def _check_whisper(file: Projector, n_blocks: int, n_bins: int) -> None:
    width = file.number("embedding_length", of="audio")
    stacks, pools = _WHISPERS[file.sound_style]
    _check_heads(file, width, step=1, of="audio")
    if n_blocks < 1:
        raise file.bad("has no block for sounds")
    for i, n_in in ((1, n_bins), (2, width)):
        file.need(f"a.conv1d.{i}.weight", (3, n_in, width), frozenset({HALF}))
        file.need(f"a.conv1d.{i}.bias", (1, width), frozenset({PLAIN}))
    n_positions = _second(file, "a.position_embd.weight")
    file.need("a.position_embd.weight", (width, max(n_positions, _N_FRAMES // 2)), frozenset({PLAIN}))
    _check_norm(file, "a.post_ln", width)
    _check_norm(file, "a.pre_ln", width)
    for i in range(n_blocks):
        _check_whisper_block(file, f"a.blk.{i}", width)
    n_stacked = _check_stack(file, pools=pools) if stacks else 1
    _check_sound_projector(file, width * n_stacked)


def _check_whisper_block(file: Projector, block: str, width: int) -> None:
    for part in ("attn_q", "attn_k", "attn_v"):
        file.need(f"{block}.{part}.weight", (width, width))
    for name in ("attn_q", "attn_v", "ln1", "ln2"):
        file.need(f"{block}.{name}.bias", (width,))
    for name in ("ln1", "ln2"):
        file.need(f"{block}.{name}.weight", (width,))
    for name in ("attn_qkv.weight", "attn_k.bias", *(f"{name}.weight" for name in _STRANGERS.split())):
        if f"{block}.{name}" in file.tensors:
            raise file.bad(f"has the tensor {block}.{name}, which this style has not")
    _check_block(file, block, width, f"{block}.ffn_up", f"{block}.ffn_down")


def _check_stack(file: Projector, *, pools: bool) -> int:
    """How many frames become one embedding. libmtmd counts them in one place and makes them in another, and aborts where
    the two differ."""
    n_stacked = file.number("projector.stack_factor", of="audio")
    if not 1 <= n_stacked <= _N_FRAMES // 2:
        raise file.bad(f"merges {n_stacked} frames of sound; 1 to {_N_FRAMES // 2} are believed")
    n_counted, n_made = -(-_N_FRAMES // n_stacked) // 2, _N_FRAMES // 2
    if pools:
        n_counted, n_made = n_counted // 2, n_made // 2
    if n_counted != -(-n_made // n_stacked):
        raise file.bad(f"merges {n_stacked} frames of sound, which do not divide a window of {_N_FRAMES}")
    return n_stacked


def _check_sound_projector(file: Projector, n_in: int) -> None:
    if file.sound_style == "qwen2a":
        n_out = _second(file, "mm.a.fc.weight")
        file.need("mm.a.fc.weight", (n_in, n_out))
        return file.need("mm.a.fc.bias", (n_out,))
    inner, n_out = _second(file, "mm.a.mlp.1.weight"), _second(file, "mm.a.mlp.2.weight")
    file.need("mm.a.mlp.1.weight", (n_in, inner))
    if file.sound_style == "voxtral":
        return file.need("mm.a.mlp.2.weight", (inner, n_out))
    if inner % 2:
        raise file.bad(f"has mm.a.mlp.1.weight of width {inner}, which cannot be halved")
    file.need("mm.a.norm_pre.weight", (n_in,))
    file.need("mm.a.norm_mid.weight", (inner // 2,))
    return file.need("mm.a.mlp.2.weight", (inner // 2, n_out))


def _check_any(file: Projector) -> None:
    if "v.patch_embd.weight" not in file.tensors:
        raise file.bad("lacks the tensor v.patch_embd.weight")
    for i in range(file.number("block_count")):
        names = [f"v.blk.{i}.attn_{part}.weight" for part in ("q", "k", "v")]
        if f"v.blk.{i}.attn_qkv.weight" not in file.tensors and not all(name in file.tensors for name in names):
            raise file.bad(f"lacks the tensor v.blk.{i}.attn_qkv.weight, or one of {', '.join(names)}")


def _check_qwen3vl(file: Projector) -> None:
    width = file.number("embedding_length")
    patch = file.number("patch_size")
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
        block = f"v.blk.{i}"
        deep = f"v.deepstack.{i}"
        file.need(f"{block}.attn_qkv.weight", (width, 3 * width))
        file.need(f"{block}.attn_qkv.bias", (3 * width,))
        _check_block(file, block, width, f"{block}.ffn_up", f"{block}.ffn_down")
        if f"{deep}.fc1.weight" in file.tensors:
            _check_norm(file, f"{deep}.norm", 4 * width)
            if _check_merger(file, f"{deep}.fc1", f"{deep}.fc2", width) != n_out:
                raise file.bad(f"has {deep}.fc2.weight of another width than mm.2.weight")


def _check_gemma3(file: Projector) -> None:
    width = file.number("embedding_length")
    patch = file.number("patch_size")
    image = file.number("image_size")
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
        up = f"{block}.ffn_up"
        down = f"{block}.ffn_down"
        if _first(file, f"{down}.weight") == width:  # named the wrong way round by an old converter: libmtmd swaps them
            up, down = down, up
        _check_block(file, block, width, up, down)
        for name in _STRANGERS.split():
            if f"{block}.{name}.weight" in file.tensors:
                raise file.bad(f"has the tensor {block}.{name}.weight, which this style has not")
    file.need("mm.soft_emb_norm.weight", (width,))
    file.need("mm.input_projection.weight", (_first(file, "mm.input_projection.weight"), width), _FLOATS)


def _check_heads(file: Projector, width: int, step: int, of: str = "vision") -> None:
    n_heads = file.number("attention.head_count", of=of)
    n_kv_heads = file.number("attention.head_count_kv", n_heads, of=of)
    size = file.number("attention.head_dim", 0, of=of) or width // max(1, n_heads)
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
    inner = _second(file, f"{first}.weight")
    n_out = _second(file, f"{second}.weight")
    file.need(f"{first}.weight", (4 * width, inner))
    file.may(f"{first}.bias", (inner,))
    file.need(f"{second}.weight", (inner, n_out))
    file.may(f"{second}.bias", (n_out,))
    return n_out


def _check_norm(file: Projector, name: str, width: int) -> None:
    file.may(f"{name}.weight", (width,))
    file.may(f"{name}.bias", (width,))


def _first(file: Projector, name: str) -> int:
    return file.tensors[name][0][0] if name in file.tensors else 0


def _second(file: Projector, name: str) -> int:
    return math.prod(file.tensors[name][0][1:]) if name in file.tensors else 0
