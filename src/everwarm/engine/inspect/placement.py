"""Where the model lies, what memory is left beside it, and the largest context that would fit: from what the devices
report once everything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from everwarm.engine.core import Core
from everwarm.engine.process import messages as m
from everwarm.llama.system.devices import Device, warn_of_blind_build
from everwarm.llama.system.memory_fit import host_free_bytes, usable_gpus

USABLE_SHARE = 0.9  # of the free memory: a longer context needs larger buffers to compute in, too
_ROUND_TOKENS = 1024


def placement_of(core: Core) -> m.Placement:
    model = core.model
    sizes = core.sizes
    warn_of_blind_build(model.lib)
    ram_left = max(0, sizes.ram_bytes - core.cache.tree.ram_bytes)  # the RAM tier will take it
    return place(
        usable_gpus(model.lib, model.options),
        max(0, host_free_bytes() - ram_left),
        n_layers=model.n_layers,
        n_gpu_layers=model.options.n_gpu_layers,
        n_ctx=core.context.n_ctx,
        kv_bytes_per_token=sizes.shape.kv_bytes_per_token,
        kv_on_gpu=core.context.options.kv_offload,
    )


def place(
    gpus: Sequence[Device],
    host_free: int,
    *,
    n_layers: int,
    n_gpu_layers: int,
    n_ctx: int,
    kv_bytes_per_token: int,
    kv_on_gpu: bool = True,
) -> m.Placement:
    """Pure. ``n_gpu_layers`` as it was given: negative for all. Free memory is what is left beside the model and its
    context of ``n_ctx`` tokens; KV lies where its layer lies."""
    wanted = n_layers if n_gpu_layers < 0 else min(n_gpu_layers, n_layers)
    on_gpu = wanted if gpus else 0
    gpu_share = on_gpu / n_layers if kv_on_gpu and n_layers else 0.0
    gpu_free = sum(gpu.free_bytes for gpu in gpus)
    return m.Placement(
        gpus=tuple(m.Gpu(gpu.description or gpu.name, gpu.free_bytes, gpu.total_bytes) for gpu in gpus),
        n_layers=n_layers,
        n_gpu_layers=on_gpu,
        host_free_bytes=host_free,
        n_ctx_fits=_fits(n_ctx, kv_bytes_per_token, ((gpu_free, gpu_share), (host_free, 1.0 - gpu_share))),
    )


def _fits(n_ctx: int, kv_bytes_per_token: int, places: Sequence[tuple[int, float]]) -> int | None:
    """None: the context costs nothing by length. ``places``: free bytes, and the share of KV that lies there."""
    rooms = [USABLE_SHARE * free / (kv_bytes_per_token * share) for free, share in places if kv_bytes_per_token * share]
    return n_ctx + int(min(rooms)) // _ROUND_TOKENS * _ROUND_TOKENS if rooms else None
