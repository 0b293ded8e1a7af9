"""Frozen settings for opening a model and a context, and for sampling. Checked once, here; nothing below re-checks.

Also how settings are parsed and key files read. Knows no libllama.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, cast, get_args

from everwarm.errors import BadRequest

StateType = Literal["f32", "f16", "q8_0"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
FlashAttention = Literal["auto", "on", "off"]

log = logging.getLogger("everwarm.config")

MAX_CTX = 1 << 26
EMBEDDING_ARCHITECTURES = frozenset(
    {
        "bert",
        "modern-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "eurobert",
        "gemma-embedding",
        "gemma-embedding2",
        "llama-embed",
        "t5encoder",
    }
)
CELLS_STEP = 256  # a context has a multiple of this
MAX_CONSTRAINT_CHARS = 1 << 20
MAX_BATCH = 1 << 16
MAX_LOGIT_BIASES = 4096
MAX_BIAS = 1e6  # beyond all logits, and far from what overflows
MAX_SAMPLERS = 32
MAX_SCALE = 1e3  # of a LoRA adapter
MAX_BREAKERS, MAX_BREAKER_CHARS = 16, 40  # libllama looks for each in every token of the vocabulary
MIN_KEY_BYTES, MAX_KEY_BYTES = 32, 1 << 16


def require(condition: bool, message: str) -> None:
    """Refuse a setting with a sentence that says what would be right."""
    if not condition:
        raise BadRequest(message)


_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MAX_DIGITS = 24  # a longer number may overflow a float


def parse_bytes(text: str) -> int:
    """``8GiB``, ``500 MB`` or ``0`` as a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    require(
        found is not None and found[2].upper() in _UNITS and len(found[1]) <= _MAX_DIGITS,
        f"{text!r} is not a size; give a number like 8GiB or 500MB",
    )
    assert found is not None
    return int(float(found[1]) * _UNITS[found[2].upper()])


def size_text(n_bytes: float) -> str:
    """``3.4 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def parse_mib(text: str) -> int:
    """The same, but a bare number means MiB, as in llama-server's flags."""
    return parse_bytes(f"{text}MiB" if text.strip().isdecimal() else text)


def parse_duration(text: str) -> float:
    """``30d``, ``12h``, ``90m`` or ``45s`` as seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text)
    require(
        found is not None and len(found[1]) <= _MAX_DIGITS,
        f"{text!r} is not a time; give a number like 30d, 12h or 90m",
    )
    assert found is not None
    return float(found[1]) * _SECONDS[found[2]]


def parse_scaled(text: str) -> tuple[str, float]:
    """An adapter as ``FILE`` or ``FILE:SCALE``."""
    path, _, scale = text.rpartition(":")
    try:
        return (path, float(scale)) if path else (text, 1.0)
    except ValueError:
        return text, 1.0


def cache_directory() -> Path:
    """The user's folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "everwarm"


def read_key(path: str) -> bytes:
    """A secret from a file: all its bytes, unchanged."""
    place = Path(path).expanduser()
    try:
        with place.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"the key file {path} cannot be read: {error.strerror}") from None
    require(
        MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES,
        f"the key file {path} has {len(key)} bytes; give {MIN_KEY_BYTES} random ones, like `head -c 32 /dev/urandom`",
    )
    if mode & 0o077:
        log.warning("others can read the key file %s; `chmod 600` it", path)
    return key


def default_threads() -> int:
    """The CPUs that this process may run on."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


LoadMode = Literal["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"]
SplitMode = Literal["none", "layer", "row", "tensor"]
Pooling = Literal["auto", "none", "mean", "cls", "last", "rank"]  # auto: as the model's file says
RopeScaling = Literal["none", "linear", "yarn"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How the weights are opened."""

    n_gpu_layers: int = -1  # negative: all that a GPU build can take
    load_mode: LoadMode = "mmap"  # mapped, read, locked in RAM, or read past the page cache (dio)
    tensor_split: tuple[float, ...] = ()  # how much of the model each GPU takes, in proportion
    n_cpu_moe: int = 0  # experts of the first n layers stay in host memory
    lora: tuple[tuple[str, float], ...] = ()  # adapter files and their scales
    split_mode: SplitMode = "layer"  # how several GPUs share the model
    main_gpu: int = 0  # which GPU has all of it, with split_mode none, or small tensors, with row
    devices: tuple[str, ...] = ()  # names of the GPUs to use; none: all
    override_tensors: tuple[tuple[str, str], ...] = ()  # patterns of tensor names, and the buffer type of each
    n_cpu_ffn: int = 0  # dense FFNs of the first n layers stay in host memory
    repack: bool = True  # weights may be kept in another layout for quicker kernels
    no_host: bool = False  # do without pinned host buffers
    check_tensors: bool = False  # look for invalid numbers while loading

    def __post_init__(self) -> None:
        require(len(self.tensor_split) <= 64, f"tensor_split has {len(self.tensor_split)} parts; give at most 64")
        for part in self.tensor_split:
            _finite("tensor_split", part, 0.0, 1e9)
        require(0 <= self.n_cpu_moe <= 4096, f"n_cpu_moe is {self.n_cpu_moe}; give 0 to 4096")
        require(0 <= self.n_cpu_ffn <= 4096, f"n_cpu_ffn is {self.n_cpu_ffn}; give 0 to 4096")
        require(0 <= self.main_gpu < 64, f"main_gpu is {self.main_gpu}; give 0 to 63")
        require(len(self.devices) <= 64, f"devices has {len(self.devices)} names; give at most 64")
        n_overrides = len(self.override_tensors)
        require(n_overrides <= 4096, f"override_tensors has {n_overrides} patterns; give at most 4096")
        for pattern, buffer_type in self.override_tensors:
            require(bool(pattern and buffer_type), "override_tensors needs PATTERN=BUFFER, like 'ffn_.*_exps=CPU'")
        for path, scale in self.lora:
            require(bool(path), "a LoRA needs a file")
            _finite(f"the scale of LoRA {path}", scale, -MAX_SCALE, MAX_SCALE)

    @property
    def use_mmap(self) -> bool:
        return self.load_mode in ("auto", "mmap", "mmap+mlock")


