"""The options of a tiny model, checked once.

Knows the limits of each architecture. Does not know tensors or files.
"""

from dataclasses import dataclass
from typing import Literal

from everwarm.demo.tiny.vocab import IMAGE_MARKERS, N_BASE_TOKENS

ARCHITECTURES: tuple[str, ...] = (
    "qwen35",
    "jamba",
    "falcon-h1",
    "granitehybrid",
    "nemotron_h",
    "lfm2",
    "mamba2",
    "gemma3",
    "llama",
)

DType = Literal["f32", "q8_0"]

_DTYPES: tuple[str, ...] = ("f32", "q8_0")
_EVERY_LAYER_ALIKE = frozenset({"falcon-h1", "mamba2", "llama"})
_MAX_LAYERS = 512  # libllama asserts on more
_WIDTH_STEP = 64
_MAX_WIDTH = 16384  # beyond it the Q8_0 scales would leave the normal half-precision range


@dataclass(frozen=True, slots=True)
class TinySpec:
    """One model file: the same spec always gives the same bytes. `n_vocab` only adds unused tokens to the base ones;
    `vision` adds the tokens around an image, and says that a projector belongs to the model; `long_rope` gives it two sets
    of RoPE factors, and contexts of more than so many tokens use the second."""

    arch: str = "qwen35"
    n_layers: int = 8
    width: int = 256
    n_vocab: int | None = None
    seed: int = 0
    dtype: DType = "f32"
    context_length: int = 262144
    vision: bool = False
    long_rope: int | None = None

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
