"""What the engine shows of itself in numbers: its slots, its counts, what is kept, what a prompt would cost, and
where the model lies. Reads only, on the loop's thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from everwarm.engine.core import Core
from everwarm.engine.memory_plan import host_free_bytes, usable_gpus
from everwarm.engine.process.messages import Gpu, Placement, PromptCost
from everwarm.engine.request import Request
from everwarm.engine.slots import Slot
from everwarm.llama.lib import Device, warn_of_blind_build
from everwarm.prompt.prompt import Prompt
from everwarm.state.store.disk import Disk

USABLE_SHARE = 0.9  # of the free memory: a longer context needs larger buffers to compute in, too
_ROUND_TOKENS = 1024


def prompt_cost(core: Core, prompt: Prompt, namespace: str) -> PromptCost:
    """What a prompt would cost now. What is only on disk or in the remote store counts as to be read."""
    n_prompt = prompt.n_tokens(len(prompt))
    n_cached = prompt.n_tokens(min(core.cache.restorer.known(prompt, namespace), len(prompt)))
    read_s = (n_prompt - n_cached) * core.speed.seconds_per_token
    return PromptCost(n_prompt, n_cached, read_s, n_prompt < core.context.n_ctx)


def version_of(core: Core) -> int:
    """Changes with everything in RAM or on disk."""
    return core.cache.tree.version + core.cache.tiers.disk.version


def report(core: Core, what: Literal["slots", "counts", "cache"], namespace: str = "") -> object:
    """``namespace``: of the slots of others only whether they are busy."""
    match what:
        case "slots":
            return slots(core, namespace)
        case "counts":
            return counts(core)
        case "cache":
            return summary(core)


def slots(core: Core, namespace: str) -> list[dict[str, Any]]:
    """Each slot as llama-server shows it, without any text; of others' only whether they are busy."""
    shown = []
    n_ctx = core.settings.n_ctx_of_request(core.context.n_ctx)
    for slot in core.slots:
        request = slot.request
        if (request or slot.n_fed) and not core.cache.tree.namespace(slot.node).startswith(namespace):
            busy = {"is_processing": request is not None and not request.ask.ahead, "is_prewarming": False}
            shown.append({"id": slot.seq, "n_ctx": n_ctx, **busy, "n_prompt_tokens": 0, "is_others": True})
            continue
        is_ahead = request is not None and request.ask.ahead
        about: dict[str, Any] = {"id": slot.seq, "n_ctx": n_ctx}
        about |= {"is_processing": request is not None and not is_ahead, "is_prewarming": is_ahead}
        n_fed = slot.resident().n_tokens(slot.n_fed)
        about["n_prompt_tokens"] = n_fed if request is None else request.n_prompt_tokens
        if request is not None:
            about |= {
                "id_task": request.id,
                "n_prompt_tokens_cache": request.n_tokens(request.n_cached),
                "n_prompt_tokens_processed": _n_read(slot, request),
                "next_token": [{"has_next_token": True, "n_decoded": request.n_reply, "n_remain": request.n_left}],
                "params": _params(request),
            }
        shown.append(about)
    return shown


def _params(request: Request) -> dict[str, Any]:
    """How a reply is sampled. Its biases are left out, and so is a seed that was not given."""
    sampling = dataclasses.asdict(request.ask.sampling)
    del sampling["logit_bias"]
    sampling["repeat_last_n"] = sampling.pop("penalty_last_n")
    return {**sampling, "n_predict": request.ask.max_tokens, "ignore_eos": request.ask.ignore_eos}


def _n_read(slot: Slot, request: Request) -> int:
    """Prompt tokens it has read so far."""
    return max(0, request.n_tokens(min(slot.n_fed, request.n_prompt)) - request.n_tokens(request.n_cached))


def counts(core: Core) -> dict[str, Any]:
    cache = core.cache
    return {
        **dataclasses.asdict(core.counts),
        "evictions": evictions(core),
        "seconds_per_token": core.speed.seconds_per_token if core.speed.n_measured else None,
        "ram_bytes": cache.tree.ram_bytes,
        "ram_n_states": cache.tree.n_states,
        "ram_n_segments": cache.tree.n_segments,
        "ram_budget_bytes": cache.ram_budget.n_bytes,
        "n_parked": len(cache.residents.spares.parked()),
        "n_spares": len(cache.residents.spares),
        "n_cells_used": core.context.cells.used,
        "n_cells": core.context.n_ctx,
        "n_decodes": core.context.n_decodes,
        "n_fed": core.context.n_fed,
        "n_running": sum(slot.request is not None and not slot.request.ask.ahead for slot in core.slots),
        "n_queued": len(core.queue),
        "n_images_encoded": 0 if core.images is None else core.images.n_encoded,
        **cache.ram.stats(),
        **cache.tier_writer.stats(),
        "disk_n_brought": cache.loader.n_brought,
    }


