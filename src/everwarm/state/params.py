"""How densely checkpoints are taken and how many are kept. The defaults need no tuning. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from everwarm.config import require

MIN_SPACING, MAX_SPACING = 256, 8192
WINDOW_FLOOR = 64


@dataclass(frozen=True, slots=True)
class CheckpointParams:
    """``None`` means: fit to the model (see ``fitted``). A value that is set is honoured for every kind of model.

    max_checkpoints  kept on one path from the beginning to the end of a conversation; 0 switches the mechanism off
    every_n_tokens   spacing inside long messages; 0 or less: only near the end of a prompt
    min_tokens       no checkpoint before this many tokens
    min_gap          no checkpoint closer than this to the one before it

    The checkpoints at the end of a prompt are always taken, unless ``max_checkpoints`` is 0.
    """

    max_checkpoints: int = 32
    every_n_tokens: int | None = None
    min_tokens: int | None = None
    min_gap: int | None = None

    def __post_init__(self) -> None:
        _bounded("max_checkpoints", self.max_checkpoints, 0, 1 << 20)
        _bounded("every_n_tokens", self.every_n_tokens, -1, 1 << 26)
        _bounded("min_tokens", self.min_tokens, 0, 1 << 26)
        _bounded("min_gap", self.min_gap, 0, 1 << 26)

    def with_max_checkpoints(self, max_checkpoints: int) -> CheckpointParams:
        return replace(self, max_checkpoints=max_checkpoints)

    def with_every_n_tokens(self, every_n_tokens: int) -> CheckpointParams:
        return replace(self, every_n_tokens=every_n_tokens)

    def with_min_tokens(self, min_tokens: int) -> CheckpointParams:
        return replace(self, min_tokens=min_tokens)

    def with_min_gap(self, min_gap: int) -> CheckpointParams:
        return replace(self, min_gap=min_gap)

    def fitted(self, *, state_bytes: int, kv_bytes_per_token: int, window: bool) -> Spacing:
        """The numbers for one model: a state then costs about what the KV it stands for costs."""
        natural = state_bytes // kv_bytes_per_token if kv_bytes_per_token else MAX_SPACING
        every = min(max(natural, MIN_SPACING), MAX_SPACING) if self.every_n_tokens is None else self.every_n_tokens
        floor = WINDOW_FLOOR if window else 0
        return Spacing(
            max_checkpoints=self.max_checkpoints,
            every_n_tokens=every,
            min_tokens=floor if self.min_tokens is None else self.min_tokens,
            min_gap=floor if self.min_gap is None else self.min_gap,
        )


@dataclass(frozen=True, slots=True)
class Spacing:
    """``CheckpointParams`` with every number decided."""

    max_checkpoints: int
    every_n_tokens: int
    min_tokens: int
    min_gap: int


def _bounded(name: str, value: int | None, low: int, high: int) -> None:
    require(value is None or low <= value <= high, f"{name} is {value}; give {low} to {high}")
