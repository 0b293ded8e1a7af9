"""The flags of ``serve``, and the frozen settings they become.

``RequestOptions`` are the defaults of requests that do not set a field, ``ServeOptions`` all others.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from everwarm.cli.flags.named_templates import named_template
from everwarm.cli.help_page import CHECKPOINTS, COMPUTE, MEMORY, MODELS, NETWORK, PLACEMENT, REQUESTS, ROPE
from everwarm.config import (
    DRY_BREAKERS,
    MAX_CONSTRAINT_CHARS,
    CacheType,
    FlashAttention,
    LoadMode,
    ModelOptions,
    Pooling,
    RopeOptions,
    RopeScaling,
    Sampling,
    SplitMode,
    StateType,
    cache_directory,
    default_threads,
    parse_bytes,
    parse_mib,
    parse_samplers,
    parse_scaled,
    read_key,
    require,
)
from everwarm.engine.settings import EngineSettings, PinRam, RemoteSettings, RestorePolicy, Speculate, StoreSettings
from everwarm.errors import BadRequest
from everwarm.gateway.access.auth import MAX_FILE_BYTES, read_key_file
from everwarm.gateway.openai.schema import ReasoningFormat, RequestDefaults
from everwarm.gateway.parsing.output_parser import ThinkingTags, ToolFormat
from everwarm.gateway.rewrite.rules import read_rules
from everwarm.gateway.settings import ServerSettings
from everwarm.logs import LogFormat, LogLevel
from everwarm.router.catalog.catalog import MAX_TEMPLATE_BYTES, Catalog
from everwarm.router.catalog.models_file import MAX_TTL_S
from everwarm.router.plan import PoolLimits
from everwarm.state.policy import CheckpointParams

_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_STANDARD = Sampling()


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class RequestOptions:
    temp: Annotated[float, Parameter(name=["--temp", "--temperature"], group=REQUESTS, help="temperature")] = (
        _STANDARD.temperature
    )
    top_k: Annotated[int, Parameter(group=REQUESTS, help="0: off")] = _STANDARD.top_k
    top_p: Annotated[float, Parameter(group=REQUESTS, help="1: off")] = _STANDARD.top_p
    min_p: Annotated[float, Parameter(group=REQUESTS, help="0: off")] = _STANDARD.min_p
    top_n_sigma: Annotated[float, Parameter(group=REQUESTS, help="0 or less: off")] = _STANDARD.top_n_sigma
    typical_p: Annotated[float, Parameter(group=REQUESTS, help="1: off")] = _STANDARD.typical_p
    xtc_probability: Annotated[float, Parameter(group=REQUESTS, help="0: off")] = _STANDARD.xtc_probability
    xtc_threshold: Annotated[float, Parameter(group=REQUESTS, help="more than 0.5: off")] = _STANDARD.xtc_threshold
    dynatemp_range: Annotated[float, Parameter(group=REQUESTS, help="0: off")] = _STANDARD.dynatemp_range
    dynatemp_exp: Annotated[float, Parameter(group=REQUESTS, help="of the dynamic temperature")] = (
        _STANDARD.dynatemp_exponent
    )
    repeat_last_n: Annotated[int, Parameter(group=REQUESTS, help="how far back penalties look")] = (
        _STANDARD.penalty_last_n
    )
    repeat_penalty: Annotated[float, Parameter(group=REQUESTS, help="1: off")] = _STANDARD.repeat_penalty
    presence_penalty: Annotated[float, Parameter(group=REQUESTS, help="0: off")] = _STANDARD.presence_penalty
    frequency_penalty: Annotated[float, Parameter(group=REQUESTS, help="0: off")] = _STANDARD.frequency_penalty
    dry_multiplier: Annotated[float, Parameter(group=REQUESTS, help="0: off")] = _STANDARD.dry_multiplier
    dry_base: Annotated[float, Parameter(group=REQUESTS, help="how fast DRY's penalty grows")] = _STANDARD.dry_base
    dry_allowed_length: Annotated[int, Parameter(group=REQUESTS, help="repetitions that DRY allows, in tokens")] = (
        _STANDARD.dry_allowed_length
    )
    dry_penalty_last_n: Annotated[int, Parameter(group=REQUESTS, help="how far back DRY looks")] = (
        _STANDARD.dry_penalty_last_n
    )
    dry_sequence_breaker: Annotated[
        tuple[str, ...],
        Parameter(group=REQUESTS, negative=(), help="text that ends a repetition; repeatable; none: there is none"),
    ] = DRY_BREAKERS
    mirostat: Annotated[int, Parameter(group=REQUESTS, help="1 or 2: that version; 0: off")] = _STANDARD.mirostat
    mirostat_lr: Annotated[float, Parameter(group=REQUESTS, help="mirostat's learning rate")] = _STANDARD.mirostat_eta
    mirostat_ent: Annotated[float, Parameter(group=REQUESTS, help="mirostat's entropy")] = _STANDARD.mirostat_tau
    adaptive_target: Annotated[
        float, Parameter(group=REQUESTS, help="probability that adaptive-p aims at; negative: off")
    ] = _STANDARD.adaptive_target
    adaptive_decay: Annotated[float, Parameter(group=REQUESTS, help="how slowly adaptive-p adapts")] = (
        _STANDARD.adaptive_decay
    )
    samplers: Annotated[str, Parameter(group=REQUESTS, help="their order, with ';' between them")] = ";".join(
        _STANDARD.samplers
    )
    seed: Annotated[int, Parameter(name=["--seed", "-s"], group=REQUESTS, help="-1: another one every time")] = -1
    logit_bias: Annotated[
        tuple[str, ...],
        Parameter(
            name=["--logit-bias", "-l"], group=REQUESTS, negative=(), help="TOKEN+BIAS or TOKEN-BIAS; repeatable"
        ),
    ] = ()
    n_predict: Annotated[
        int, Parameter(name=["--n-predict", "-n"], group=REQUESTS, help="tokens of a reply at most; -1: any number")
    ] = -1
    context_shift: Annotated[
        bool,
        Parameter(
            group=REQUESTS,
            help="a reply that fills its context drops half of it and goes on; what is left is read again",
        ),
    ] = False
    keep: Annotated[
        int,
        Parameter(group=REQUESTS, help="tokens that such a reply keeps from its beginning; -1: its whole prompt"),
    ] = 0
    ignore_eos: Annotated[bool, Parameter(group=REQUESTS, negative=(), help="let no token end a reply")] = False
    reverse_prompt: Annotated[
        tuple[str, ...],
        Parameter(name=["--reverse-prompt", "-r"], group=REQUESTS, negative=(), help="stop string; repeatable"),
    ] = ()
    escape: Annotated[bool, Parameter(group=REQUESTS, help=r"read \n, \t … in stop strings and sequence breakers")] = (
        True
    )
    cache_prompt: Annotated[bool, Parameter(group=REQUESTS, help="reuse what is known of a prompt")] = True
    grammar: Annotated[str | None, Parameter(group=REQUESTS, help="GBNF that replies must match")] = None
    grammar_file: Annotated[str | None, Parameter(group=REQUESTS, help="the same from a file")] = None
    json_schema: Annotated[
        str | None, Parameter(name=["--json-schema", "-j"], group=REQUESTS, help="JSON schema that replies must match")
    ] = None
    json_schema_file: Annotated[
        str | None, Parameter(name=["--json-schema-file", "-jf"], group=REQUESTS, help="the same from a file")
    ] = None
    reasoning_format: Annotated[
        ReasoningFormat | None, Parameter(group=REQUESTS, help="none: thinking stays in the text of a reply")
    ] = None
    reasoning: Annotated[
        Literal["on", "off", "auto"],
        Parameter(
            name=["--reasoning", "-rea"], group=REQUESTS, help="whether models think; auto: as the template says"
        ),
    ] = "auto"
    reasoning_effort: Annotated[
        str, Parameter(group=REQUESTS, help="level for the template, like low or high; default: the template's")
    ] = "default"
    reasoning_budget: Annotated[
        int, Parameter(group=REQUESTS, help="tokens of thinking, after which it is ended; -1: any number")
    ] = -1
    reasoning_budget_message: Annotated[
        str | None, Parameter(group=REQUESTS, help="text that is written before the end of a thought that was ended")
    ] = None
    spm_infill: Annotated[
        bool,
        Parameter(group=REQUESTS, negative=(), help="/infill puts what follows the cursor before what precedes it"),
    ] = False
    chat_template_kwargs: Annotated[
        str | None, Parameter(group=REQUESTS, help="JSON object with values for the chat template")
    ] = None

    def defaults(self) -> RequestDefaults:
        budget = self.reasoning_budget
        require(-1 <= budget <= 1 << 26, f"reasoning-budget is {budget}; give -1 (any number) or more")
        require(-2 <= self.n_predict <= 1 << 26, f"n-predict is {self.n_predict}; give -1 (any number) or more")
        require(-1 <= self.keep <= 1 << 26, f"keep is {self.keep}; give -1 (the whole prompt) or more")
        return RequestDefaults(
            sampling=self._sampling(),
            max_tokens=None if self.n_predict < 0 else self.n_predict,
            stop=self._texts(self.reverse_prompt),
            context_shift=self.context_shift,
            n_keep=self.keep,
            ignore_eos=self.ignore_eos,
            cache_prompt=self.cache_prompt,
            grammar=_given(self.grammar, self.grammar_file, "grammar"),
            json_schema=_object("json-schema", _given(self.json_schema, self.json_schema_file, "json-schema")),
            reasoning_format=self.reasoning_format,
            reasoning_budget=None if self.reasoning_budget < 0 else self.reasoning_budget,
            reasoning_budget_message=self.reasoning_budget_message,
            spm_infill=self.spm_infill,
            template_kwargs=self._template_kwargs(),
        )

    def _sampling(self) -> Sampling:
        breakers = () if self.dry_sequence_breaker == ("none",) else self._texts(self.dry_sequence_breaker)
        return Sampling(
            temperature=max(0.0, self.temp),
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            penalty_last_n=max(0, self.repeat_last_n),
            seed=None if self.seed < 0 else self.seed % ((1 << 32) - 1),
            logit_bias=dict(map(_bias, self.logit_bias)),
            typical_p=self.typical_p,
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            dynatemp_range=self.dynatemp_range,
            dynatemp_exponent=self.dynatemp_exp,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=max(0, self.dry_penalty_last_n),
            dry_sequence_breakers=breakers,
            mirostat=self.mirostat,
            mirostat_tau=self.mirostat_ent,
            mirostat_eta=self.mirostat_lr,
            adaptive_target=self.adaptive_target,
            adaptive_decay=self.adaptive_decay,
            samplers=parse_samplers([name for name in self.samplers.split(";") if name]),
        )

    def _texts(self, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_unescaped, given)) if self.escape else given

    def _template_kwargs(self) -> dict[str, Any]:
        given = _object("chat-template-kwargs", self.chat_template_kwargs) or {}
        if self.reasoning != "auto":
            given = {"enable_thinking": self.reasoning == "on", **given}
        if self.reasoning_effort != "default":
            given = {"reasoning_effort": self.reasoning_effort, **given}
        return given


def _unescaped(text: str) -> str:
    return re.sub(r"\\(?:[nrt'\"\\]|x[0-9a-fA-F]{2})", lambda found: codecs.decode(found[0], "unicode_escape"), text)


def _bias(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"(\d{1,9})([+-](?:\d+(?:\.\d*)?|\.\d+|inf))", text)
    require(found is not None, f"logit-bias is {text!r}; give a token and a number, like 15043-1")
    assert found is not None
    return int(found[1]), float(found[2])


def _given(text: str | None, file: str | None, name: str) -> str | None:
    require(text is None or file is None, f"give --{name} or --{name}-file, not both")
    return text if file is None else read_text(file, MAX_CONSTRAINT_CHARS)


def _object(name: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"--{name} is not JSON: {error}") from None
    require(isinstance(found, dict), f"--{name} is {text[:40]!r}; give a JSON object")
    return dict(found)


def read_text(path: str, most: int) -> str:
    """A file that a flag names."""
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(most + 1)
        require(len(data) <= most, f"{path} has more than {most} bytes")
        return data.decode()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"{path} is not UTF-8") from None


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
    load_mode: Annotated[
        LoadMode | None,
        Parameter(group=PLACEMENT, help="how the model file is read, instead of --mmap and --mlock; dio: direct I/O"),
    ] = None
    split_mode: Annotated[SplitMode, Parameter(group=PLACEMENT, help="how several GPUs share the model")] = "layer"
    main_gpu: Annotated[
        int, Parameter(group=PLACEMENT, help="the GPU for all of it (--split-mode none) or for small tensors (row)")
    ] = 0
    device: Annotated[
        tuple[str, ...], Parameter(group=PLACEMENT, negative=(), help="GPU to use; repeatable; default: all")
    ] = ()
    override_tensor: Annotated[
        tuple[str, ...],
        Parameter(
            group=PLACEMENT,
            negative=(),
            help="PATTERN=BUFFER keeps tensors whose names fit elsewhere, like 'ffn_.*_exps=CPU'; repeatable",
        ),
    ] = ()
    cpu_moe: Annotated[bool, Parameter(group=PLACEMENT, negative=(), help="all experts stay in host memory")] = False
    n_cpu_ffn: Annotated[int, Parameter(group=PLACEMENT, help="layers whose dense FFN stays in host memory")] = 0
    repack: Annotated[bool, Parameter(group=PLACEMENT, help="keep weights in a layout for quicker kernels")] = True
    no_host: Annotated[bool, Parameter(group=PLACEMENT, negative=(), help="do without pinned host buffers")] = False
    check_tensors: Annotated[
        bool, Parameter(group=PLACEMENT, negative=(), help="look for invalid numbers in the model file")
    ] = False
    kv_offload: Annotated[bool, Parameter(group=PLACEMENT, help="keep KV where its layer is")] = True
    op_offload: Annotated[
        bool, Parameter(group=PLACEMENT, help="let a GPU compute large batches of layers in host memory, too")
    ] = True
    threads_batch: Annotated[
        int | None, Parameter(group=PLACEMENT, help="CPU threads for prompts; default: --threads")
    ] = None

    rope_scaling: Annotated[RopeScaling | None, Parameter(group=ROPE, help="default: the model's")] = None
    rope_freq_base: Annotated[float | None, Parameter(group=ROPE, help="default: the model's")] = None
    rope_freq_scale: Annotated[float | None, Parameter(group=ROPE, help="1/N extends the context N times")] = None
    yarn_orig_ctx: Annotated[
        int | None, Parameter(group=ROPE, help="context of the training; default: the model's")
    ] = None
    yarn_ext_factor: Annotated[float | None, Parameter(group=ROPE, help="default: the model's")] = None
    yarn_attn_factor: Annotated[float | None, Parameter(group=ROPE, help="default: the model's")] = None
    yarn_beta_fast: Annotated[float | None, Parameter(group=ROPE, help="default: the model's")] = None
    yarn_beta_slow: Annotated[float | None, Parameter(group=ROPE, help="default: the model's")] = None
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
            n_threads_batch=self.threads_batch,
            kv_unified=self.kv_unified,
            cache_type_k=self.cache_type_k,
            state_type=self.state_type,
            cache_type_v=self.cache_type_v,
            flash_attention=self.flash_attn,
            rope=self._rope(),
            kv_offload=self.kv_offload,
            op_offload=self.op_offload,
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
        return ModelOptions(
            n_gpu_layers=self.n_gpu_layers,
            load_mode=self._load_mode(),
            tensor_split=self.tensor_split,
            n_cpu_moe=self.n_cpu_moe,
            lora=self._adapters(),
            split_mode=self.split_mode,
            main_gpu=self.main_gpu,
            devices=self.device,
            override_tensors=self._overrides(),
            n_cpu_ffn=self.n_cpu_ffn,
            repack=self.repack,
            no_host=self.no_host,
            check_tensors=self.check_tensors,
        )

    def _overrides(self) -> tuple[tuple[str, str], ...]:
        found = []
        for text in self.override_tensor:
            pattern, _, buffer_type = text.rpartition("=")
            require(bool(pattern and buffer_type), f"{text!r} is no PATTERN=BUFFER; give one like 'ffn_.*_exps=CPU'")
            found.append((pattern, buffer_type))
        return (*found, *([(_EXPERTS, "CPU")] if self.cpu_moe else []))

    def _rope(self) -> RopeOptions:
        return RopeOptions(
            self.rope_scaling,
            self.rope_freq_base,
            self.rope_freq_scale,
            self.yarn_orig_ctx,
            self.yarn_ext_factor,
            self.yarn_attn_factor,
            self.yarn_beta_fast,
            self.yarn_beta_slow,
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
        if self.load_mode is not None:
            return self.load_mode
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
