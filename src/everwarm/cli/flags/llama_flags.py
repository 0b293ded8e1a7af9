"""llama-server's command line, as data: every flag with its names, its variable and what becomes of it here; and such a
command line, and llama-server's variables, turned into our flags. Pure.

A flag is handed to one of ours (``to``), accepted because what it asks for holds anyway (``holds``), or refused with a
sentence that says what to use. What the table does not have passes unchanged: our own flags, and mistakes for the parser
to name. ``docs/dialects/llama-server.md`` shows the table, and a test compares its names with those of the wheel's own
parser.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from cyclopts import Parameter

from everwarm.config import parse_samplers
from everwarm.errors import BadRequest

Convert = Callable[[str], str]
PREFIX = "LLAMA_ARG_"
_NEGATED = "LLAMA_ARG_NO_"
_TRUE = ("on", "enabled", "true", "1")
_FALSE = ("off", "disabled", "false", "0")


Value = str | bool | list[str]


class Row(NamedTuple):
    """``names`` switch on or take a value, ``negatives`` switch off."""

    names: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    env: str = ""
    n_values: int = 1
    to: str = ""  # our flag; with "=" its value, too
    to_negative: str = ""  # of the negatives, where it is not the same with ``no``
    convert: Convert | None = None
    is_list: bool = False  # commas part values, each of which is given to ours
    holds: str = ""  # why nothing has to be done
    refusal: str = ""  # what to use instead
    refuses_negatives: str = ""
    only: tuple[str, ...] = ()  # values that can be accepted; others are refused
    is_theirs: bool = True  # False: older builds of llama-server have it


def _row(spelling: str, env: str = "", **fields: object) -> Row:
    """``--a -b | --no-a``"""
    positive, _, negative = spelling.partition("|")
    return Row(tuple(positive.split()), tuple(negative.split()), env and f"LLAMA_ARG_{env}", **fields)  # type: ignore[arg-type]


def _same(spelling: str, env: str = "", to: str = "", **fields: object) -> Row:
    """Handed to our flag: of the same name, unless ``to`` names another."""
    long = [name for name in spelling.partition("|")[0].split() if name.startswith("--")]
    return _row(spelling, env, to=to or long[0], **fields)


def _switch(spelling: str, env: str = "", to: str = "", **fields: object) -> Row:
    return _same(spelling, env, to, n_values=0, **fields)


def _holds(spelling: str, why: str, env: str = "", n_values: int = 0, **fields: object) -> Row:
    return _row(spelling, env, n_values=n_values, holds=why, **fields)


def _refused(spelling: str, instead: str, env: str = "", n_values: int = 1, **fields: object) -> Row:
    return _row(spelling, env, n_values=n_values, refusal=instead, **fields)


def _auto(word: str, *others: str) -> Convert:
    """Words and numbers that mean: decide yourself."""
    return lambda value: word if value in others else value


def _letters(value: str) -> str:
    return ";".join(parse_samplers(value))


def _drafter(value: str) -> str:
    """Our word for one of llama-server's kinds of speculation."""
    named = {"none": "off", "draft-mtp": "mtp", "draft-simple": "draft"}
    return "lookup" if value.startswith("ngram-") else named.get(value, value)


def _levels(value: str) -> str:
    return {"0": "error", "1": "error", "2": "warning", "3": "info"}.get(value, "debug")


def _hf(value: str) -> str:
    return f"hf:{value}"


def _reciprocal(value: str) -> str:
    try:
        return repr(1.0 / float(value))
    except (ValueError, ZeroDivisionError):
        return value  # refused as a number where it is read


def _reasoning_format(value: str) -> str:
    return "deepseek" if value == "deepseek-legacy" else value


_AFFINITY = "start it under taskset (which CPUs), nice or chrt (priority), or numactl"
_SPECULATION = "speculation of that kind is not offered; leave it out"
_NO_TOOLS = "Everwarm runs no tools and proxies nothing; leave it out, and let the client run them"
_REMOTE = "only Hugging Face models can be downloaded: give hf:owner/repo[:quant], or download the file yourself"
_VIDEO = "Everwarm reads no video; leave it out"


