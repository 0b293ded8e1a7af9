"""What a context costs in memory, measured on the model itself; whether this machine has it; and how many spares and how
much RAM an engine takes of what is left.

The kernel grants more memory than there is and kills the process later, so a context that cannot fit must be refused
before libllama asks for it. Sizes differ by architecture in ways only libllama knows; a probe of two tokens tells.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from everwarm.config import ContextOptions, ModelOptions
from everwarm.engine.settings import MAX_SEQUENCES, EngineSettings
from everwarm.errors import ContextTooBig
from everwarm.llama import abi
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.lib import Device, Lib, devices
from everwarm.llama.model import Model
from everwarm.memory_limits import tightest_limit
from everwarm.state.policy import Spacing
from everwarm.types import SeqId

_MIB = 1 << 20
SPARE_SHARE = 0.05  # of the free memory, for parked checkpoints
RAM_SHARE = 0.25  # of the free memory, for copies
MAX_RAM_BYTES = 8 << 30
MAX_SPARES = 16
MAX_ROLLBACK = 4
N_SNAPSHOTS = 3  # a head's draft: more than three tokens are seldom right, and each costs a state per sequence
SNAPSHOT_SHARE = 0.25  # of the free memory, for snapshots of slots
SLACK_BYTES = 16 << 20  # under a limit: buffers that steps compute in, and what the gateway takes for requests


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """Bytes per token of attention KV, with that of an MTP head, and bytes of one recurrent or sliding-window state."""

    kv_bytes_per_token: int
    state_bytes: int

    def context_bytes(self, n_ctx: int, n_seqs: int) -> int:
        return n_ctx * self.kv_bytes_per_token + n_seqs * self.state_bytes


@functools.lru_cache(maxsize=8)
def measure(model: Model, options: ContextOptions) -> MemoryShape:
    """Decode two tokens in a small context and look at what they left behind. Warms the weights up as well."""
    probe = replace(options, n_ctx=256, n_batch=32, n_ubatch=32, n_seq_max=1, n_snapshots=0)
    token = np.array([model.vocab.bos or 0], np.int32)
    with Context(model, probe) as context:
        sizes = []
        for _ in range(2):
            context.decode([Feed(SeqId(0), token, context.end(SeqId(0)), wants_logits=False)])
            sizes.append((context._size(SeqId(0), abi.STATE_FULL), context._size(SeqId(0), abi.STATE_PARTIAL)))
        of_head = 0 if context.head is None else context.head.bytes_per_token(SeqId(0))
    (full_1, partial_1), (full_2, partial_2) = sizes
    if not model.memory_kind.needs_checkpoints:
        return MemoryShape(full_2 - full_1 + of_head, 0)
    window_bytes = (partial_2 - partial_1) * model.n_swa
    kv_bytes = (full_2 - full_1) - (partial_2 - partial_1) + of_head
    return MemoryShape(kv_bytes, partial_1 + window_bytes)


def require_fit(model: Model, options: ContextOptions) -> None:
    """Refuse a context that this machine cannot hold, before the kernel kills the process."""
    n_states = (options.n_seq_max + 1) * (1 + options.n_snapshots)
    needed = measure(model, options).context_bytes(options.n_ctx, n_states)
    free = free_bytes(model)
    if needed > free:
        raise ContextTooBig(
            f"a context of {options.n_ctx} tokens and {options.n_seq_max} sequences needs {needed // _MIB} MiB "
            f"but {free // _MIB} MiB are free; give fewer tokens, slots or spares"
        )


def free_bytes(model: Model) -> int:
    """What a context of this model can have: the GPUs' memory if the whole model is there, else the host's as well."""
    on_gpu = gpu_free_bytes(model.lib, model.options) if model.options.n_gpu_layers else 0
    return on_gpu if is_on_gpu(model) else host_free_bytes() + on_gpu


def is_on_gpu(model: Model) -> bool:
    """Whether all of the model is on GPUs, and its contexts with it."""
    layers = model.options.n_gpu_layers
    return (layers < 0 or layers > model.n_layers) and gpu_free_bytes(model.lib, model.options) > 0


def mapped_bytes(model: Model) -> int:
    """Weights that lie in the page cache: the kernel counts them for no process, but every step reads them."""
    return model.size_bytes if model.options.use_mmap and not is_on_gpu(model) else 0


def host_free_bytes() -> int:
    free = [_meminfo_available(), limited_bytes()]
    return min(n for n in free if n is not None) if any(n is not None for n in free) else 1 << 62


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def limited_bytes() -> int | None:
    """What the memory limits of this process leave, those of all its cgroups and of its address space."""
    limit = tightest_limit()
    return None if limit is None else limit.free_bytes


def gpu_free_bytes(lib: Lib, options: ModelOptions) -> int:
    return sum(gpu.free_bytes for gpu in usable_gpus(lib, options))


def usable_gpus(lib: Lib, options: ModelOptions) -> list[Device]:
    """The GPUs that a model opened so may use."""
    gpus = [gpu for gpu in devices(lib) if gpu.is_gpu and (not options.devices or gpu.name in options.devices)]
    return gpus[options.main_gpu : options.main_gpu + 1] if options.split_mode == "none" else gpus


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
