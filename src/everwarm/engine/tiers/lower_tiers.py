"""The tiers below RAM as one, with a thread of its own that opens them (``open_tiers``), writes, and heals the disk.

What is handed over is found and read like what is written. The thread hashes, writes and syncs. Decides nothing:
``tier_writer`` says what is written, ``loader`` what is read.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from everwarm.engine.tiers.open_tiers import OpenTiers
from everwarm.engine.tiers.packing import Job
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import are_sound, name_of
from everwarm.state.tier import DiskTier, PartReader

log = logging.getLogger("everwarm.tiers")

OPEN_S = 2.0  # how long a start waits for the directory; the digest of a model seen for the first time may take longer
MAX_QUEUED = 1 << 30  # bytes that wait to be written stay in RAM, beyond its budget

Done = Callable[[], object]


@dataclass(eq=False)
class LowerTiers(OpenTiers):
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


def _as_indexed(job: Job) -> IndexedObject:
    head = job.header
    span = (head.kind, head.key, head.n_items, job.size, head.needs)
    return IndexedObject(name_of(head), *span, time.time(), 0, head.space, head.reaches)
