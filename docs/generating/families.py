"""What states and KV of known models weigh, by the estimate that decides whether a model fits.

Shapes are the published ones, in the words of a GGUF header. The estimate is the server's own (``router/catalog/memory_estimate.py``), and
the spacing is what ``CheckpointParams`` makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everwarm.engine.memory_plan import MAX_SPARES, SPARE_SHARE
from everwarm.engine.settings import EngineSettings
from everwarm.router.catalog.gguf_header import GgufHeader
from everwarm.router.catalog.memory_estimate import ModelShape, shape_of
from everwarm.state.policy import CheckpointParams
from generating.markdown import table, written_by

MIB, GIB = 1 << 20, 1 << 30
Values = dict[str, Any]


@dataclass(frozen=True)
class Known:
    name: str
    arch: str
    values: Values

    def shape(self, settings: EngineSettings) -> ModelShape:
        named = {f"{self.arch}.{key}": value for key, value in self.values.items()}
        return shape_of(GgufHeader({"general.architecture": self.arch} | named, {}, 1), 0, settings)


def _attention(heads: int, kv: int | tuple[int, ...], length: int) -> Values:
    keys = {"attention.head_count": heads, "attention.head_count_kv": kv}
    return keys | {"attention.key_length": length, "attention.value_length": length}


def _ssm(inner: int, state: int, groups: int) -> Values:
    sizes = {"ssm.inner_size": inner, "ssm.state_size": state, "ssm.group_count": groups}
    return sizes | {"ssm.conv_kernel": 4}


def _size(layers: int, width: int) -> Values:
    return {"block_count": layers, "embedding_length": width}


def _qwen(name: str, arch: str, size: Values, attention: Values, n_values: int) -> Known:
    """Gated DeltaNet: 16 key heads of 128, so many value heads of 128; every fourth layer attends."""
    return Known(name, arch, size | attention | _ssm(n_values * 128, 128, 16) | {"full_attention_interval": 4})


def _at(n_layers: int, layers: tuple[int, ...], kv: int) -> tuple[int, ...]:
    return tuple(kv if i in layers else 0 for i in range(n_layers))


def _pattern(pattern: str, kv: int, n_ff: int) -> Values:
    """Nemotron's: M recurs, * attends, - only feeds forward."""
    feeds = tuple(n_ff if one == "-" else 0 for one in pattern)
    return {"attention.head_count_kv": tuple(kv if one == "*" else 0 for one in pattern), "feed_forward_length": feeds}


_GRANITE = (5, 15, 25, 35)
_NEMOTRON_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_JAMBA = _at(32, (4, 12, 20, 28), 8)
_LFM2 = _at(16, (2, 5, 8, 10, 12, 14), 8)

KNOWN = (
    _qwen("Qwen3.5-27B", "qwen35", _size(64, 5120), _attention(24, 4, 256), 48),
    _qwen("Qwen3.5-9B", "qwen35", _size(32, 4096), _attention(16, 4, 256), 32),
    Known("Jamba Mini (52B)", "jamba", _size(32, 4096) | _attention(32, _JAMBA, 128) | _ssm(8192, 16, 0)),
    Known("Falcon-H1-34B", "falcon-h1", _size(72, 5120) | _attention(20, 4, 128) | _ssm(4096, 256, 2)),
    Known("Falcon-H1-7B", "falcon-h1", _size(44, 3072) | _attention(12, 2, 128) | _ssm(3072, 256, 1)),
    Known("Falcon-H1-1.5B", "falcon-h1", _size(24, 2048) | _attention(8, 2, 128) | _ssm(3072, 256, 1)),
    Known(
        "Granite-4.0-H-Small",
        "granitehybrid",
        _size(40, 4096) | _attention(32, _at(40, _GRANITE, 8), 128) | _ssm(8192, 128, 1),
    ),
    Known(
        "Granite-4.0-H-Tiny",
        "granitehybrid",
        _size(40, 1536) | _attention(12, _at(40, _GRANITE, 4), 128) | _ssm(3072, 128, 1),
    ),
    Known(
        "Nemotron-H-8B",
        "nemotron_h",
        _size(52, 4096) | _attention(32, 8, 128) | _ssm(8192, 128, 8) | _pattern(_NEMOTRON_8B, 8, 21504),
    ),
    Known("LFM2-1.2B", "lfm2", _size(16, 2048) | _attention(32, _LFM2, 64) | {"shortconv.l_cache": 3}),
    Known("Mamba2-2.7B", "mamba2", _size(64, 2560) | _ssm(5120, 128, 1) | {"attention.head_count": 0}),
)
HALF = EngineSettings(cache_type_k="q8_0", cache_type_v="q8_0", n_threads=1)
FULL = EngineSettings(n_threads=1)


