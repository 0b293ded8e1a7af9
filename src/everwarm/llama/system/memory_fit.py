"""What a context costs in memory, measured on the model itself, and whether this machine has it.

The kernel grants more memory than there is and kills the process later, so a context that cannot fit must be refused
before libllama asks for it. Sizes differ by architecture in ways only libllama knows; a probe of two tokens tells.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from everwarm.config import ContextOptions, ModelOptions
from everwarm.errors import ContextTooBig
from everwarm.llama import abi
from everwarm.llama.context import Context, Feed
from everwarm.llama.lib import Lib
from everwarm.llama.model import Model
from everwarm.llama.system.devices import Device, devices
from everwarm.memory_limits import tightest_limit
from everwarm.types import SeqId

_MIB = 1 << 20


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
