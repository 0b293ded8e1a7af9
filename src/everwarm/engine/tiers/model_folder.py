"""What an engine writes into its folder about its model, and what it learns from earlier engines: how fast they read.

``state.store.folder_meta`` is the format.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from everwarm.engine.speed import Speed
from everwarm.llama.context import Context
from everwarm.state.store.folder_meta import MAX_WAYS, FolderAbout, Way, read_about, write_about

log = logging.getLogger("everwarm.archive")

WORTH_WRITING = 0.1  # by how much the speed has to change


class ModelFolder:
    """Runs on the disk's thread. A failure is only logged."""

    def __init__(self, folder: Path, fingerprint: str, context: Context, speed: Speed) -> None:
        self._folder = folder
        self._speed = speed
        before = read_about(folder)
        if before is not None and before.seconds_per_token is not None:
            speed.assume(before.seconds_per_token)
        self._about = self._of_this_engine(fingerprint, before, context)
        self._write(self._about)

    def _of_this_engine(self, fingerprint: str, before: FolderAbout | None, context: Context) -> FolderAbout:
        model = context.model
        path = os.fsencode(model.path.absolute()).decode("utf-8", "replace")
        own = Way(model.options, context.options)
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
        """Stores the speed if it has changed."""
        now = self._speed.seconds_per_token
        written = self._about.seconds_per_token
        if not self._speed.n_measured or (written is not None and abs(now / written - 1) < WORTH_WRITING):
            return
        self._about = msgspec.structs.replace(self._about, seconds_per_token=now)
        self._write(self._about)

    def _write(self, about: FolderAbout) -> None:
        try:
            write_about(self._folder, about)
        except (OSError, ValueError) as error:
            log.warning("what this engine is could not be written into %s: %s", self._folder, error)