def _preset(spelling: str, repository: str) -> Row:
    return _refused(spelling, f"give the model itself: `everwarm serve hf:{repository}`", n_values=0)


ROWS: tuple[Row, ...] = (
    # common
    _switch("-h --help --usage", to="--help"),
    _switch("--version"),
    _refused("-cl --cache-list", "start with `--models hf:`; GET /v1/models lists what is in the cache", n_values=0),
    _refused("--completion-bash", "there is no completion script for everwarm", n_values=0),
    _same("-t --threads", "THREADS", convert=_auto("", "-1", "0")),
    _same("-tb --threads-batch", convert=_auto("", "-1", "0")),
    _refused("-C --cpu-mask", _AFFINITY),
    _refused("-Cr --cpu-range", _AFFINITY),
    _refused("--cpu-strict", _AFFINITY, only=("0",)),
    _refused("--prio", _AFFINITY, only=("0",)),
    _refused("--poll", "how long libllama spins is decided by Everwarm; leave it out", only=("50",)),
    _refused("-Cb --cpu-mask-batch", _AFFINITY),
    _refused("-Crb --cpu-range-batch", _AFFINITY),
    _refused("--cpu-strict-batch", _AFFINITY, only=("0",)),
    _refused("--prio-batch", _AFFINITY, only=("0",)),
    _refused("--poll-batch", "how long libllama spins is decided by Everwarm; leave it out", only=("50",)),
    _same("-c --ctx-size", "CTX_SIZE"),
    _same("-n --predict --n-predict", "N_PREDICT", "--n-predict"),
    _same("-b --batch-size", "BATCH"),
    _same("-ub --ubatch-size", "UBATCH"),
    _same("--keep"),
    _holds("--swa-full", "a sliding window is kept at checkpoints, so prompts are reused without it", "SWA_FULL"),
    _same("-fa --flash-attn", "FLASH_ATTN"),
    _holds("--perf | --no-perf", "timings are in every answer", "PERF"),
    _switch("-e --escape | --no-escape", to="--escape"),
    _same("--rope-scaling", "ROPE_SCALING_TYPE"),
    _same("--rope-scale", "ROPE_SCALE", "--rope-freq-scale", convert=_reciprocal),
    _same("--rope-freq-base", "ROPE_FREQ_BASE"),
    _same("--rope-freq-scale", "ROPE_FREQ_SCALE"),
    _same("--yarn-orig-ctx", "YARN_ORIG_CTX", convert=_auto("", "0")),
    _same("--yarn-ext-factor", "YARN_EXT_FACTOR", convert=_auto("", "-1", "-1.0")),
    _same("--yarn-attn-factor", "YARN_ATTN_FACTOR", convert=_auto("", "-1", "-1.0")),
    _same("--yarn-beta-slow", "YARN_BETA_SLOW", convert=_auto("", "-1", "-1.0")),
    _same("--yarn-beta-fast", "YARN_BETA_FAST", convert=_auto("", "-1", "-1.0")),
    _switch("-kvo --kv-offload | -nkvo --no-kv-offload", "KV_OFFLOAD"),
    _switch("--repack | -nr --no-repack", "REPACK"),
    _switch("--no-host", "NO_HOST"),
    _same("-ctk --cache-type-k", "CACHE_TYPE_K"),
    _same("-ctv --cache-type-v", "CACHE_TYPE_V"),
    _holds("-dt --defrag-thold", "it has no effect in llama-server, either", "DEFRAG_THOLD", n_values=1),
    _refused("--rpc", "give `--ray` for many machines; libllama's RPC is not offered", "RPC"),
    _same("-lm --load-mode", "LOAD_MODE"),
    _refused(
        "-lzm --lazy-mode", "libllama decides it by the size of a tensor; leave it out", "LAZY_MODE", only=("auto",)
    ),
    _refused("--numa", "start it under numactl", "NUMA"),
    _same("-dev --device", "DEVICE", is_list=True),
    _refused("--list-devices", "`--device ?` answers with the names of all devices", n_values=0),
    _same("-ot --override-tensor", "OVERRIDE_TENSOR", is_list=True),
    _switch("-cmoe --cpu-moe", "CPU_MOE"),
    _same("-ncmoe --n-cpu-moe", "N_CPU_MOE"),
    _refused("--moe-cache-mib", "there is no cache of experts; give `--n-cpu-moe`", "MOE_CACHE_MIB", only=("0",)),
    _same("-ncffn --n-cpu-ffn", "N_CPU_FFN"),
    _same(
        "-ngl --gpu-layers --n-gpu-layers", "N_GPU_LAYERS", "--n-gpu-layers", convert=_auto("-1", "auto", "all", "-2")
    ),
    _same("-sm --split-mode", "SPLIT_MODE"),
    _same("-ts --tensor-split", "TENSOR_SPLIT", is_list=True),
    _same("-mg --main-gpu", "MAIN_GPU"),
    _refused("-fit --fit", "sizes are not changed to fit: give `-ngl` and `-c`", "FIT", only=("off",)),
    _refused("-fitt --fit-target", "sizes are not changed to fit: give `-ngl` and `-c`", "FIT_TARGET"),
    _refused("-fitc --fit-ctx", "sizes are not changed to fit: give `-c`", "FIT_CTX"),
    _switch("--check-tensors"),
    _refused("--override-kv", "a model is served as its file says; change the file with gguf_set_metadata.py"),
    _switch("--op-offload | --no-op-offload"),
    _same("--lora", is_list=True),
    _same("--lora-scaled", to="--lora", is_list=True),
    _refused("--control-vector", "control vectors are not offered; make a LoRA of it: `--lora`"),
    _refused("--control-vector-scaled", "control vectors are not offered; make a LoRA of it: `--lora`"),
    _refused(
        "--control-vector-layer-range", "control vectors are not offered; make a LoRA of it: `--lora`", n_values=2
    ),
    _same("-m --model", "MODEL"),
    _refused("-mu --model-url", _REMOTE, "MODEL_URL"),
    _refused("-dr --docker-repo", _REMOTE, "DOCKER_REPO"),
    _same("-hf -hfr --hf-repo", "HF_REPO", "--model", convert=_hf),
    _refused("-hff --hf-file", "name the quantization: `-hf owner/repo:Q4_K_M`", "HF_FILE"),
    Row(("-hft", "--hf-token"), refusal="set the variable HF_TOKEN; a flag would be seen by every user of the machine"),
    _switch("--log-disable", to="--log-level=critical"),
    _refused("--log-file", "the log is on standard error: `2> FILE`", "LOG_FILE"),
    _switch("--log-jsonl | --no-log-jsonl", "LOG_JSONL", "--log-format=json", to_negative="--log-format=text"),
    _holds("--log-colors", "lines of the log have no colours", "LOG_COLORS", n_values=1),
    _switch("-v --verbose --log-verbose", to="--log-level=debug"),
    _switch("--offline", "OFFLINE"),
    _same("-lv --verbosity --log-verbosity", "LOG_VERBOSITY", "--log-level", convert=_levels),
    _holds("--log-prefix | --no-log-prefix", "every line of the log has its level", "LOG_PREFIX"),
    _holds("--log-timestamps | --no-log-timestamps", "every line of the log has its time", "LOG_TIMESTAMPS"),
    _refused("--spec-draft-type-k -ctkd --cache-type-k-draft", _SPECULATION, "SPEC_DRAFT_CACHE_TYPE_K"),
    _refused("--spec-draft-type-v -ctvd --cache-type-v-draft", _SPECULATION, "SPEC_DRAFT_CACHE_TYPE_V"),
    # sampling
    _same("--samplers"),
    _same("-s --seed"),
    _same("--sampler-seq --sampling-seq", to="--samplers", convert=_letters),
    _switch("--ignore-eos"),
    _same("--temp --temperature", "TEMPERATURE"),
    _same("--top-k", "TOP_K"),
    _same("--top-p", "TOP_P"),
    _same("--min-p", "MIN_P"),
    _same("--top-nsigma --top-n-sigma", to="--top-n-sigma"),
    _same("--xtc-probability"),
    _same("--xtc-threshold"),
    _same("--typical --typical-p", to="--typical-p"),
    _same("--repeat-last-n"),
    _same("--repeat-penalty", "REPEAT_PENALTY"),
    _same("--presence-penalty", "PRESENCE_PENALTY"),
    _same("--frequency-penalty", "FREQUENCY_PENALTY"),
    _same("--dry-multiplier"),
    _same("--dry-base"),
    _same("--dry-allowed-length"),
    _same("--dry-penalty-last-n"),
    _same("--dry-sequence-breaker"),
    _same("--adaptive-target"),
    _same("--adaptive-decay"),
    _same("--dynatemp-range"),
    _same("--dynatemp-exp"),
    _same("--mirostat"),
    _same("--mirostat-lr"),
    _same("--mirostat-ent"),
    _same("-l --logit-bias"),
    _same("--grammar"),
    _same("--grammar-file"),
    _same("-j --json-schema"),
    _same("-jf --json-schema-file"),
    _holds("-bs --backend-sampling", "tokens are picked on the CPU, the same ones", "BACKEND_SAMPLING"),
    # speculation
    _refused("--spec-draft-hf -hfd -hfrd --hf-repo-draft", _SPECULATION, "SPEC_DRAFT_HF_REPO"),
    _refused("--spec-draft-threads -td --threads-draft", _SPECULATION),
    _refused("--spec-draft-threads-batch -tbd --threads-batch-draft", _SPECULATION),
    _refused("--spec-draft-cpu-mask -Cd --cpu-mask-draft", _AFFINITY),
    _refused("--spec-draft-cpu-range -Crd --cpu-range-draft", _AFFINITY),
    _refused("--spec-draft-cpu-strict --cpu-strict-draft", _AFFINITY),
    _refused("--spec-draft-prio --prio-draft", _AFFINITY),
    _refused("--spec-draft-poll --poll-draft", _AFFINITY),
    _refused("--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft", _AFFINITY),
    _refused("--spec-draft-cpu-strict-batch --cpu-strict-batch-draft", _AFFINITY),
    _refused("--spec-draft-prio-batch --prio-batch-draft", _AFFINITY),
    _refused("--spec-draft-poll-batch --poll-batch-draft", _AFFINITY),
    _refused("--spec-draft-override-tensor -otd --override-tensor-draft", _SPECULATION),
    _refused("--spec-draft-cpu-moe -cmoed --cpu-moe-draft", _SPECULATION, "SPEC_DRAFT_CPU_MOE", n_values=0),
    _refused(
        "--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft", _SPECULATION, "SPEC_DRAFT_N_CPU_MOE"
    ),
    _refused("--spec-draft-n-max", _SPECULATION, "SPEC_DRAFT_N_MAX"),
    _refused("--spec-draft-n-min", _SPECULATION, "SPEC_DRAFT_N_MIN"),
    _refused("--spec-synth-len", _SPECULATION, "SPEC_SYNTH_LEN"),
    _refused("--spec-synth-rates", _SPECULATION, "SPEC_SYNTH_RATES"),
    _refused("--spec-draft-p-split --draft-p-split", _SPECULATION, "SPEC_DRAFT_P_SPLIT"),
    _refused("--spec-draft-p-min --draft-p-min", _SPECULATION, "SPEC_DRAFT_P_MIN"),
    _refused(
        "--spec-draft-backend-sampling | --no-spec-draft-backend-sampling",
        _SPECULATION,
        "SPEC_DRAFT_BACKEND_SAMPLING",
        n_values=0,
        refuses_negatives=_SPECULATION,
    ),
    _refused("--spec-draft-sampling", _SPECULATION, "SPEC_DRAFT_SAMPLING"),
    _refused("--spec-draft-device -devd --device-draft", _SPECULATION),
    _refused("--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft", _SPECULATION, "N_GPU_LAYERS_DRAFT"),
    _refused("--spec-draft-model -md --model-draft", _SPECULATION, "SPEC_DRAFT_MODEL"),
    _same("--spec-type", "SPEC_TYPE", to="--speculate", convert=_drafter),
    *(
        _refused(f"--spec-ngram-{name}", _SPECULATION)
        for name in (
            "mod-n-min",
            "mod-n-max",
            "mod-n-match",
            "simple-size-n",
            "simple-size-m",
            "simple-min-hits",
            "map-k-size-n",
            "map-k-size-m",
            "map-k-min-hits",
            "map-k4v-size-n",
            "map-k4v-size-m",
            "map-k4v-min-hits",
            "size-n",
            "size-m",
            "min-hits",
        )
    ),
    _refused("--draft --draft-n --draft-max", _SPECULATION, "DRAFT_MAX"),
    _refused("--draft-min --draft-n-min", _SPECULATION, "DRAFT_MIN"),
    # the server's own
    _refused("-lcs --lookup-cache-static", _SPECULATION),
    _refused("-lcd --lookup-cache-dynamic", _SPECULATION),
    _refused("--kv-unified-per-slot", "slots share the context: give `-c` for all of them", "KV_UNIFIED_PER_SLOT"),
    _same("-ctxcp --ctx-checkpoints --swa-checkpoints", "CTX_CHECKPOINTS", "--max-checkpoints"),
    _same("-cms --checkpoint-min-step", "CHECKPOINT_MIN_SPACING_NT", "--checkpoint-min-gap"),
    _same("-cram --cache-ram", "CACHE_RAM", convert=_auto("1TiB", "-1")),
    _switch("-kvu --kv-unified | -no-kvu --no-kv-unified", "KV_UNIFIED", "--kv-unified"),
    _holds(
        "--cache-idle-slots | --no-cache-idle-slots",
        "a conversation without a slot is kept in RAM; `--cache-ram 0` keeps none",
        "CACHE_IDLE_SLOTS",
    ),
    _switch("--context-shift | --no-context-shift", "CONTEXT_SHIFT"),
    _same("-r --reverse-prompt"),
    _refused(
        "-sp --special", "replies have no control tokens; /completion with return_tokens gives their ids", n_values=0
    ),
    _holds("--warmup | --no-warmup", "the first decode at the start measures the context"),
    _switch("--spm-infill"),
    _same("--pooling", "POOLING"),
    _same("-np --parallel", "N_PARALLEL", "--parallel", convert=_auto("4", "-1")),
    _holds(
        "-cb --cont-batching | -nocb --no-cont-batching",
        "requests are always batched as they come",
        "CONT_BATCHING",
        refuses_negatives="requests are always batched as they come: `-np 1` runs one at a time",
    ),
    _same("-mm --mmproj", "MMPROJ"),
    _refused("-mmu --mmproj-url", _REMOTE, "MMPROJ_URL"),
    _switch("--mmproj-auto | --no-mmproj --no-mmproj-auto", "MMPROJ_AUTO"),
    _holds(
        "--mmproj-offload | --no-mmproj-offload",
        "the projector is on the GPU where the model is",
        "MMPROJ_OFFLOAD",
        refuses_negatives="the projector is on the GPU where the model is: `-ngl 0` keeps both off it",
    ),
    Row(("-mmdev", "--mmproj-device"), refusal="the projector is where the model is: give `--device`"),
    _refused("--image-min-tokens", "an image has the tokens that its projector says; leave it out", "IMAGE_MIN_TOKENS"),
    _refused("--image-max-tokens", "an image has the tokens that its projector says; leave it out", "IMAGE_MAX_TOKENS"),
    _refused("--mtmd-batch-max-tokens", "images are encoded one by one; leave it out", "MTMD_BATCH_MAX_TOKENS"),
    _refused("--video-fps", _VIDEO, "VIDEO_FPS"),
    _refused("--video-timestamp-interval", _VIDEO, "VIDEO_TIMESTAMP_INTERVAL"),
    _refused("--video-ffmpeg-dir", _VIDEO, "VIDEO_FFMPEG_DIR"),
    _same("-a --alias", "ALIAS"),
    _same("--tags", "TAGS"),
    _same("--embd-normalize"),
    _same("--host", "HOST"),
    _same("--port", "PORT"),
    _switch("--reuse-port", "REUSE_PORT"),
    _refused("--path", "only Everwarm's own page is served; serve files with a web server", "STATIC_PATH"),
    _same("--cors-origins", "CORS_ORIGINS"),
    _refused("--cors-methods", "a page that may call may use GET, POST and DELETE; leave it out", "CORS_METHODS"),
    _refused("--cors-headers", "a page that may call may send any header; leave it out", "CORS_HEADERS"),
    _refused(
        "--cors-credentials | --no-cors-credentials",
        "there are no cookies: pages send the key in a header",
        "CORS_CREDENTIALS",
        n_values=0,
    ),
    _refused("--api-prefix", "let a reverse proxy strip the prefix", "API_PREFIX"),
    _refused("--ui-config --webui-config", "the page has no settings of the server; leave it out", "UI_CONFIG"),
    _refused(
        "--ui-config-file --webui-config-file", "the page has no settings of the server; leave it out", "UI_CONFIG_FILE"
    ),
    _refused(
        "--ui-mcp-proxy --webui-mcp-proxy | --no-ui-mcp-proxy --no-webui-mcp-proxy",
        _NO_TOOLS,
        "UI_MCP_PROXY",
        n_values=0,
    ),
    _refused("--tools", _NO_TOOLS, "TOOLS"),
    _refused("--tools-runtime", _NO_TOOLS, "TOOLS_RUNTIME"),
    _refused("--mcp-servers-config", _NO_TOOLS, "MCP_SERVERS_CONFIG"),
    _refused("--mcp-servers-json", _NO_TOOLS, "MCP_SERVERS_JSON"),
    _refused("-ag --agent | -no-ag --no-agent", _NO_TOOLS, "AGENT", n_values=0),
    _switch("--ui --webui | --no-ui --no-webui", "UI", "--ui"),
    _switch("--embedding --embeddings", "EMBEDDINGS", "--embeddings"),
    _switch("--rerank --reranking", "RERANKING", "--reranking"),
    Row(("--api-key",), env="LLAMA_API_KEY", to="--api-key"),
    _same("--api-key-file", "API_KEY_FILE"),
    _same("--ssl-key-file", "SSL_KEY_FILE"),
    _same("--ssl-cert-file", "SSL_CERT_FILE"),
    _same("--chat-template-kwargs", "CHAT_TEMPLATE_KWARGS"),
    _same("-to --timeout", "TIMEOUT", "--client-timeout"),
    _holds("--sse-ping-interval", "a silent stream is kept alive", "SSE_PING_INTERVAL", n_values=1),
    _holds("--threads-http", "one thread serves all connections", "THREADS_HTTP", n_values=1),
    _switch("--cache-prompt | --no-cache-prompt", "CACHE_PROMPT"),
    _holds(
        "--cache-reuse",
        "what a prompt shares from its beginning is reused anyway; what moved is read again",
        "CACHE_REUSE",
        n_values=1,
    ),
    _switch("--metrics", "ENDPOINT_METRICS"),
    _holds("--props", "POST /props is answered, and changes nothing in llama-server, either", "ENDPOINT_PROPS"),
    _switch("--slots | --no-slots", "ENDPOINT_SLOTS", "--slots-endpoint"),
    _same("--slot-save-path", "SLOT_SAVE_PATH"),
    _refused(
        "--media-path",
        "files of the server are not read for requests: send images in them, or allow a host with `--picture-host`",
    ),
    _same("--models-dir", "MODELS_DIR", "--models"),
    _same("--models-preset", "MODELS_PRESET", "--models"),
    _same("--models-max", "MODELS_MAX"),
    _switch("--models-autoload | --no-models-autoload", "MODELS_AUTOLOAD"),
    _holds("--jinja | --no-jinja", "templates are always rendered as Jinja", "JINJA"),
    _same("--reasoning-format", "THINK", convert=_reasoning_format),
    _same("-rea --reasoning", "REASONING"),
    _same("--reasoning-effort", "REASONING_EFFORT"),
    _same("--reasoning-budget", "THINK_BUDGET"),
    _same("--reasoning-budget-message", "THINK_BUDGET_MESSAGE"),
    _holds(
        "--reasoning-preserve | --no-reasoning-preserve",
        "the template decides what of the thinking stays in the history",
        "REASONING_PRESERVE",
        refuses_negatives="the template decides it: give `--chat-template-kwargs`",
    ),
    _same("--chat-template", "CHAT_TEMPLATE"),
    _same("--chat-template-file", "CHAT_TEMPLATE_FILE"),
    _switch(
        "--skip-chat-parsing | --no-skip-chat-parsing",
        "SKIP_CHAT_PARSING",
        "--thinking-tags=none --tool-format=none",
        to_negative="--thinking-tags=auto --tool-format=auto",
    ),
    _holds(
        "--prefill-assistant | --no-prefill-assistant",
        "a last message of the assistant is continued",
        "PREFILL_ASSISTANT",
        refuses_negatives="end the conversation with a message of the user",
    ),
    _holds(
        "-sps --slot-prompt-similarity",
        "the slot that holds most of a conversation gets it, and all share what was read",
        n_values=1,
    ),
    _switch("--lora-init-without-apply"),
    _same("--sleep-idle-seconds"),
    _refused("--log-prompts-dir", "prompts are never written to a log"),
    _preset("--embd-gemma-default", "ggml-org/embeddinggemma-300M-qat-q4_0-GGUF"),
    _preset("--fim-qwen-1.5b-default", "ggml-org/Qwen2.5-Coder-1.5B-Q8_0-GGUF"),
    _preset("--fim-qwen-3b-default", "ggml-org/Qwen2.5-Coder-3B-Q8_0-GGUF"),
    _preset("--fim-qwen-7b-default", "ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF"),
    _preset("--fim-qwen-7b-spec", "ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF"),
    _preset("--fim-qwen-14b-spec", "ggml-org/Qwen2.5-Coder-14B-Q8_0-GGUF"),
    _preset("--fim-qwen-30b-default", "ggml-org/Qwen3-Coder-30B-A3B-Instruct-Q8_0-GGUF"),
    _preset("--gpt-oss-20b-default", "ggml-org/gpt-oss-20b-GGUF"),
    _preset("--gpt-oss-120b-default", "ggml-org/gpt-oss-120b-GGUF"),
    _preset("--vision-gemma-4b-default", "ggml-org/gemma-3-4b-it-qat-GGUF"),
    _preset("--vision-gemma-12b-default", "ggml-org/gemma-3-12b-it-qat-GGUF"),
    _refused("--spec-default", _SPECULATION, n_values=0),
    # what older builds had, and command lines still have
    _switch("--mlock", "MLOCK", is_theirs=False),
    _switch("--mmap | --no-mmap", "MMAP", is_theirs=False),
    _switch("-dio --direct-io", "DIO", "--load-mode=dio", is_theirs=False),
    _refused("-gan --grp-attn-n", "self-extend is gone from llama.cpp: give `--rope-scaling yarn`", is_theirs=False),
    _refused("-gaw --grp-attn-w", "self-extend is gone from llama.cpp: give `--rope-scaling yarn`", is_theirs=False),
)

