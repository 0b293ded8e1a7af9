"""What a model will take when it is loaded, from its header alone. Pure: numbers in, bytes out.

The rules are libllama's own: KV for every attention layer, a window for sliding ones, a state per sequence for recurrent
ones. Where the header does not say which layers are which, every layer counts as everything it could be. Where it does not
even say how many layers there are, a token costs ``UNKNOWN_TOKEN_BYTES`` and a state an eighth of the file. So an
unknown model is taken for a large one, and fewer models are held at once than might fit.

The engine measures the true numbers on the open model; this is only for deciding what to make room for beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from everwarm.config import CacheType
from everwarm.engine.settings import EngineSettings
from everwarm.router.catalog.gguf_header import GgufHeader

MAX_SPARES = 16  # what an engine takes at most when it is left to decide
UNKNOWN_TOKEN_BYTES = 256 << 10
MOST_LAYERS = 1 << 10
MOST_WIDTH = 1 << 24  # of anything that is counted in a header; more is not believed
_STATE_TYPE_BYTES = 4  # recurrent states are always f32
_CELLS_STEP = 256

_TYPE_BYTES: dict[CacheType, float] = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
    "q5_0": 22 / 32,
    "q5_1": 24 / 32,
}
# Which layers recur, and every how many layers one attends fully, where files leave it to libllama to know.
_ATTENTION_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
_WINDOW_PERIOD = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "llama4": 4,
    "olmo2": 4,
    "smallthinker": 4,
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a context is made of: bytes per token, per token of a window, and per sequence."""

    kv_bytes_per_token: int
    window_bytes_per_token: int = 0
    n_window: int = 0
    state_bytes: int = 0
    n_heads: int = 0
    work_bytes_per_row: int = 0  # of one computed batch

    def context_bytes(self, n_ctx: int, n_seqs: int, n_ubatch: int) -> int:
        """Memory that stays taken for KV, windows and states."""
        n_cells = _padded(n_ctx)
        n_window_cells = min(n_cells, _padded(self.n_window * n_seqs + n_ubatch))
        kv = n_cells * self.kv_bytes_per_token + n_window_cells * self.window_bytes_per_token
        return kv + n_seqs * self.state_bytes


def loaded_bytes(header: GgufHeader, n_file_bytes: int, settings: EngineSettings) -> int:
    """Weights, context and the buffers it computes in."""
    shape = shape_of(header, n_file_bytes, settings)
    context = shape.context_bytes(settings.n_ctx, n_sequences(shape, settings), settings.n_ubatch)
    n_scored = 1 + (shape.n_heads if settings.flash_attention == "off" else 0)  # the mask, and all scores at once
    scores = n_scored * 4 * _padded(settings.n_ctx) if shape.kv_bytes_per_token else 0
    return n_file_bytes + context + settings.n_ubatch * (scores + shape.work_bytes_per_row)


def n_sequences(shape: ModelShape, settings: EngineSettings) -> int:
    """Slots, the spares an engine parks checkpoints in, and the one that moves KV in and out, with their snapshots."""
    parks = shape.state_bytes > 0 and shape.n_window == 0 and settings.checkpoints.max_checkpoints > 0
    n_spares = MAX_SPARES if settings.n_spares is None else settings.n_spares
    n_states = 1 + (settings.n_snapshots or 0)
    return n_states * (settings.n_slots + (n_spares if parks else 0) + 1)


