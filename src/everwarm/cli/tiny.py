"""``everwarm tiny``: a small random model with a real architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from everwarm.demo.tiny import ARCHITECTURES, TinySpec, projector_path, write_tiny, write_tiny_projector


def tiny(
    *,
    arch: Annotated[str, Parameter(help=f"one of {', '.join(ARCHITECTURES)}")] = "qwen35",
    out: Path,
    layers: int = 8,
    width: int = 256,
    vocab: int | None = None,
    seed: int = 0,
    dtype: Literal["f32", "q8_0"] = "f32",
    vision: Annotated[bool, Parameter(negative=())] = False,
    audio: Annotated[bool, Parameter(negative=())] = False,
    mtp: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Write a small random model with a real architecture, for tests and benchmarks. The same flags give the same bytes.

    Parameters
    ----------
    out
        Where to write it, for example m.gguf.
    layers
        Number of layers; 8 or more, so that hybrid models have attention in the middle.
    width
        Embedding width, a multiple of 64.
    vocab
        Vocabulary size; what exceeds the base set are unused tokens.
    seed
        Other seeds give other weights.
    dtype
        f32, or q8_0 for large files.
    vision
        Also write a projector for images, for example mmproj-m.gguf (qwen35 and gemma3).
    audio
        Also write a projector for sounds; with ``vision`` one file does both.
    mtp
        Add an MTP head, which guesses the token after the next one (qwen35, qwen35moe, qwen3next, nemotron_h_moe).
    """
    sized = TinySpec(arch=arch, n_layers=layers, width=width, n_vocab=vocab, seed=seed, dtype=dtype)
    spec = replace(sized, vision=vision, audio=audio, mtp=mtp)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"writing {out.name}", total=None)
        size = write_tiny(out, spec, lambda done, total: progress.update(task, completed=done, total=total))
    Console().print(f"{out}: {arch}, {layers} layers, width {width}, {dtype}, {size / 1e6:.1f} MB")
    if vision or audio:
        beside = projector_path(out)
        Console().print(f"{beside}: its projector, {write_tiny_projector(beside, spec) / 1e6:.1f} MB")