_POSITIVE = {name: row for row in ROWS for name in row.names}
_NEGATIVE = {name: row for row in ROWS for name in row.negatives}


def our_line(tokens: Sequence[str], options: type) -> list[str]:
    """The same command line in our flags. ``options``: where ours are declared."""
    ours: list[str] = []
    rest = deque(tokens)
    while rest:
        token = rest.popleft()
        if token == "--":
            return [*ours, token, *rest]
        name, equals, inline = _split(token)
        row = _POSITIVE.get(name) or _NEGATIVE.get(name)
        if row is None or (row.refusal and name in declared(options)):
            ours.append(token)
        elif name == "--slots":
            ours += _slots(inline if equals else None, rest)
        else:
            n_values = row.n_values if name in _POSITIVE else 0
            values = [inline] if equals else [rest.popleft() for _ in range(min(n_values, len(rest)))]
            if len(values) < n_values:
                raise BadRequest(f"{name} needs a value")
            ours += [_flag(to, value) for to, value in _given(row, name, values, is_on=name in _POSITIVE)]
    return ours


def _split(token: str) -> tuple[str, str, str]:
    """llama-server takes ``_`` for ``-`` in long names; we take ``--name=value`` as well."""
    if not token.startswith("--"):
        return token, "", ""
    name, equals, value = token.partition("=")
    return name.replace("_", "-"), equals, value


