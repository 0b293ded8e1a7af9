"""How much of each LoRA adapter a request's reply has: what it says itself, else what an admin has set, else as the model
was started. The engine is told with every request, so nothing is lost when it is started again."""

from __future__ import annotations

from collections.abc import Sequence

from everwarm.errors import BadRequest
from everwarm.gateway.openai.schema import LoraScale
from everwarm.router.catalog.catalog import ModelSpec

LoraScales = tuple[float, ...]


class AdapterScales:
    def __init__(self) -> None:
        self._set: dict[str, tuple[LoraScales, LoraScales]] = {}  # by model: those it was started with, those set

    def now(self, spec: ModelSpec) -> LoraScales:
        """The scales of requests that do not set any."""
        started, scales = self._set.get(spec.id, ((), ()))
        own = _started_with(spec)
        return scales if started == own else own  # its adapters were changed since: set it again

    def set(self, spec: ModelSpec, given: Sequence[LoraScale]) -> None:
        self._set[spec.id] = (_started_with(spec), listed(given, len(spec.settings.model.lora)))

    def of_request(self, spec: ModelSpec, given: Sequence[LoraScale] | None) -> LoraScales | None:
        """None: as the model was started."""
        scales = self.now(spec) if given is None else listed(given, len(spec.settings.model.lora))
        return None if scales == _started_with(spec) else scales


def _started_with(spec: ModelSpec) -> LoraScales:
    return tuple(scale for _, scale in spec.settings.model.lora)


def listed(given: Sequence[LoraScale], n_adapters: int) -> LoraScales:
    """The scale of every adapter."""
    scales = [0.0] * n_adapters
    for adapter in given:
        if adapter.id >= n_adapters:
            there = f"this model has adapters 0 to {n_adapters - 1}" if n_adapters else "this model has no adapters"
            raise BadRequest(f"lora names adapter {adapter.id}; {there}")
        scales[adapter.id] = adapter.scale
    return tuple(scales)
