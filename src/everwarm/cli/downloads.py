"""A progress bar for each model that has to be downloaded from the Hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console

from everwarm.router.catalog import hub
from everwarm.router.catalog.catalog import Resolve


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
