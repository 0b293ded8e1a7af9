"""Everything an engine is started with. Frozen, checked once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, get_args

from everwarm.config import (
    CELLS_STEP,
    CacheType,
    ContextOptions,
    FlashAttention,
    ModelOptions,
    Pooling,
    RopeOptions,
    StateType,
    default_threads,
    require,
)
from everwarm.engine.fingerprint import state_fingerprint
from everwarm.state.policy import CheckpointParams

MAX_SLOTS = 64
MAX_DRAFT = 64
MIN_HEAD_LAYERS = 16  # every token is read by the head, too: with fewer layers that costs more than guesses bring
MAX_SEQUENCES = 255  # libllama has 256; one moves KV in and out


RestorePolicy = Literal["auto", "always"]
PinRam = Literal["auto", "on", "off"]
Speculate = Literal["auto", "off", "lookup", "mtp", "draft"]


DISK_FREE_SHARE = 0.8  # of the file system's free space, for any budget


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The disk tier. ``auto`` reads a prompt again where that is measured to be faster than loading it."""

    directory: str
    disk_bytes: int = 64 << 30
    write_bytes_per_day: int = 0  # 0: any number
    restore_policy: RestorePolicy = "auto"

    def __post_init__(self) -> None:
        require(bool(self.directory), "the state directory has no name")
        require(
            self.disk_bytes >= 1 << 20, f"disk_bytes is {self.disk_bytes}; give at least 1 MiB, or leave the store out"
        )
        require(self.write_bytes_per_day >= 0, f"write_bytes_per_day is {self.write_bytes_per_day}; give 0 or more")


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """The remote tier: a store that many servers share, and the key that says which objects are theirs."""

    url: str
    key_file: str | None = None
    endpoint: str | None = None  # of an S3-compatible store; None: as AWS's environment variables say
    restore_policy: RestorePolicy = "auto"
    wait_s: float = 0.25  # for the first answer to a request, before it continues without the store

    def __post_init__(self) -> None:
        from everwarm.state.remote.bucket import require_bucket  # loads asyncio, which only a remote store needs

        require_bucket(self.url)
        require(0.0 < self.wait_s <= 60.0, f"remote-wait is {self.wait_s}; give more than 0 and at most 60 seconds")
        require(
            self.key_file is not None or self.url.startswith("memory:"),
            f"the remote store {self.url} needs a key file: others could lay wrong states there; give remote-key",
        )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """``n_ctx`` cells are shared by all slots. ``None`` means: sized from this machine's free memory."""

    n_slots: int = 4
    n_ctx: int = 16384
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = field(default_factory=default_threads)
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    flash_attention: FlashAttention = "auto"
    state_type: StateType = "f32"  # of copies of recurrent states in RAM, on disk and in the remote store
    model: ModelOptions = field(default_factory=ModelOptions)
    checkpoints: CheckpointParams = field(default_factory=CheckpointParams)
    n_spares: int | None = None  # parked checkpoints; each reserves a whole recurrent state on the device
    ram_bytes: int | None = None  # copies of checkpoints and segments
    pin_ram: PinRam = "auto"  # with a model on a GPU: have the RAM tier's memory copied at the speed of the bus
    namespace_share: float = 1.0  # the most of RAM and disk that what one API key and salt keeps may take
    mmproj: str | None = None  # the projector file that lets the model see images and hear sounds
    store: StoreSettings | None = None  # None: nothing is written to disk
    remote: RemoteSettings | None = None  # None: nothing is shared with other servers
    prefill_beside_decode: int = 128  # prompt tokens per step while replies are being written
    finish_prefill_s: float = 0.0  # for so long a prompt whose client went away is read on in idle time; 0: never
    max_step_ms: float = 0.0  # how long such a step should take: their number follows from it; 0: as many as above
    n_threads_batch: int | None = None  # for prompts; None: as many as n_threads
    rope: RopeOptions = field(default_factory=RopeOptions)
    kv_offload: bool = True
    op_offload: bool = True
    speculate: Speculate = "auto"  # where drafts of replies come from; they change speed, never which tokens are likely
    draft_model: str | None = None  # a smaller model of the same vocabulary, that drafts in place of an MTP head
    max_draft: int = 32  # tokens that are drafted in one step
    n_snapshots: int | None = None  # earlier states of every sequence: so many drafted tokens are taken back at once
    embedding: Pooling | None = None  # how the model's vectors are made of its tokens; None: it writes text
    kv_unified: bool = True  # one request may use the whole context; False: at most a slot's share of it
    idle_cells: int = 256  # cells that idle conversations may keep, per running request; docs/log.md has the curve

    def __post_init__(self) -> None:
        require(1 <= self.n_slots <= MAX_SLOTS, f"n_slots is {self.n_slots}; give 1 to {MAX_SLOTS}")
        most = MAX_SEQUENCES - self.n_slots
        require(self.n_spares is None or 0 <= self.n_spares <= most, f"n_spares is {self.n_spares}; give 0 to {most}")
        require(self.ram_bytes is None or self.ram_bytes >= 0, f"ram_bytes is {self.ram_bytes}; give 0 or more")
        require(self.pin_ram in get_args(PinRam), f"pin_ram is {self.pin_ram!r}; give auto, on or off")
        share = self.namespace_share
        require(0.0 < share <= 1.0, f"namespace_share is {share}; give more than 0 and at most 1")
        require(self.prefill_beside_decode >= 1, "prefill_beside_decode must be at least 1")
        require(
            0 <= self.finish_prefill_s <= 86_400,
            f"finish_prefill_s is {self.finish_prefill_s}; give 0 (never) to 86400",
        )
        require(0 <= self.max_step_ms <= 60_000, f"max_step_ms is {self.max_step_ms}; give 0 (none) to 60000")
        modes = ", ".join(get_args(Speculate))
        require(self.speculate in get_args(Speculate), f"speculate is {self.speculate!r}; give one of {modes}")
        require(self.speculate != "draft" or bool(self.draft_model), "speculate is draft; give a model-draft, too")
        require(1 <= self.max_draft <= MAX_DRAFT, f"max_draft is {self.max_draft}; give 1 to {MAX_DRAFT}")
        require(self.idle_cells >= 0, f"idle_cells is {self.idle_cells}; give 0 or more")
        require(self.embedding is None or self.embedding in get_args(Pooling), f"embedding is {self.embedding!r}")
        self.context(0, self.n_snapshots or 0)  # the same limits as the context's own

    @property
    def drafts_with_model(self) -> bool:
        return self.draft_model is not None and self.speculate in ("auto", "draft")

    @property
    def head_from(self) -> int | None:
        """How many layers a model must have for its MTP head to be used; None: it is not."""
        if self.embedding is not None or self.drafts_with_model:
            return None
        return {"auto": MIN_HEAD_LAYERS, "mtp": 0}.get(self.speculate)

    def n_ctx_of_request(self, n_cells: int) -> int:
        """The most tokens of one request, in a context of so many cells. A share is rounded up, as libllama does it."""
        if self.kv_unified:
            return n_cells
        share = -(-self.n_ctx // self.n_slots)
        return min(n_cells, -(-share // CELLS_STEP) * CELLS_STEP)

    def fingerprint(self, model: str, rope_limit: int | None) -> str:
        """What kept states of an engine with these settings are recognised by."""
        return state_fingerprint(model, self.context(0), rope_limit, os.environ)

    def context(self, n_spares: int, n_snapshots: int = 0) -> ContextOptions:
        return ContextOptions(
            n_ctx=self.n_ctx,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            n_seq_max=self.n_slots + n_spares,
            n_snapshots=n_snapshots,
            n_threads=self.n_threads,
            n_threads_batch=self.n_threads if self.n_threads_batch is None else self.n_threads_batch,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            flash_attention=self.flash_attention,
            rope=self.rope,
            kv_offload=self.kv_offload,
            op_offload=self.op_offload,
            state_type=self.state_type,
        )