def summary(core: Core) -> dict[str, Any]:
    cache = core.cache
    tree = cache.tree
    stats = core.counts
    n_parked = len(cache.residents.spares.parked())
    ram = {
        "bytes": tree.ram_bytes,
        "budget_bytes": cache.ram_budget.n_bytes,
        "n_states": tree.n_states,
        "n_segments": tree.n_segments,
    }
    return {
        "version": version_of(core),
        "n_nodes": len(tree.by_id),
        "engine": {
            "n_slots": len(core.slots),
            "n_running": sum(slot.request is not None and not slot.request.ask.ahead for slot in core.slots),
            "n_queued": len(core.queue),
            "n_ctx": core.context.n_ctx,
            "n_cells_used": core.context.cells.used,
        },
        "tiers": {
            "device": {"n_states": n_parked, "n_cells": core.context.cells.used},
            "ram": ram,
            "disk": _disk(core),
        },
        "evictions": sum(evictions(core).values()),
        "quarantines": stats.n_quarantined,
        "prewarm": {
            "turns": core.counts.n_prewarms,
            "used": stats.n_prewarms_used,
            "interrupted": core.counts.n_prewarms_interrupted,
            "tokens": core.counts.n_prewarm_tokens,
        },
        "seconds_per_token": core.speed.seconds_per_token if core.speed.n_measured else None,
        "speculation": {
            "is_on": core.speculator.is_on,
            "n_drafted": core.counts.n_drafted,
            "n_draft_accepted": core.counts.n_draft_accepted,
            "n_verified": core.counts.n_verified,
        },
    }


def _disk(core: Core) -> dict[str, Any] | None:
    """None: no disk tier is configured. One that cannot be used is shown as degraded and empty."""
    disk = core.cache.tiers.disk
    if not isinstance(disk, Disk):
        reason = core.cache.tiers.degraded
        return None if reason is None else _NO_DISK | {"reason": reason}
    return {
        "bytes": disk.n_bytes,
        "budget_bytes": disk.budget_bytes,
        "n_objects": len(disk.names()),
        "written_bytes": disk.counts.n_bytes_written,
        "write_budget_bytes": disk.write_budget or None,
        "written_today_bytes": disk.n_written_today if disk.write_budget else None,
        "degraded": disk.degraded is not None,
        "reason": disk.degraded,
    }


_NO_DISK = {
    "bytes": 0,
    "budget_bytes": 0,
    "n_objects": 0,
    "written_bytes": 0,
    "write_budget_bytes": None,
    "written_today_bytes": None,
    "degraded": True,
}


def evictions(core: Core) -> dict[str, int]:
    """How many usable checkpoints were evicted, by reason."""
    return {**core.counts.evictions, "disk_budget": core.cache.tiers.disk.counts.n_evicted}


def placement_of(core: Core) -> Placement:
    """Where the model lies, what memory is left beside it, and the largest context that would fit: from what the devices
    report once everything is loaded."""
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
) -> Placement:
    """Pure. ``n_gpu_layers`` as it was given: negative for all. Free memory is what is left beside the model and its
    context of ``n_ctx`` tokens; KV lies where its layer lies."""
    wanted = n_layers if n_gpu_layers < 0 else min(n_gpu_layers, n_layers)
    on_gpu = wanted if gpus else 0
    gpu_share = on_gpu / n_layers if kv_on_gpu and n_layers else 0.0
    gpu_free = sum(gpu.free_bytes for gpu in gpus)
    return Placement(
        gpus=tuple(Gpu(gpu.description or gpu.name, gpu.free_bytes, gpu.total_bytes) for gpu in gpus),
        n_layers=n_layers,
        n_gpu_layers=on_gpu,
        host_free_bytes=host_free,
        n_ctx_fits=_fits(n_ctx, kv_bytes_per_token, ((gpu_free, gpu_share), (host_free, 1.0 - gpu_share))),
    )


def _fits(n_ctx: int, kv_bytes_per_token: int, places: Sequence[tuple[int, float]]) -> int | None:
    """None: the context costs nothing by length. ``places``: free bytes, and the share of KV that lies there."""
    rooms = [USABLE_SHARE * free / (kv_bytes_per_token * share) for free, share in places if kv_bytes_per_token * share]
    return n_ctx + int(min(rooms)) // _ROUND_TOKENS * _ROUND_TOKENS if rooms else None
