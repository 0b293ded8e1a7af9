"""What an engine writes into its folder about its model, and what it learns from earlier engines: how fast they read.

``state.store.folder_meta`` is the format.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from everwarm.engine.cache.checkpointing import Keeper
from everwarm.state.store.folder_meta import MAX_WAYS, FolderAbout, Way, read_about, write_about

log = logging.getLogger("everwarm.archive")

WORTH_WRITING = 0.1  # by how much the speed has to change


class ModelFolder:
    """On the disk's thread. A failure is logged and changes nothing else."""

    def __init__(self, folder: Path, fingerprint: str, keeper: Keeper, guessed_speed: float) -> None:
        """``guessed_speed``: seconds per token before anything was measured."""
        self._folder = folder
        self._keeper = keeper
        self._guessed_speed = guessed_speed
        before = read_about(folder)
        earlier = None if before is None else before.seconds_per_token
        if earlier is not None and keeper.seconds_per_token == guessed_speed:  # else it was measured while this opened
            keeper.seconds_per_token = earlier
        self._about = self._of_this_engine(fingerprint, before)
        self._write(self._about)

    def _of_this_engine(self, fingerprint: str, before: FolderAbout | None) -> FolderAbout:
        model = self._keeper.context.model
        path = os.fsencode(model.path.absolute()).decode("utf-8", "replace")
        own = Way(model.options, self._keeper.context.options)
        others = () if before is None else tuple(way for way in before.ways if way != own)
        return FolderAbout(
            fingerprint=fingerprint,
            model=Path(path).name,
            path=path,
            description=model.description,
            seconds_per_token=None if before is None else before.seconds_per_token,
            ways=(own, *others)[:MAX_WAYS],
        )

    def renew(self) -> None:
        """Write down the speed if it has changed."""
        now = self._keeper.seconds_per_token
        written = self._about.seconds_per_token
        if now == self._guessed_speed or (written is not None and abs(now / written - 1) < WORTH_WRITING):
            return
        self._about = msgspec.structs.replace(self._about, seconds_per_token=now)
        self._write(self._about)

    def _write(self, about: FolderAbout) -> None:
        try:
            write_about(self._folder, about)
        except (OSError, ValueError) as error:
            log.warning("what this engine is could not be written into %s: %s", self._folder, error)
