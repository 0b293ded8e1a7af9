"""The flags of ``serve``, and the frozen settings they become."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts import Group, Parameter

from everwarm.config import (
    CacheType,
    FlashAttention,
    ModelOptions,
    cache_directory,
    default_threads,
    parse_bytes,
    parse_scaled,
    read_key,
    require,
)
from everwarm.engine.settings import EngineSettings, PinRam, RemoteSettings, RestorePolicy, StoreSettings
from everwarm.gateway.access.auth import read_key_file
from everwarm.gateway.parsing.output_parser import ThinkingTags, ToolFormat
from everwarm.gateway.settings import ServerSettings
from everwarm.logs import LogFormat
from everwarm.router.catalog.catalog import Catalog
from everwarm.router.plan import PoolLimits
from everwarm.state.policy import CheckpointParams

_GROUPS = ("Network", "Many models", "Context and memory", "Compute", "Checkpoints")
_NETWORK, _MODELS, _MEMORY, _COMPUTE, _CHECKPOINTS = (Group(name, sort_key=i) for i, name in enumerate(_GROUPS))


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The flags of ``serve``; llama-server's short names where it has them."""

    host: Annotated[
        str, Parameter(group=_NETWORK, help="address to listen on; any but loopback needs --api-key or --key-file")
    ] = "127.0.0.1"
    port: Annotated[int, Parameter(group=_NETWORK, help="0 takes any free port")] = 8080
    api_key: Annotated[
        str | None,
        Parameter(
            group=_NETWORK,
            help="clients must send it as a Bearer token; without --admin-key and --key-file it is also the admin's",
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        Parameter(
            group=_NETWORK,
            help="needed to load and unload models and to see, pin or drop others' cache; default: every client may",
        ),
    ] = None
    key_file: Annotated[
        str | None,
        Parameter(group=_NETWORK, help="TOML with many keys, each with a namespace and a role; read again on SIGHUP"),
    ] = None
    allowed_host: Annotated[
        tuple[str, ...], Parameter(group=_NETWORK, help="another host name that clients may use; repeatable")
    ] = ()
    alias: Annotated[str | None, Parameter(group=_NETWORK, help="the model's name in the API; default: the file's")] = (
        None
    )
    models_max: Annotated[
        int | None, Parameter(group=_MODELS, help="how many models may be in memory at once; 0: any number; default: 1")
    ] = None
    memory_limit: Annotated[
        str | None,
        Parameter(group=_MODELS, help="how much memory all loaded models may take, like 48GiB; default: any"),
    ] = None
    models_default: Annotated[
        str | None, Parameter(group=_MODELS, help="the model for requests with an unknown name; default: none")
    ] = None
    models_autoload: Annotated[
        bool, Parameter(group=_MODELS, help="load a model on its first request; otherwise only POST /models/load does")
    ] = True

    picture_host: Annotated[
        tuple[str, ...], Parameter(group=_NETWORK, help="host from which images may be fetched by https; repeatable")
    ] = ()
    cache_text: Annotated[
        bool, Parameter(group=_NETWORK, negative=(), help="GET /cache/tree shows the beginning of cached text")
    ] = False
    max_requests: Annotated[int, Parameter(group=_NETWORK, help="requests running and waiting; more get 429")] = 256
    max_connections: Annotated[
        int,
        Parameter(group=_NETWORK, help="open at once; when all are in use, an idle one is closed for a new one"),
    ] = 1024
    client_timeout: Annotated[
        float,
        Parameter(group=_NETWORK, help="seconds a client may pause in sending its body or reading its answer"),
    ] = 30.0
    max_body: Annotated[str, Parameter(group=_NETWORK, help="the largest body, like 32MiB; larger ones get 413")] = (
        "32MiB"
    )
    tool_format: Annotated[
        ToolFormat, Parameter(group=_NETWORK, help="how the model writes tool calls; auto: as its template says")
    ] = "auto"
    thinking_tags: Annotated[
        ThinkingTags, Parameter(group=_NETWORK, help="how the model marks its thinking; none: the whole reply is text")
    ] = "auto"
    otel_endpoint: Annotated[
        str | None,
        Parameter(group=_NETWORK, help="OpenTelemetry collector (OTLP over HTTP) that gets a trace per request"),
    ] = None
    prewarm: Annotated[
        bool,
        Parameter(
            group=_MEMORY,
            help="when idle, read the prefix of the next turn in advance (work after each reply)",
        ),
    ] = True
    canonicalise: Annotated[
        bool,
        Parameter(group=_NETWORK, help="leave out lines of system text that are known to change and break prefixes"),
    ] = True
    log_format: Annotated[
        LogFormat | None,
        Parameter(group=_NETWORK, help="log lines as text or as JSON objects; default: EVERWARM_LOG_FORMAT, or text"),
    ] = None
    request_timeout: Annotated[float, Parameter(group=_NETWORK, help="seconds until a request is ended; 0: none")] = 0.0
    grace: Annotated[float, Parameter(group=_NETWORK, help="seconds that running requests may take after SIGTERM")] = (
        10.0
    )

    slots: Annotated[int, Parameter(name=["--slots", "--parallel", "-np"], group=_MEMORY, help="requests at once")] = 4
    ctx_size: Annotated[
        int, Parameter(name=["--ctx-size", "-c"], group=_MEMORY, help="tokens of context, shared by all slots")
    ] = 16384
    cache_type_k: Annotated[CacheType, Parameter(name=["--cache-type-k", "-ctk"], group=_MEMORY, help="KV keys")] = (
        "f16"
    )
    cache_type_v: Annotated[CacheType, Parameter(name=["--cache-type-v", "-ctv"], group=_MEMORY, help="KV values")] = (
        "f16"
    )
    cache_ram: Annotated[
        str | None,
        Parameter(group=_MEMORY, help="RAM for states and KV, like 8GiB; default: a quarter of the free memory"),
    ] = None
    pin_ram: Annotated[
        PinRam,
        Parameter(group=_MEMORY, help="pin that RAM for faster copies to a GPU; auto: up to half of the free memory"),
    ] = "auto"
    state_dir: Annotated[
        str, Parameter(group=_MEMORY, help="directory that keeps conversations across restarts, one folder per model")
    ] = dataclasses.field(default_factory=lambda: str(cache_directory() / "states"))
    disk_cache: Annotated[
        str, Parameter(group=_MEMORY, help="how large it may become, like 64GiB; 0: nothing on disk")
    ] = "64GiB"
    disk_write_budget: Annotated[str, Parameter(group=_MEMORY, help="bytes written to disk per day; 0: any number")] = (
        "0"
    )
    namespace_share: Annotated[
        float,
        Parameter(group=_MEMORY, help="the largest share of RAM and disk that one API key and cache_salt may fill"),
    ] = 1.0
    pin_quota: Annotated[
        float, Parameter(group=_MEMORY, help="the largest share of RAM that one namespace may pin; admins may pin more")
    ] = 0.1
    slot_save_path: Annotated[
        str | None, Parameter(group=_MEMORY, help="directory of the files of POST /slots/N?action=save and restore")
    ] = None
    trust_slot_files: Annotated[
        bool,
        Parameter(
            group=_MEMORY,
            help="restore files of llama-server, which name neither model nor build; what is computed from one is not kept",
        ),
    ] = False
    restore_policy: Annotated[
        RestorePolicy, Parameter(group=_MEMORY, help="auto: recompute where that is faster than loading from disk")
    ] = "auto"
    remote: Annotated[
        str | None,
        Parameter(group=_MEMORY, help="a store shared with other servers, like s3://bucket/prefix; default: none"),
    ] = None
    remote_key: Annotated[
        str | None,
        Parameter(group=_MEMORY, help="file of at least 32 random bytes; states written with another key are not used"),
    ] = None
    remote_endpoint: Annotated[
        str | None,
        Parameter(group=_MEMORY, help="URL of an S3-compatible server; default: AWS_ENDPOINT_URL, or AWS's own"),
    ] = None
    remote_wait: Annotated[
        float, Parameter(group=_MEMORY, help="the most seconds that a request waits for the remote store")
    ] = 0.25
    spares: Annotated[
        int | None,
        Parameter(group=_MEMORY, help="checkpoints kept on the device; default: from the free memory, up to 16"),
    ] = None

    threads: Annotated[int, Parameter(name=["--threads", "-t"], group=_COMPUTE, help="CPU threads")] = (
        dataclasses.field(default_factory=default_threads)
    )
    batch_size: Annotated[
        int, Parameter(name=["--batch-size", "-b"], group=_COMPUTE, help="tokens per decode call")
    ] = 2048
    finish_prefill: Annotated[
        float,
        Parameter(
            group=_COMPUTE,
            help="for so many seconds a long prompt whose client went away while it was read is read on in idle time, for "
            "when the same is sent again; 0: never",
        ),
    ] = 0.0
    max_step_ms: Annotated[
        float,
        Parameter(
            group=_COMPUTE,
            help="how long a step should take while replies are written: it decides how much of a prompt is read beside "
            "them; 0: 128 tokens",
        ),
    ] = 0.0
    ubatch_size: Annotated[int, Parameter(name=["--ubatch-size", "-ub"], group=_COMPUTE, help="tokens per step")] = 512
    n_gpu_layers: Annotated[
        int, Parameter(name=["--n-gpu-layers", "-ngl"], group=_COMPUTE, help="layers on GPUs; -1: all")
    ] = -1
    flash_attn: Annotated[
        FlashAttention, Parameter(name=["--flash-attn", "-fa"], group=_COMPUTE, help="use flash attention")
    ] = "auto"
    tensor_split: Annotated[
        tuple[float, ...],
        Parameter(name=["--tensor-split", "-ts"], group=_COMPUTE, help="each GPU's share of the model"),
    ] = ()
    n_cpu_moe: Annotated[
        int, Parameter(name=["--n-cpu-moe", "-ncmoe"], group=_COMPUTE, help="layers whose experts stay in host memory")
    ] = 0
    mmproj: Annotated[
        str | None,
        Parameter(group=_COMPUTE, help="projector file for images; default: mmproj-MODEL.gguf beside the model"),
    ] = None
    lora: Annotated[
        tuple[str, ...], Parameter(group=_COMPUTE, help="adapter file, or FILE:SCALE; repeatable", negative=())
    ] = ()
    mmap: Annotated[bool, Parameter(group=_COMPUTE, help="map the model file instead of reading it")] = True

    max_checkpoints: Annotated[int, Parameter(group=_CHECKPOINTS, help="checkpoints per conversation; 0: off")] = 32
    checkpoint_every: Annotated[
        int | None,
        Parameter(group=_CHECKPOINTS, help="distance in tokens inside long messages; default: from the model"),
    ] = None
    checkpoint_min_tokens: Annotated[
        int | None, Parameter(group=_CHECKPOINTS, help="no checkpoint before so many tokens; default: 0")
    ] = None
    checkpoint_min_gap: Annotated[
        int | None, Parameter(group=_CHECKPOINTS, help="no two checkpoints closer than so many tokens; default: 0")
    ] = None

    def engine(self) -> EngineSettings:
        return EngineSettings(
            n_slots=self.slots,
            n_ctx=self.ctx_size,
            n_batch=self.batch_size,
            n_ubatch=min(self.ubatch_size, self.batch_size),
            max_step_ms=self.max_step_ms,
            finish_prefill_s=self.finish_prefill,
            n_threads=self.threads,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            flash_attention=self.flash_attn,
            model=ModelOptions(
                self.n_gpu_layers, self.mmap, self.tensor_split, self.n_cpu_moe, tuple(map(parse_scaled, self.lora))
            ),
            checkpoints=CheckpointParams(
                self.max_checkpoints, self.checkpoint_every, self.checkpoint_min_tokens, self.checkpoint_min_gap
            ),
            mmproj=self.mmproj,
            store=self._store(),
            remote=self._remote(),
            namespace_share=self.namespace_share,
            n_spares=self.spares,
            ram_bytes=None if self.cache_ram is None else parse_bytes(self.cache_ram),
            pin_ram=self.pin_ram,
        )

    def _store(self) -> StoreSettings | None:
        disk_bytes = parse_bytes(self.disk_cache)
        write_bytes = parse_bytes(self.disk_write_budget)
        return StoreSettings(self.state_dir, disk_bytes, write_bytes, self.restore_policy) if disk_bytes else None

    def _remote(self) -> RemoteSettings | None:
        if self.remote is None:
            require(self.remote_key is None and self.remote_endpoint is None, "remote-key and -endpoint need --remote")
            return None
        settings = RemoteSettings(
            self.remote, self.remote_key, self.remote_endpoint, self.restore_policy, self.remote_wait
        )
        if self.remote_key is not None:
            read_key(self.remote_key)  # a bad key file is refused here, not later by an engine
        return settings

    def limits(self, catalog: Catalog) -> PoolLimits:
        """Limits that are not flags come from the models file."""
        most = self.models_max if self.models_max is not None else catalog.models_max
        memory = self.memory_limit
        n_bytes = parse_bytes(memory) if memory is not None else catalog.memory_limit
        require(most is None or most >= 0, f"models-max is {most}; give 0 (any number) or more")
        return PoolLimits(1 if most is None else most, n_bytes or 0)

    def server(self) -> ServerSettings:
        return ServerSettings(
            host=self.host,
            port=self.port,
            api_key=self.api_key,
            admin_key=self.admin_key,
            keys=() if self.key_file is None else read_key_file(self.key_file),
            key_file=self.key_file,
            pin_quota=self.pin_quota,
            allowed_hosts=self.allowed_host,
            max_requests=self.max_requests,
            max_body_bytes=parse_bytes(self.max_body),
            max_connections=self.max_connections,
            client_timeout_s=self.client_timeout,
            request_timeout_s=self.request_timeout,
            grace_s=self.grace,
            slot_save_path=self.slot_save_path,
            trust_slot_files=self.trust_slot_files,
            tool_format=self.tool_format,
            thinking_tags=self.thinking_tags,
            otel_endpoint=self.otel_endpoint,
            prewarm=self.prewarm,
            canonicalise=self.canonicalise,
            state_dir=self.state_dir if parse_bytes(self.disk_cache) else None,
            picture_hosts=self.picture_host,
            cache_text=self.cache_text,
            log_format=self.log_format,
        )


DEFAULTS = ServeOptions()
