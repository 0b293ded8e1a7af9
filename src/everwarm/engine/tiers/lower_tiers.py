"""The tiers below RAM as one: the disk, then the remote store, with a thread of their own that opens them, writes,
and heals a degraded disk.

What is handed over is found and read like what is written. The thread hashes, writes and syncs. Where no tier is
configured nothing is opened, and a tier that is off stands in. Decides nothing: ``tier_writer`` says what is written,
``loader`` what is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everwarm.config import read_key
from everwarm.engine.settings import DISK_FREE_SHARE, RemoteSettings, StoreSettings
from everwarm.engine.stats import Speed
from everwarm.engine.tiers.packing import Job
from everwarm.errors import EngineStopped, EverwarmError
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key
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
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import are_sound, name_of
from everwarm.state.tier import DiskTier, Dropped, OnPrompts, PartReader, Selection, SharedTier
from everwarm.types import Blob

log = logging.getLogger("everwarm.tiers")

RETRY_S = (1.0, 30.0)  # the first and the longest wait before a degraded disk tier is tried again
WORTH_WRITING = 0.1  # by how much the speed has to change, before a folder says so
_MIB = 1 << 20
OPEN_S = 2.0  # how long a start waits for the directory; the digest of a model seen for the first time may take longer
MAX_QUEUED = 1 << 30  # bytes that wait to be written stay in RAM, beyond its budget

Done = Callable[[], object]


@dataclass(eq=False)
class LowerTiers:
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

    def __post_init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | Done | None] = queue.SimpleQueue()
        self._on_the_way: dict[str, Job] = {}  # what waits to be written, by name
        self._n_sent = 0  # bytes; counted by the loop's thread
        self._n_done = 0  # bytes; counted by the own thread
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everwarm-tiers", daemon=True)
        self._thread.start()
        self._opened.wait(OPEN_S)

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

    @property
    def is_opening(self) -> bool:
        """What is on disk is not known yet, perhaps because a large model's digest takes its time."""
        return not self._opened.is_set()

    def wait_open(self, seconds: float) -> None:
        self._opened.wait(seconds)

    @property
    def is_unsettled(self) -> bool:
        """Whether something may have to be written soon although no request comes."""
        is_well = self.degraded is None and not self.is_healing and not self.has_healed.is_set()
        return self.is_opening or self.is_behind or not is_well

    def take_healed(self) -> bool:
        """True once after the disk tier has come back: what was offered before may not be there."""
        if not self.has_healed.is_set():
            return False
        self.has_healed.clear()
        return True

    @property
    def is_behind(self) -> bool:
        """Whether too much waits to be written: turns stay in RAM until the disk has caught up."""
        return self.n_waiting_bytes > MAX_QUEUED

    @property
    def takes_more(self) -> bool:
        return not self.is_opening and not self.is_behind

    @property
    def n_waiting_bytes(self) -> int:
        """Handed over and not written yet."""
        return self._n_sent - self._n_done

    def disk_has_room(self, n_bytes: int) -> bool:
        """Whether the disk takes so many bytes more, beside what waits for it, without evicting anything."""
        return self.disk.degraded is None and self.disk.has_room(n_bytes + self.n_waiting_bytes)

    # finding

    def find(self, root: str, prompt: Prompt, most: int) -> IndexedObject | None:
        """The deepest state that these items begin with, of at most so many of them: on disk, or waiting to be
        written."""
        kept = self.disk.find(root, prompt, most)
        n_kept = 0 if kept is None else kept.n_items
        jobs = [job for job in list(self._on_the_way.values()) if job.header.kind == "state"]
        waiting = {job.header.key: job for job in jobs if n_kept < job.header.n_items <= most}
        named = keys(root, prompt, {job.header.n_items for job in waiting.values()}) if waiting else {}
        found = (waiting[named[n]] for n in sorted(named, reverse=True) if named[n] in waiting)
        job = next(found, None)
        return kept if job is None else _as_indexed(job)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[PartReader]:
        """Opens an object, on disk or waiting to be written."""
        job = self._on_the_way.get(name)
        if job is not None:
            yield job
        else:
            with self.disk.reading(name) as reader:
                yield reader

    def is_known(self, name: str) -> bool:
        """Whether an object and everything it needs is on disk, or waits to be written."""
        return name in self._on_the_way or self.disk.has(name)

    # writing and forgetting

    def put(self, job: Job) -> None:
        """Hands an object to the thread, unless it is known."""
        name = name_of(job.header)
        if not self.is_known(name):
            self._on_the_way[name] = job
            self._n_sent += job.size
            self._jobs.put(job)

    def after_all(self, job: Done) -> None:
        """Run a job on the disk's thread, when everything offered so far is durable or has failed."""
        self._jobs.put(job)

    def forget(self, prompt: Prompt, namespace: str, beyond: int) -> None:
        """Forgets the states of a prompt after ``beyond`` items, and waits until they are gone from the disk."""
        what = self.on_prompts(namespace, (prompt,), beyond)
        self.remote.forget(what)
        self.require_disk()
        self.flush()  # what is still on its way would come back
        self.disk.forget(what)

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

    def catch_up(self) -> bool:
        """Waits for a disk that is behind, so that it takes more. False: it does."""
        is_behind = self.is_behind
        if is_behind:
            self.flush()
        return is_behind and not self.is_behind

    def flush(self) -> None:
        """Wait until everything offered is durable or has failed."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def flush_all(self) -> None:
        """The same, and waits for what was offered to the remote store, if that answers in time."""
        self.flush()
        if not self.remote.flush():
            log.warning("not everything was written to the remote store in time")

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        for tier in reversed(self.all):
            tier.close()

    # the thread

    def _run(self) -> None:
        self.open_all()
        self._opened.set()
        while True:
            try:
                job = self._jobs.get(timeout=self.retry_in_s())
            except queue.Empty:
                self.heal()
                continue
            if job is None:
                return
            if self.retry_in_s() == 0.0:  # a queue that is never empty does not time out
                self.heal()
            self.note_speed()
            if callable(job):
                self._call(job)
            else:
                self._put(self.disk, job)
            del job  # and what it would write

    @staticmethod
    def _call(job: Done) -> None:
        """Whatever it raises, others wait for this thread."""
        try:
            job()
        except Exception:
            log.exception("a job beside the disk tier's writing failed")

    def _put(self, disk: DiskTier, job: Job) -> None:
        try:
            if are_sound(job.parts.values(), self.is_sound):
                disk.put(job.header, job.parts)
        except Exception:
            log.exception("an object was not kept")  # a caller of ``flush`` must not wait for ever
        self._n_done += job.size
        self._on_the_way.pop(name_of(job.header), None)

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


def _as_indexed(job: Job) -> IndexedObject:
    head = job.header
    span = (head.kind, head.key, head.n_items, job.size, head.needs)
    return IndexedObject(name_of(head), *span, time.time(), 0, head.space, head.reaches)
