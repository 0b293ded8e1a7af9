"""``everwarm pull``, ``list``, ``rm``, ``ps``, ``run`` and ``stop``: models by name, on disk and in a running server.

Models of the Hub lie in the Hugging Face cache, which other programs share.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from everwarm.config import size_text
from everwarm.demo import EMBEDDED_MODEL
from everwarm.errors import EverwarmError, ModelFileError
from everwarm.gateway.client import Client
from everwarm.gateway.ollama.models import size_text as count_text
from everwarm.router.catalog import hub
from everwarm.router.catalog.catalog import Resolve
from everwarm.router.catalog.gguf_header import read_header
from everwarm.types import Json

_DAY_S = 86_400
DEFAULT_URL = "http://127.0.0.1:8080"

HubModelName = Annotated[str, Parameter(help="`owner/repo` or `owner/repo:QUANT`, with or without `hf:` before it")]
Url = Annotated[str, Parameter(help="the server's address")]
ApiKey = Annotated[str | None, Parameter(help="the server's API key")]


@contextlib.contextmanager
def downloads(console: Console) -> Iterator[Resolve]:
    """Finds models of the Hub in the local cache, and downloads those that are not there."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with shown as bar:

        def resolve(name: str) -> hub.HubModel:
            task = bar.add_task(name, total=None, visible=False)
            return hub.resolve(name, lambda done, total: bar.update(task, completed=done, total=total, visible=True))

        yield resolve


def pull(name: HubModelName) -> None:
    """Download a model from the Hugging Face Hub. A download that was interrupted continues where it stopped."""
    console = Console(stderr=True)
    with downloads(console) as resolve:
        model = resolve(name)
    projector = ", with its projector for images" if model.mmproj else ""
    console.print(f"{model.id}: {size_text(model.n_bytes)}{projector}", highlight=False, markup=False)
    console.print(f"  everwarm run hf:{model.id}", style="dim", highlight=False, markup=False)


def list_models() -> None:
    """List the models that can be served by name: the embedded one, and those in the Hugging Face cache."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("name", "family", "parameters", "size", "added"):
        table.add_column(title, justify="right" if title in ("parameters", "size") else "left", overflow="fold")
    table.add_row("--demo", *_facts(EMBEDDED_MODEL), size_text(EMBEDDED_MODEL.stat().st_size), "")
    for model in hub.cached_models():
        table.add_row(f"hf:{model.id}", *_facts(model.path), size_text(model.n_bytes), _ago(model.path))
    Console(highlight=False).print(table)


def remove(name: HubModelName) -> None:
    """Delete a model from the Hugging Face cache. Its conversations stay on disk: `everwarm cache prune` frees those."""
    n_bytes = hub.remove(name)
    Console().print(f"{name}: {size_text(n_bytes)} freed", highlight=False, markup=False)


def show_loaded(*, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Show the models that a running server has in memory, and how many requests each is running."""
    loaded = [model for model in Client(url, api_key).get("/v1/models")["data"] if _state(model) != "unloaded"]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("name", "state", "parameters", "context", "running", "waiting"):
        table.add_column(title, justify="left" if title in ("name", "state") else "right", overflow="fold")
    for model in loaded:
        n_params = model.get("meta", {}).get("n_params", 0)
        counts = (f"{model.get('max_tokens', 0):,}", str(model["n_running"]), str(model["n_waiting"]))
        table.add_row(str(model["id"]), _state(model), count_text(n_params), *counts)
    Console(highlight=False).print(table if loaded else "no model is in memory")


def run(
    model: str,
    *,
    system: str | None = None,
    temperature: float = 0.7,
    max_tokens: int = 1024,
) -> int:
    """Chat with a model: download it if need be, serve it on a free port, and stop the server at the end.

    Parameters
    ----------
    model
        A GGUF file, or `hf:owner/repo[:quant]` for a model of the Hugging Face Hub.
    system
        A system message.
    temperature
        How freely the model chooses words; 0: always the likeliest.
    max_tokens
        The longest reply.
    """
    from everwarm.cli.chat.session import chat_locally

    if Path(model).is_file():
        return chat_locally([model], system, temperature, max_tokens)
    if not model.startswith(hub.PREFIX) and (model.endswith(".gguf") or "/" not in model):
        raise ModelFileError(f"there is no file {model}; give a GGUF file, or hf:owner/repo for a model of the Hub")
    with downloads(Console(stderr=True)) as resolve:
        found = resolve(model)
    return chat_locally([f"{hub.PREFIX}{found.id}"], system, temperature, max_tokens)


def stop(model: str, *, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Take a model out of a running server's memory. Its conversations are kept, and warm when it is loaded again.

    Parameters
    ----------
    model
        Its name, as `everwarm ps` shows it.
    """
    client = Client(url, api_key)
    names = [str(one["id"]) for one in client.get("/v1/models")["data"]]
    if model not in names:
        raise EverwarmError(f"{url} has no model {model!r}; it has {', '.join(names) or 'none'}")
    client.post("/models/unload", {"model": model})
    Console().print(f"{model} is being unloaded", highlight=False, markup=False)


def _state(model: Json) -> str:
    return str(model["status"]["value"])


def _facts(path: Path) -> tuple[str, str]:
    """Family and number of parameters, or that the file cannot be read."""
    try:
        header = read_header(path)
    except ModelFileError:
        return "unreadable", ""
    return header.architecture or "unknown", count_text(header.n_params)


def _ago(path: Path) -> str:
    days = int((time.time() - path.stat().st_mtime) / _DAY_S)
    if days <= 0:
        return "today"
    return "yesterday" if days == 1 else f"{days} days ago"
