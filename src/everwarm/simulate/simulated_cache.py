"""One tree of states and KV under a budget, driven by a policy: what an engine does with a trace, without the engine.

Uses the real tree, the real weighing and the real learning, with blobs that weigh what they would and take no memory.
Requests run one after the other, and between two of them there is time for all idle work. What is copied, when, and in
which order is the engine's own (``engine.cache``): a checkpoint is parked in a spare, or copied to RAM if no spare can
be given up; at the end of a turn its KV and the states that the next turn needs are copied, then everything else that
is parked, and small segments are joined; when another conversation runs, spares and idle slots leave the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from everwarm.prompt.prompt import Prompt
from everwarm.simulate.policies import Policy, TurnReading
from everwarm.simulate.simulated_machine import (
    Curves,
    MachineSize,
    SimulatedDevice,
    SimulatedDisk,
    SimulatedSlot,
    weightless,
)
from everwarm.simulate.trace import TraceTurn
from everwarm.state import policy as state_policy
from everwarm.state import segment_merge
from everwarm.state.policy import GUARD, Cut, CutKind, Seat
from everwarm.state.ram_eviction import Hand, Part, WeighingFacts, is_worth_copying, least_parked, weigh
from everwarm.state.returns import Continuation, Partings, Returns
from everwarm.state.segment_merge import SegmentRun, most_joined
from everwarm.state.tree import Checkpoint, Match, Node, Segment, Tree, first_message_end
from everwarm.types import Blob

LOW_WATER = 0.97
SHARED_S = 0.05  # of reading: below it a shared point is not written
IDLE_CELLS = 256  # that other conversations may keep on the device while one runs
_NAMESPACE = ""
_TICK_S = 1e-6  # between two events of one request
_ROW = np.zeros(1, np.float32)
_OPTIONAL = (CutKind.EVERY, CutKind.LEARNED, CutKind.GUESS, CutKind.BOUNDARY, CutKind.BRANCH, CutKind.NEAR_END)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request cost, in tokens and bytes."""

    n_from: int  # tokens it did not have to read
    n_to: int  # tokens of the prompt when it was over
    loaded_bytes: int = 0  # from RAM to the device
    disk_bytes: int = 0  # from disk to RAM


