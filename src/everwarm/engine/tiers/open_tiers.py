"""The tiers below RAM, opened: the disk, then the remote store; a disk that is degraded is tried again.

Where no tier is configured nothing is opened, and a tier that is off stands in. All of it may take long, so it runs on
the thread of ``lower_tiers``, but for what only asks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everwarm.config import read_key
from everwarm.engine.settings import DISK_FREE_SHARE, RemoteSettings, StoreSettings
from everwarm.engine.speed import Speed
from everwarm.errors import EngineStopped, EverwarmError
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import root_key
from everwarm.state.store.arena import Arena
from everwarm.state.store.disk import Disk
from everwarm.state.store.folder_meta import (
    MAX_WAYS,
    FolderAbout,
    ForeignStates,
    Way,
    find_foreign_states,
    folder_name,
    read_about,
    write_about,
)
from everwarm.state.tier import DiskTier, Dropped, OnPrompts, Selection, SharedTier
from everwarm.types import Blob

log = logging.getLogger("everwarm.tiers")

RETRY_S = (1.0, 30.0)  # the first and the longest wait before a degraded disk tier is tried again
WORTH_WRITING = 0.1  # by how much the speed has to change, before a folder says so
_MIB = 1 << 20


@dataclass(eq=False)
class OpenTiers:
    """``is_right`` says whether everything that was captured until now may be written down, for any process to use."""

    settings: StoreSettings | None
    remote_settings: RemoteSettings | None
    read_fingerprint: Callable[[], str]
    context: Context
    arena: Arena
    speed: Speed
    namespace_share: float
    is_right: Callable[[], bool]
    disk: DiskTier = field(init=False, default_factory=DiskTier)
    remote: SharedTier = field(init=False, default_factory=SharedTier)
    foreign_states: ForeignStates = field(init=False, default_factory=dict)
    fingerprint: str = field(init=False, default="")  # until the model's digest is known
    trouble: str | None = field(init=False, default=None)  # why there is no disk tier although one is configured
    is_healing: bool = field(init=False, default=False)
    has_healed: threading.Event = field(init=False, default_factory=threading.Event)  # cleared by ``take_healed``
    _model_folder: ModelFolder | None = field(init=False, default=None)
    _retry_at: float | None = field(init=False, default=None)
    _retry_wait_s: float = field(init=False, default_factory=lambda: RETRY_S[0])

    # how they are

    @property
    def all(self) -> tuple[DiskTier, SharedTier]:
        """The nearest first."""
        return self.disk, self.remote

    @property
    def is_on(self) -> bool:
        """Whether there is a tier beyond RAM now."""
        return any(tier.is_on for tier in self.all)

    @property
    def is_wanted(self) -> bool:
        """Whether one is configured."""
        return self.settings is not None or self.remote_settings is not None

    @property
    def is_disk_wanted(self) -> bool:
        return self.settings is not None

    @property
    def degraded(self) -> str | None:
        """Why the disk tier does not work as configured; None: it does, or none is configured."""
        return self.disk.degraded if self.disk.is_on else self.trouble

    def stats(self) -> dict[str, float]:
        shown = self.remote.stats() | self.disk.stats()
        if self.settings is not None and not self.disk.is_on:
            shown["disk_is_degraded"] = float(self.degraded is not None)
        return shown

    # forgetting

    def on_prompts(self, namespace: str, prompts: tuple[Prompt, ...], beyond: int) -> OnPrompts:
        return OnPrompts(root_key(self.fingerprint, namespace), prompts, beyond)

    def forget_now(self, what: Selection) -> Dropped:
        """Forgets in every tier. Runs on the disk's thread, as a job of ``after_all``: else a pending write would bring
        it back."""
        return sum((tier.forget(what) for tier in self.all), Dropped())

    def require_disk(self) -> None:
        """``EngineStopped``: a configured disk tier is not open, so what it keeps cannot be forgotten now."""
        if self.settings is not None and not self.disk.is_on:
            raise EngineStopped(
                "it is dropped from RAM, but the disk tier cannot be reached now (GET /cache has the reason), and what it "
                "keeps is not dropped: try again when it is in order"
            )

    # on the disk's thread

    def open_all(self) -> None:
        if self.settings is not None:
            self.trouble = self._try("on disk", self._open)
        if self.remote_settings is not None:
            self._try("in the remote store", self._open_remote)

    def note_speed(self) -> None:
        """Writes down what was learned of it since."""
        if self._model_folder is not None:
            self._model_folder.renew()

    def _try(self, what: str, opens: Callable[[str], None]) -> str | None:
        """Opens the tier; returns why it cannot be opened, None: it is open. A reason is logged once while it stays the
        same."""
        try:
            self.fingerprint = self.fingerprint or self.read_fingerprint()
            opens(self.fingerprint)
            return None
        except (OSError, EverwarmError) as error:
            if str(error) != self.trouble:
                log.warning("nothing is kept %s: %s", what, error)
            return str(error)
        except Exception as error:
            if str(error) != self.trouble:
                log.exception("nothing is kept %s", what)
            return str(error)

    def retry_in_s(self) -> float | None:
        """None: all is well."""
        if self.degraded is None:
            self._retry_at = None
            self._retry_wait_s = RETRY_S[0]
            return None
        if self._retry_at is None:
            self._retry_at = time.monotonic() + self._retry_wait_s
        return max(0.0, self._retry_at - time.monotonic())

    def heal(self) -> None:
        """Try a degraded tier again: another server may have gone, a file system may be writable again."""
        self.is_healing = True
        if isinstance(self.disk, Disk):
            self.disk.probe()
        else:
            self.trouble = self._try("on disk", self._open)
        self._retry_at = None
        self._retry_wait_s = min(2 * self._retry_wait_s, RETRY_S[1])
        if self.degraded is None:
            log.info("the disk tier is in order again")
            self.has_healed.set()
        self.is_healing = False

    def is_sound(self, blob: Blob) -> bool:
        """Whether a part of an object may leave this process."""
        return self.arena.is_sound(blob) and self.is_right()

    def _open_remote(self, fingerprint: str) -> None:
        assert self.remote_settings is not None
        from everwarm.state.remote.bucket import Bucket  # loads asyncio, which only a remote store needs
        from everwarm.state.remote.remote_tier import RemoteTier

        settings = self.remote_settings
        key = b"" if settings.key_file is None else read_key(settings.key_file)
        bucket = Bucket(settings.url, settings.endpoint)
        self.remote = RemoteTier(bucket, key, fingerprint, self.is_sound, settings.wait_s)

    def _open(self, fingerprint: str) -> None:
        assert self.settings is not None
        directory = Path(self.settings.directory).expanduser()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = directory / folder_name(fingerprint)
        write_bytes = self.settings.write_bytes_per_day
        share = self.namespace_share
        disk = Disk(place, self.settings.disk_bytes, write_bytes, space_share=share, free_share=DISK_FREE_SHARE)
        shown = (len(disk.names()), disk.n_bytes / _MIB, disk.budget_bytes / _MIB, place)
        log.info("%d objects on disk, %.1f of %.0f MiB, in %s", *shown)
        self.foreign_states = find_foreign_states(directory, fingerprint)
        self.disk = disk
        self._model_folder = ModelFolder(place, fingerprint, self.context, self.speed)


class ModelFolder:
    """What an engine writes into its folder about its model, and what it learns from earlier engines: how fast they read.
    Runs on the disk's thread. A failure is only logged. ``state.store.folder_meta`` is the format."""

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
            log.warning("the description of the model could not be written into %s: %s", self._folder, error)
