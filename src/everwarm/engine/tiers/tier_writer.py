"""From the tree to the disk and the remote store: decides what of a finished turn is written. ``loader`` is the way back.

A turn writes the KV that is new and one state, and the states of shared points once, from RAM or straight from the
device. What RAM evicts before it was written is handed over first. Any failure here only means that a prompt is read
again. Runs on the loop's thread: it decides and packs, and ``lower_tiers`` writes on a thread of its own.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from everwarm.engine.cache.provenance import is_worth_it, shared_points
from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.slots import Slot
from everwarm.engine.stats import Speed
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.engine.tiers.packing import Packing
from everwarm.engine.tiers.pins import PinJob, pin_again, pin_job, pinned_below, unpin_job
from everwarm.engine.tiers.ram import Ram
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import PROVISIONAL, CutKind
from everwarm.state.returns import Returns
from everwarm.state.tree import Node, Tree

log = logging.getLogger("everwarm.tiers")

OVERDUE_S = 1.0  # after its end a turn is handed to the disk's thread, though other requests run
MAX_DUE = 4096  # turns that wait for the disk to catch up
MAX_NAMES = 4096  # of nodes that were written
CATCH_UP_S = 0.02  # so long RAM waits for a disk that is behind, before it evicts what was not written
_MIB = 1 << 20


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
        tiers: LowerTiers,
        tree: Tree,
        context: Context,
        writer: RamWriter,
        ram: Ram,
        speed: Speed,
        returns: Returns,
        *,
        words: Callable[[Prompt], str],
        writes_all: bool,
        shares_all: bool,
    ) -> None:
        """``writes_all``, ``shares_all``: also points that are read again as fast as they are loaded, to the disk and to
        the remote store."""
        self._tiers = tiers
        self._tree = tree
        self._context = context
        self._writer = writer
        self._ram = ram
        self._speed = speed
        self._returns = returns
        self._writes_all = writes_all
        self._shares_all = shares_all
        self._packing = Packing(context, tree, words, lambda: tiers.fingerprint)
        self._names: OrderedDict[int, str] = OrderedDict()  # of objects, by the ids of the nodes whose states they are
        self._due: dict[int, FinishedTurn] = {}  # not handed to the thread yet, by the id of their end, oldest first
        self._wait_again_at = 0.0  # for a disk that is behind
        self._writing: dict[int, float] = {}  # when the turns ended that the thread is writing

    def stats(self) -> dict[str, float]:
        shown = self._tiers.stats()
        if self._tiers.disk.is_on:
            shown["disk_lag_s"] = self.lag_s(time.monotonic())
        return shown

    def lag_s(self, now: float) -> float:
        """The age of the oldest finished turn that is not on disk yet."""
        ends = [*(turn.ended_at for turn in self._due.values()), *list(self._writing.values())]
        return max(0.0, now - min(ends, default=now))

    # keeping

    def tidy(self, slots: Sequence[Slot]) -> bool:
        """One piece of idle work: offer a finished turn to the tiers. False: there is none, or not yet."""
        if not self._tiers.takes_more:
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
        if self._tiers.take_healed():
            for slot in slots:
                slot.archive_again()

    def tidy_overdue(self, slots: Sequence[Slot], now: float) -> None:
        """Offers a turn that ended a while ago, while other requests run: a busy engine is never idle."""
        if not self._tiers.takes_more or not self._tiers.is_wanted:
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
        if self._tiers.is_disk_wanted:
            self._due.pop(turn.end.id, None)
            self._due[turn.end.id] = turn
            while len(self._due) > MAX_DUE:
                del self._due[next(iter(self._due))]

    def offer_ended(self, slot: Slot) -> str | None:
        """Offer a turn that has no room in RAM; returns the name of its object on disk."""
        if not self._tiers.takes_more:
            return None
        slot.note_archived()
        return self.offer(slot)

    def save_leaving(self, slots: Sequence[Slot], nodes: Sequence[Node]) -> None:
        """RAM is about to evict something of these nodes. Before that the turns that need it and still wait in RAM are
        offered, and states that a next turn will need and the disk does not have."""
        if self._tiers.is_opening or not self._tiers.is_on:
            return
        self._let_catch_up()
        leaving = {id(node) for node in nodes}
        for turn in list(self._due.values()):
            if self._tiers.takes_more and _passes(turn.end, leaving):
                del self._due[turn.end.id]
                self._offer(turn)
        for slot in slots:
            is_waiting = slot.is_idle and slot.n_fed and not slot.is_archived
            if is_waiting and self._tiers.takes_more and _passes(slot.node, leaving):
                slot.note_archived()
                self.offer(slot)
        for node in nodes if self._tiers.takes_more and self._tiers.disk_has_room(1) else ():
            if self._is_needed_next(node) and not self._tiers.is_known(self._packing.state_name(node)):
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
        if self._tiers.is_behind and now >= self._wait_again_at:
            deadline = now + CATCH_UP_S
            while self._tiers.is_behind and time.monotonic() < deadline:
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
        if self._tiers.takes_more:
            return self._offer(turn)
        self._note_due(turn)
        return None

    def _offer(self, turn: FinishedTurn) -> str | None:
        end = self._what_is_left(turn.end)
        if not self._tree.has(end) or end.root().is_volatile or not self._tiers.is_on:
            return None
        disk = self._tiers.disk
        if disk.is_on:
            namespace = self._tree.namespace(end)
            pin_again(self._tree, self._ram, disk, self._tiers.fingerprint, namespace, end.path, end.n_items)
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
        if not has_one or not self._context.kind.needs_checkpoints or self._tiers.remote.is_on:
            return None
        name = self._packing.state_name(turn.end, turn.stable)
        return name if self._tiers.is_known(name) else None

    def _what_is_left(self, end: Node) -> Node:
        """The deepest node of a lineage that is still in the tree."""
        while end.parent is not None and not self._tree.has(end):
            end = end.parent
        return end

    def _write_turn(self, turn: FinishedTurn, node: Node) -> str | None:
        self._writing[turn.end.id] = turn.ended_at
        name = self._write(node, is_hinted=turn.stable is not None)
        self._tiers.after_all(lambda: self._writing.pop(turn.end.id, None))
        return name

    def _write(self, node: Node, *, is_hinted: bool) -> str | None:
        """Hands a point over, and after it the shared points above: their KV is part of its KV, so only their states
        are new. Returns the name of its object on disk."""
        shared = [point for point in shared_points(self._context.kind, node) if self._is_worth_it(point)]
        unknown = [point for point in (node, *shared) if not self._tiers.is_known(self._packing.state_name(point))]
        name = None
        with self._writer.staged((node, *shared) if self._tiers.remote.is_on else unknown):
            if self._tiers.disk.is_on:
                name = self._keep(node)
                for point in shared:
                    self._keep(point)
            self._share(node, is_hinted=is_hinted)
        return name

    def _share(self, node: Node, *, is_hinted: bool) -> None:
        """Offers the remote store what other servers can use: the point that the next turn continues from, and the shared
        points above it. They can prefill everything else from there."""
        remote = self._tiers.remote
        if not remote.is_on:
            return
        seconds_per_token = self._speed.seconds_per_token
        for point in (*shared_points(self._context.kind, node), node):
            if is_worth_it(point, seconds_per_token, is_always=self._shares_all):
                parcel = self._packing.parcel(point, remote.has, is_hinted=is_hinted or point is not node)
                if parcel is not None:
                    remote.offer(parcel)

    def _is_worth_it(self, node: Node) -> bool:
        return is_worth_it(node, self._speed.seconds_per_token, is_always=self._writes_all)

    def stores(self, node: Node) -> bool:
        """Whether the disk has a node's state, as far as this engine wrote it: one lookup, for eviction."""
        name = self._names.get(node.id)
        return name is not None and self._tiers.is_known(name)

    def keep_pinned(self, node: Node) -> None:
        """Stores the pin, and the point itself if its state is in RAM."""
        if node.root().is_volatile:
            return
        self._write_pin(pin_job(self._tree, node))
        state = None if node.checkpoint is None else node.checkpoint.state
        if self._tiers.disk.is_on and (state is not None or not self._context.kind.needs_checkpoints):
            self._keep(node)

    def drop_pin(self, node: Node) -> None:
        """Removes the stored pin of a node."""
        self._write_pin(unpin_job(self._tree, node))

    def _write_pin(self, job: PinJob) -> None:
        self._tiers.after_all(lambda: job(self._tiers.disk, self._tiers.fingerprint))

    def _keep(self, node: Node) -> str | None:
        """Returns the name of the state's object. None: it cannot be kept."""
        for pinned in pinned_below(node):
            self._write_pin(pin_job(self._tree, pinned))  # this point is part of its lineage
        name = self._packing.state_name(node)
        self._names[node.id] = name
        while len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)
        if self._tiers.is_known(name):
            return name
        jobs = self._packing.jobs(node, self._tiers.is_known)
        if jobs is None:
            return None
        if self._tiers.is_behind:
            n_waiting = self._tiers.n_waiting_bytes / _MIB
            log.warning("a turn is not kept: %.0f MiB wait for the disk already", n_waiting)
            return None
        for job in jobs:
            self._tiers.put(job)
        return name

    def _worth_writing(self, turn: FinishedTurn, end: Node) -> Node | None:
        """One point per turn: where the next turn is expected to continue."""
        lineage = end.lineage()
        if not self._context.kind.needs_checkpoints and lineage:
            n_items = min(turn.stable or end.n_items, end.n_items, turn.n_turn_items)
            return self._tree.grow(end.root(), end.path, n_items) if n_items else None  # any point will do
        return _point(lineage)


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
