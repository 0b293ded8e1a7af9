"""The command line: parse, make frozen settings, call one function.

Values come from flags, then ``EVERWARM_*`` environment variables, then a TOML file, then defaults: the first one that is
set wins, for every command alike. Unknown keys are errors.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter
from rich.console import Console

from everwarm import __version__
from everwarm.cli.flags.llama_flags import from_environment, our_line, unknown_variables
from everwarm.cli.flags.serve_options import DEFAULTS, ServeOptions, listed
from everwarm.cli.help_page import HELP_ALL, HELP_ENV, LineFormatter
from everwarm.config import require
from everwarm.demo import EMBEDDED_MODEL
from everwarm.errors import BadRequest, EverwarmError
from everwarm.logs import LEVEL_VARIABLE
from everwarm.router.catalog import hub
from everwarm.router.catalog.catalog import Catalog, discover, only, projector_beside
from everwarm.router.catalog.gguf_header import read_header
from everwarm.router.plan import PoolLimits

app = cyclopts.App(
    name="everwarm",
    version=__version__,
    help="""An inference server for hybrid and recurrent language models that never reads a prompt twice.

    Start with `everwarm demo`: it needs no model and takes under a minute. Then `everwarm serve MODEL.gguf`.

    Every option can also be given as an environment variable (`EVERWARM_SERVE_CTX_SIZE=32768`) or in a TOML file named by
    `EVERWARM_CONFIG` (a `[serve]` table with `ctx-size = 32768`). Flags win over the environment, the environment over the
    file. `everwarm config` shows the result. llama-server's flags and variables are understood, too.
    """,
    help_formatter=LineFormatter(),
)


def _llama_variables(_app: cyclopts.App, commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection) -> None:
    """llama-server's variables, for what neither a flag nor our environment nor the file says."""
    if commands != ("serve",):
        return
    given = from_environment(os.environ)
    if any(argument.tokens for argument in arguments if argument.name in ("--model", "--demo", "--models")):
        given = {flag: value for flag, value in given.items() if flag not in ("--model", "--models")}
    for flag, value in given.items():
        argument, *_ = arguments.match(flag)
        if not argument.tokens:
            for i, text in enumerate(value if isinstance(value, list) else [str(value)]):
                argument.append(cyclopts.Token(keyword=flag, value=text, source="llama-server's variables", index=i))


app.config = [
    cyclopts.config.Env("EVERWARM_", command=True),
    *(
        [cyclopts.config.Toml(os.environ["EVERWARM_CONFIG"], must_exist=True)]
        if os.environ.get("EVERWARM_CONFIG")
        else []
    ),
    _llama_variables,
]

# loaded when they are called, so that a server starts sooner
_LATER = ("backend", "cache", "explain", "simulate", "tiny")
for _name in _LATER:
    app.command(f"everwarm.cli.{_name}:{_name}", name=_name)
_OF_MODELS = {"pull": "pull", "list": "list_models", "rm": "remove", "ps": "show_loaded", "run": "run", "stop": "stop"}
for _name, _function in _OF_MODELS.items():
    app.command(f"everwarm.cli.models:{_function}", name=_name)
app.register_install_completion_command()

VARIABLES = "EVERWARM_SERVE_"
SECRET = ("api_key", "admin_key")


@app.command
def serve(
    model: Annotated[str | None, Parameter(name=["model", "--model", "-m"])] = None,
    *,
    demo: bool = False,
    models: str | None = None,
    ray: Path | None = None,
    options: ServeOptions = DEFAULTS,
) -> int:
    """Serve one model or many over HTTP, for clients of the OpenAI, Anthropic, Ollama and llama-server APIs.

    Rarely needed flags are listed by --help-all, environment variables by --help-env. llama-server's flags are understood
    or refused with a sentence.

    Parameters
    ----------
    model
        The GGUF file, or `hf:owner/repo[:quant]` for a model of the Hugging Face Hub, which is downloaded once. A folder is
        the same as --models with it.
    demo
        Serve the embedded everwarm-tiny instead of a file.
    models
        Many models behind one address, each loaded on its first request: a folder of GGUF files, a TOML file that lists
        them, or `hf:` for all in the Hugging Face cache. A model keeps its conversations while it is not loaded.
    ray
        Replicas on many machines: a TOML file that describes the cluster. It replaces all flags.
    """
    _require_known_variables()
    if ray is not None:
        return _serve_cluster(ray, is_alone=(model, demo, models, options) == (None, False, None, DEFAULTS))
    from everwarm.gateway.server import serve as run

    if model is not None and models is None and Path(model).is_dir():
        model, models = None, model
    require((model is not None) + demo + (models is not None) == 1, "give a GGUF file, --models for many, or --demo")
    require(
        not options.allow_pull or (models == hub.PREFIX and not options.offline),
        "--allow-pull needs --models hf:, which serves all of the Hugging Face cache, and no --offline",
    )
    require(models is None or options.mmproj is None, "--mmproj is for one model; with --models give each its own")
    console = Console(stderr=True)
    _set_environment(options)
    _tell_unused_gpu(console)
    if models is not None:
        return _serve_many(models, options, console)
    catalog = _single(model, options, console)
    return run(lambda: catalog, PoolLimits(), options.server(), console)