@dataclass(frozen=True, slots=True)
class RopeOptions:
    """How positions are encoded, where it is not to be as the model's file says (None)."""

    scaling: RopeScaling | None = None
    freq_base: float | None = None
    freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None

    def __post_init__(self) -> None:
        for name in ("freq_base", "freq_scale"):
            value = getattr(self, name)
            require(value is None or 0.0 < value <= 1e12, f"rope {name} is {value}; give more than 0 and at most 1e12")
        for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
            value = getattr(self, name)
            require(value is None or 0.0 <= value <= 1e6, f"{name} is {value}; give 0 to 1e6")
        orig = self.yarn_orig_ctx
        require(orig is None or 1 <= orig <= MAX_CTX, f"yarn_orig_ctx is {orig}; give 1 to {MAX_CTX}")

    def text(self) -> str:
        """What differs from the file, for a fingerprint; empty: nothing."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ",".join(f"{name}={value!r}" for name, value in given if value is not None)


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """The shape of one libllama context. ``n_ctx`` cells are shared by all sequences (unified KV)."""

    n_ctx: int = 4096
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_snapshots: int = 0  # earlier states of every sequence: so many tokens of its last decode can be taken back
    n_threads: int = field(default_factory=default_threads)
    n_threads_batch: int = field(default_factory=default_threads)
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    flash_attention: FlashAttention = "auto"
    rope: RopeOptions = field(default_factory=RopeOptions)
    kv_offload: bool = True  # KV lies where its layer does
    op_offload: bool = True  # a GPU computes large batches also of layers in host memory
    state_type: StateType = "f32"  # of copies of recurrent states; f32: as the context holds them

    def __post_init__(self) -> None:
        require(1 <= self.n_ctx <= MAX_CTX, f"n_ctx is {self.n_ctx}; give 1 to {MAX_CTX} cells")
        require(1 <= self.n_ubatch <= self.n_batch, f"n_ubatch is {self.n_ubatch}; give 1 to n_batch ({self.n_batch})")
        require(self.n_batch <= MAX_BATCH, f"n_batch is {self.n_batch}; give at most {MAX_BATCH}")
        require(1 <= self.n_seq_max <= 255, f"n_seq_max is {self.n_seq_max}; give 1 to 255 (one more is needed inside)")
        require(0 <= self.n_snapshots <= 15, f"n_snapshots is {self.n_snapshots}; give 0 to 15")
        require(1 <= self.n_threads <= 1024, f"n_threads is {self.n_threads}; give 1 to 1024")
        require(1 <= self.n_threads_batch <= 1024, f"n_threads_batch is {self.n_threads_batch}; give 1 to 1024")
        require(self.state_type in get_args(StateType), f"state_type is {self.state_type!r}; give f32, f16 or q8_0")

    @property
    def n_cells(self) -> int:
        """What libllama makes of ``n_ctx``: it rounds up."""
        return -(-self.n_ctx // CELLS_STEP) * CELLS_STEP


def _finite(name: str, value: float, low: float, high: float) -> None:
    require(math.isfinite(value) and low <= value <= high, f"{name} is {value}; give a number from {low} to {high}")


SamplerName = Literal[
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
    "infill",
    "adaptive_p",
]
_NOT_BY_DEFAULT = {"infill", "adaptive_p"}
DEFAULT_SAMPLERS: tuple[SamplerName, ...] = tuple(name for name in get_args(SamplerName) if name not in _NOT_BY_DEFAULT)
DRY_BREAKERS = ("\n", ":", '"', "*")
_LETTERS: dict[str, SamplerName] = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
    "w": "adaptive_p",
}
_OTHER_NAMES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical_p": "typ_p"}
_BY_NAME = {name.replace("_", ""): name for name in get_args(SamplerName)}


def parse_samplers(given: str | Sequence[str]) -> tuple[SamplerName, ...]:
    """The order of samplers: llama.cpp's names, or one text with a letter for each. An unknown one is an error."""
    names = [_LETTERS.get(letter, letter) for letter in given] if isinstance(given, str) else given
    return tuple(_sampler(name) for name in names)


