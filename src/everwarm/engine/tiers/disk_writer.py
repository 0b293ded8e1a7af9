"""From the tree to the disk and the remote store: what of a finished turn is written; ``fetch`` is the way back.

A turn writes the KV that is new and one state, and the states of crossings once. Everything here may fail without harm:
then a prompt is read again. The loop's thread decides and reads; one thread of its own hashes, writes and syncs.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from everwarm.engine.cache.checkpointing import Keeper
from everwarm.engine.cache.shared_points import is_worth_it, shared_points
from everwarm.engine.settings import RemoteSettings, StoreSettings
from everwarm.engine.slots import Slot
from everwarm.engine.tiers.disk_pins import PinBoard, PinnedDisk, pinned_below
from everwarm.engine.tiers.model_folder import ModelFolder
from everwarm.engine.tiers.packing import Job, Packing
from everwarm.engine.tiers.ram import Ram
from everwarm.errors import EngineStopped, EverwarmError
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key
from everwarm.state.policy import CutKind
from everwarm.state.store.disk import Disk
from everwarm.state.store.folder_meta import NOWHERE, find_foreign_prompts, folder_name
from everwarm.state.store.object import are_sound, name_of
from everwarm.state.tree import Node
from everwarm.types import Blob

if TYPE_CHECKING:
    from everwarm.engine.tiers.remote_writer import RemoteWriter
    from everwarm.state.remote.remote_tier import RemoteTier

log = logging.getLogger("everwarm.archive")

RETRY_S = (1.0, 30.0)  # the first and the longest wait before a degraded disk tier is tried again
OVERDUE_S = 1.0  # after its end a turn is handed to the disk's thread, whoever else runs
OPEN_S = 2.0  # how long a start waits for the directory; the digest of a model seen for the first time may take longer
MAX_DUE = 4096  # turns that wait for the disk to catch up
MAX_QUEUED = 1 << 30  # bytes that wait to be written stay in RAM, beyond its budget
FREE_SHARE = 0.8  # of the file system's free space, whatever the budget says
_MIB = 1 << 20

Done = Callable[[], object]


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A conversation at the end of a turn: enough to know what the next one goes on from."""

    end: Node
    stable: int | None
    n_asked: int  # beyond it lies what was read ahead
    ended_at: float

    @classmethod
    def of(cls, slot: Slot, ended_at: float) -> FinishedTurn:
        return cls(slot.node, slot.stable, int(slot.content.common_prefix(slot.node.path)), ended_at)


