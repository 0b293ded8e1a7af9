"""The command line: parse, make frozen settings, call one function.

Values come from flags, then ``EVERWARM_*`` environment variables, then a TOML file, then defaults: the first that says
something wins, for every command alike. Unknown keys are errors.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import Progress

from everwarm import __version__
from everwarm.config import CacheType, FlashAttention, ModelOptions, cache_directory, default_threads, parse_bytes
from everwarm.demo import EMBEDDED_MODEL
from everwarm.demo.tiny import ARCHITECTURES, TinySpec, write_tiny
from everwarm.engine.settings import EngineSettings, RestorePolicy, StoreSettings
from everwarm.errors import BadRequest, EverwarmError
from everwarm.gateway.settings import ServerSettings
from everwarm.state.params import CheckpointParams

app = cyclopts.App(
    name="everwarm",
    version=__version__,
    help="""An inference server for hybrid and recurrent language models that never reads a prompt twice.

    Start with `everwarm demo`: it needs no model and takes under a minute. Then `everwarm serve MODEL.gguf`.

    Every option can also be given as an environment variable (`EVERWARM_SERVE_CTX_SIZE=32768`) or in a TOML file named by
    `EVERWARM_CONFIG` (a `[serve]` table with `ctx-size = 32768`). Flags win over the environment, the environment over the
    file. `everwarm config` shows what holds.
    """,
)
app.config = [
    cyclopts.config.Env("EVERWARM_", command=True),
    *(
        [cyclopts.config.Toml(os.environ["EVERWARM_CONFIG"], must_exist=True)]
        if os.environ.get("EVERWARM_CONFIG")
        else []
    ),
]

_NETWORK, _MEMORY, _COMPUTE, _CHECKPOINTS = (
    Group(name, sort_key=i) for i, name in enumerate(("Network", "Context and memory", "Compute", "Checkpoints"))
)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The flags of ``serve``; llama-server's short names where it has them."""

    host: Annotated[
        str, Parameter(group=_NETWORK, help="address to listen on; another than loopback needs --api-key")
    ] = "127.0.0.1"
    port: Annotated[int, Parameter(group=_NETWORK, help="0 takes any free port")] = 8080
    api_key: Annotated[str | None, Parameter(group=_NETWORK, help="required from clients as a Bearer token")] = None
    allowed_host: Annotated[
        tuple[str, ...], Parameter(group=_NETWORK, help="another name clients may call this server by; repeatable")
    ] = ()
    alias: Annotated[str | None, Parameter(group=_NETWORK, help="the model's name in the API; default: the file's")] = (
        None
    )
    max_requests: Annotated[int, Parameter(group=_NETWORK, help="running and waiting; more get 429")] = 256
    max_body: Annotated[str, Parameter(group=_NETWORK, help="the largest request, like 32MiB; larger ones get 413")] = (
        "32MiB"
    )
    request_timeout: Annotated[float, Parameter(group=_NETWORK, help="seconds; 0: none")] = 0.0
    grace: Annotated[float, Parameter(group=_NETWORK, help="seconds to finish what runs after SIGTERM")] = 10.0

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
        Parameter(group=_MEMORY, help="RAM for states and KV, like 8GiB; default: a quarter of what is free"),
    ] = None
    state_dir: Annotated[
        str, Parameter(group=_MEMORY, help="where conversations are kept across restarts, one folder per model")
    ] = dataclasses.field(default_factory=lambda: str(cache_directory() / "states"))
    disk_cache: Annotated[str, Parameter(group=_MEMORY, help="how much of it, like 64GiB; 0: nothing on disk")] = (
        "64GiB"
    )
    disk_write_budget: Annotated[str, Parameter(group=_MEMORY, help="bytes written per day; 0: any number")] = "0"
    slot_save_path: Annotated[
        str | None, Parameter(group=_MEMORY, help="directory for files of POST /slots/N?action=save and restore")
    ] = None
    restore_policy: Annotated[
        RestorePolicy, Parameter(group=_MEMORY, help="auto: read again where that is faster than loading from disk")
    ] = "auto"
    spares: Annotated[
        int | None, Parameter(group=_MEMORY, help="checkpoints on the device; default: from the free memory, up to 16")
    ] = None

    threads: Annotated[int, Parameter(name=["--threads", "-t"], group=_COMPUTE, help="CPU threads")] = (
        dataclasses.field(default_factory=default_threads)
    )
    batch_size: Annotated[
        int, Parameter(name=["--batch-size", "-b"], group=_COMPUTE, help="tokens per decode call")
    ] = 2048
    ubatch_size: Annotated[int, Parameter(name=["--ubatch-size", "-ub"], group=_COMPUTE, help="tokens per step")] = 512
    n_gpu_layers: Annotated[int, Parameter(name=["--n-gpu-layers", "-ngl"], group=_COMPUTE, help="-1: all")] = -1
    flash_attn: Annotated[FlashAttention, Parameter(name=["--flash-attn", "-fa"], group=_COMPUTE, help="")] = "auto"
    tensor_split: Annotated[
        tuple[float, ...],
        Parameter(name=["--tensor-split", "-ts"], group=_COMPUTE, help="each GPU's share of the model"),
    ] = ()
    n_cpu_moe: Annotated[
        int, Parameter(name=["--n-cpu-moe", "-ncmoe"], group=_COMPUTE, help="layers whose experts stay in host memory")
    ] = 0
    lora: Annotated[
        tuple[str, ...], Parameter(group=_COMPUTE, help="adapter file, or FILE:SCALE; repeatable", negative=())
    ] = ()
    mmap: Annotated[bool, Parameter(group=_COMPUTE, help="map the model file instead of reading it")] = True

    max_checkpoints: Annotated[int, Parameter(group=_CHECKPOINTS, help="per conversation; 0: off")] = 32
    checkpoint_every: Annotated[
        int | None, Parameter(group=_CHECKPOINTS, help="tokens inside long messages; default: from the model")
    ] = None
    checkpoint_min_tokens: Annotated[int | None, Parameter(group=_CHECKPOINTS, help="none before; default: 0")] = None
    checkpoint_min_gap: Annotated[int | None, Parameter(group=_CHECKPOINTS, help="none closer; default: 0")] = None

    def engine(self) -> EngineSettings:
        return EngineSettings(
            n_slots=self.slots,
            n_ctx=self.ctx_size,
            n_batch=self.batch_size,
            n_ubatch=min(self.ubatch_size, self.batch_size),
            n_threads=self.threads,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            flash_attention=self.flash_attn,
            model=ModelOptions(
                self.n_gpu_layers, self.mmap, self.tensor_split, self.n_cpu_moe, tuple(map(_scaled, self.lora))
            ),
            checkpoints=CheckpointParams(
                self.max_checkpoints, self.checkpoint_every, self.checkpoint_min_tokens, self.checkpoint_min_gap
            ),
            store=self._store(),
            n_spares=self.spares,
            ram_bytes=None if self.cache_ram is None else parse_bytes(self.cache_ram),
        )

    def _store(self) -> StoreSettings | None:
        disk_bytes, write_bytes = parse_bytes(self.disk_cache), parse_bytes(self.disk_write_budget)
        return StoreSettings(self.state_dir, disk_bytes, write_bytes, self.restore_policy) if disk_bytes else None

    def server(self, model: Path) -> ServerSettings:
        return ServerSettings(
            host=self.host,
            port=self.port,
            api_key=self.api_key,
            allowed_hosts=self.allowed_host,
            model_name=self.alias or model.stem,
            max_requests=self.max_requests,
            max_body_bytes=parse_bytes(self.max_body),
            request_timeout_s=self.request_timeout,
            grace_s=self.grace,
            slot_save_path=self.slot_save_path,
        )


