"""The flags of ``serve``, and the frozen settings they become."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from everwarm.cli.flags.named_templates import named_template
from everwarm.cli.flags.option_groups import CHECKPOINTS, COMPUTE, MEMORY, MODELS, NETWORK
from everwarm.cli.flags.placement_options import PlacementOptions
from everwarm.cli.flags.request_options import RequestOptions, read_text
from everwarm.config import (
    CacheType,
    FlashAttention,
    LoadMode,
    ModelOptions,
    Pooling,
    StateType,
    cache_directory,
    default_threads,
    parse_bytes,
    parse_mib,
    parse_scaled,
    read_key,
    require,
)
from everwarm.engine.settings import EngineSettings, PinRam, RemoteSettings, RestorePolicy, Speculate, StoreSettings
from everwarm.gateway.access.auth import MAX_FILE_BYTES, read_key_file
from everwarm.gateway.parsing.output_parser import ThinkingTags, ToolFormat
from everwarm.gateway.rewrite.rules import read_rules
from everwarm.gateway.settings import ServerSettings
from everwarm.logs import LogFormat, LogLevel
from everwarm.router.catalog.catalog import MAX_TEMPLATE_BYTES, Catalog
from everwarm.router.catalog.models_file import MAX_TTL_S
from everwarm.router.plan import PoolLimits
from everwarm.state.policy import CheckpointParams


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The flags of ``serve``; llama-server's short names where it has them."""

    host: Annotated[
        str,
        Parameter(
            group=NETWORK,
            help="address to listen on, or several with commas, or a Unix socket (PATH.sock); any but loopback needs a key",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Parameter(group=NETWORK, help="0 takes any free port")] = 8080
    api_key: Annotated[
        str | None,
        Parameter(
            group=NETWORK,
            help="clients must send it as a Bearer token; several with commas, each with a cache of its own; without "
            "--admin-key and --key-file they are also the admin's",
        ),
    ] = None
    api_key_file: Annotated[
        str | None, Parameter(group=NETWORK, help="API keys from a file, one per line; lines with # are comments")
    ] = None
    admin_key: Annotated[
        str | None,
        Parameter(
            group=NETWORK,
            help="needed to load and unload models and to see, pin or drop others' cache; default: every client may",
        ),
    ] = None
    key_file: Annotated[
        str | None,
        Parameter(group=NETWORK, help="TOML with many keys, each with a namespace and a role; read again on SIGHUP"),
    ] = None
    allowed_host: Annotated[
        tuple[str, ...], Parameter(group=NETWORK, help="another host name that clients may use; repeatable")
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Parameter(
            group=NETWORK,
            negative=(),
            help="web pages that may call besides those of this machine, like https://chat.example.org; repeatable, or "
            "with commas; *: any page, but not for the cache, slots, models and settings",
        ),
    ] = ()
    ssl_key_file: Annotated[str | None, Parameter(group=NETWORK, help="PEM file of the private key, for HTTPS")] = None
    ssl_cert_file: Annotated[str | None, Parameter(group=NETWORK, help="PEM file of the certificate, for HTTPS")] = None
    reuse_port: Annotated[
        bool, Parameter(group=NETWORK, negative=(), help="let other processes listen on the same port")
    ] = False
    strict: Annotated[
        bool,
        Parameter(
            group=NETWORK,
            negative=(),
            help="refuse requests with unknown fields; otherwise the header x-everwarm-ignored names them",
        ),
    ] = False
    ui: Annotated[bool, Parameter(group=NETWORK, help="serve the web page at /")] = True
    slots_endpoint: Annotated[bool, Parameter(group=NETWORK, help="answer GET /slots")] = True
    metrics: Annotated[bool, Parameter(group=NETWORK, help="answer GET /metrics")] = True
    alias: Annotated[
        str | None,
        Parameter(
            name=["--alias", "-a"],
            group=NETWORK,
            help="the model's names in the API, with commas; the first in the alphabet is its id; default: the file's",
        ),
    ] = None
    tags: Annotated[
        str | None, Parameter(group=NETWORK, help="words that /v1/models shows with the model, with commas")
    ] = None
    chat_template: Annotated[
        str | None,
        Parameter(group=NETWORK, help="Jinja chat template instead of the model's own, or llama.cpp's name of one"),
    ] = None
    chat_template_file: Annotated[str | None, Parameter(group=NETWORK, help="the same from a file")] = None
    offline: Annotated[
        bool, Parameter(group=MODELS, negative=(), help="download nothing: take Hugging Face models from the cache")
    ] = False
    allow_pull: Annotated[
        bool,
        Parameter(group=MODELS, negative=(), help="with --models hf:, admins may download and delete models over HTTP"),
    ] = False
    models_max: Annotated[
        int | None, Parameter(group=MODELS, help="how many models may be in memory at once; 0: any number; default: 1")
    ] = None
    memory_limit: Annotated[
        str | None,
        Parameter(group=MODELS, help="how much memory all loaded models may take, like 48GiB; default: any"),
    ] = None
    models_default: Annotated[
        str | None, Parameter(group=MODELS, help="the model for requests with an unknown name; default: none")
    ] = None
    models_autoload: Annotated[
        bool, Parameter(group=MODELS, help="load a model on its first request; otherwise only POST /models/load does")
    ] = True

    sleep_idle_seconds: Annotated[
        float,
        Parameter(
            group=MODELS,
            help="after so long without a request the one model is unloaded until the next; -1: never; several models "
            "have a ttl in their TOML file",
        ),
    ] = -1.0
    picture_host: Annotated[
        tuple[str, ...], Parameter(group=NETWORK, help="host from which images may be fetched by https; repeatable")
    ] = ()
    cache_text: Annotated[
        bool, Parameter(group=NETWORK, negative=(), help="GET /cache/tree shows the beginning of cached text")
    ] = False
    max_requests: Annotated[int, Parameter(group=NETWORK, help="requests running and waiting; more get 429")] = 256
    max_connections: Annotated[
        int,
        Parameter(group=NETWORK, help="open at once; when all are in use, an idle one is closed for a new one"),
    ] = 1024
    client_timeout: Annotated[
        float,
        Parameter(group=NETWORK, help="seconds a client may pause in sending its body or reading its answer"),
    ] = 30.0
    max_body: Annotated[str, Parameter(group=NETWORK, help="the largest body, like 32MiB; larger ones get 413")] = (
        "32MiB"
    )
    tool_format: Annotated[
        ToolFormat, Parameter(group=NETWORK, help="how the model writes tool calls; auto: as its template says")
    ] = "auto"
    thinking_tags: Annotated[
        ThinkingTags, Parameter(group=NETWORK, help="how the model marks its thinking; none: the whole reply is text")
    ] = "auto"
    otel_endpoint: Annotated[
        str | None,
        Parameter(group=NETWORK, help="OpenTelemetry collector (OTLP over HTTP) that gets a trace per request"),
    ] = None
    prewarm: Annotated[
        bool,
        Parameter(
            group=MEMORY,
            help="when idle, read the prefix of the next turn in advance (work after each reply)",
        ),
    ] = True
    workspace: Annotated[
        str | None,
        Parameter(
            group=MEMORY,
            help="folder of files to read ahead when a tool call names one (own key, no cache_salt; off)",
        ),
    ] = None
    canonicalise: Annotated[
        bool,
        Parameter(group=NETWORK, help="leave out lines of system text that are known to change and break prefixes"),
    ] = True
    rewrite: Annotated[
        str | None,
        Parameter(group=NETWORK, help="TOML file of rules that freeze, drop or move lines of clients' system text"),
    ] = None
    log_format: Annotated[
        LogFormat | None,
        Parameter(group=NETWORK, help="log lines as text or as JSON objects; default: EVERWARM_LOG_FORMAT, or text"),
    ] = None
    log_level: Annotated[
        LogLevel | None, Parameter(group=NETWORK, help="the least level that is logged; default: EVERWARM_LOG, or info")
    ] = None
    request_timeout: Annotated[float, Parameter(group=NETWORK, help="seconds until a request is ended; 0: none")] = 0.0
    grace: Annotated[float, Parameter(group=NETWORK, help="seconds that running requests may take after SIGTERM")] = (
        10.0
    )

    slots: Annotated[int, Parameter(name=["--slots", "--parallel", "-np"], group=MEMORY, help="requests at once")] = 4
    ctx_size: Annotated[
        int,
        Parameter(
            name=["--ctx-size", "-c"], group=MEMORY, help="tokens of context, shared by all slots; 0: as trained"
        ),
    ] = 16384
    kv_unified: Annotated[
        bool,
        Parameter(
            name=["--kv-unified", "-kvu"],
            group=MEMORY,
            negative=["--no-kv-unified", "-no-kvu"],
            help="one request may use the whole context; otherwise at most its slot's share",
        ),
    ] = True
    cache_type_k: Annotated[CacheType, Parameter(name=["--cache-type-k", "-ctk"], group=MEMORY, help="KV keys")] = "f16"
    cache_type_v: Annotated[CacheType, Parameter(name=["--cache-type-v", "-ctv"], group=MEMORY, help="KV values")] = (
        "f16"
    )
    state_type: Annotated[
        StateType,
        Parameter(group=MEMORY, help="recurrent states in RAM and on disk; f16, q8_0: fewer bytes, other numbers"),
    ] = "f32"
    cache_ram: Annotated[
        str | None,
        Parameter(
            name=["--cache-ram", "-cram"],
            group=MEMORY,
            help="RAM for states and KV, like 8GiB; a bare number is MiB; default: a quarter of the free memory",
        ),
    ] = None
    pin_ram: Annotated[
        PinRam,
        Parameter(group=MEMORY, help="pin that RAM for faster copies to a GPU; auto: up to half of the free memory"),
    ] = "auto"
    state_dir: Annotated[
        str, Parameter(group=MEMORY, help="directory that keeps conversations across restarts, one folder per model")
    ] = dataclasses.field(default_factory=lambda: str(cache_directory() / "states"))
    disk_cache: Annotated[
        str, Parameter(group=MEMORY, help="how large it may become, like 64GiB; 0: nothing on disk")
    ] = "64GiB"
    disk_write_budget: Annotated[str, Parameter(group=MEMORY, help="bytes written to disk per day; 0: any number")] = (
        "0"
    )
    namespace_share: Annotated[
        float,
        Parameter(group=MEMORY, help="the largest share of RAM and disk that one API key and cache_salt may fill"),
    ] = 1.0
    pin_quota: Annotated[
        float, Parameter(group=MEMORY, help="the largest share of RAM that one namespace may pin; admins may pin more")
    ] = 0.1
    slot_save_path: Annotated[
        str | None, Parameter(group=MEMORY, help="directory of the files of POST /slots/N?action=save and restore")
    ] = None
    trust_slot_files: Annotated[
        bool,
        Parameter(
            group=MEMORY,
            help="restore files of llama-server, which name neither model nor build; what is computed from one is not kept",
        ),
    ] = False
    restore_policy: Annotated[
        RestorePolicy, Parameter(group=MEMORY, help="auto: recompute where that is faster than loading from disk")
    ] = "auto"
    remote: Annotated[
        str | None,
        Parameter(group=MEMORY, help="a store shared with other servers, like s3://bucket/prefix; default: none"),
    ] = None
    remote_key: Annotated[
        str | None,
        Parameter(group=MEMORY, help="file of at least 32 random bytes; states written with another key are not used"),
    ] = None
    remote_endpoint: Annotated[
        str | None,
        Parameter(group=MEMORY, help="URL of an S3-compatible server; default: AWS_ENDPOINT_URL, or AWS's own"),
    ] = None
    remote_wait: Annotated[
        float, Parameter(group=MEMORY, help="the most seconds that a request waits for the remote store")
    ] = 0.25
    snapshots: Annotated[
        int | None,
        Parameter(
            group=MEMORY,
            help="earlier states of every sequence on the device, so that the rest of a wrong draft is cut off; default: 3 "
            "for a model with an MTP head on a GPU with much free memory, else 0",
        ),
    ] = None
    spares: Annotated[
        int | None,
        Parameter(group=MEMORY, help="checkpoints kept on the device; default: from the free memory, up to 16"),
    ] = None

    threads: Annotated[int, Parameter(name=["--threads", "-t"], group=COMPUTE, help="CPU threads")] = dataclasses.field(
        default_factory=default_threads
    )
    batch_size: Annotated[int, Parameter(name=["--batch-size", "-b"], group=COMPUTE, help="tokens per decode call")] = (
        2048
    )
    finish_prefill: Annotated[
        float,
        Parameter(
            group=COMPUTE,
            help="for so many seconds a long prompt whose client went away while it was read is read on in idle time, for "
            "when the same is sent again; 0: never",
        ),
    ] = 0.0
    max_step_ms: Annotated[
        float,
        Parameter(
            group=COMPUTE,
            help="how long a step should take while replies are written: it decides how much of a prompt is read beside "
            "them; 0: 128 tokens",
        ),
    ] = 0.0
    ubatch_size: Annotated[int, Parameter(name=["--ubatch-size", "-ub"], group=COMPUTE, help="tokens per step")] = 512
    n_gpu_layers: Annotated[
        int, Parameter(name=["--n-gpu-layers", "-ngl"], group=COMPUTE, help="layers on GPUs; -1: all")
    ] = -1
    flash_attn: Annotated[
        FlashAttention, Parameter(name=["--flash-attn", "-fa"], group=COMPUTE, help="use flash attention")
    ] = "auto"
    tensor_split: Annotated[
        tuple[float, ...],
        Parameter(name=["--tensor-split", "-ts"], group=COMPUTE, help="each GPU's share of the model"),
    ] = ()
    n_cpu_moe: Annotated[
        int, Parameter(name=["--n-cpu-moe", "-ncmoe"], group=COMPUTE, help="layers whose experts stay in host memory")
    ] = 0
    mmproj: Annotated[
        str | None,
        Parameter(
            name=["--mmproj", "-mm"],
            group=COMPUTE,
            help="projector file for images and sounds; default: mmproj-MODEL.gguf beside the model",
        ),
    ] = None
    mmproj_auto: Annotated[bool, Parameter(group=COMPUTE, help="use the projector that lies beside the model")] = True
    lora: Annotated[
        tuple[str, ...], Parameter(group=COMPUTE, help="adapter file, or FILE:SCALE; repeatable", negative=())
    ] = ()
    lora_init_without_apply: Annotated[
        bool,
        Parameter(group=COMPUTE, negative=(), help="open adapters with the scale 0; requests say how much of each"),
    ] = False
    mmap: Annotated[bool, Parameter(group=COMPUTE, help="map the model file instead of reading it")] = True
    mlock: Annotated[bool, Parameter(group=COMPUTE, negative=(), help="keep the model in RAM: never swap it out")] = (
        False
    )
    placement: PlacementOptions = dataclasses.field(default_factory=PlacementOptions)
    request: RequestOptions = dataclasses.field(default_factory=RequestOptions)

    speculate: Annotated[
        Speculate,
        Parameter(
            group=COMPUTE,
            help="guess tokens (by lookup, an MTP head or a draft model) and verify several at once; auto: where it pays",
        ),
    ] = "auto"
    model_draft: Annotated[
        str | None,
        Parameter(
            name=["--model-draft", "-md", "--spec-draft-model"],
            group=COMPUTE,
            help="GGUF file of a smaller model with the same vocabulary, that guesses tokens of replies",
        ),
    ] = None
    draft_max: Annotated[
        int,
        Parameter(
            name=["--draft-max", "--draft", "--spec-draft-n-max"],
            group=COMPUTE,
            help="tokens that are guessed at once, at most",
        ),
    ] = 32
    embeddings: Annotated[
        bool, Parameter(group=COMPUTE, negative=(), help="serve an embedding model: vectors instead of text")
    ] = False
    reranking: Annotated[bool, Parameter(group=COMPUTE, negative=(), help="serve a model that ranks texts")] = False
    pooling: Annotated[
        Pooling | None, Parameter(group=COMPUTE, help="how an embedding model makes one vector; default: the model's")
    ] = None
    embd_normalize: Annotated[
        int, Parameter(group=COMPUTE, help="how vectors are scaled: 2 euclidean, 1 taxicab, 0 to 32,760, -1 not")
    ] = 2

    max_checkpoints: Annotated[int, Parameter(group=CHECKPOINTS, help="checkpoints per conversation; 0: off")] = 32
    checkpoint_every: Annotated[
        int | None,
        Parameter(group=CHECKPOINTS, help="distance in tokens inside long messages; default: from the model"),
    ] = None
    checkpoint_min_tokens: Annotated[
        int | None, Parameter(group=CHECKPOINTS, help="no checkpoint before so many tokens; default: 0")
    ] = None
    checkpoint_min_gap: Annotated[
        int | None, Parameter(group=CHECKPOINTS, help="no two checkpoints closer than so many tokens; default: 0")
    ] = None

    def engine(self, n_ctx_trained: int | None = None) -> EngineSettings:
        """``n_ctx_trained``: what a context size of 0 means; None: it is not known."""
        n_ctx = self.ctx_size or n_ctx_trained
        require(
            n_ctx is not None, "--ctx-size is 0, which means the model's own; give a number where it is not one model"
        )
        assert n_ctx is not None
        return EngineSettings(
            n_slots=self.slots,
            n_ctx=n_ctx,
            n_batch=self.batch_size,
            n_ubatch=min(self.ubatch_size, self.batch_size),
            max_step_ms=self.max_step_ms,
            finish_prefill_s=self.finish_prefill,
            n_threads=self.threads,
            n_threads_batch=self.placement.threads_batch,
            kv_unified=self.kv_unified,
            cache_type_k=self.cache_type_k,
            state_type=self.state_type,
            cache_type_v=self.cache_type_v,
            flash_attention=self.flash_attn,
            rope=self.placement.rope(),
            kv_offload=self.placement.kv_offload,
            op_offload=self.placement.op_offload,
            model=self._model(),
            checkpoints=CheckpointParams(
                self.max_checkpoints, self.checkpoint_every, self.checkpoint_min_tokens, self.checkpoint_min_gap
            ),
            mmproj=self.mmproj,
            store=self._store(),
            remote=self._remote(),
            namespace_share=self.namespace_share,
            n_spares=self.spares,
            n_snapshots=self.snapshots,
            ram_bytes=None if self.cache_ram is None else parse_mib(self.cache_ram),
            embedding=self._pooling(),
            pin_ram=self.pin_ram,
            speculate=self.speculate,
            draft_model=self.model_draft,
            max_draft=self.draft_max,
        )

    def _model(self) -> ModelOptions:
        placement = self.placement
        return ModelOptions(
            n_gpu_layers=self.n_gpu_layers,
            load_mode=self._load_mode(),
            tensor_split=self.tensor_split,
            n_cpu_moe=self.n_cpu_moe,
            lora=self._adapters(),
            split_mode=placement.split_mode,
            main_gpu=placement.main_gpu,
            devices=placement.device,
            override_tensors=placement.overrides(),
            n_cpu_ffn=placement.n_cpu_ffn,
            repack=placement.repack,
            no_host=placement.no_host,
            check_tensors=placement.check_tensors,
        )

    def _adapters(self) -> tuple[tuple[str, float], ...]:
        given = map(parse_scaled, self.lora)
        return tuple((path, 0.0 if self.lora_init_without_apply else scale) for path, scale in given)

    def _pooling(self) -> Pooling | None:
        require(not self.reranking or self.pooling in (None, "rank"), f"--reranking pools by rank, not {self.pooling}")
        is_on = self.embeddings or self.reranking
        require(is_on or self.pooling is None, "--pooling is for embedding models; give --embeddings, too")
        if not is_on:
            return None
        return "rank" if self.reranking else self.pooling or "auto"

    def _load_mode(self) -> LoadMode:
        if self.placement.load_mode is not None:
            return self.placement.load_mode
        if self.mlock:
            return "mmap+mlock" if self.mmap else "mlock"
        return "mmap" if self.mmap else "none"

    def template(self) -> str | None:
        """The chat template that replaces the model's own."""
        given, file = self.chat_template, self.chat_template_file
        require(given is None or file is None, "give --chat-template or --chat-template-file, not both")
        if given is not None and "{" not in given:
            return named_template(given)
        return given if file is None else read_text(file, MAX_TEMPLATE_BYTES)

    @property
    def idle_limit_s(self) -> float:
        """0: the model never sleeps."""
        seconds = self.sleep_idle_seconds
        require(seconds <= MAX_TTL_S, f"sleep-idle-seconds is {seconds}; give -1 (never) to {MAX_TTL_S}")
        return max(0.0, seconds)

    @property
    def aliases(self) -> tuple[str, ...]:
        """In the order of the alphabet: llama-server names a model by the first."""
        return tuple(sorted(set(listed(self.alias))))

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
        hosts = listed(self.host) or ("",)
        api_keys = self._api_keys()
        return ServerSettings(
            host=hosts[0],
            more_hosts=hosts[1:],
            port=self.port,
            reuse_port=self.reuse_port,
            ssl_key_file=self.ssl_key_file,
            ssl_cert_file=self.ssl_cert_file,
            api_key=api_keys[0] if api_keys else None,
            more_api_keys=api_keys[1:],
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
            workspace=self.workspace,
            canonicalise=self.canonicalise,
            rewrite=() if self.rewrite is None else read_rules(Path(self.rewrite)),
            state_dir=self.state_dir if parse_bytes(self.disk_cache) else None,
            picture_hosts=self.picture_host,
            cache_text=self.cache_text,
            log_format=self.log_format,
            defaults=dataclasses.replace(self.request.defaults(), verbose=self.log_level == "debug"),
            embd_normalize=self.embd_normalize,
            strict=self.strict,
            web_ui=self.ui,
            allow_pull=self.allow_pull,
            shows_slots=self.slots_endpoint,
            shows_metrics=self.metrics,
            cors_origins=tuple(origin for text in self.cors_origins for origin in listed(text)),
        )

    def _api_keys(self) -> tuple[str, ...]:
        """Of the flag and of the file, each once."""
        given = () if self.api_key is None else listed(self.api_key) or ("",)  # an empty one is refused later
        lines = () if self.api_key_file is None else read_text(self.api_key_file, MAX_FILE_BYTES).splitlines()
        from_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        require(self.api_key_file is None or bool(from_file), f"there are no keys in {self.api_key_file}")
        return tuple(dict.fromkeys((*given, *from_file)))


def listed(text: str | None) -> tuple[str, ...]:
    """The parts of a text with commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


DEFAULTS = ServeOptions()