def shape_of(header: GgufHeader, n_file_bytes: int, settings: EngineSettings) -> ModelShape:
    n_layers = _known(header, "block_count", MOST_LAYERS)
    width = _known(header, "embedding_length", MOST_WIDTH)
    if n_layers is None or width is None:
        return ModelShape(UNKNOWN_TOKEN_BYTES, state_bytes=n_file_bytes // 8)
    n_layers -= min(n_layers, header.number("nextn_predict_layers") or 0)
    n_heads = max(_by_layer(header, "attention.head_count", n_layers, 0), default=0)
    n_kv_heads = _by_layer(header, "attention.head_count_kv", n_layers, n_heads)
    token_bytes = _token_bytes(header, width, n_heads, settings)
    kv = window = state = 0.0
    recurrent_bytes = _recurrent_width(header, width, n_heads) * _STATE_TYPE_BYTES
    for i in range(n_layers):
        attends, recurs = _kinds(header, i, n_kv_heads[i])
        state += recurrent_bytes if recurs else 0
        if attends and _slides(header, i):
            window += n_kv_heads[i] * token_bytes
        elif attends:
            kv += n_kv_heads[i] * token_bytes
    n_window = (_known(header, "attention.sliding_window", MOST_WIDTH) or 0) if window else 0
    return ModelShape(math.ceil(kv), math.ceil(window), n_window, math.ceil(state), n_heads, _row_bytes(header, width))


def _token_bytes(header: GgufHeader, width: int, n_heads: int, settings: EngineSettings) -> float:
    """Keys and values of one head of one layer."""
    natural = width // n_heads if n_heads else 0
    key = _known(header, "attention.key_length", MOST_WIDTH)
    value = _known(header, "attention.value_length", MOST_WIDTH)
    key = natural if key is None else key
    value = natural if value is None else value
    return key * _TYPE_BYTES[settings.cache_type_k] + value * _TYPE_BYTES[settings.cache_type_v]


def _recurrent_width(header: GgufHeader, width: int, n_heads: int) -> int:
    """Numbers in one recurrent layer's state: what it convolves and what it accumulates; 0 if nothing recurs."""

    def known(key: str) -> int:
        return _known(header, key, MOST_WIDTH) or 0

    if (wkv := known("wkv.head_size")) > 0:
        return width * (wkv + (known("token_shift_count") or 2))
    if (n_convolved := known("shortconv.l_cache")) > 0:
        return width * (n_convolved - 1)
    kernel = max(1, known("ssm.conv_kernel")) - 1
    if (head := known("kda.head_dim")) > 0:
        return 3 * (kernel or 3) * n_heads * head + head * head * n_heads
    inner = known("ssm.inner_size")
    state = known("ssm.state_size")
    if inner or state:
        return kernel * (inner + 2 * known("ssm.group_count") * state) + inner * state
    if header.number("full_attention_interval") or header.architecture in _ATTENTION_INTERVAL:
        return known("attention.key_length") ** 2 * n_heads  # linear attention
    return 0


def _kinds(header: GgufHeader, layer: int, n_kv_heads: int) -> tuple[bool, bool]:
    """Whether a layer keeps KV, and whether it keeps a state."""
    listed = header.numbers("attention.recurrent_layers")
    if listed is not None and layer < len(listed):
        return not listed[layer], bool(listed[layer])
    interval = header.number("full_attention_interval") or _ATTENTION_INTERVAL.get(header.architecture)
    if interval:
        recurs = (layer + 1) % interval != 0
        return not recurs, recurs
    if header.numbers("attention.head_count_kv") is not None:
        n_ff = header.numbers("feed_forward_length") if header.architecture.startswith("nemotron_h") else None
        only_feeds_forward = n_ff is not None and any(n_ff[layer : layer + 1])
        return n_kv_heads > 0, n_kv_heads == 0 and not only_feeds_forward
    return n_kv_heads > 0, True


def _slides(header: GgufHeader, layer: int) -> bool:
    if not header.number("attention.sliding_window"):
        return False
    flags = header.numbers("attention.sliding_window_pattern")
    if flags is not None:
        return layer < len(flags) and bool(flags[layer])
    period = header.number("attention.sliding_window_pattern") or _WINDOW_PERIOD.get(header.architecture, 1)
    return layer % period < period - 1


def _row_bytes(header: GgufHeader, width: int) -> int:
    """Buffers for one token of a batch: its logits, and a few vectors as wide as the widest layer."""
    n_vocab = _known(header, "vocab_size", MOST_WIDTH) or header.lengths.get("tokenizer.ggml.tokens", 0)
    widest = max((*(header.numbers("feed_forward_length") or ()), header.number("feed_forward_length") or 0, 4 * width))
    return 4 * (min(n_vocab, MOST_WIDTH) + 4 * min(widest, MOST_WIDTH))


def _by_layer(header: GgufHeader, key: str, n_layers: int, otherwise: int) -> list[int]:
    listed = header.numbers(key)
    if listed is None:
        one = _known(header, key, MOST_WIDTH)
        return [otherwise if one is None else one] * n_layers
    return [min(n, MOST_WIDTH) for n in listed[:n_layers]] + [otherwise] * (n_layers - len(listed))


def _known(header: GgufHeader, key: str, most: int) -> int | None:
    value = header.number(key)
    return value if value is not None and value <= most else None


def _padded(n_cells: int) -> int:
    return -(-n_cells // _CELLS_STEP) * _CELLS_STEP