DEFAULTS = ServeOptions()


@app.command
def serve(
    model: Annotated[Path | None, Parameter(name=["model", "--model", "-m"])] = None,
    *,
    demo: bool = False,
    options: ServeOptions = DEFAULTS,
) -> int:
    """Serve a model over HTTP, for clients of OpenAI's and llama-server's APIs.

    Parameters
    ----------
    model
        The GGUF file.
    demo
        Serve the embedded everwarm-tiny instead of a file.
    """
    from everwarm.gateway.server import serve as run

    path = _chosen(model, demo)
    return run(path, options.engine(), options.server(path), Console(stderr=True))


@app.command
def config(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    show: bool = True,
) -> None:
    """Show the settings that `serve` would run with, from its flags, its environment and its file, and check them.

    Parameters
    ----------
    show
        Print them; with --no-show they are only checked.
    """
    _, bound, *_ = app.parse_args(["serve", *tokens], exit_on_error=True)
    options: ServeOptions = bound.arguments.get("options", DEFAULTS)
    engine, server = options.engine(), options.server(bound.arguments.get("model") or EMBEDDED_MODEL)
    for title, settings in (("engine", engine), ("server", server)) if show else ():
        print(f"[{title}]")
        for name, value in dataclasses.asdict(settings).items():
            print(f"{name} = {'(hidden)' if name == 'api_key' and value else _toml(value)}")
        print()


