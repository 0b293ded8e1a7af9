"""How many spares and how much RAM an engine takes, from what the model needs and the machine has."""

from __future__ import annotations

from dataclasses import dataclass

from everwarm.engine.settings import MAX_SEQUENCES, EngineSettings
from everwarm.llama.model import Model
from everwarm.llama.system.memory_fit import (
    MemoryShape,
    free_bytes,
    host_free_bytes,
    is_on_gpu,
    mapped_bytes,
    measure,
    require_fit,
)
from everwarm.state.policy import Spacing

SPARE_SHARE = 0.05  # of the free memory, for parked checkpoints
RAM_SHARE = 0.25  # of the free memory, for copies
MAX_RAM_BYTES = 8 << 30
MAX_SPARES = 16
MAX_ROLLBACK = 4
N_SNAPSHOTS = 3  # a head's draft: more than three tokens are seldom right, and each costs a state per sequence
SNAPSHOT_SHARE = 0.25  # of the free memory, for snapshots of slots
SLACK_BYTES = 16 << 20  # under a limit: buffers that steps compute in, and what the gateway takes for requests


@dataclass(frozen=True, slots=True)
class Sizes:
    shape: MemoryShape
    spacing: Spacing
    n_spares: int
    n_rollback: int  # sequences that hold states while drafts are verified
    n_snapshots: int  # earlier states of every sequence
    ram_bytes: int
    ram_room: int  # the most that the memory limits leave for it beside weights and context


def decide_sizes(model: Model, settings: EngineSettings, limited: int | None, n_left: int = 0) -> Sizes:
    """Refuses a context that does not fit; shrinks what was left to us to decide. ``limited``: what memory limits leave
    to this process; None: there are none. ``n_left`` bytes of what is in use are the RAM tier's own, from an earlier
    process."""
    kind = model.memory_kind
    shape = measure(model, settings.context(0))
    on_gpu = is_on_gpu(model)
    spacing = settings.checkpoints.fitted(
        state_bytes=shape.state_bytes,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        window=kind.has_window,
        on_gpu=on_gpu,
    )
    require_fit(model, settings.context(0))
    free = free_bytes(model) - shape.context_bytes(settings.n_ctx, settings.n_slots + 1)
    has_parked = kind.needs_checkpoints and kind.can_share_cells
    n_snapshots = _snapshots(settings, shape, free, is_wanted=on_gpu and model.has_head) if has_parked else 0
    free -= n_snapshots * (settings.n_slots + 1) * shape.state_bytes
    seq_bytes = (1 + n_snapshots) * shape.state_bytes
    n_rollback = _rollbacks(settings, seq_bytes, free) if has_parked else 0
    n_spares = _spares(settings, seq_bytes, free - n_rollback * seq_bytes) if has_parked else 0
    require_fit(model, settings.context(n_spares + n_rollback, n_snapshots))
    n_states = (settings.n_slots + n_spares + n_rollback + 1) * (1 + n_snapshots)
    beside = 0 if on_gpu else shape.context_bytes(settings.n_ctx, n_states)
    room = ram_room(limited, beside + mapped_bytes(model), n_left)
    on_host = host_free_bytes() if on_gpu else free
    ram = min(MAX_RAM_BYTES, int(min(on_host, room) * RAM_SHARE)) if settings.ram_bytes is None else settings.ram_bytes
    return Sizes(shape, spacing, n_spares, n_rollback, n_snapshots, max(0, ram), room)


def ram_room(limited: int | None, beside: int, n_left: int) -> int:
    """What a memory limit leaves for the RAM tier beside ``beside`` bytes that are not taken yet; without a limit, any."""
    return 1 << 62 if limited is None else max(0, limited - beside + n_left - SLACK_BYTES)


def _spares(settings: EngineSettings, seq_bytes: int, free: int) -> int:
    if settings.checkpoints.max_checkpoints == 0:
        return 0
    if settings.n_spares is not None:
        return settings.n_spares
    affordable = int(free * SPARE_SHARE) // max(1, seq_bytes)
    return max(0, min(MAX_SPARES, affordable, MAX_SEQUENCES - MAX_ROLLBACK - settings.n_slots))


def _snapshots(settings: EngineSettings, shape: MemoryShape, free: int, *, is_wanted: bool) -> int:
    """``is_wanted``: a head drafts on a GPU, where decoding accepted tokens again costs more than the memory."""
    if settings.n_snapshots is not None or settings.speculate == "off" or not is_wanted:
        return settings.n_snapshots or 0
    n_bytes = N_SNAPSHOTS * (settings.n_slots + 1) * shape.state_bytes
    return N_SNAPSHOTS if n_bytes <= free * SNAPSHOT_SHARE else 0


def _rollbacks(settings: EngineSettings, seq_bytes: int, free: int) -> int:
    """One for each request that verifies a draft in a step. Steps of many requests need no drafts to be worth it."""
    if settings.speculate == "off":
        return 0
    left = MAX_SEQUENCES - settings.n_slots - (settings.n_spares or 0)
    affordable = int(free * SPARE_SHARE) // max(1, seq_bytes)
    return max(0, min(MAX_ROLLBACK, settings.n_slots, affordable, left))
