"""``everwarm backend``: builds of libllama for this machine's GPU or CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from everwarm.backend import compiling, installed, source_archive
from everwarm.backend.installed import Kind
from everwarm.config import default_threads, require, size_text
from everwarm.llama.abi import BUILD

backend = cyclopts.App(
    name="backend",
    help="""Build libllama for this machine's GPU or CPU, and choose which build is used.

    The wheel's libllama runs on every CPU with AVX2 and on no GPU. `install` builds the same version for this machine, from
    the pinned source, and `serve` uses it from then on.
    """,
)


@backend.command
def install(
    kind: Kind,
    *,
    archive: Path | None = None,
    build_dir: Path | None = None,
    jobs: int | None = None,
    cuda_architectures: str = "native",
) -> None:
    """Build libllama for this machine and use it from now on. A build that failed is continued.

    Parameters
    ----------
    kind
        cuda (NVIDIA), vulkan (needs its SDK), or native: this CPU's own instructions.
    archive
        The source archive, for a machine without a network; default: pip downloads it.
    build_dir
        Compile in this folder and keep it: the next build there compiles only what changed; default: a folder that is
        removed when all is done.
    jobs
        How many compilers run at once; default: as many as there are CPUs.
    cuda_architectures
        The number of the card that it is built for, like 90; default: the card of this machine.
    """
    n_jobs = default_threads() if jobs is None else jobs
    require(1 <= n_jobs <= 1024, f"--jobs is {jobs}; give 1 to 1024")
    require(
        cuda_architectures.replace(";", "").replace("-", "").isalnum(), "--cuda-architectures takes numbers like 90"
    )
    console = Console(stderr=True)
    with _progress(console, kind) as progress:
        # before the download, so that a missing tool is reported at once
        tools = compiling.find_tools(kind, installed.backends_directory() / ".tools", progress)
        source = archive or _fetched(progress)
        place = compiling.install(
            kind,
            BUILD,
            source,
            tools,
            progress,
            jobs=n_jobs,
            architectures=cuda_architectures,
            kept=build_dir,
        )
    installed.use(kind, BUILD)
    console.print(f"libllama {BUILD} for {kind} is in {place}, and is used from now on", highlight=False, markup=False)


def _fetched(progress: compiling.Progress) -> Path:
    progress("fetching the source", 0.0)
    return source_archive.fetch(installed.backends_directory() / ".source")


@contextmanager
def _progress(console: Console, kind: Kind) -> Iterator[compiling.Progress]:
    """A bar in a terminal; elsewhere a line for each tenth."""
    if not console.is_terminal:
        reported: set[tuple[str, int]] = set()

        def tell(doing: str, done: float) -> None:
            if (doing, int(done * 10)) not in reported:
                reported.add((doing, int(done * 10)))
                console.print(f"{doing}: {done:.0%}", highlight=False, markup=False)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(kind, total=1.0)
        yield lambda doing, done: bar.update(task, description=doing, completed=done)


@backend.command(name="list")
def list_backends() -> None:
    """List the builds of libllama; a star marks the one that is used."""
    used = installed.used_kind()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "name", "libllama", "size", "folder"):
        table.add_column(title, overflow="fold")
    table.add_row("*" if used is None else "", installed.WHEEL, BUILD, "", "")
    for one in installed.all_backends():
        is_used = one.kind == used and one.build == BUILD
        table.add_row("*" if is_used else "", one.kind, one.build, size_text(one.n_bytes), str(one.folder))
    console = Console(highlight=False)
    console.print(table)
    if os.environ.get("EVERWARM_LIBLLAMA"):
        console.print("EVERWARM_LIBLLAMA is set, and wins over all of them")


@backend.command
def use(name: str) -> None:
    """Choose the build that servers load from their next start on.

    Parameters
    ----------
    name
        cuda, vulkan, native, or wheel for the one that was installed with Everwarm.
    """
    installed.use(name, BUILD)
    Console().print(f"{name} is used from the next start on", highlight=False, markup=False)


@backend.command
def remove(name: Annotated[str, Parameter(help="cuda, vulkan or native")]) -> None:
    """Delete a build."""
    Console().print(f"{name}: {size_text(installed.remove(name))} freed", highlight=False, markup=False)