def _slots(inline: str | None, rest: deque[str]) -> list[str]:
    """A number follows our flag; none follows llama-server's, which is about GET /slots."""
    if inline is None and (not rest or rest[0].startswith("-")):
        return ["--slots-endpoint"]
    return [f"--parallel={rest.popleft() if inline is None else inline}"]


def _flag(to: str, value: Value) -> str:
    if isinstance(value, bool):
        return to if value else f"--no-{to.removeprefix('--')}"
    return f"{to}={value}"


def _given(row: Row, name: str, values: list[str], *, is_on: bool) -> Iterator[tuple[str, Value]]:
    """Our flags and their values for one of theirs; ``BadRequest`` if it is refused. ``name``: for the message."""
    refusal = row.refusal if is_on else row.refuses_negatives
    if refusal and not (is_on and values and values[0] in row.only):
        raise BadRequest(f"{name} of llama-server is not offered: {refusal}")
    if row.refusal or not row.to:
        return
    if name in ("-dev", "--device", "LLAMA_ARG_DEVICE") and values == ["none"]:
        yield from (("--n-gpu-layers", "0"), ("--op-offload", False))
        return
    if row.n_values:
        parts = [part for part in values[0].split(",") if part] if row.is_list else values
        for part in parts:
            value = part if row.convert is None else row.convert(part)
            if value or not part:  # a value that becomes nothing means: as it is without the flag
                yield row.to, value
        return
    for to in (row.to if is_on or not row.to_negative else row.to_negative).split():
        flag, equals, value = to.partition("=")
        yield flag, value if equals else is_on


