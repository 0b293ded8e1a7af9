"""Requests with other scales of LoRA adapters do not decode in one step: the scales belong to the whole context.

Groups of requests with the same scales take turns, each for a short while, since another graph has to be made at every
change. Of a group the oldest request gets a token in every step of its turn, and every group has its turn, so all end.
Pure, but for what it remembers of turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from everwarm.config import MAX_SCALE, require
from everwarm.engine.request import Ask
from everwarm.errors import BadRequest
from everwarm.state.namespace import adapted

TURN_S = 0.2  # how long a group runs on while another waits

Scales = tuple[float, ...]


def with_own_namespace(ask: Ask, own: Scales) -> Ask:
    """The request in the namespace of its scales. ``own``: those that the model was opened with."""
    if ask.lora is None:
        return ask
    if len(ask.lora) != len(own):
        raise BadRequest(f"lora has {len(ask.lora)} scales; this model has {len(own)} adapters")
    require(all(-MAX_SCALE <= scale <= MAX_SCALE for scale in ask.lora), f"a scale of lora is not within ±{MAX_SCALE}")
    if ask.lora == own:
        return replace(ask, lora=None)
    return replace(ask, namespace=adapted(ask.namespace, ask.lora))


@dataclass(slots=True)
class AdapterTurns:
    """Which scales are decoded with, and when each group last was."""

    scales: Scales | None = None  # None: the model's own
    began_at: float = 0.0
    _ran_at: dict[Scales | None, float] = field(default_factory=dict)

    def choose(self, running: Sequence[Scales | None], now: float) -> Scales | None:
        """``running``: the scales of the running requests, the oldest first."""
        others = [scales for scales in dict.fromkeys(running) if scales != self.scales]
        if not others or (self.scales in running and now - self.began_at < TURN_S):
            return self.scales
        self._ran_at = {scales: at for scales, at in self._ran_at.items() if scales in running}
        self._ran_at[self.scales] = now
        self.scales = min(others, key=lambda scales: self._ran_at.get(scales, 0.0))
        self.began_at = now
        return self.scales