def _serve_many(source: str, options: ServeOptions, console: Console) -> int:
    from everwarm.cli.models import downloads
    from everwarm.gateway.server import serve as run

    require(options.template() is None, "a chat template is for one model; with --models give each its own")
    require(options.mmproj_auto, "--no-mmproj-auto is for one model; with --models leave out the projectors")
    read_again = partial(
        discover, source, options.engine(), default=options.models_default, state_dir=options.state_dir
    )
    with downloads(console) as resolve:
        found = read_again(resolve=resolve)
    return run(read_again, options.limits(found), options.server(), console, autoload=options.models_autoload)


def _tell_unused_gpu(console: Console) -> None:
    from everwarm.backend import installed

    if not os.environ.get("EVERWARM_LIBLLAMA") and sys.platform == "linux":  # on macOS the wheel has Metal
        nvidia, amd = installed.nvidia_gpus(), installed.amd_gpus()
        hint = installed.unused_gpu(nvidia, amd, installed.used_kind(), installed.all_backends())
        if hint is not None:
            console.print(hint, style="yellow", markup=False, highlight=False)


def _set_environment(options: ServeOptions) -> None:
    """Sets variables that are read later: by the log of every process, and by huggingface_hub."""
    if options.log_level is not None:
        os.environ[LEVEL_VARIABLE] = options.log_level
    if options.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _require_known_variables() -> None:
    """Refuse a misspelt variable, which would otherwise be ignored; name one that is llama-server's and not known."""
    for name in unknown_variables(os.environ):
        Console(stderr=True).print(f"everwarm: {name} is ignored: llama-server has no such variable", style="yellow")
    given = sorted(name for name in os.environ if name.startswith(VARIABLES))
    if not given:  # most often; the list of all options takes a while to make
        return
    import difflib

    arguments = app["serve"].assemble_argument_collection()
    flags = (name for argument in arguments for name in argument.names if name not in argument.negatives)
    known = {flag.lstrip("-").replace("-", "_").upper() for flag in flags if flag.startswith("--")}
    for name in (name for name in given if name.removeprefix(VARIABLES) not in known):
        near = difflib.get_close_matches(name.removeprefix(VARIABLES), known, 1)
        hint = f"did you mean {VARIABLES}{near[0]}?" if near else "`everwarm serve --help` lists the options"
        raise BadRequest(f"the environment has {name}, which is no option; {hint}")


def _serve_cluster(config: Path, *, is_alone: bool) -> int:
    require(is_alone, "--ray takes everything from its file; give no model and no other flags")
    try:
        from everwarm.ray.deploy import run
    except ModuleNotFoundError as error:
        raise BadRequest(f"{error}; install everwarm[ray]") from None
    return run(config)


def _single(model: str | None, options: ServeOptions, console: Console) -> Catalog:
    mmproj: Path | None
    if model is not None and model.startswith(hub.PREFIX):
        from everwarm.cli.models import downloads

        with downloads(console) as resolve:
            there = resolve(model)
        path, name, mmproj = there.path, there.id, there.mmproj
    else:
        path = EMBEDDED_MODEL if model is None else Path(model)
        name, mmproj = path.stem, projector_beside(path)
    return only(
        path,
        options.engine(None if options.ctx_size else _trained_context(path)),
        *(options.aliases or (name,))[:1],
        mmproj=mmproj if options.mmproj_auto else None,
        aliases=options.aliases,
        tags=tuple(dict.fromkeys(listed(options.tags))),
        template=options.template(),
        ttl_s=options.idle_limit_s,
    )


def _trained_context(path: Path) -> int | None:
    return read_header(path).number("context_length")


