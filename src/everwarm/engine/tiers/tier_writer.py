"""From the tree to the disk and the remote store: decides what of a finished turn is written. ``loader`` is the way back.

A turn writes the KV that is new and one state, and the states of shared points once, from RAM or straight from the
device. What RAM evicts before it was written is handed over first, and what waits to be written is found like what is
written. Any failure here only means that a prompt is read again. The loop's thread decides and packs; a thread of its
own opens the disk tier, tries it again while it is degraded, and hashes, writes and syncs. Where no tier is configured
nothing is opened and nothing is written.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everwarm.engine.cache.provenance import is_worth_it, shared_points
from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.settings import DISK_FREE_SHARE, RemoteSettings, StoreSettings
from everwarm.engine.slots import Slot
from everwarm.engine.speed import Speed
from everwarm.engine.tiers.disk_pins import PinJob, pin_again, pin_job, pinned_below, unpin_job
from everwarm.engine.tiers.model_folder import ModelFolder
from everwarm.engine.tiers.packing import Job, Packing
from everwarm.engine.tiers.ram import Ram
from everwarm.engine.tiers.remote_writer import RemoteWriter
from everwarm.errors import EngineStopped, EverwarmError
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key
from everwarm.state.null_tiers import DiskTier, NullDisk, SharedTier
from everwarm.state.policy import PROVISIONAL, CutKind
from everwarm.state.returns import Returns
from everwarm.state.store.disk import Disk
from everwarm.state.store.folder_meta import NOWHERE, find_foreign_prompts, folder_name
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import are_sound, name_of
from everwarm.state.tier import Dropped, OnPrompts, PartReader, Selection, Tier
from everwarm.state.tree import Node, Tree
from everwarm.types import Blob

log = logging.getLogger("everwarm.archive")

RETRY_S = (1.0, 30.0)  # the first and the longest wait before a degraded disk tier is tried again
OVERDUE_S = 1.0  # after its end a turn is handed to the disk's thread, though other requests run
OPEN_S = 2.0  # how long a start waits for the directory; the digest of a model seen for the first time may take longer
MAX_DUE = 4096  # turns that wait for the disk to catch up
MAX_NAMES = 4096  # of nodes that were written
MAX_QUEUED = 1 << 30  # bytes that wait to be written stay in RAM, beyond its budget
CATCH_UP_S = 0.02  # so long RAM waits for a disk that is behind, before it evicts what was not written
_MIB = 1 << 20

Done = Callable[[], object]


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A conversation at the end of a turn: enough to know what the next one continues from."""

    end: Node
    stable: int | None
    n_turn_items: int  # items of the request and its reply; later ones were prewarmed
    ended_at: float

    @classmethod
    def of(cls, slot: Slot, ended_at: float) -> FinishedTurn:
        return cls(slot.node, slot.stable, int(slot.content.common_prefix(slot.node.path)), ended_at)


