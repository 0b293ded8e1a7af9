"""The command line: parse, make frozen settings, call one function."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from rich.console import Console
from rich.progress import Progress

from everwarm import __version__
from everwarm.demo.tiny import ARCHITECTURES, TinySpec, write_tiny
from everwarm.errors import EverwarmError

app = cyclopts.App(
    name="everwarm",
    version=__version__,
    help="""An inference engine for hybrid and recurrent language models that never reads a prompt twice.

    Start with `everwarm demo`: it needs no model and takes under a minute.
    """,
)


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
    arch: Annotated[str, cyclopts.Parameter(help=f"one of {', '.join(ARCHITECTURES)}")] = "qwen35",
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
        app()
    except (EverwarmError, ValueError, OSError) as error:
        Console(stderr=True).print(f"everwarm: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