def from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    """What llama-server's variables say, by the names of our flags."""
    found: dict[str, Value] = {}
    for row in ROWS:
        negated = row.env.replace(PREFIX, _NEGATED) if row.negatives and row.env.startswith(PREFIX) else ""
        if negated and negated in environment:
            given = _given(row, negated, [], is_on=False)
        elif row.env and row.env in environment:
            given = _from_variable(row, environment[row.env])
        else:
            continue
        for to, value in given:
            known = found.get(to)
            if isinstance(known, list):
                found[to] = [*known, str(value)]
            else:
                found[to] = [str(value)] if row.is_list else value
    return found


def _from_variable(row: Row, text: str) -> Iterator[tuple[str, Value]]:
    if row.n_values:
        return _given(row, row.env, [text], is_on=True)
    word = text.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise BadRequest(f"{row.env} is {text[:40]!r}; give 1 or 0")
    is_on = word in _TRUE
    if not is_on and not row.negatives:
        return iter(())
    return _given(row, row.env, [], is_on=is_on)


def unknown_variables(environment: Collection[str]) -> list[str]:
    known = {row.env for row in ROWS} | {row.env.replace(PREFIX, _NEGATED) for row in ROWS if row.negatives}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


@functools.cache
def declared(options: type) -> frozenset[str]:
    """The flags that a class of options has, with those of the classes in it."""
    names: set[str] = set()
    for field, hint in typing.get_type_hints(options, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            names |= declared(typing.cast("type", hint))
            continue
        own = [extra.name for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Parameter) and extra.name]
        names |= {name for given in own for name in given} or {f"--{field.replace('_', '-')}"}
    return frozenset(names)
