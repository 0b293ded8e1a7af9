"""Starts a server with the flags of llama-server's tests: ``python -m bench.compat.launch everwarm|llama-server FLAGS``.

The tests name models by where they can be downloaded; tiny models of the same kind are used instead. Flags that a server
does not have are left out and named on standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.models import EMBEDDED, tiny_model, tiny_vision  # noqa: E402

SWITCHES = frozenset(
    [
        "--cont-batching",
        "--embedding",
        "--reranking",
        "--metrics",
        "--kv-unified",
        "--swa-full",
        "--slots",
        "--no-slots",
        "--verbose",
        "--context-shift",
        "--no-ui",
        "--no-models-autoload",
        "--jinja",
        "--no-jinja",
        "--offline",
        "--no-mmproj",
        "--no-cache-idle-slots",
        "--ui-mcp-proxy",
        "--backend_sampling",
        "--no-warmup",
    ]
)
MODELS = {
    "ggml-org/test-model-stories260K": lambda: (tiny_model("llama"), None),
    "ggml-org/test-model-stories260K-infill": lambda: (tiny_model("llama"), None),
    "ggml-org/stories15M_MOE": lambda: (EMBEDDED, None),
    "ggml-org/tinygemma3-GGUF:Q8_0": lambda: tiny_vision("gemma3"),
}


def main() -> None:
    kind, flags = sys.argv[1], parsed(sys.argv[2:])
    repo = flags.pop("--hf-repo", None)
    flags.pop("--hf-file", None)
    if "--model" not in flags:
        if repo not in MODELS:
            raise SystemExit(f"no stand-in for the model {repo}")
        model, projector = MODELS[repo]()
        flags["--model"] = str(model)
        if projector is not None and "--no-mmproj" not in flags:
            flags["--mmproj"] = str(projector)
    (run_everwarm if kind == "everwarm" else run_llama_server)(flags)


def parsed(args: Sequence[str]) -> dict[str, str | None]:
    """Flags with their values; a switch has none."""
    flags: dict[str, str | None] = {}
    rest = list(args)
    while rest:
        flag = rest.pop(0)
        flags[flag] = None if flag in SWITCHES else rest.pop(0)
    return flags


def run_everwarm(flags: dict[str, str | None]) -> None:
    known = os.environ["COMPAT_FLAGS"].split()
    args = [str(Path(sys.executable).parent / "everwarm"), "serve"]
    for flag, value in flags.items():
        if flag not in known:
            print(f"left out: {flag} {value or ''}", file=sys.stderr)
            continue
        args += [flag] if value is None else [flag, value]
    os.execv(args[0], args)


def run_llama_server(flags: dict[str, str | None]) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.warmup, params.verbosity, params.use_jinja = False, -1, "--no-jinja" not in flags
    params.endpoint_slots, params.endpoint_metrics = "--slots" in flags, "--metrics" in flags
    params.kv_unified, params.ctx_shift = "--kv-unified" in flags, "--context-shift" in flags
    params.embedding = "--embedding" in flags or "--reranking" in flags
    for flag, (name, kind) in _ATTRIBUTES.items():
        if (value := flags.get(flag)) is not None:
            owner, _, attribute = name.rpartition(".")
            setattr(getattr(params, owner) if owner else params, attribute, kind(value))
    if template := flags.get("--chat-template-file"):
        params.chat_template = Path(template).read_text()
    if key := flags.get("--api-key"):
        params.api_keys = [key]
    if alias := flags.get("--alias"):
        params.model_alias = {alias}
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os._exit(0)


_ATTRIBUTES = {
    "--model": ("model.path", str),
    "--mmproj": ("mmproj.path", str),
    "--port": ("port", int),
    "--ctx-size": ("n_ctx", int),
    "--parallel": ("n_parallel", int),
    "--batch-size": ("n_batch", int),
    "--ubatch-size": ("n_ubatch", int),
    "--n-predict": ("n_predict", int),
    "--slot-save-path": ("slot_save_path", lambda path: path.rstrip("/") + "/"),
    "--temp": ("sampling.temp", float),
    "--seed": ("sampling.seed", int),
    "--chat-template": ("chat_template", str),
    "--cache-ram": ("cache_ram_mib", int),
    "--sleep-idle-seconds": ("sleep_idle_seconds", int),
    "--reasoning": ("enable_reasoning", lambda word: {"on": 1, "off": 0}.get(word, -1)),
}


if __name__ == "__main__":
    main()