def _sampler(given: str) -> SamplerName:
    known = _OTHER_NAMES.get(given, given)
    found = _BY_NAME.get(known.replace("-", "").replace("_", ""))
    require(found is not None, f"there is no sampler {given[:40]!r}; give some of {', '.join(get_args(SamplerName))}")
    return cast("SamplerName", found)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is picked. The defaults are llama-server's; the same seed gives the same tokens."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None  # None: a fresh random one for every request
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    typical_p: float = 1.0
    top_n_sigma: float = -1.0  # 0 or less: off
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    mirostat: int = 0  # 1 or 2: that version of it, instead of the samplers
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    samplers: tuple[SamplerName, ...] = DEFAULT_SAMPLERS
    min_keep: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in _SAMPLING_BOUNDS.items():
            _finite(name, getattr(self, name), low, high)
        require(0.0 < self.repeat_penalty <= 100.0, f"repeat_penalty is {self.repeat_penalty}; give 0 < p <= 100")
        require(self.seed is None or 0 <= self.seed < 1 << 32, f"seed is {self.seed}; give 0 to {(1 << 32) - 1}")
        n_biases = len(self.logit_bias)
        require(n_biases <= MAX_LOGIT_BIASES, f"logit_bias has {n_biases} entries; give at most {MAX_LOGIT_BIASES}")
        for token, bias in self.logit_bias.items():
            is_bounded = abs(bias) <= MAX_BIAS or bias == -math.inf
            require(is_bounded, f"logit_bias of token {token} is {bias}; give -{MAX_BIAS:,.0f} to {MAX_BIAS:,.0f}")
        require(len(self.samplers) <= MAX_SAMPLERS, f"samplers has {len(self.samplers)}; give at most {MAX_SAMPLERS}")
        breakers = self.dry_sequence_breakers
        require(
            len(breakers) <= MAX_BREAKERS and all(len(text) <= MAX_BREAKER_CHARS for text in breakers),
            f"give at most {MAX_BREAKERS} dry_sequence_breakers of at most {MAX_BREAKER_CHARS} characters",
        )

    @property
    def is_coldest(self) -> bool:
        return self.temperature < 1e-6  # smaller ones overflow in single precision

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always picked, after bias, penalties and DRY."""
        if self.mirostat or self.dynatemp_range or self.samplers != DEFAULT_SAMPLERS:
            return False
        return self.top_k == 1 or (self.is_coldest and self.typical_p >= 1.0 and self.xtc_probability == 0.0)

    @property
    def has_penalties(self) -> bool:
        changed = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)
        return changed and self.penalty_last_n > 0 and "penalties" in self.samplers and not self.mirostat

    @property
    def has_dry(self) -> bool:
        is_on = self.dry_multiplier != 0.0 and self.dry_base >= 1.0 and self.dry_penalty_last_n > 0
        return is_on and "dry" in self.samplers and not self.mirostat

    @property
    def n_remembered(self) -> int:
        """How many tokens before the reply it looks back on."""
        penalties = self.penalty_last_n if self.has_penalties else 0
        return max(penalties, self.dry_penalty_last_n if self.has_dry else 0)


_SAMPLING_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 1 << 24),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-100.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "penalty_last_n": (0, 1 << 16),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (-100.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (0.0, 100.0),
    "dry_allowed_length": (0, 1 << 16),
    "dry_penalty_last_n": (0, 1 << 16),
    "mirostat": (0, 2),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 100.0),
    "adaptive_target": (-100.0, 1.0),
    "adaptive_decay": (0.0, 0.99),
    "min_keep": (0, 1 << 24),
}


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Thought:
    """Free text before the constraint begins, up to a closing tag. Without an ``opening`` tag the prompt has opened it;
    with one the model may think or not."""

    closing: str
    opening: str = ""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most so many tokens of thinking; then ``message`` and the ``closing`` tag are written for the model. Without an
    ``opening`` tag the prompt has opened it."""

    n_tokens: int
    closing: str
    opening: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class ContextShift:
    """What a reply that fills its context gives up to go on: ``n_discard`` tokens behind the first ``n_keep``."""

    n_keep: int = 0  # negative: the whole prompt
    n_discard: int = 0  # 0: half of what is not kept


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a reply must match. In a Lark text the rules ``tag_0``, ``tag_1`` … stand for ``tags``: words that are one
    control token in some vocabularies and plain text in others."""

    kind: Literal["json_schema", "lark", "gbnf", "regex"]
    text: str
    tags: tuple[str, ...] = ()
    thought: Thought | None = None

    def __post_init__(self) -> None:
        n = len(self.text)
        require(
            n <= MAX_CONSTRAINT_CHARS, f"the schema or grammar has {n} characters; give at most {MAX_CONSTRAINT_CHARS}"
        )
