"""The hyperparameters and tensors of each architecture, and the vocabulary of all of them, as plain data.

Knows which keys and shapes libllama expects and how sizes follow from the width. Does not draw weights or write files.
Shapes are in ggml order: the first number is the row length, that is, what a matrix takes in.

The vocabulary has exactly one token per byte, plus the control tokens of a ChatML conversation. One exception to "one token
per byte" is real behaviour of libllama: user-defined tokens (`<think>`, `</think>`) are recognised in any text, control
tokens only on request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gguf import TokenType

ARCHITECTURES: tuple[str, ...] = (
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "jamba",
    "falcon-h1",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "lfm2",
    "mamba2",
    "gemma3",
    "llama",
)

WITH_HEADS = ("qwen35", "qwen35moe", "qwen3next", "nemotron_h_moe")  # that `mtp` can be given to

DType = Literal["f32", "q8_0"]

_DTYPES: tuple[str, ...] = ("f32", "q8_0")
_EVERY_LAYER_ALIKE = frozenset({"falcon-h1", "mamba2", "llama"})
_MAX_LAYERS = 512  # libllama asserts on more
_WIDTH_STEP = 64
_MAX_WIDTH = 16384  # beyond it the Q8_0 scales would leave the normal half-precision range
CONV_KERNEL = 4
SLIDING_WINDOW = 64
_RMS_EPSILON = 1e-6
_MAMBA1_STATE = 16  # the sizes that the CUDA scan kernels know, so that nothing falls back to the CPU
_MAMBA2_STATE = 128
_N_EXPERTS = 4  # of which each token uses two
_N_EXPERTS_USED = 2
_OUTPUT_NORM_NAMES = {"lfm2": "token_embd_norm.weight"}


_SPECIAL: tuple[tuple[str, TokenType], ...] = (
    ("<|endoftext|>", TokenType.CONTROL),
    ("<|im_start|>", TokenType.CONTROL),
    ("<|im_end|>", TokenType.CONTROL),
    ("<think>", TokenType.USER_DEFINED),
    ("</think>", TokenType.USER_DEFINED),
    ("<|vision_start|>", TokenType.CONTROL),
    ("<|vision_end|>", TokenType.CONTROL),
    ("<|image_pad|>", TokenType.CONTROL),
)

N_BYTES = 256
N_BASE_TOKENS = N_BYTES + len(_SPECIAL)
# What stands around an image and is not among the base tokens, of the architectures that can have a projector.
IMAGE_MARKERS: dict[str, tuple[str, ...]] = {"qwen35": (), "gemma3": ("<start_of_image>", "<end_of_image>")}
END_OF_TEXT = 256
IM_END = 258

# libllama refuses a missing merges list. Neither side of this pair can be built by a merge, so it never applies.
DEAD_MERGE = "<|vision_start|> <|vision_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each byte in byte-level tokenizers, by byte value."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return tuple(chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(N_BYTES))


def vocabulary(n_tokens: int, markers: tuple[str, ...] = ()) -> dict[str, TokenType]:
    """Token texts in the order of their ids: the base tokens, these markers, and as many unused ones as it takes to reach
    `n_tokens`."""
    tokens = dict.fromkeys(byte_alphabet(), TokenType.NORMAL)
    tokens |= dict(_SPECIAL) | dict.fromkeys(markers, TokenType.CONTROL)
    return tokens | {f"<|unused_{i}|>": TokenType.UNUSED for i in range(n_tokens - len(tokens))}


@dataclass(frozen=True, slots=True)
class TinySpec:
    """One model file: the same spec always gives the same bytes. `n_vocab` only adds unused tokens to the base ones;
    `vision` adds the tokens around an image, and says that its projector reads images; `audio`: it reads sounds;
    `long_rope` gives it two sets of RoPE factors, and contexts of more than so many tokens use the second; `mtp` adds a
    head that guesses tokens."""

    arch: str = "qwen35"
    n_layers: int = 8
    width: int = 256
    n_vocab: int | None = None
    seed: int = 0
    dtype: DType = "f32"
    context_length: int = 262144
    vision: bool = False
    audio: bool = False
    long_rope: int | None = None
    mtp: bool = False

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise ValueError(f"unknown architecture {self.arch!r}; known: {', '.join(ARCHITECTURES)}")
        if not self.min_layers <= self.n_layers <= _MAX_LAYERS:
            wanted = f"between {self.min_layers} and {_MAX_LAYERS} for {self.arch}"
            raise ValueError(f"n_layers is {self.n_layers}; it must be {wanted}, so that every kind of layer occurs")
        if self.width % _WIDTH_STEP or not _WIDTH_STEP <= self.width <= _MAX_WIDTH:
            wanted = f"a multiple of {_WIDTH_STEP} from {_WIDTH_STEP} to {_MAX_WIDTH}"
            raise ValueError(f"width is {self.width}; it must be {wanted}")
        if self.vision and self.arch not in IMAGE_MARKERS:
            raise ValueError(f"no projector is known for {self.arch}; known: {', '.join(IMAGE_MARKERS)}")
        if self.long_rope is not None and (self.arch != "llama" or self.long_rope < 1):
            raise ValueError(f"long_rope is {self.long_rope} for {self.arch}; only llama can have it, from 1 on")
        if self.mtp and self.arch not in WITH_HEADS:
            raise ValueError(f"no MTP head is known for {self.arch}; known: {', '.join(WITH_HEADS)}")
        if self.n_vocab is not None and self.n_vocab < self._n_named_tokens:
            wanted = f"at least {self._n_named_tokens} (the base tokens), or None for exactly those"
            raise ValueError(f"n_vocab is {self.n_vocab}; it must be {wanted}")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(_DTYPES)}")
        if not 1 <= self.context_length < 2**31:
            raise ValueError(f"context_length is {self.context_length}; it must be between 1 and {2**31 - 1}")

    @property
    def min_layers(self) -> int:
        """Interleaved architectures need one whole period, or a kind of layer would be missing."""
        return 1 if self.arch in _EVERY_LAYER_ALIKE else 4

    @property
    def n_tokens(self) -> int:
        """The size of the whole vocabulary."""
        return self._n_named_tokens if self.n_vocab is None else self.n_vocab

    @property
    def markers(self) -> tuple[str, ...]:
        """What stands around an image, beyond the base tokens."""
        return IMAGE_MARKERS[self.arch] if self.vision else ()

    @property
    def _n_named_tokens(self) -> int:
        return N_BASE_TOKENS + len(self.markers)

    # what follows from the width

    @property
    def head(self) -> int:
        """The size of an attention head."""
        if self.width < 256:
            return 32
        return 64 if self.width < 1024 or self.width % 128 else 128

    @property
    def n_heads(self) -> int:
        return self.width // self.head

    @property
    def n_kv_heads(self) -> int:
        return _divisor_up_to(self.n_heads, self.n_heads // 2 if self.n_heads < 8 else self.n_heads // 4)

    @property
    def inner(self) -> int:
        """The width inside a recurrent layer."""
        return 2 * self.width

    @property
    def feed_forward(self) -> int:
        return 2 * self.width


Kind = Literal[
    "embedding",
    "output",
    "matrix",
    "small_matrix",
    "experts",
    "norm",
    "conv",
    "half_conv",
    "bias",
    "step_bias",
    "decay",
    "skip",
    "factors",
]
Value = int | float | str | tuple[int, ...] | tuple[bool, ...]
Hyper = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to draw: `kind` decides its distribution and whether it may be quantised."""

    name: str
    shape: tuple[int, ...]
    kind: Kind


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole model before any number is drawn. Keys of `hyper` lack the architecture prefix."""

    arch: str
    hyper: Hyper
    tensors: tuple[Tensor, ...]


Layer = tuple[Tensor, ...]  # what one layer holds


def _divisor_up_to(n: int, limit: int) -> int:
    """The largest divisor of `n` that is not above `limit` (1 if there is none)."""
    return next((d for d in range(limit, 1, -1) if n % d == 0), 1)


def _layer(index: int, *parts: tuple[str, tuple[int, ...], Kind]) -> Layer:
    return tuple(Tensor(f"blk.{index}.{name}", shape, kind) for name, shape, kind in parts)


def _attention_hyper(spec: TinySpec, n_kv_heads: int | tuple[int, ...]) -> Hyper:
    return {
        "attention.head_count": spec.n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": spec.head,
        "attention.value_length": spec.head,
        "rope.dimension_count": spec.head,
        "rope.freq_base": 1e6,
    }


def _attention(i: int, spec: TinySpec, query_factor: int = 1) -> Layer:
    queries = spec.head * spec.n_heads
    keys = spec.head * spec.n_kv_heads
    return _layer(
        i,
        ("attn_q.weight", (spec.width, queries * query_factor), "matrix"),
        ("attn_k.weight", (spec.width, keys), "matrix"),
        ("attn_v.weight", (spec.width, keys), "matrix"),
        ("attn_output.weight", (queries, spec.width), "matrix"),
    )


def _query_key_norms(i: int, spec: TinySpec) -> Layer:
    return _layer(i, ("attn_q_norm.weight", (spec.head,), "norm"), ("attn_k_norm.weight", (spec.head,), "norm"))


def _norms(i: int, spec: TinySpec, *names: str) -> Layer:
    return _layer(i, *((name, (spec.width,), "norm") for name in names))


def _gated_feed_forward(i: int, spec: TinySpec) -> Layer:
    return _layer(i, ("ffn_gate.weight", (spec.width, spec.feed_forward), "matrix")) + _plain_feed_forward(i, spec)


def _plain_feed_forward(i: int, spec: TinySpec) -> Layer:
    return _layer(
        i,
        ("ffn_up.weight", (spec.width, spec.feed_forward), "matrix"),
        ("ffn_down.weight", (spec.feed_forward, spec.width), "matrix"),
    )


def _expert_hyper(spec: TinySpec) -> Hyper:
    return {
        "expert_count": _N_EXPERTS,
        "expert_used_count": _N_EXPERTS_USED,
        "expert_feed_forward_length": spec.feed_forward // 4,
        "expert_shared_feed_forward_length": spec.feed_forward // 4,
    }


def _expert_feed_forward(i: int, spec: TinySpec) -> Layer:
    """A few experts, chosen for each token, and one that all tokens share; not gated."""
    n = spec.feed_forward // 4
    return _layer(
        i,
        ("ffn_gate_inp.weight", (spec.width, _N_EXPERTS), "small_matrix"),
        ("ffn_up_exps.weight", (spec.width, n, _N_EXPERTS), "experts"),
        ("ffn_down_exps.weight", (n, spec.width, _N_EXPERTS), "experts"),
        ("ffn_up_shexp.weight", (spec.width, n), "matrix"),
        ("ffn_down_shexp.weight", (n, spec.width), "matrix"),
    )


def _gated_expert_feed_forward(i: int, spec: TinySpec) -> Layer:
    n = spec.feed_forward // 4
    return _expert_feed_forward(i, spec) + _layer(
        i,
        ("ffn_gate_exps.weight", (spec.width, n, _N_EXPERTS), "experts"),
        ("ffn_gate_shexp.weight", (spec.width, n), "matrix"),
        ("ffn_gate_inp_shexp.weight", (spec.width,), "bias"),
    )


def _mamba2_hyper(spec: TinySpec, n_groups: int) -> Hyper:
    return {
        "ssm.conv_kernel": CONV_KERNEL,
        "ssm.inner_size": spec.inner,
        "ssm.state_size": _MAMBA2_STATE,
        "ssm.time_step_rank": spec.inner // spec.head,
        "ssm.group_count": n_groups,
    }


def _mamba2(i: int, spec: TinySpec, n_groups: int) -> Layer:
    n_heads = spec.inner // spec.head
    n_conv = spec.inner + 2 * n_groups * _MAMBA2_STATE
    return _layer(
        i,
        ("ssm_in.weight", (spec.width, spec.inner + n_conv + n_heads), "matrix"),
        ("ssm_conv1d.weight", (CONV_KERNEL, n_conv), "conv"),
        ("ssm_conv1d.bias", (n_conv,), "bias"),
        ("ssm_dt.bias", (n_heads,), "step_bias"),
        ("ssm_a", (1, n_heads), "decay"),
        ("ssm_d", (1, n_heads), "skip"),
        ("ssm_norm.weight", (spec.inner // n_groups, n_groups), "norm"),
        ("ssm_out.weight", (spec.inner, spec.width), "matrix"),
    )


def _mamba1_hyper(spec: TinySpec) -> Hyper:
    return {
        "ssm.conv_kernel": CONV_KERNEL,
        "ssm.inner_size": spec.inner,
        "ssm.state_size": _MAMBA1_STATE,
        "ssm.time_step_rank": _mamba1_rank(spec),
    }


def _mamba1_rank(spec: TinySpec) -> int:
    return max(8, spec.width // 16)


def _mamba1(i: int, spec: TinySpec) -> Layer:
    rank = _mamba1_rank(spec)
    return _layer(
        i,
        ("ssm_in.weight", (spec.width, 2 * spec.inner), "matrix"),
        ("ssm_conv1d.weight", (CONV_KERNEL, spec.inner), "conv"),
        ("ssm_conv1d.bias", (spec.inner,), "bias"),
        ("ssm_x.weight", (spec.inner, rank + 2 * _MAMBA1_STATE), "matrix"),
        ("ssm_dt_norm.weight", (rank,), "norm"),
        ("ssm_dt.weight", (rank, spec.inner), "small_matrix"),
        ("ssm_dt.bias", (spec.inner,), "step_bias"),
        ("ssm_b_norm.weight", (_MAMBA1_STATE,), "norm"),
        ("ssm_c_norm.weight", (_MAMBA1_STATE,), "norm"),
        ("ssm_a", (_MAMBA1_STATE, spec.inner), "decay"),
        ("ssm_d", (spec.inner,), "skip"),
        ("ssm_out.weight", (spec.inner, spec.width), "matrix"),
    )


def _delta_net(i: int, spec: TinySpec, *, joined: bool = False) -> Layer:
    """``joined``: beta and alpha are one matrix."""
    n_values, n_keys = _delta_heads(spec)
    rates: tuple[tuple[str, tuple[int, ...], Kind], ...] = (("ssm_ba.weight", (spec.width, 2 * n_values), "matrix"),)
    if not joined:
        rates = tuple((f"{name}.weight", (spec.width, n_values), "matrix") for name in ("ssm_beta", "ssm_alpha"))
    n_conv = 2 * n_keys * spec.head + spec.inner
    return _layer(
        i,
        ("attn_qkv.weight", (spec.width, n_conv), "matrix"),
        ("attn_gate.weight", (spec.width, spec.inner), "matrix"),
        ("ssm_conv1d.weight", (CONV_KERNEL, n_conv), "conv"),
        ("ssm_dt.bias", (n_values,), "step_bias"),
        ("ssm_a", (n_values,), "decay"),
        *rates,
        ("ssm_norm.weight", (spec.head,), "norm"),
        ("ssm_out.weight", (spec.inner, spec.width), "matrix"),
    )


def _delta_heads(spec: TinySpec) -> tuple[int, int]:
    """How many value heads and how many key heads a Gated DeltaNet layer has."""
    n_values = spec.inner // spec.head
    return n_values, _divisor_up_to(n_values, n_values // 2)


def _mid_period(i: int) -> bool:
    """Where interleaved models attend: never first, and with recurrent layers on both sides."""
    return i % 4 == 2


def _kv_heads_by_layer(spec: TinySpec) -> tuple[int, ...]:
    return tuple(spec.n_kv_heads if _mid_period(i) else 0 for i in range(spec.n_layers))


def _qwen35(spec: TinySpec) -> tuple[Hyper, list[Layer]]:
    """Three layers in four are Gated DeltaNets. The dense one, the one with experts, and Qwen3-Next, which has experts,
    joins two matrices and rotates by plain positions."""
    n_rotated, (n_values, n_keys) = spec.head // 4, _delta_heads(spec)
    half = n_rotated // 2
    is_next, is_dense = spec.arch == "qwen3next", spec.arch == "qwen35"
    hyper: Hyper = _attention_hyper(spec, spec.n_kv_heads) | {
        "feed_forward_length": spec.feed_forward,
        "rope.dimension_count": n_rotated,
        "rope.dimension_sections": ((half + 2) // 3, (half + 1) // 3, half // 3, 0),
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": CONV_KERNEL,
        "ssm.inner_size": spec.inner,
        "ssm.state_size": spec.head,
        "ssm.time_step_rank": n_values,
        "ssm.group_count": n_keys,
        "full_attention_interval": 4,
    }
    if is_next:
        del hyper["rope.dimension_sections"]
    if not is_dense:
        hyper |= _expert_hyper(spec)
    feed_forward = _gated_feed_forward if is_dense else _gated_expert_feed_forward

    def block(i: int, *, attends: bool) -> Layer:
        outer = _norms(i, spec, "attn_norm.weight", "post_attention_norm.weight") + feed_forward(i, spec)
        if not attends:
            return outer + _delta_net(i, spec, joined=is_next)
        return outer + _attention(i, spec, query_factor=2) + _query_key_norms(i, spec)

    blocks = [block(i, attends=(i + 1) % 4 == 0) for i in range(spec.n_layers)]
    if not spec.mtp:
        return hyper, blocks
    head = block(spec.n_layers, attends=True)
    more = mtp_tensors(spec.n_layers, spec.width)
    return hyper | {"nextn_predict_layers": 1}, [*blocks, head + more]


def mtp_tensors(i: int, width: int) -> Layer:
    """What a head has beyond an attention block: it joins a token's embedding with the model's row before it."""
    return _layer(
        i,
        ("nextn.eh_proj.weight", (2 * width, width), "matrix"),
        ("nextn.enorm.weight", (width,), "norm"),
        ("nextn.hnorm.weight", (width,), "norm"),
        ("nextn.shared_head_norm.weight", (width,), "norm"),
    )


def _jamba(spec: TinySpec) -> tuple[Hyper, list[Layer]]:
    hyper = _attention_hyper(spec, _kv_heads_by_layer(spec)) | _mamba1_hyper(spec)
    return hyper | {"feed_forward_length": spec.feed_forward}, _mid_period_blocks(spec, _mamba1)


def _granitehybrid(spec: TinySpec) -> tuple[Hyper, list[Layer]]:
    hyper = _attention_hyper(spec, _kv_heads_by_layer(spec)) | _mamba2_hyper(spec, n_groups=1)
    blocks = _mid_period_blocks(spec, lambda i, spec: _mamba2(i, spec, n_groups=1))
    return hyper | {"feed_forward_length": spec.feed_forward}, blocks


def _mid_period_blocks(spec: TinySpec, recurrence: Callable[[int, TinySpec], Layer]) -> list[Layer]:
    def block(i: int) -> Layer:
        outer = _norms(i, spec, "attn_norm.weight", "ffn_norm.weight") + _gated_feed_forward(i, spec)
        if _mid_period(i):
            return outer + _attention(i, spec)
        return outer + recurrence(i, spec)

    return [block(i) for i in range(spec.n_layers)]


def _falcon_h1(spec: TinySpec) -> tuple[Hyper, list[Layer]]:
    hyper = _attention_hyper(spec, spec.n_kv_heads) | _mamba2_hyper(spec, n_groups=2)

    def block(i: int) -> Layer:
        outer = _norms(i, spec, "attn_norm.weight", "ffn_norm") + _gated_feed_forward(i, spec)  # sic: no ".weight"
        return outer + _attention(i, spec) + _mamba2(i, spec, n_groups=2)

    return hyper | {"feed_forward_length": spec.feed_forward}, [block(i) for i in range(spec.n_layers)]


def _nemotron_h(spec: TinySpec) -> tuple[Hyper, list[Layer]]:
    """Every layer is one thing only: in each four, a recurrence, a feed-forward, an attention, a recurrence. With experts,
    a head attends and has experts of its own."""
    n_head = int(spec.mtp)
    has_experts = spec.arch == "nemotron_h_moe"
    feed_forward = tuple(spec.feed_forward if i % 4 == 1 else 0 for i in range(spec.n_layers)) + (0,) * n_head
    kv_heads = _kv_heads_by_layer(spec) + (spec.n_kv_heads,) * n_head
    hyper = _attention_hyper(spec, kv_heads) | _mamba2_hyper(spec, n_groups=2)
    hyper |= {"feed_forward_length": feed_forward, "attention.layer_norm_epsilon": _RMS_EPSILON}
    if has_experts:
        hyper |= _expert_hyper(spec) | {"expert_shared_count": 1}

    def experts(i: int) -> Layer:
        return _expert_feed_forward(i, spec) + _layer(i, ("exp_probs_b.bias", (_N_EXPERTS,), "bias"))

    def block(i: int) -> Layer:
        norm = _norms(i, spec, "attn_norm.weight")
        if feed_forward[i]:
            return norm + (experts(i) if has_experts else _plain_feed_forward(i, spec))
        if _mid_period(i):
            return norm + _attention(i, spec)
        return norm + _mamba2(i, spec, n_groups=2)

    blocks = [block(i) for i in range(spec.n_layers)]
    if not spec.mtp:
        return hyper, blocks
    i = spec.n_layers
    outer = _norms(i, spec, "attn_norm.weight", "post_attention_norm.weight")
    head = outer + _attention(i, spec) + experts(i) + mtp_tensors(i, spec.width)
    return hyper | {"nextn_predict_layers": 1}, [*blocks, head]


def _lfm2(spec: TinySpec) -> tuple[Hyper, list[Layer]]:
    hyper = _attention_hyper(spec, _kv_heads_by_layer(spec))
    hyper |= {"feed_forward_length": spec.feed_forward, "shortconv.l_cache": 3}

    def block(i: int) -> Layer:
        outer = _norms(i, spec, "attn_norm.weight", "ffn_norm.weight") + _gated_feed_forward(i, spec)
        if _mid_period(i):
            return outer + _attention(i, spec) + _query_key_norms(i, spec)
        short_conv = _layer(
            i,
            ("shortconv.conv.weight", (3, spec.width), "conv"),
            ("shortconv.in_proj.weight", (spec.width, 3 * spec.width), "matrix"),
            ("shortconv.out_proj.weight", (spec.width, spec.width), "matrix"),
        )
        return outer + short_conv

    return hyper, [block(i) for i in range(spec.n_layers)]


def _mamba2_only(spec: TinySpec) -> tuple[Hyper, list[Layer]]:
    hyper = _mamba2_hyper(spec, n_groups=1) | {"feed_forward_length": 0, "attention.head_count": 0}
    blocks = [_norms(i, spec, "attn_norm.weight") + _mamba2(i, spec, n_groups=1) for i in range(spec.n_layers)]
    return hyper, blocks


def _gemma3(spec: TinySpec) -> tuple[Hyper, list[Layer]]:
    """Every third layer sees the whole past; the others only the window."""
    hyper = _attention_hyper(spec, spec.n_kv_heads) | {
        "feed_forward_length": spec.feed_forward,
        "attention.sliding_window": SLIDING_WINDOW,
        "attention.sliding_window_pattern": tuple(i % 3 != 2 for i in range(spec.n_layers)),
    }
    names = ("attn_norm.weight", "post_attention_norm.weight", "ffn_norm.weight", "post_ffw_norm.weight")

    def block(i: int) -> Layer:
        attention = _attention(i, spec) + _query_key_norms(i, spec)
        return _norms(i, spec, *names) + attention + _gated_feed_forward(i, spec)

    return hyper, [block(i) for i in range(spec.n_layers)]


def _llama(spec: TinySpec) -> tuple[Hyper, list[Layer]]:
    hyper = _attention_hyper(spec, spec.n_kv_heads) | {"feed_forward_length": spec.feed_forward}
    if spec.long_rope is not None:
        hyper |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": spec.long_rope}

    def block(i: int) -> Layer:
        norms = _norms(i, spec, "attn_norm.weight", "ffn_norm.weight")
        return norms + _attention(i, spec) + _gated_feed_forward(i, spec)

    return hyper, [block(i) for i in range(spec.n_layers)]


_PLANNERS: dict[str, Callable[[TinySpec], tuple[Hyper, list[Layer]]]] = {
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3next": _qwen35,
    "jamba": _jamba,
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granitehybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "lfm2": _lfm2,
    "mamba2": _mamba2_only,
    "gemma3": _gemma3,
    "llama": _llama,
}
_EMBEDDING_KINDS: dict[str, Kind] = {"gemma3": "matrix"}  # libllama multiplies its embeddings by sqrt(width)


def plan_tiny(spec: TinySpec) -> Plan:
    """Everything about the model except its numbers. The output matrix is not the embedding, or a
    model would mostly repeat its last token."""
    hyper, layers = _PLANNERS[spec.arch](spec)
    shared: Hyper = {
        "context_length": spec.context_length,
        "embedding_length": spec.width,
        "block_count": len(layers),
        "attention.layer_norm_rms_epsilon": _RMS_EPSILON,
    }
    outer = (
        Tensor("token_embd.weight", (spec.width, spec.n_tokens), _EMBEDDING_KINDS.get(spec.arch, "embedding")),
        Tensor("output.weight", (spec.width, spec.n_tokens), "output"),
        Tensor(_OUTPUT_NORM_NAMES.get(spec.arch, "output_norm.weight"), (spec.width,), "norm"),
    )
    return Plan(
        arch=spec.arch,
        hyper=shared | hyper,
        tensors=outer + _rope_factors(spec) + tuple(tensor for layer in layers for tensor in layer),
    )


def _rope_factors(spec: TinySpec) -> tuple[Tensor, ...]:
    names = ("long", "short") if spec.long_rope is not None else ()
    return tuple(Tensor(f"rope_factors_{name}.weight", (spec.head // 2,), "factors") for name in names)