class DiskWriter:
    def __init__(
        self,
        settings: StoreSettings | None,
        fingerprint: Callable[[], str],
        keeper: Keeper,
        ram: Ram,
        words: Callable[[Prompt], str] = lambda _: "",
        remote: RemoteSettings | None = None,
        is_right: Callable[[], bool] = lambda: True,
    ) -> None:
        """``is_right`` says whether everything that was captured until now may be written down, for any process to use."""
        self._settings = settings
        self._remote_settings = remote
        self._keeper = keeper
        self._ram = ram
        self._is_right = is_right
        self._packing = Packing(keeper, words)
        self.pins = PinBoard(
            keeper.tree, ram, lambda: None if self.disk is None else PinnedDisk(self.disk, self.fingerprint)
        )
        self._is_always = settings is not None and settings.restore_policy == "always"
        self.fingerprint = ""
        self._jobs: queue.SimpleQueue[Job | Done | None] = queue.SimpleQueue()
        self._on_the_way: set[str] = set()
        self._n_sent = self._n_done = 0  # bytes; each is counted by one thread
        self._due: dict[
            int, FinishedTurn
        ] = {}  # turns that were not handed over yet, by the id of their end, oldest first
        self._writing: dict[int, float] = {}  # when those ended that were
        self._opened = threading.Event()
        self.disk: Disk | None = None
        self.trouble: str | None = None  # why there is no disk tier although one was asked for
        self.sharer: RemoteWriter | None = None
        self.elsewhere = NOWHERE
        self._signature: ModelFolder | None = None
        self._retry_at: float | None = None
        self._retry_wait_s = RETRY_S[0]
        self._is_healing = False
        self._has_healed = threading.Event()  # what was offered meanwhile is to be offered again
        self._thread = threading.Thread(target=self._run, args=(fingerprint,), name="everwarm-archive", daemon=True)
        self._thread.start()
        self._opened.wait(OPEN_S)

    @property
    def is_opening(self) -> bool:
        """Not known yet what is on disk, perhaps because a large model's digest takes its time."""
        return not self._opened.is_set()

    @property
    def is_unsettled(self) -> bool:
        """There may be something to write soon although nobody asks for anything."""
        is_well = self.degraded is None and not self._is_healing and not self._has_healed.is_set()
        return self.is_opening or self.is_behind or not is_well

    @property
    def degraded(self) -> str | None:
        """Why the disk tier does not do all that was asked of it; None: it does, or none was asked for."""
        return self.trouble if self.disk is None else self.disk.degraded

    def wait_open(self, seconds: float) -> None:
        self._opened.wait(seconds)

    @property
    def remote(self) -> RemoteTier | None:
        return None if self.sharer is None else self.sharer.remote

    def stats(self) -> dict[str, float]:
        disk = self.disk
        shared = {} if self.remote is None else self.remote.stats()
        if disk is None:
            degraded = {} if self._settings is None else {"disk_is_degraded": float(self.degraded is not None)}
            return shared | degraded
        shown: dict[str, float] = {f"disk_{name}": value for name, value in dataclasses.asdict(disk.counts).items()}
        sizes = {"disk_bytes": disk.n_bytes, "disk_budget_bytes": disk.budget_bytes}
        state = {"disk_is_degraded": disk.degraded is not None, "disk_lag_s": self.lag_s(time.monotonic())}
        return {**shared, **shown, **sizes, **state}

    def lag_s(self, now: float) -> float:
        """How long ago the oldest turn ended that is not on disk yet."""
        ends = [*(turn.ended_at for turn in self._due.values()), *list(self._writing.values())]
        return max(0.0, now - min(ends, default=now))

    def has(self, name: str) -> bool:
        """Whether an object and everything it needs is on disk."""
        return self.disk is not None and self.disk.is_whole(name)

    @property
    def is_behind(self) -> bool:
        """The disk is slower than what is to be written: turns wait in RAM until it has caught up."""
        return self._n_sent - self._n_done > MAX_QUEUED

    # keeping

    def tidy(self, slots: Sequence[Slot]) -> bool:
        """One piece of idle work: offer a finished turn to the disk. False: there is none, or not yet."""
        if self.is_opening or self.is_behind:
            return False
        self._offer_again(slots)
        for slot in slots:
            if slot.is_idle and slot.is_tidy and not slot.is_archived:
                slot.is_archived = True
                self.offer(slot)
                return True
        return self._offer_due(time.monotonic())

    def _offer_again(self, slots: Sequence[Slot]) -> None:
        """What was offered while the disk tier was degraded may not have been written."""
        if self._has_healed.is_set():
            self._has_healed.clear()
            for slot in slots:
                slot.is_archived = False

    def tidy_overdue(self, slots: Sequence[Slot], now: float) -> None:
        """The same for a turn that ended a while ago, while others run: an engine with much to do is never idle."""
        if self.is_opening or self.is_behind:
            return
        for slot in slots:
            is_due = slot.is_idle and not slot.is_archived and now - slot.used_at > OVERDUE_S
            if is_due and slot.n_fed:
                slot.is_archived = True
                self._copy_down(slot)
                self.offer(slot)
                return
        self._offer_due(now - OVERDUE_S)

    def note_end(self, slot: Slot, ended_at: float) -> None:
        """A turn has ended, and is in RAM: it is handed over in time, also if its slot is needed again before."""
        if self._settings is not None:
            self._due.pop(slot.node.id, None)
            self._due[slot.node.id] = FinishedTurn.of(slot, ended_at)
            while len(self._due) > MAX_DUE:
                del self._due[next(iter(self._due))]

    def offer_ended(self, slot: Slot) -> str | None:
        """A turn that has no room in RAM, and all others that wait there; returns the name of its object on disk."""
        if self.is_opening or self.is_behind:
            return None
        slot.is_archived = True
        name = self.offer(slot)
        while self._offer_due(time.monotonic()):
            pass
        return name

    def _offer_due(self, until: float) -> bool:
        """The oldest turn, if it ended before then. False: there is none."""
        turn = next(iter(self._due.values()), None)
        if turn is None or turn.ended_at > until:
            return False
        del self._due[turn.end.id]
        if self._keeper.tree.has(turn.end):
            self._offer(turn)
        return True

    def _copy_down(self, slot: Slot) -> None:
        """To RAM, as idle work would: the one state that the next turn needs, and the KV before it."""
        node = _point(slot.node.lineage()) or slot.node
        if node.checkpoint is not None and node.checkpoint.parked is not None:
            self._keeper.copy_down(node)
        if self._keeper.context.kind.has_attention:
            self._keeper.save_lineage(slot.seq, node.lineage())

    def offer(self, slot: Slot) -> str | None:
        """Write what the next turn will need of the slot's lineage, as far as it is not there yet; returns the name of the
        object that makes it whole."""
        due = self._due.pop(slot.node.id, None)
        return self._offer(FinishedTurn.of(slot, slot.used_at if due is None else due.ended_at))

    def _offer(self, turn: FinishedTurn) -> str | None:
        disk, sharer, end, name = self.disk, self.sharer, turn.end, None
        if end.root().is_volatile:
            return None
        if disk is not None:
            self.pins.renew(self._keeper.tree.namespace(end), end.path, end.n_items)
            for pinned in [n for n in end.lineage() if n.is_pinned]:
                self.keep_pinned(pinned)
        node = None if disk is None and sharer is None else self._worth_writing(turn)
        if node is not None and disk is not None:
            self._writing[end.id] = turn.ended_at
            name = self._keep(disk, node)
            self._keep_crossings(disk, node)
            self._jobs.put(lambda: self._writing.pop(end.id, None))
        if node is not None and sharer is not None:
            sharer.offer(node, is_hinted=turn.stable is not None)
        return name

    def _keep_crossings(self, disk: Disk, node: Node) -> None:
        """Other conversations go on from these. Their KV is the node's, so their states are all that is new."""
        for point in shared_points(self._keeper, node):
            if is_worth_it(self._keeper, point, is_always=self._is_always):
                self._keep(disk, point)

    def keep_pinned(self, node: Node) -> None:
        """Write it down, and the point itself if it can be gone on from and is in RAM."""
        if node.root().is_volatile:
            return
        self._jobs.put(self.pins.note(node))
        state = None if node.checkpoint is None else node.checkpoint.state
        if self.disk is not None and (state is not None or not self._keeper.context.kind.needs_checkpoints):
            self._keep(self.disk, node)

    def _keep(self, disk: Disk, node: Node) -> str | None:
        """Returns the name of the state's object. None: it cannot be kept."""
        for pinned in pinned_below(node):
            self._jobs.put(self.pins.note(pinned))  # this point is on the way there
        segments = self._packing.segments(node)
        if segments is None:
            return None
        root = self._packing.root(node)

        def is_known(name: str) -> bool:
            return name in self._on_the_way or disk.is_whole(name)

        kv = self._packing.kv(root, segments, is_known)
        if kv is None:
            return None
        if self.is_behind:
            n_waiting = self._n_sent - self._n_done
            log.warning("a turn is not kept: %.0f MiB wait for the disk already", n_waiting / _MIB)
            return None
        state = self._packing.state_job(root, node, kv)
        for job in (*kv.jobs, state):
            if not is_known(name_of(job.header)):
                self._on_the_way.add(name_of(job.header))
                self._n_sent += job.size
                self._jobs.put(job)
        return name_of(state.header)

    def forget(self, prompt: Prompt, namespace: str, beyond: int) -> None:
        """Take off the disk what lies on the way of a prompt after ``beyond`` items, and KV that nobody needs then."""
        if self.remote is not None:
            self.remote.forget(root_key(self.fingerprint, namespace), prompt, beyond)
        self.require_disk()
        if self.disk is None:
            return
        self.flush()  # what is still on its way would come back
        lengths = {kept.n_items for kept in self.disk.objects() if beyond < kept.n_items <= len(prompt)}
        named = set(keys(root_key(self.fingerprint, namespace), prompt, lengths).values())
        gone = [kept for kept in self.disk.objects() if kept.kind == "state" and kept.key in named]
        for kept in gone:
            self.disk.drop(kept.name)
        needed = {name for kept in self.disk.objects() for name in kept.needs}
        for name in {name for kept in gone for name in kept.needs} - needed:
            self.disk.drop(name)

    def require_disk(self) -> None:
        """Whoever wants something forgotten must hear that what is on disk cannot be."""
        if self._settings is not None and self.disk is None:
            raise EngineStopped(
                "it is dropped from RAM, but the disk tier cannot be reached now (GET /cache has the reason), and what it "
                "keeps is not dropped: try again when it is in order"
            )

    def after_all(self, job: Done) -> None:
        """Do something on the disk's thread, when everything offered so far is durable or has failed."""
        self._jobs.put(job)

    def _worth_writing(self, turn: FinishedTurn) -> Node | None:
        """One point per turn: where the next turn will go on from, as far as anybody knows."""
        end = turn.end
        lineage = end.lineage()
        if not self._keeper.context.kind.needs_checkpoints and lineage:
            n_items = min(turn.stable or end.n_items, end.n_items, turn.n_asked)
            return self._keeper.tree.grow(end.root(), end.path, n_items) if n_items else None  # any point will do
        return _point(n for n in lineage if n.checkpoint is not None and n.checkpoint.state is not None)

    # the thread

    def flush(self) -> None:
        """Wait until everything offered is durable or has failed."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def flush_all(self) -> None:
        """The same, and what was offered to the remote store is there, too, if that answers in time."""
        self.flush()
        if self.remote is not None and not self.remote.flush():
            log.warning("not everything was written to the remote store in time")

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        if self.remote is not None:
            self.remote.close()
        if self.disk is not None:
            self.disk.close()

    def _run(self, fingerprint: Callable[[], str]) -> None:
        self.trouble = self._try("on disk", self._open, fingerprint)
        self._try("in the remote store", self._open_remote, fingerprint)
        self._opened.set()
        while True:
            try:
                job = self._jobs.get(timeout=self._retry_in_s())
            except queue.Empty:
                self._heal(fingerprint)
                continue
            if job is None:
                return
            if self._retry_in_s() == 0.0:  # somebody who always has something to write waits for nothing
                self._heal(fingerprint)
            if self._signature is not None:
                self._signature.renew()
            if callable(job):
                job()
            elif self.disk is not None:
                self._put(self.disk, job)
            del job  # and what it would write

    def _try(self, what: str, opens: Callable[[str], None], fingerprint: Callable[[], str]) -> str | None:
        """Why it cannot be opened; None: it is. Said once for as long as the reason is the same."""
        try:
            self.fingerprint = self.fingerprint or fingerprint()
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

    def _retry_in_s(self) -> float | None:
        """None: all is well."""
        if self.degraded is None:
            self._retry_at, self._retry_wait_s = None, RETRY_S[0]
            return None
        if self._retry_at is None:
            self._retry_at = time.monotonic() + self._retry_wait_s
        return max(0.0, self._retry_at - time.monotonic())

    def _heal(self, fingerprint: Callable[[], str]) -> None:
        """Another server may have gone, a file system may be writable again."""
        self._is_healing = True
        if self.disk is None:
            self.trouble = self._try("on disk", self._open, fingerprint)
        else:
            self.disk.probe()
        self._retry_at, self._retry_wait_s = None, min(2 * self._retry_wait_s, RETRY_S[1])
        if self.degraded is None:
            log.info("the disk tier is in order again")
            self._has_healed.set()
        self._is_healing = False

    def _put(self, disk: Disk, job: Job) -> None:
        try:
            if are_sound(job.parts.values(), self._is_sound):
                disk.put(job.header, job.parts)
        except Exception:
            log.exception("an object was not kept")  # whoever waits for a flush must not wait for ever
        self._n_done += job.size
        self._on_the_way.discard(name_of(job.header))

    def _is_sound(self, blob: Blob) -> bool:
        """Whether a part of an object may leave this process."""
        return self._ram.arena.is_sound(blob) and self._is_right()

    def _open_remote(self, fingerprint: str) -> None:
        if self._remote_settings is not None:
            from everwarm.engine.tiers.remote_writer import (
                RemoteWriter,  # loads asyncio, which only a remote store needs
            )

            self._packing.fingerprint = fingerprint
            self.sharer = RemoteWriter(self._remote_settings, self._packing, self._keeper, self._is_sound)

    def _open(self, fingerprint: str) -> None:
        if self._settings is None:
            return
        directory = Path(self._settings.directory).expanduser()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._packing.fingerprint = fingerprint
        place = directory / folder_name(fingerprint)
        share, write_bytes = self._keeper.namespace_share, self._settings.write_bytes_per_day
        disk = Disk(place, self._settings.disk_bytes, write_bytes, space_share=share)
        room = disk.n_bytes + int(FREE_SHARE * shutil.disk_usage(place).free)
        disk.budget_bytes = min(disk.budget_bytes, room)
        shown = (len(disk.names()), disk.n_bytes / _MIB, disk.budget_bytes / _MIB, place)
        log.info("%d objects on disk, %.1f of %.0f MiB, in %s", *shown)
        self.elsewhere = find_foreign_prompts(directory, fingerprint)
        self.disk = disk
        self._signature = ModelFolder(place, fingerprint, self._keeper)


def _point(lineage: Iterable[Node]) -> Node | None:
    """Where the next turn will go on from: the last stable point, else the last one that anybody asked for."""
    kept = [(n, n.checkpoint.kind) for n in lineage if n.checkpoint is not None]
    asked = [(n, kind) for n, kind in kept if kind is not CutKind.PREWARM]  # a guess is not worth the bytes
    stable = [(n, kind) for n, kind in asked if kind is CutKind.STABLE]
    best = stable or asked
    return best[-1][0] if best else None