@app.command
def config(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    show: bool = True,
) -> None:
    """Check and show the settings that `serve` would use, from its flags, environment and file.

    What is printed is a file for `EVERWARM_CONFIG` that gives the same settings. Keys are left out.

    Parameters
    ----------
    show
        Print the settings; with --no-show they are only checked.
    """
    from everwarm.cli.config_file import as_toml

    _require_known_variables()
    _, bound, *_ = app.parse_args(["serve", *our_line(tokens, ServeOptions)], exit_on_error=True)
    options: ServeOptions = bound.arguments.get("options", DEFAULTS)
    options.engine()
    options.server()
    if show:
        given = {name: value for name, value in bound.arguments.items() if name != "options"}
        print(as_toml("serve", given | dataclasses.asdict(options), SECRET), end="")


@app.command
def chat(
    where: str | None = None,
    *,
    demo: bool = False,
    model: str | None = None,
    system: str | None = None,
    api_key: str | None = None,
    temperature: float = 0.7,
    max_tokens: int = 1024,
) -> int:
    """Chat with a model. After each reply it shows how much of the prompt was reused and how much was read.

    Parameters
    ----------
    where
        A GGUF file, or the URL of a running server; default: http://127.0.0.1:8080.
    demo
        Chat with the embedded everwarm-tiny.
    model
        Which of the server's models, if it has several.
    system
        A system message.
    api_key
        The server's API key.
    temperature
        How freely the model chooses words; 0: always the likeliest.
    max_tokens
        The longest reply.
    """
    from everwarm.cli.chat.session import chat_locally, chat_with
    from everwarm.cli.models import DEFAULT_URL
    from everwarm.gateway.client import Client

    require(where is None or not demo, "give a GGUF file or a URL, or --demo for the embedded model")
    if demo or (where is not None and not where.startswith(("http://", "https://"))):
        return chat_locally([where or "--demo"], system, temperature, max_tokens)
    return chat_with(Client(where or DEFAULT_URL, api_key), model, system, temperature, max_tokens)


@app.command
def top(
    *,
    url: str = "http://127.0.0.1:8080",
    api_key: str | None = None,
    model: str | None = None,
    once: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Watch a running server: slots, tiers, what was reused, and the last requests. End with q or Ctrl-C.

    Parameters
    ----------
    url
        The server's address.
    api_key
        The server's API key.
    model
        Which of its models to show; default: the only one, or one that is loaded.
    once
        Print the screen once and end.
    """
    from everwarm.cli import top
    from everwarm.gateway.client import Client

    return (top.print_once if once else top.top)(Client(url, api_key), model, Console())


@app.command
def demo(*, model: Path | None = None) -> None:
    """Show what Everwarm does: conversations that lose their slot, edits, branches and retries; only new text is read.

    Parameters
    ----------
    model
        A GGUF file to use instead of the embedded everwarm-tiny. It needs a chat template.
    """
    from everwarm.demo.tour import run_tour  # late, because libllama takes a moment to load

    run_tour(Console(), model)


def _our_tokens(tokens: list[str]) -> list[str]:
    """The command line, with llama-server's flags of ``serve`` turned into ours."""
    tokens = ["--help" if token in (HELP_ALL, HELP_ENV) else token for token in tokens]
    return ["serve", *our_line(tokens[1:], ServeOptions)] if tokens[:1] == ["serve"] else tokens


def main() -> None:
    gc.set_threshold(50_000, 20, 50)  # loading modules makes many objects and no garbage
    if set(sys.argv[1:]) <= {"--help", "-h"}:
        for name in (*_LATER, *_OF_MODELS):
            app[name]  # loads it: the list of commands shows its help
    try:
        if os.environ.get("EVERWARM_CONFIG"):
            from everwarm.cli.config_file import require_known_keys

            require_known_keys(app, Path(os.environ["EVERWARM_CONFIG"]))
        sys.exit(app(_our_tokens(sys.argv[1:])))
    except BrokenPipeError:  # the output goes to a program like head, which has ended
        os._exit(0)
    except (EverwarmError, ValueError, OSError) as error:
        console = Console(stderr=True)
        message = f"everwarm: {_in_words(error)}"
        console.print(message, style="red", markup=False, highlight=False, soft_wrap=not console.is_terminal)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _in_words(error: Exception) -> str:
    from everwarm.cli.config_file import in_words_of_flags

    is_of_serve = isinstance(error, BadRequest) and sys.argv[1:2] in (["serve"], ["config"])
    return in_words_of_flags(str(error), app["serve"]) if is_of_serve else str(error)