class TierWriter:
    def __init__(
        self,
        settings: StoreSettings | None,
        fingerprint: Callable[[], str],
        tree: Tree,
        context: Context,
        writer: RamWriter,
        ram: Ram,
        speed: Speed,
        returns: Returns,
        *,
        words: Callable[[Prompt], str] = lambda _: "",
        remote: RemoteSettings | None = None,
        namespace_share: float = 1.0,
        is_right: Callable[[], bool] = lambda: True,
    ) -> None:
        """``is_right`` says whether everything that was captured until now may be written down, for any process to use."""
        self._settings = settings
        self._remote_settings = remote
        self._namespace_share = namespace_share
        self._tree = tree
        self._context = context
        self._writer = writer
        self._ram = ram
        self._speed = speed
        self._returns = returns
        self._is_right = is_right
        self._packing = Packing(context, tree, words)
        self._is_always = settings is not None and settings.restore_policy == "always"
        self.fingerprint: str = ""  # until the model's digest is known
        self._jobs: queue.SimpleQueue[Job | Done | None] = queue.SimpleQueue()
        self._names: OrderedDict[int, str] = OrderedDict()  # of objects, by the ids of the nodes whose states they are
        self._on_the_way: dict[str, Job] = {}  # what waits to be written, by name
        self._n_sent = self._n_done = 0  # bytes; each is counted by one thread
        self._due: dict[int, FinishedTurn] = {}  # not handed to the thread yet, by the id of their end, oldest first
        self._wait_again_at = 0.0  # for a disk that is behind
        self._writing: dict[int, float] = {}  # when the turns ended that the thread is writing
        self._opened = threading.Event()
        self.disk: DiskTier = NullDisk()
        self.trouble: str | None = None  # why there is no disk tier although one is configured
        self._remote_writer = RemoteWriter(self._packing, context.kind, speed)
        self.foreign_prompts = NOWHERE
        self._model_folder: ModelFolder | None = None
        self._retry_at: float | None = None
        self._retry_wait_s = RETRY_S[0]
        self._is_healing = False
        self._has_healed = threading.Event()  # what was offered meanwhile is to be offered again
        self._thread = threading.Thread(target=self._run, args=(fingerprint,), name="everwarm-archive", daemon=True)
        self._thread.start()
        self._opened.wait(OPEN_S)

    @property
    def is_opening(self) -> bool:
        """What is on disk is not known yet, perhaps because a large model's digest takes its time."""
        return not self._opened.is_set()

    @property
    def is_unsettled(self) -> bool:
        """Whether something may have to be written soon although no request comes."""
        is_well = self.degraded is None and not self._is_healing and not self._has_healed.is_set()
        return self.is_opening or self.is_behind or not is_well

    @property
    def degraded(self) -> str | None:
        """Why the disk tier does not work as configured; None: it does, or none is configured."""
        return self.disk.degraded if self.disk.is_on else self.trouble

    def wait_open(self, seconds: float) -> None:
        self._opened.wait(seconds)

    @property
    def remote(self) -> SharedTier:
        return self._remote_writer.remote

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The nearest first."""
        return self.disk, self.remote

    @property
    def is_on(self) -> bool:
        """Whether there is a tier beyond RAM now."""
        return any(tier.is_on for tier in self.tiers)

    def stats(self) -> dict[str, float]:
        shown = self.remote.stats() | self.disk.stats()
        if self.disk.is_on:
            shown["disk_lag_s"] = self.lag_s(time.monotonic())
        elif self._settings is not None:
            shown["disk_is_degraded"] = float(self.degraded is not None)
        return shown

    def lag_s(self, now: float) -> float:
        """The age of the oldest finished turn that is not on disk yet."""
        ends = [*(turn.ended_at for turn in self._due.values()), *list(self._writing.values())]
        return max(0.0, now - min(ends, default=now))

    def has(self, name: str) -> bool:
        """Whether an object and everything it needs is on disk."""
        return self.disk.has(name)

    @property
    def is_behind(self) -> bool:
        """Whether too much waits to be written: turns stay in RAM until the disk has caught up."""
        return self._n_sent - self._n_done > MAX_QUEUED

    @property
    def _is_wanted(self) -> bool:
        return self._settings is not None or self._remote_settings is not None

    @property
    def _takes_more(self) -> bool:
        return not self.is_opening and not self.is_behind

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

    # keeping

    def tidy(self, slots: Sequence[Slot]) -> bool:
        """One piece of idle work: offer a finished turn to the tiers. False: there is none, or not yet."""
        if not self._takes_more:
            return False
        self._offer_again(slots)
        for slot in slots:
            if slot.is_idle and slot.is_tidy and not slot.is_archived:
                slot.note_archived()
                self.offer(slot)
                return True
        return self._offer_due(time.monotonic())

    def _offer_again(self, slots: Sequence[Slot]) -> None:
        """After the disk tier has healed: what was offered while it was degraded may not have been written."""
        if self._has_healed.is_set():
            self._has_healed.clear()
            for slot in slots:
                slot.archive_again()

    def tidy_overdue(self, slots: Sequence[Slot], now: float) -> None:
        """Offers a turn that ended a while ago, while other requests run: a busy engine is never idle."""
        if not self._takes_more or not self._is_wanted:
            return
        for slot in slots:
            is_due = slot.is_idle and not slot.is_archived and now - slot.used_at > OVERDUE_S
            if is_due and slot.n_fed:
                slot.note_archived()
                self.offer(slot)
                return
        self._offer_due(now - OVERDUE_S)

    def note_end(self, slot: Slot, ended_at: float) -> None:
        """A turn has ended and is in RAM: it will be offered in time, even if its slot is reused before."""
        self._note_due(FinishedTurn.of(slot, ended_at))

    def note_adopted(self) -> None:
        """What an earlier engine left in RAM may not be on disk."""
        for end in [node for node in self._tree.nodes() if node.parent is not None and not node.children]:
            self._note_due(FinishedTurn(end, None, end.n_items, time.monotonic()))

    def _note_due(self, turn: FinishedTurn) -> None:
        if self._settings is not None:
            self._due.pop(turn.end.id, None)
            self._due[turn.end.id] = turn
            while len(self._due) > MAX_DUE:
                del self._due[next(iter(self._due))]

    def offer_ended(self, slot: Slot) -> str | None:
        """Offer a turn that has no room in RAM; returns the name of its object on disk."""
        if not self._takes_more:
            return None
        slot.note_archived()
        return self.offer(slot)

    def save_leaving(self, slots: Sequence[Slot], nodes: Sequence[Node]) -> None:
        """RAM is about to evict something of these nodes. Before that the turns that need it and still wait in RAM are
        offered, and states that a next turn will need and the disk does not have."""
        if self.is_opening or not self.is_on:
            return
        self._let_catch_up()
        leaving = {id(node) for node in nodes}
        for turn in list(self._due.values()):
            if self._takes_more and _passes(turn.end, leaving):
                del self._due[turn.end.id]
                self._offer(turn)
        for slot in slots:
            is_waiting = slot.is_idle and slot.n_fed and not slot.is_archived
            if is_waiting and self._takes_more and _passes(slot.node, leaving):
                slot.note_archived()
                self.offer(slot)
        for node in nodes if self._takes_more and _has_room(self.disk) else ():
            if self._is_needed_next(node) and not self._is_known(self._packing.state_name(node)):
                self._write(node, is_hinted=True)

    def _is_needed_next(self, node: Node) -> bool:
        """Whether a next turn may continue from here and would have to read again what follows an earlier point: a
        stable point, what was read ahead, and the end of a reply where turns continue from those."""
        kind = None if node.checkpoint is None or node.root().is_volatile else node.checkpoint.kind
        return kind in (CutKind.STABLE, CutKind.PREWARM) or (kind is CutKind.REPLY and self._returns.continues_replies)

    def _let_catch_up(self) -> None:
        """Gives a disk that is behind a moment before RAM evicts what it has not taken yet: a tenth of the time at
        most."""
        now = time.monotonic()
        if self.is_behind and now >= self._wait_again_at:
            deadline = now + CATCH_UP_S
            while self.is_behind and time.monotonic() < deadline:
                time.sleep(CATCH_UP_S / 10)
            self._wait_again_at = time.monotonic() + 9 * CATCH_UP_S

    def _offer_due(self, until: float) -> bool:
        """Offer the oldest turn that waits, if it ended before ``until``. False: there is none."""
        turn = next(iter(self._due.values()), None)
        if turn is None or turn.ended_at > until:
            return False
        del self._due[turn.end.id]
        self._offer(turn)
        return True

    def offer(self, slot: Slot) -> str | None:
        """Writes what the next turn will need of the slot's lineage and is not stored yet; returns the name of the
        object that completes it."""
        due = self._due.pop(slot.node.id, None)
        turn = FinishedTurn.of(slot, slot.used_at if due is None else due.ended_at)
        if self._takes_more:
            return self._offer(turn)
        self._note_due(turn)
        return None

    def _offer(self, turn: FinishedTurn) -> str | None:
        end = self._what_is_left(turn.end)
        if not self._tree.has(end) or end.root().is_volatile or not self.is_on:
            return None
        disk = self.disk
        if disk.is_on:
            self.renew_pins(self._tree.namespace(end), end.path, end.n_items)
        name = self._known_point(turn)
        node = self._worth_writing(turn, end) if name is None else None
        if node is not None:
            name = self._write_turn(turn, node)
        for pinned in [n for n in end.lineage() if n.is_pinned] if disk.is_on else ():
            self.keep_pinned(pinned)
        return name

    def _known_point(self, turn: FinishedTurn) -> str | None:
        """The name of the state at the turn's stable point, if the disk has it although RAM may not any more."""
        has_one = turn.stable is not None and 0 < turn.stable <= turn.end.n_items
        if not has_one or not self._context.kind.needs_checkpoints or self.remote.is_on:
            return None
        name = self._packing.state_name(turn.end, turn.stable)
        return name if self._is_known(name) else None

    def _what_is_left(self, end: Node) -> Node:
        """The deepest node of a lineage that is still in the tree."""
        while end.parent is not None and not self._tree.has(end):
            end = end.parent
        return end

    def _write_turn(self, turn: FinishedTurn, node: Node) -> str | None:
        self._writing[turn.end.id] = turn.ended_at
        name = self._write(node, is_hinted=turn.stable is not None)
        self._jobs.put(lambda: self._writing.pop(turn.end.id, None))
        return name

    def _write(self, node: Node, *, is_hinted: bool) -> str | None:
        """Hands a point over, and after it the shared points above: their KV is part of its KV, so only their states
        are new. Returns the name of its object on disk."""
        shared = [point for point in shared_points(self._context.kind, node) if self._is_worth_it(point)]
        unknown = [point for point in (node, *shared) if not self._is_known(self._packing.state_name(point))]
        name = None
        with self._writer.staged((node, *shared) if self.remote.is_on else unknown):
            if self.disk.is_on:
                name = self._keep(node)
                for point in shared:
                    self._keep(point)
            self._remote_writer.offer(node, is_hinted=is_hinted)
        return name

    def _is_worth_it(self, node: Node) -> bool:
        return is_worth_it(node, self._speed.seconds_per_token, is_always=self._is_always)

    def _is_known(self, name: str) -> bool:
        return name in self._on_the_way or self.disk.has(name)

    def stores(self, node: Node) -> bool:
        """Whether the disk has a node's state, as far as this engine wrote it: one lookup, for eviction."""
        name = self._names.get(node.id)
        return name is not None and self._is_known(name)

    def keep_pinned(self, node: Node) -> None:
        """Stores the pin, and the point itself if its state is in RAM."""
        if node.root().is_volatile:
            return
        self._write_pin(pin_job(self._tree, node))
        state = None if node.checkpoint is None else node.checkpoint.state
        if self.disk.is_on and (state is not None or not self._context.kind.needs_checkpoints):
            self._keep(node)

    def drop_pin(self, node: Node) -> None:
        """Removes the stored pin of a node."""
        self._write_pin(unpin_job(self._tree, node))

    def renew_pins(self, namespace: str, prompt: Prompt, n_items: int) -> None:
        """Pins those nodes again that were pinned before, once these items are in the tree."""
        pin_again(self._tree, self._ram, self.disk, self.fingerprint, namespace, prompt, n_items)

    def _write_pin(self, job: PinJob) -> None:
        self._jobs.put(lambda: job(self.disk, self.fingerprint))

    def _keep(self, node: Node) -> str | None:
        """Returns the name of the state's object. None: it cannot be kept."""
        for pinned in pinned_below(node):
            self._write_pin(pin_job(self._tree, pinned))  # this point is part of its lineage
        name = self._packing.state_name(node)
        self._names[node.id] = name
        while len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)
        if self._is_known(name):
            return name
        segments = self._packing.segments(node)
        if segments is None:
            return None
        root = self._packing.root(node)
        kv = self._packing.kv(root, segments, self._is_known)
        if kv is None:
            return None
        if self.is_behind:
            n_waiting = self._n_sent - self._n_done
            log.warning("a turn is not kept: %.0f MiB wait for the disk already", n_waiting / _MIB)
            return None
        for job in (*kv.jobs, self._packing.state_job(root, node, kv)):
            if not self._is_known(name_of(job.header)):
                self._on_the_way[name_of(job.header)] = job
                self._n_sent += job.size
                self._jobs.put(job)
        return name

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
        return sum((tier.forget(what) for tier in self.tiers), Dropped())

    def require_disk(self) -> None:
        """``EngineStopped``: a configured disk tier is not open, so what it keeps cannot be forgotten now."""
        if self._settings is not None and not self.disk.is_on:
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

    def after_all(self, job: Done) -> None:
        """Run a job on the disk's thread, when everything offered so far is durable or has failed."""
        self._jobs.put(job)

    def _worth_writing(self, turn: FinishedTurn, end: Node) -> Node | None:
        """One point per turn: where the next turn is expected to continue."""
        lineage = end.lineage()
        if not self._context.kind.needs_checkpoints and lineage:
            n_items = min(turn.stable or end.n_items, end.n_items, turn.n_turn_items)
            return self._tree.grow(end.root(), end.path, n_items) if n_items else None  # any point will do
        return _point(lineage)

    # the thread

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
        for tier in reversed(self.tiers):
            tier.close()

    def _run(self, fingerprint: Callable[[], str]) -> None:
        if self._settings is not None:
            self.trouble = self._try("on disk", self._open, fingerprint)
        if self._remote_settings is not None:
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
            if self._retry_in_s() == 0.0:  # a queue that is never empty does not time out
                self._heal(fingerprint)
            if self._model_folder is not None:
                self._model_folder.renew()
            if callable(job):
                job()
            else:
                self._put(self.disk, job)
            del job  # and what it would write

    def _try(self, what: str, opens: Callable[[str], None], fingerprint: Callable[[], str]) -> str | None:
        """Opens the tier; returns why it cannot be opened, None: it is open. A reason is logged once while it stays the
        same."""
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
            self._retry_at = None
            self._retry_wait_s = RETRY_S[0]
            return None
        if self._retry_at is None:
            self._retry_at = time.monotonic() + self._retry_wait_s
        return max(0.0, self._retry_at - time.monotonic())

    def _heal(self, fingerprint: Callable[[], str]) -> None:
        """Try a degraded tier again: another server may have gone, a file system may be writable again."""
        self._is_healing = True
        if isinstance(self.disk, NullDisk):
            self.trouble = self._try("on disk", self._open, fingerprint)
        else:
            self.disk.probe()
        self._retry_at = None
        self._retry_wait_s = min(2 * self._retry_wait_s, RETRY_S[1])
        if self.degraded is None:
            log.info("the disk tier is in order again")
            self._has_healed.set()
        self._is_healing = False

    def _put(self, disk: DiskTier, job: Job) -> None:
        try:
            if are_sound(job.parts.values(), self._is_sound):
                disk.put(job.header, job.parts)
        except Exception:
            log.exception("an object was not kept")  # a caller of ``flush`` must not wait for ever
        self._n_done += job.size
        self._on_the_way.pop(name_of(job.header), None)

    def _is_sound(self, blob: Blob) -> bool:
        """Whether a part of an object may leave this process."""
        return self._ram.arena.is_sound(blob) and self._is_right()

    def _open_remote(self, fingerprint: str) -> None:
        assert self._remote_settings is not None
        self._packing.fingerprint = fingerprint
        self._remote_writer.open(self._remote_settings, self._is_sound)

    def _open(self, fingerprint: str) -> None:
        assert self._settings is not None
        directory = Path(self._settings.directory).expanduser()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._packing.fingerprint = fingerprint
        place = directory / folder_name(fingerprint)
        write_bytes = self._settings.write_bytes_per_day
        share = self._namespace_share
        disk = Disk(place, self._settings.disk_bytes, write_bytes, space_share=share, free_share=DISK_FREE_SHARE)
        shown = (len(disk.names()), disk.n_bytes / _MIB, disk.budget_bytes / _MIB, place)
        log.info("%d objects on disk, %.1f of %.0f MiB, in %s", *shown)
        self.foreign_prompts = find_foreign_prompts(directory, fingerprint)
        self.disk = disk
        self._model_folder = ModelFolder(place, fingerprint, self._context, self._speed)


def _point(lineage: Iterable[Node]) -> Node | None:
    """Where the next turn will continue: the last stable point, else the last checkpoint that was not prewarmed. The end
    of a prompt is the last choice: on disk it has no logits, so an identical prompt could not use it."""
    kept = [(n, n.checkpoint.kind) for n in lineage if n.checkpoint is not None and n.checkpoint.is_held]
    stable = [n for n, kind in kept if kind is CutKind.STABLE]
    others = [n for n, kind in kept if kind not in (*PROVISIONAL, CutKind.END)]  # a guess is not worth the bytes
    ends = [n for n, kind in kept if kind is CutKind.END]
    best = stable or others or ends
    return best[-1] if best else None


def _passes(end: Node, nodes: Collection[int]) -> bool:
    return any(id(node) in nodes for node in end.lineage())


def _has_room(disk: DiskTier) -> bool:
    """Whether more can be written without evicting anything there."""
    return not isinstance(disk, NullDisk) and disk.degraded is None and disk.n_bytes < disk.budget_bytes


def _as_indexed(job: Job) -> IndexedObject:
    head = job.header
    span = (head.kind, head.key, head.n_items, job.size, head.needs)
    return IndexedObject(name_of(head), *span, time.time(), 0, head.space, head.reaches)