class SimulatedCache:
    def __init__(self, policy: Policy, curves: Curves, budget: int, machine: MachineSize) -> None:
        self.most_bytes = 0  # that RAM held at once
        self.written_bytes = 0  # to RAM
        self.tree = Tree()
        self._policy = policy
        self._curves = curves
        self._budget = budget
        self._disk = SimulatedDisk(machine, curves) if machine.disk_bytes else None
        self._spacing = policy.spacing(curves)
        self._most_joined = most_joined(budget, curves.kv_bytes_per_token)
        self._returns = Returns(self.tree)
        self._partings = Partings()
        self._hand = Hand(self.tree)
        self._device = SimulatedDevice(machine, self.tree)
        self._n_lifted = 0
        self._now = 0.0

    @property
    def disk_written(self) -> int:
        return 0 if self._disk is None else self._disk.written_bytes

    def serve(self, turn: TraceTurn) -> Outcome:
        self._now = max(self._now, turn.at_s)
        if turn.before:
            self._clear()
        prompt, device = turn.prompt, self._device
        slot = self._seat(prompt)
        match = self.tree.match(_NAMESPACE, prompt, device.n_common(prompt))
        disk_bytes = self._load(prompt, match)
        if disk_bytes:
            match = self.tree.match(_NAMESPACE, prompt, device.n_common(prompt))
        continuation = self._returns.arrive(match, self._now) if self._policy.learns else Continuation()
        n_items, loaded = self._bring(slot, prompt, match)
        slot.n_prompt = len(prompt)
        slot.continuation = continuation
        self._limit_idle(slot)
        self._enforce_budget()
        self._read(slot, turn, match, n_items)
        if self._policy.learns:
            self._returns.leave(slot.node, len(prompt), continuation)
        slot.continuation = None
        slot.used_at = self._tick()
        self._write(slot, len(prompt))
        self._save(slot, len(prompt))
        self._tidy()
        self.most_bytes = max(self.most_bytes, self.tree.ram_bytes)
        return Outcome(prompt.n_tokens(n_items), prompt.n_tokens(max(n_items, turn.n_stop)), loaded, disk_bytes)

    def _tick(self) -> float:
        self._now += _TICK_S
        return self._now

    # starting

    def _seat(self, prompt: Prompt) -> SimulatedSlot:
        slots = self._device.slots
        seats = [
            Seat(i, slot.n_fed, int(prompt.common_prefix(slot.items)), slot.used_at) for i, slot in enumerate(slots)
        ]
        return slots[state_policy.seat(seats, lambda i: self._worth(slots[i]))]

    def _bring(self, slot: SimulatedSlot, prompt: Prompt, match: Match) -> tuple[int, int]:
        """Restores the deepest kept point of the prompt: returns where that is, and the bytes it took."""
        own, n_there = int(prompt.common_prefix(slot.items)), self._device.n_common(prompt)
        usable = next((node for node in match.usable if _leaves_work(node, prompt)), None)
        slot.n_settled = own
        if 0 < own == slot.n_fed < len(prompt) and (usable is None or usable.n_items <= own):
            slot.items = prompt.first(own)
            return own, 0
        if usable is None or usable.checkpoint is None:
            self._vacate(slot)
            return 0, 0
        n_items, checkpoint = usable.n_items, usable.checkpoint
        is_parked = checkpoint.parked is not None
        with self.tree.pinned(usable), self._lifted():
            if slot.node is not usable:
                self._save_kv(slot, slot.node, beyond=0 if is_parked else own)
            self._device.hold(slot, usable, prompt.first(n_items))
            checkpoint.used_at = self._tick()
            checkpoint.hits += 1
        slot.n_settled = n_items
        n_kv = 0 if is_parked else prompt.n_tokens(n_items) - prompt.n_tokens(min(n_there, n_items))
        self._make_room(n_kv, slot)
        return n_items, (0 if is_parked else checkpoint.size_bytes) + n_kv * self._curves.kv_bytes_per_token

    # the disk

    def _load(self, prompt: Prompt, match: Match) -> int:
        """Loads the deepest state on disk if it is deeper than what RAM has and that is faster than reading: returns the
        bytes."""
        n_items = 0 if self._disk is None else self._disk.deepest(prompt)
        n_have = next((node.n_items for node in match.usable if node.n_items < len(prompt)), 0)
        if self._disk is None or n_items <= n_have + GUARD:
            return 0
        curves, first, last = self._curves, prompt.n_tokens(min(match.n_kv, n_items)), prompt.n_tokens(n_items)
        n_bytes = curves.state_bytes + (last - first) * curves.kv_bytes_per_token
        if self._disk.seconds(n_bytes) > curves.read_s(prompt.n_tokens(n_have), last):
            return 0
        node = self.tree.grow(self.tree.root(_NAMESPACE), prompt, n_items)
        if node.checkpoint is None:
            self.tree.set_checkpoint(node, Checkpoint(CutKind.STABLE, True, (), used_at=self._now))
            self.tree.set_state(node, weightless(curves.state_bytes))
        self._fill_kv(node.lineage())
        self._disk.note_loaded(node, self._now)
        return n_bytes

    def _write(self, slot: SimulatedSlot, n_prompt: int) -> None:
        """What the next turn needs of this one, and the points above it that other conversations may continue from."""
        if self._disk is None:
            return
        lineage = slot.node.lineage()
        kept = [node for node in lineage if node.checkpoint is not None and node.n_items < n_prompt]
        first = first_message_end(lineage)
        shared = [node for node in kept[:-1] if node is first or node.is_junction]
        for node in (*kept[-1:], *(node for node in shared if self._curves.read_s(0, node.mark.n_tokens) >= SHARED_S)):
            self._disk.write(node, self._now)

    def _write_leaving(self, node: Node) -> None:
        """A state that a next turn may need is written before RAM evicts it, while the disk has room."""
        if self._disk is None or node.checkpoint is None or not self._disk.has_room():
            return
        kind = node.checkpoint.kind
        continues = not self._policy.learns or self._returns.continues_replies
        if kind is CutKind.STABLE or (kind is CutKind.REPLY and continues):
            self._disk.write(node, self._now)

    # what leaves the device

    def _worth(self, slot: SimulatedSlot) -> float:
        return self._returns.worth(slot.node, self._now - slot.used_at) if self._policy.learns else 0.0

    def _idle_by_worth(self, running: SimulatedSlot) -> list[SimulatedSlot]:
        idle = [slot for slot in self._device.slots if slot is not running and slot.n_fed]
        return sorted(idle, key=lambda slot: (self._worth(slot) * slot.n_fed, slot.used_at))

    def _limit_idle(self, running: SimulatedSlot) -> None:
        """Idle conversations keep few cells, unless they can be kept nowhere else."""
        device = self._device
        own = {id(node) for node in running.node.lineage()}
        most = running.items.n_tokens(running.n_fed) + IDLE_CELLS
        for node in device.parked_by_age():
            if device.n_used <= most:
                return
            if id(node) not in own and self._has_other_place(node.mark.n_tokens, self._parked_bytes(node)):
                self._move_out(node)
        for slot in self._idle_by_worth(running):
            if device.n_used <= most:
                return
            if self._has_other_place(slot.items.n_tokens(slot.n_fed), self._unsaved_bytes(slot)):
                self._vacate(slot)

    def _has_other_place(self, n_tokens: int, unsaved_bytes: int) -> bool:
        """Whether what the device holds of a conversation of so many tokens may leave it."""
        curves = self._curves
        n_bytes = curves.state_bytes + n_tokens * curves.kv_bytes_per_token
        load_s = math.inf
        if self._disk is not None and self._disk.has_room(n_bytes):
            load_s = self._disk.seconds(n_bytes)
        return state_policy.has_other_place(unsaved_bytes, self._n_left, load_s, n_tokens * curves.seconds_per_token)

    def _make_room(self, n_cells: int, running: SimulatedSlot) -> None:
        """Empties spares and idle slots until so many cells are free."""
        for node in self._device.parked_by_age():
            if self._device.n_free >= n_cells:
                return
            self._move_out(node)
        for slot in self._idle_by_worth(running):
            if self._device.n_free < n_cells:
                self._vacate(slot)

    def _clear(self) -> None:
        for node in self._device.parked():
            self._move_out(node)
        for slot in self._device.slots:
            self._vacate(slot)

    def _vacate(self, slot: SimulatedSlot) -> None:
        with self._lifted():  # until it has left, its KV would seem to be on the device as well
            self._save_kv(slot, slot.node)
            self._device.hold(slot, self.tree.root(_NAMESPACE), Prompt.of_tokens([]))
        slot.n_settled = 0

    def _move_out(self, node: Node) -> None:
        """Empties the spare of a node. The end of a prompt is lost by that."""
        with self._lifted():
            if _is_worth_copying(node):
                self._copy_state(node)
            self._unpark(node)

    def _unpark(self, node: Node) -> int:
        """Empties the spare of a node, and the node loses what RAM has no copy of: returns which spare it was."""
        assert node.checkpoint is not None
        spare = self._device.spares.index(node)
        if node.checkpoint.state is None:
            self._drop(node)
            return spare
        with self._lifted():
            self._save_kv(node, node)
            self._device.release(node)
        return spare

    # reading

    def _read(self, slot: SimulatedSlot, turn: TraceTurn, match: Match, n_items: int) -> None:
        path = turn.path_from(n_items)
        n_prompt, n_end = len(turn.prompt), len(path)
        places = self._places(turn, match.n_shared, n_items)
        skipped: set[CutKind] = set()
        cuts = self._policy.cuts(TurnReading(turn, n_items, match.n_shared, places), self._spacing)
        for cut in (cut for cut in cuts if n_items < cut.at <= turn.n_stop):
            if cut.kind not in skipped and not self._take(slot, path, cut.at, cut.kind):
                skipped.add(cut.kind)
        if turn.n_stop == n_prompt > n_items:
            self._take(slot, path, n_prompt, CutKind.END)
        kind = CutKind.REPLY if turn.stop_at is None else CutKind.CANCEL
        if n_end != n_prompt and n_end > slot.node.n_items and self._keeps_end(kind):
            self._take(slot, path, n_end, kind)
        else:
            self._mark(slot, path, n_end)
        slot.items, slot.n_fed, slot.is_tidy = path, n_end, False

    def _places(self, turn: TraceTurn, n_shared: int, n_items: int) -> list[int]:
        """Where a prompt is likely to be left, as was learned."""
        if not self._policy.learns:
            return []
        is_at_end = any(0 <= n_shared - end <= GUARD for end in turn.boundaries)
        if n_shared - n_items > GUARD and not is_at_end:
            self._partings.note(_NAMESPACE, turn.prompt, n_shared)
        found = self._partings.places(_NAMESPACE, turn.prompt, n_items)
        return [*self._returns.places(len(turn.prompt), self._spacing), *found]

    def _keeps_end(self, kind: CutKind) -> bool:
        learned = kind is CutKind.REPLY and self._policy.learns
        return self._policy.keeps_ends and (not learned or self._returns.keeps_replies)

    def _mark(self, slot: SimulatedSlot, path: Prompt, n_items: int) -> Node:
        self._make_room(path.n_tokens(n_items) - path.n_tokens(min(slot.n_fed, n_items)), slot)
        node = self.tree.grow(slot.node, path, n_items) if n_items > slot.node.n_items else slot.node
        self._device.stand(slot, node)
        slot.items, slot.n_fed = path.first(n_items), n_items
        return node

    def _take(self, slot: SimulatedSlot, path: Prompt, n_items: int, kind: CutKind) -> bool:
        """Keeps the state there: parked if a spare is at hand, else in RAM. False: RAM is full of better ones."""
        node = self._mark(slot, path, n_items)
        known = node.checkpoint
        if self._spacing.max_checkpoints == 0:
            return True
        if known is not None:
            known.used_at = self._tick()
            known.kind = state_policy.better(known.kind, kind)
            if kind is CutKind.END and known.logits is None:
                self.tree.add_logits(node, self._new_logits())
                self._enforce_budget()
            return True
        spare = self._spare_at_hand(kind)
        if kind is CutKind.END and spare is None:
            return True
        state = None if spare is not None else self._new_state()
        checkpoint = Checkpoint(kind, True, (), state=state, used_at=self._tick())
        checkpoint.logits = self._new_logits() if kind is CutKind.END else None
        with self._lifted():
            self.tree.set_checkpoint(node, checkpoint)
            if spare is not None:
                self._device.park(spare, node)
            self._drop_superseded(node)
            self._thin(node)
        return node.checkpoint is checkpoint or kind not in _OPTIONAL

    def _spare_at_hand(self, kind: CutKind) -> int | None:
        """A free spare, or one whose checkpoint can be dropped without a copy."""
        spares = self._device.spares
        if None in spares:
            return spares.index(None)
        for node in () if kind is CutKind.GUESS else self._device.parked_by_use():
            checkpoint = node.checkpoint
            assert checkpoint is not None
            is_lost = checkpoint.kind in _OPTIONAL and self._curves.state_bytes > self._budget
            can_go = checkpoint.state is not None or not _is_worth_copying(node) or is_lost
            if can_go and not self._unsaved(node, node):
                return self._unpark(node)
        for node in () if kind in (CutKind.GUESS, CutKind.END) else self._device.parked_by_use():
            unsaved = [n for n in node.lineage() if n.segment is None]
            elsewhere = self._device.passed(but=node) if unsaved else {}
            if all(id(n) in elsewhere for n in unsaved):
                spare = spares.index(node)
                self._move_out(node)
                return spare
        return None if kind in (CutKind.GUESS, CutKind.END) else self._spare_of_least()

    def _spare_of_least(self) -> int | None:
        """That of a parked state which would be missed less than what RAM would evict for the new one."""
        if not self._policy.learns or self._n_left >= self._curves.state_bytes:
            return None
        part = self._part()
        parked = self._device.parked_by_use()
        least = least_parked(parked, part, self._facts(part.among), self._curves.state_bytes, self._n_left)
        if least is None:
            return None
        spare = self._device.spares.index(least)
        self._write_leaving(least)
        self._drop(least)
        return spare

    def _drop_superseded(self, node: Node) -> None:
        """The end of a reply, once the next turn has a checkpoint a few items behind it."""
        above = node.parent
        while above is not None and node.n_items - above.n_items <= GUARD and len(above.children) == 1:
            if above.checkpoint is not None and above.checkpoint.kind is CutKind.REPLY and not above.pins:
                return self._drop(above)
            above = above.parent

    def _thin(self, node: Node) -> None:
        for end in [n for n in node.below() if n.checkpoint is not None and not n.children] or [node]:
            kept = {n.n_items: n for n in end.lineage() if n.checkpoint is not None}
            path = [Cut(n.n_items, n.checkpoint.kind) for n in kept.values() if n.checkpoint is not None]
            for n_items in state_policy.thin(path, self._spacing.max_checkpoints):
                self._drop(kept[n_items])

    def _drop(self, node: Node) -> None:
        assert node.checkpoint is not None
        with self._lifted():
            if node.checkpoint.parked is not None:
                if node.parent is not None:
                    self._save_kv(node, node.parent)  # states above it may live on this spare's KV
                self._device.release(node)
            self.tree.drop_checkpoint(node)

    # copies to RAM

    def _new_state(self) -> Blob:
        self.written_bytes += self._curves.state_bytes
        return weightless(self._curves.state_bytes)

    def _new_logits(self) -> NDArray[np.float32]:
        return np.broadcast_to(_ROW, (self._curves.logits_bytes // _ROW.nbytes,))

    def _copy_state(self, node: Node) -> None:
        if node.checkpoint is not None and node.checkpoint.state is None:
            self.tree.set_state(node, self._new_state())

    def _save(self, slot: SimulatedSlot, n_prompt: int) -> None:
        """Copies what the next turn needs of this one to RAM, if what would be evicted for that is worth less."""
        points = _needed_points(slot, n_prompt)
        if points and self._would_keep(points):
            with self._lifted():
                for node in points:
                    self._copy_state(node)
                self._fill_kv(points[-1].lineage())

    def _would_keep(self, points: Sequence[Node]) -> bool:
        """Whether copies of these points of one lineage would stay in RAM."""
        lineage, state_bytes = points[-1].lineage(), self._curves.state_bytes
        n_bytes = len(points) * state_bytes + sum(map(self._kv_bytes, lineage))
        n_new = sum(state_bytes for node in points if not _has_copy(node))
        n_new += sum(self._kv_bytes(node) for node in lineage if node.segment is None)
        if n_new <= self._n_left or not self._policy.learns:
            return n_new <= self._n_left  # other policies know no worth: they make a copy only where there is room
        end, seconds = points[-1], points[-1].n_items * self._curves.seconds_per_token
        turn = state_policy.Entry(0, n_bytes, seconds, self._returns.worth(end, 0.0))
        entries = self._weigh(self._part())
        return n_bytes <= self._budget and is_worth_copying(turn, entries, n_new - self._n_left)

    def _tidy(self) -> None:
        """Idle work, as far as there is room: copies what is parked, and the KV of conversations in slots. Joins small
        segments."""
        for node in self._device.parked():
            checkpoint = node.checkpoint
            has_room = self._n_left >= self._curves.state_bytes
            if checkpoint is not None and not checkpoint.tidied and _is_worth_copying(node) and has_room:
                checkpoint.tidied = True
                self._copy_state(node)
        for slot in [slot for slot in self._device.slots if not slot.is_tidy]:
            for run in list(self._runs(_wanted(slot.node))):
                if self._n_left < sum(map(self._kv_bytes, run)):
                    break
                self._fill_kv(run)
            slot.is_tidy = True
            self._join(slot)

    @property
    def _n_left(self) -> int:
        return self._budget - self.tree.ram_bytes

    def _save_kv(self, holder: SimulatedSlot | Node, node: Node, *, beyond: int = 0) -> None:
        """Copies the KV of a lineage that would be lost if the slot or spare that holds it went."""
        self._fill_kv(self._unsaved(holder, node, beyond=beyond))
        self._enforce_budget()

    def _unsaved(self, holder: SimulatedSlot | Node, node: Node, *, beyond: int = 0) -> list[Node]:
        wanted = [n for n in _wanted(node) if n.n_items > beyond and n.segment is None]
        elsewhere = self._device.passed(but=holder) if wanted else {}
        return [n for n in wanted if id(n) not in elsewhere]

    def _unsaved_bytes(self, slot: SimulatedSlot) -> int:
        return sum(map(self._kv_bytes, self._unsaved(slot, slot.node)))

    def _parked_bytes(self, node: Node) -> int:
        """What RAM would have to take of a parked state, with the KV that only its spare holds. Nothing if it can hold no
        state at all: then spares are for the conversation that runs."""
        if self._curves.state_bytes > self._budget:
            return 0
        if not _is_worth_copying(node):
            return sum(map(self._kv_bytes, self._unsaved(node, node)))
        elsewhere = self._device.passed(but=node)
        kv = sum(self._kv_bytes(n) for n in node.lineage() if n.segment is None and id(n) not in elsewhere)
        return kv + (0 if _has_copy(node) else self._curves.state_bytes)

    def _kv_bytes(self, node: Node) -> int:
        n_above = 0 if node.parent is None else node.parent.mark.n_tokens
        return (node.mark.n_tokens - n_above) * self._curves.kv_bytes_per_token

    def _fill_kv(self, nodes: Iterable[Node]) -> None:
        """Gives RAM the KV of these nodes that it does not have, in as few segments as the engine would."""
        for run in self._runs(nodes):
            self.written_bytes += self._set_segment(run[0].parent or run[0], run[-1]).blob.nbytes

    def _runs(self, nodes: Iterable[Node]) -> Iterator[list[Node]]:
        unsaved = [node for node in nodes if node.segment is None and node.parent is not None]
        return segment_merge.runs(unsaved, lambda _node: True, self._most_joined)

    def _set_segment(self, above: Node, end: Node) -> Segment:
        """One segment for the nodes between two."""
        n_tokens = end.mark.n_tokens - above.mark.n_tokens
        n_bytes = n_tokens * self._curves.kv_bytes_per_token + self._curves.segment_bytes
        segment = Segment(weightless(n_bytes), above.mark, end.mark, True, (), items=(above.n_items, end.n_items))
        self.tree.set_segment(end, segment)
        return segment

    def _join(self, slot: SimulatedSlot) -> None:
        while groups := segment_merge.to_join(slot.node, slot.n_settled, self._most_joined):
            group = groups[-1]
            ends = [_last_user(stretch) for stretch in group]
            for stretch, end in zip(group, ends, strict=True):
                if end is not stretch.users[-1]:
                    self._set_segment(stretch.users[-1], end)
            self._set_segment(group[0].users[0].parent or group[0].users[0], group[-1].users[-1])
            self._enforce_budget()

    # the budget

    @contextlib.contextmanager
    def _lifted(self) -> Iterator[None]:
        """Suspends eviction inside the block."""
        self._n_lifted += 1
        try:
            yield
        finally:
            self._n_lifted -= 1
            self._enforce_budget()

    def _enforce_budget(self) -> None:
        """As the engine does. Other policies weigh everything at once."""
        if self._n_lifted:
            return
        goal, most = int(self._budget * LOW_WATER), self._budget
        n_left = 1 + self._hand.n_parts  # parts with nothing to evict
        while self.tree.ram_bytes > most and n_left > 0:
            part = self._part() if self._policy.learns else Part(list(self.tree.nodes()), is_whole=True)
            most = goal if part.is_whole else self._budget
            entries = self._weigh(part)
            choice = self._policy.victims(entries, part.share(self.tree.ram_bytes - goal, entries), self._curves)
            n_left -= not choice.keys
            self._hand.note_least(part.nodes[key // 2] for key in choice.next_keys)
            for key in choice.keys:
                self._evict(part.nodes[key // 2], is_state=key % 2 == 0)

    def _part(self) -> Part:
        return self._hand.part(resident=self._device.ends())

    def _weigh(self, part: Part) -> list[state_policy.Entry]:
        return weigh(part.nodes, self._facts(part.among))

    def _facts(self, among: set[Node] | None) -> WeighingFacts:
        learns = self._policy.learns
        running = [
            self._returns.running_visit(slot.node, slot.n_prompt, slot.continuation)
            for slot in self._device.slots
            if slot.continuation is not None
        ]
        expected = self._returns.expected(running, anywhere=False, among=among) if learns else {}
        seconds, resident = self._curves.seconds_per_token, frozenset(self._device.passed())
        facts = WeighingFacts(self._now, seconds, True, True, resident, expected, self._returns.worth_unvisited)
        return facts if self._disk is None else replace(facts, load_s=self._disk.load_s)

    def _evict(self, node: Node, *, is_state: bool) -> None:
        if is_state and node.checkpoint is not None:
            self._write_leaving(node)
            if node.checkpoint.parked is not None:
                self.tree.drop_state(node)
            else:
                self.tree.drop_checkpoint(node)
        elif not is_state and node.segment is not None:
            self.tree.drop_segment(node)


def _leaves_work(node: Node, prompt: Prompt) -> bool:
    """Whether an item is left to decode, or the logits after the last one were kept."""
    return node.n_items < len(prompt) or (node.checkpoint is not None and node.checkpoint.logits is not None)


def _is_worth_copying(node: Node) -> bool:
    """Of what is parked: all but the end of a prompt, which only an identical prompt can use."""
    return node.checkpoint is not None and node.checkpoint.kind is not CutKind.END


def _needed_points(slot: SimulatedSlot, n_prompt: int) -> list[Node]:
    """The nodes whose states a next turn or a retry continues from, the deepest last."""
    kept = [(n, n.checkpoint.kind) for n in slot.node.lineage() if n.checkpoint is not None]
    stable = [n for n, kind in kept if kind is CutKind.STABLE]
    stable = [n for n in stable if n is stable[-1] or n.n_items >= slot.n_settled]
    reply = [n for n, _ in kept if n is slot.node and n.n_items > n_prompt]
    chosen = {n.n_items: n for n in (*[n for n, _ in kept if n.n_items < n_prompt][-1:], *stable, *reply)}
    return [chosen[n_items] for n_items in sorted(chosen)]


def _wanted(node: Node) -> list[Node]:
    """The part of a lineage whose KV a state in RAM needs."""
    lineage = node.lineage()
    while lineage and not any(_has_copy(n) for n in lineage[-1].below()):
        lineage.pop()
    return lineage


def _has_copy(node: Node) -> bool:
    return node.checkpoint is not None and node.checkpoint.state is not None


def _last_user(stretch: SegmentRun) -> Node:
    """The deepest node that uses its segment."""
    node = stretch.users[-1]
    while (child := next((c for c in node.children.values() if c.segment is stretch.segment), None)) is not None:
        node = child
    return node
