"""What a model costs: seconds to read a token at a depth, bytes of a state and of a token's KV, speed of loading."""

from __future__ import annotations

import msgspec
import numpy as np

from everwarm.config import require
from everwarm.errors import BadRequest


class Curves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``prefill`` holds pairs of a depth and the seconds that one token takes there; between them lines are drawn."""

    name: str
    state_bytes: int
    kv_bytes_per_token: int
    load_bytes_per_s: float
    prefill: tuple[tuple[float, float], ...]
    logits_bytes: int = 0  # of one row, which is kept with the end of a prompt
    segment_bytes: int = 0  # that each segment takes beside its tokens

    def read_s(self, start: int, stop: int) -> float:
        """Seconds to read the tokens from ``start`` to ``stop``."""
        if stop <= start:
            return 0.0
        depths, seconds = zip(*self.prefill, strict=True)
        inner = [d for d in depths if start < d < stop]
        at = np.array([start, *inner, stop], float)
        return float(np.trapezoid(np.interp(at, depths, seconds), at))

    def load_s(self, n_bytes: int) -> float:
        return n_bytes / self.load_bytes_per_s

    @property
    def seconds_per_token(self) -> float:
        """At a middling depth; what an engine would have learned."""
        return self.read_s(0, 32_768) / 32_768


_BOUNDS: dict[str, tuple[float, float]] = {
    "state_bytes": (1, 1 << 40),
    "kv_bytes_per_token": (0, 1 << 30),
    "load_bytes_per_s": (1, 1e15),
    "logits_bytes": (0, 1 << 30),
    "segment_bytes": (0, 1 << 30),
}

# A 27B hybrid at Q8_0 on an H200: 26,549 tokens in 9.2 s, 149.6 MiB of state, 64 KiB of KV per token, 22 ms to set a state.
LARGE = Curves("27b", 156_867_000, 65_536, 7.1e9, ((0, 3.2e-4), (26_549, 3.7e-4), (131_072, 5.7e-4)))
# A hybrid of 9B parameters on a card of 24 GiB, from its shape: a third of the state, half of the KV, three times as fast.
MEDIUM = Curves("9b", 52_000_000, 32_768, 7.1e9, ((0, 1.1e-4), (26_549, 1.3e-4), (131_072, 2.2e-4)))
# The embedded model on two cores that others used as well, 5,000 tokens.
TINY = Curves("tiny", 430_252, 1_048, 2e9, ((0, 5.0e-4), (5_000, 1.1e-3)))
KNOWN = {curves.name: curves for curves in (LARGE, MEDIUM, TINY)}


def parse_curves(text: bytes) -> Curves:
    """Curves from JSON; what makes no sense is refused with a sentence."""
    try:
        curves = msgspec.json.decode(text, type=Curves)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the curves cannot be read: {error}") from None
    for name, (low, high) in _BOUNDS.items():
        value = getattr(curves, name)
        require(low <= value <= high, f"{name} is {value}; give {low:g} to {high:g}")
    depths = [depth for depth, _ in curves.prefill]
    require(
        bool(depths) and depths == sorted(set(depths)) and depths[0] >= 0, "prefill needs pairs with growing depths"
    )
    require(all(0 < s < 1e3 for _, s in curves.prefill), "prefill needs seconds per token above 0 and below 1000")
    return curves