def every(shape: ModelShape) -> int:
    kv = shape.kv_bytes_per_token
    return CheckpointParams().fitted(state_bytes=shape.state_bytes, kv_bytes_per_token=kv, window=False).every_n_tokens


def conversation_bytes(shape: ModelShape, n_tokens: int, n_turns: int) -> int:
    """KV once, a state at each of the last checkpoints of a turn: its stable point and its reply's end."""
    return n_tokens * shape.kv_bytes_per_token + min(2 * n_turns, 32) * shape.state_bytes


def page() -> str:
    return "\n".join(
        [
            written_by(
                "src/everwarm/router/catalog/memory_estimate.py and the published shapes in docs/generating/families.py"
            ),
            "# What models weigh\n",
            "Estimates from the shapes that models are published with, by the code with which the server decides what fits. The engine "
            "measures the true numbers when it opens a file. What to do with them is in the [tuning guide](../tuning.md).\n",
            "## A state, a token\n",
            "A *state* is everything that the recurrent layers remember at one point. It has the same size after 10 tokens and after "
            "100,000, and is always F32. *KV* grows with every token, and `--cache-type-k`, `--cache-type-v` shrink it.\n",
            _weights(),
            "*Worth*: after so many tokens KV weighs what one state weighs. It is the default of `--checkpoint-every`, within 256 to 8192.\n",
            "## The context on the device\n",
            "KV of `--ctx-size` tokens and a state for each of 4 slots, each spare, and one more that moves KV. Weights come on top.\n",
            _contexts(),
            "## Spares that memory pays for\n",
            f"By default {SPARE_SHARE:.0%} of what is free beside the context becomes spares, at most {MAX_SPARES}:\n",
            _spares(),
            "## Conversations in RAM\n",
            "How many conversations of 32,000 tokens and 10 turns `--cache-ram` holds, where each turn keeps two states (32 on a path at "
            "most) and nothing is shared. A common beginning (tools, system prompt) is kept once, so real numbers are higher.\n",
            _conversations(),
        ]
    )


def _weights() -> str:
    rows = []
    for known in KNOWN:
        shape, half = known.shape(FULL), known.shape(HALF)
        kv = shape.kv_bytes_per_token
        worth = f"{shape.state_bytes // kv:,}" if kv else "–"
        rows.append(
            [known.name, _mib(shape.state_bytes), _kib(kv), _kib(half.kv_bytes_per_token), worth, f"{every(shape):,}"]
        )
    return table(["model", "state", "KV per token, f16", "q8_0", "worth, tokens", "`--checkpoint-every`"], rows)


def _contexts() -> str:
    rows = []
    for known in KNOWN:
        shape = known.shape(FULL)
        cells = [_gib(shape.context_bytes(n, 5, 512)) for n in (16384, 65536, 131072)]
        rows.append([known.name, *cells, _gib(16 * shape.state_bytes)])
    return table(["model", "16,384", "65,536", "131,072", "16 spares more"], rows)


def _spares() -> str:
    sizes = (8, 16, 24, 48, 80)
    rows = []
    for known in KNOWN:
        state = known.shape(FULL).state_bytes
        rows.append([known.name, *(str(min(MAX_SPARES, int(n * GIB * SPARE_SHARE) // state)) for n in sizes)])
    return table(["model", *(f"{n} GiB free" for n in sizes)], rows)


def _conversations() -> str:
    budgets = (2, 4, 8, 16, 32)
    rows = []
    for known in KNOWN:
        one = conversation_bytes(known.shape(FULL), 32_000, 10)
        rows.append([known.name, _gib(one), *(f"{n * GIB // one:,}" for n in budgets)])
    return table(["model", "one", *(f"{n} GiB" for n in budgets)], rows)


def _mib(n: int) -> str:
    return f"{n / MIB:.1f} MiB" if n < 100 * MIB else f"{n / MIB:.0f} MiB"


def _kib(n: int) -> str:
    return f"{n / 1024:.3g} KiB" if n else "none"


def _gib(n: int) -> str:
    return f"{n / GIB:.2f} GiB" if n >= GIB // 10 else f"{n / MIB:.0f} MiB"