def _scaled(lora: str) -> tuple[str, float]:
    """``FILE`` or ``FILE:SCALE``."""
    path, _, scale = lora.rpartition(":")
    try:
        return (path, float(scale)) if path else (lora, 1.0)
    except ValueError:
        return lora, 1.0


def _toml(value: Any) -> str:
    if value is None:
        return '"auto"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value) if not isinstance(value, str) else f'"{value}"'


def _chosen(model: Path | None, demo: bool) -> Path:
    if demo == (model is not None):
        raise BadRequest("give a GGUF file, or --demo for the embedded model")
    return EMBEDDED_MODEL if model is None else model


@app.command
def chat(
    where: str | None = None,
    *,
    demo: bool = False,
    system: str | None = None,
    api_key: str | None = None,
    temperature: float = 0.7,
    max_tokens: int = 1024,
) -> int:
    """Talk to a model. After each answer it says how much of the prompt was reused and how much was read.

    Parameters
    ----------
    where
        A GGUF file, or the URL of a running server such as http://127.0.0.1:8080.
    demo
        Talk to the embedded everwarm-tiny.
    system
        A system message.
    """
    from everwarm.gateway.talk import talk

    if where is not None and where.startswith(("http://", "https://")):
        return talk(where, api_key, system, temperature, max_tokens)
    from everwarm.gateway.talk import talk_locally

    return talk_locally(_chosen(Path(where) if where else None, demo), system, temperature, max_tokens)


@app.command
def demo(*, model: Path | None = None) -> None:
    """Show the main job: conversations that lose their slot, edits, branches and retries, read only where they are new.

    Parameters
    ----------
    model
        A GGUF file to use instead of the embedded everwarm-tiny. It needs a chat template.
    """
    from everwarm.demo.tour import run_tour  # loading libllama takes a moment; --help should not

    run_tour(Console(), model)


@app.command
def tiny(
    *,
    arch: Annotated[str, Parameter(help=f"one of {', '.join(ARCHITECTURES)}")] = "qwen35",
    out: Path,
    layers: int = 8,
    width: int = 256,
    vocab: int | None = None,
    seed: int = 0,
    dtype: Literal["f32", "q8_0"] = "f32",
) -> None:
    """Write a small random model with a real architecture: for tests and benchmarks. Same flags, same bytes.

    Parameters
    ----------
    out
        Where to write it, for example m.gguf.
    layers
        Number of layers; 8 or more, so that hybrid models have attention in the middle.
    width
        Embedding width, a multiple of 64.
    vocab
        Total vocabulary size; more than the base set only adds unused tokens.
    seed
        Another seed, other weights.
    dtype
        f32, or q8_0 for large files.
    """
    spec = TinySpec(arch=arch, n_layers=layers, width=width, n_vocab=vocab, seed=seed, dtype=dtype)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"writing {out.name}", total=None)
        size = write_tiny(out, spec, lambda done, total: progress.update(task, completed=done, total=total))
    Console().print(f"{out}: {arch}, {layers} layers, width {width}, {dtype}, {size / 1e6:.1f} MB")


def main() -> None:
    try:
        sys.exit(app())
    except BrokenPipeError:  # somebody piped us into head
        os._exit(0)
    except (EverwarmError, ValueError, OSError) as error:
        Console(stderr=True).print(f"everwarm: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
