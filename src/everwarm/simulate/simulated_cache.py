"""One tree of states and KV under a budget, driven by a policy: what an engine does with a trace, without the engine.

Uses the real tree, the real weighing and the real learning, with blobs that weigh what they would and take no memory.
Requests run one after the other. The device keeps the KV of the conversations in its slots and the states in its spares;
what leaves it is copied to RAM. At the end of every turn its KV and the states that the next turn needs are copied, too,
so that they outlive the engine. An idle conversation leaves the device when another one runs, unless RAM has no room for
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from everwarm.prompt.prompt import Prompt
from everwarm.simulate.curves import Curves
from everwarm.simulate.policies import Policy, TurnReading
from everwarm.simulate.simulated_disk import DiskSize, SimulatedDisk
from everwarm.simulate.trace import TraceTurn
from everwarm.simulate.weightless import weightless
from everwarm.state import policy as state_policy
from everwarm.state.eviction import Hand, Part, Scales, weigh
from everwarm.state.policy import GUARD, CutKind, KeptCheckpoint, Seat
from everwarm.state.returns import Continuation, Returns, RunningVisit
from everwarm.state.tree import Checkpoint, Match, Node, Segment, Tree, first_message_end
from everwarm.types import Blob, SeqId

LOW_WATER = 0.97
SHARED_S = 0.05  # of reading: below it a shared point is not written
IDLE_CELLS = 256  # that other conversations may keep on the device while one runs
_EMPTY = Prompt.of_tokens([])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request cost, in tokens and bytes."""

    n_from: int  # tokens it did not have to read
    n_to: int  # tokens of the prompt when it was over
    loaded_bytes: int = 0  # from RAM to the device
    disk_bytes: int = 0  # from disk to RAM


@dataclass(slots=True)
class HeldState:
    """Bytes of a memory so far."""

    written: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True)
class DeviceSize:
    """What an engine has beside RAM."""

    n_slots: int = 2
    n_spares: int = 4  # states
    n_cells: int = 131_072


@dataclass(slots=True, eq=False)
class _Slot:
    node: Node
    items: Prompt = field(default_factory=lambda: _EMPTY)
    n_fed: int = 0
    used_at: float = 0.0


class SimulatedCache:
    def __init__(
        self, policy: Policy, curves: Curves, budget: int, device: DeviceSize, disk: DiskSize | None = None
    ) -> None:
        self.held = HeldState()
        self.tree = Tree()
        self._policy = policy
        self._curves = curves
        self._budget = budget
        self._device = device
        self._disk = None if disk is None else SimulatedDisk(disk, curves)
        self._spacing = policy.spacing(curves)
        self._returns = Returns(self.tree)
        self._hand = Hand(self.tree)
        self._slots = [_Slot(self.tree.root("")) for _ in range(device.n_slots)]
        self._parked: list[Node] = []  # whose states lie in spares, the oldest first
        self._running: list[RunningVisit] = []
        self._now = 0.0
        for slot in self._slots:
            self.tree.hold(slot.node)

    @property
    def held_bytes(self) -> int:
        return self.tree.ram_bytes

    def serve(self, turn: TraceTurn) -> Outcome:
        self._now = turn.at_s
        if turn.before:
            for slot in self._slots:
                self._vacate(slot)
        prompt = turn.prompt
        common = [int(prompt.common_prefix(slot.items)) for slot in self._slots]
        seats = [Seat(i, slot.n_fed, common[i], slot.used_at) for i, slot in enumerate(self._slots)]
        number = state_policy.seat(seats, lambda i: self._worth(self._slots[i]))
        slot = self._slots[number]
        match = self.tree.match("", prompt, max(common))
        disk_bytes = self._load(prompt, match)
        if disk_bytes:
            match = self.tree.match("", prompt, max(common))
        continuation = self._returns.arrive(match, self._now) if self._policy.learns else Continuation()
        n_items, loaded = self._bring(slot, prompt, match, common, number)
        self._limit_idle(slot, len(prompt))
        self._read(slot, turn, match, n_items, continuation)
        slot.used_at = self._now
        self._write(slot, len(prompt))
        self._save(slot, len(prompt))
        self.held.most = max(self.held.most, self.tree.ram_bytes)
        return Outcome(prompt.n_tokens(n_items), prompt.n_tokens(max(n_items, turn.n_stop)), loaded, disk_bytes)

    @property
    def disk_written(self) -> int:
        return 0 if self._disk is None else self._disk.written_bytes

    # starting

    def _bring(self, slot: _Slot, prompt: Prompt, match: Match, common: Sequence[int], number: int) -> tuple[int, int]:
        """Restores the deepest kept point of the prompt: returns where that is, and the bytes it took."""
        own = common[number]
        usable = next((node for node in match.usable if node.n_items < len(prompt)), None)
        if 0 < own == slot.n_fed < len(prompt) and (usable is None or usable.n_items <= own):
            slot.items = prompt.first(own)
            return own, 0
        if usable is None:
            self._vacate(slot)
            self._stand(slot, prompt, (), 0)
            return 0, 0
        n_items = usable.n_items
        with self.tree.pinned(usable):
            self._move_out(slot, usable)
            on_device = min(max(common), n_items)
            self._stand(slot, prompt, match.path, n_items)
            assert usable.checkpoint is not None
            usable.checkpoint.used_at = self._now
            usable.checkpoint.hits += 1
        n_kv = prompt.n_tokens(n_items) - prompt.n_tokens(on_device)
        return n_items, usable.checkpoint.size_bytes + n_kv * self._curves.kv_bytes_per_token

    def _stand(self, slot: _Slot, prompt: Prompt, path: Sequence[Node], n_items: int) -> None:
        self._seat(slot, next((n for n in reversed(path) if n.n_items <= n_items), self.tree.root("")))
        slot.n_fed, slot.items = n_items, prompt.first(n_items)

    def _seat(self, slot: _Slot, node: Node) -> None:
        self.tree.hold(node)
        self.tree.release(slot.node)
        slot.node = node

    # the disk

    def _load(self, prompt: Prompt, match: Match) -> int:
        """Loads the deepest state on disk if it is deeper than what RAM has and that is faster than reading: returns the
        bytes."""
        n_items = 0 if self._disk is None else self._disk.deepest(prompt, self._now)
        n_have = next((node.n_items for node in match.usable if node.n_items < len(prompt)), 0)
        if self._disk is None or n_items <= n_have + GUARD:
            return 0
        curves, first, last = self._curves, prompt.n_tokens(min(match.n_kv, n_items)), prompt.n_tokens(n_items)
        n_bytes = curves.state_bytes + (last - first) * curves.kv_bytes_per_token
        if n_bytes / self._disk.size.bytes_per_s > curves.read_s(prompt.n_tokens(n_have), last):
            return 0
        node = self.tree.grow(self.tree.root(""), prompt, n_items)
        if node.checkpoint is None:
            self.tree.set_checkpoint(node, Checkpoint(CutKind.STABLE, True, (), used_at=self._now))
            self.tree.set_state(node, weightless(curves.state_bytes))
        self._fill_kv(node.lineage())
        self._disk.note_loaded(node)
        return n_bytes

    def _write(self, slot: _Slot, n_prompt: int) -> None:
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
        if self._disk is None or node.checkpoint is None or not self._disk.has_room:
            return
        kind = node.checkpoint.kind
        continues = not self._policy.learns or self._returns.continues_replies
        if kind is CutKind.STABLE or (kind is CutKind.REPLY and continues):
            self._disk.write(node, self._now)

    # the device

    def _worth(self, slot: _Slot) -> float:
        return self._returns.worth(slot.node, self._now - slot.used_at) if self._policy.learns else 0.0

    def _limit_idle(self, running: _Slot, n_items: int) -> None:
        """Idle conversations keep few cells, unless they can be kept nowhere else: those of least worth leave."""
        used = sum(slot.n_fed for slot in self._slots)
        idle = [slot for slot in self._slots if slot is not running and slot.n_fed]
        for slot in sorted(idle, key=lambda slot: (self._worth(slot) * slot.n_fed, slot.used_at)):
            if used <= running.n_fed + IDLE_CELLS:
                return
            fits = self.tree.ram_bytes + self._unsaved_bytes(slot) <= self._budget
            if fits or used - running.n_fed + n_items > self._device.n_cells:
                used -= slot.n_fed
                self._vacate(slot)

    def _unsaved_bytes(self, slot: _Slot) -> int:
        lineage = slot.node.lineage()
        n_tokens = sum(n.mark.n_tokens - n.parent.mark.n_tokens for n in lineage if n.parent and n.segment is None)
        n_states = sum(n.checkpoint.state is None for n in lineage if n.checkpoint is not None)
        return n_tokens * self._curves.kv_bytes_per_token + n_states * self._curves.state_bytes

    def _vacate(self, slot: _Slot) -> None:
        self._move_out(slot, None)
        self._seat(slot, self.tree.root(""))
        slot.n_fed = 0
        slot.items = _EMPTY

    def _move_out(self, slot: _Slot, goal: Node | None) -> None:
        """Copies to RAM what the device keeps for this slot alone; ``goal``: where the slot will stand."""
        self._copy_kv(slot)
        ends = [other.node for other in self._slots if other is not slot] + ([] if goal is None else [goal])
        staying = {id(node) for end in ends for node in end.lineage()}
        for node in [node for node in self._parked if id(node) not in staying]:
            self._unpark(node)
        self._enforce_budget()

    def _unpark(self, node: Node) -> None:
        self._parked.remove(node)
        checkpoint = node.checkpoint
        assert checkpoint is not None
        checkpoint.parked = None
        if checkpoint.state is None:
            self.tree.set_state(node, self._new_state())

    def _new_state(self) -> Blob:
        self.held.written += self._curves.state_bytes
        return weightless(self._curves.state_bytes)

    # reading

    def _read(self, slot: _Slot, turn: TraceTurn, match: Match, n_items: int, continuation: Continuation) -> None:
        path = turn.path_from(n_items)
        n_prompt, n_end = len(turn.prompt), len(path)
        places = self._returns.places(n_prompt, self._spacing) if self._policy.learns else []
        for cut in self._policy.cuts(TurnReading(turn, n_items, match.n_shared, places), self._spacing):
            if n_items < cut.at <= turn.n_stop:
                self._take(
                    slot,
                    path,
                    cut.at,
                    cut.kind,
                    RunningVisit(slot.node, n_prompt, continuation),
                )
        kind = CutKind.REPLY if turn.stop_at is None else CutKind.CANCEL
        if n_end != n_prompt and n_end > slot.node.n_items and self._keeps_end(kind):
            self._take(slot, path, n_end, kind, RunningVisit(slot.node, n_prompt, continuation))
        else:
            self._mark(slot, path, n_end)
        slot.items = path
        slot.n_fed = n_end
        if self._policy.learns:
            self._returns.leave(slot.node, n_prompt, continuation)

    def _keeps_end(self, kind: CutKind) -> bool:
        learned = kind is CutKind.REPLY and self._policy.learns
        return self._policy.keeps_ends and (not learned or self._returns.keeps_replies)

    def _mark(self, slot: _Slot, path: Prompt, n_items: int) -> Node:
        node = self.tree.grow(slot.node, path, n_items) if n_items > slot.node.n_items else slot.node
        self._seat(slot, node)
        return node

    def _take(self, slot: _Slot, path: Prompt, n_items: int, kind: CutKind, running: RunningVisit) -> None:
        node = self._mark(slot, path, n_items)
        checkpoint = node.checkpoint
        if self._spacing.max_checkpoints == 0:
            return
        if checkpoint is not None:
            checkpoint.used_at = self._now
            checkpoint.kind = state_policy.better(checkpoint.kind, kind)
            return
        self._running = [replace(running, node=node)]
        checkpoint = Checkpoint(kind, True, (), used_at=self._now)
        if self._device.n_spares:
            if len(self._parked) == self._device.n_spares:
                self._unpark(self._oldest_parked(node))
            checkpoint.parked = SeqId(0)
            self._parked.append(node)
        else:
            checkpoint.state = self._new_state()
        self.tree.set_checkpoint(node, checkpoint)
        self._thin(node)
        self._enforce_budget()
        self._running = []

    def _oldest_parked(self, running: Node) -> Node:
        """Of other conversations first."""
        own = {id(node) for node in running.lineage()}
        return next((node for node in self._parked if id(node) not in own), self._parked[0])

    def _thin(self, node: Node) -> None:
        for end in [n for n in node.below() if n.checkpoint is not None and not n.children] or [node]:
            kept = {n.n_items: n for n in end.lineage() if n.checkpoint is not None}
            path = [KeptCheckpoint(n.n_items, n.checkpoint.kind) for n in kept.values() if n.checkpoint is not None]
            for n_items in state_policy.thin(path, self._spacing.max_checkpoints):
                self._drop(kept[n_items])

    def _drop(self, node: Node) -> None:
        if node in self._parked:
            self._parked.remove(node)
        self.tree.drop_checkpoint(node)

    # keeping

    def _save(self, slot: _Slot, n_prompt: int) -> None:
        """Copies what the next turn needs of this one to RAM. It evicts others' entries first."""
        kept = [node for node in slot.node.lineage() if node.checkpoint is not None]
        needed = [n for n in kept if n.n_items < n_prompt][-1:] + [n for n in kept[-1:] if n.n_items > n_prompt]
        with self.tree.pinned(slot.node):
            for node in needed:
                if node.checkpoint is not None and node.checkpoint.state is None:
                    self.tree.set_state(node, self._new_state())
            self._copy_kv(slot)
        self._enforce_budget()

    def _copy_kv(self, slot: _Slot) -> None:
        """Copy to RAM the KV of a slot that a later request can use."""
        lineage = slot.node.lineage()
        while lineage and not any(n.checkpoint is not None for n in lineage[-1].below()):
            lineage.pop()
        self.held.written += self._fill_kv(lineage)

    def _fill_kv(self, lineage: Sequence[Node]) -> int:
        """Gives RAM the KV of a lineage that it does not have: returns its bytes."""
        n_bytes = 0
        for node in lineage:
            if node.segment is None and node.parent is not None:
                n_tokens = node.mark.n_tokens - node.parent.mark.n_tokens
                blob = weightless(n_tokens * self._curves.kv_bytes_per_token)
                items = node.start, node.n_items
                self.tree.set_segment(node, Segment(blob, node.parent.mark, node.mark, True, (), items=items))
                n_bytes += blob.nbytes
        return n_bytes

    def _enforce_budget(self) -> None:
        """As the engine does. Other policies weigh everything at once."""
        goal, most = int(self._budget * LOW_WATER), self._budget
        n_left = 1 + self._hand.n_parts  # parts with nothing to evict
        while self.tree.ram_bytes > most and n_left > 0:
            part = self._hand.part() if self._policy.learns else Part(list(self.tree.nodes()), is_whole=True)
            most = goal if part.is_whole else self._budget
            entries = self._weigh(part)
            choice = self._policy.victims(entries, part.share(self.tree.ram_bytes - goal, entries), self._curves)
            n_left -= not choice.keys
            self._hand.note_least(part.nodes[key // 2] for key in choice.next_keys)
            for key in choice.keys:
                self._evict(part.nodes[key // 2], is_state=key % 2 == 0)

    def _weigh(self, part: Part) -> list[state_policy.Entry]:
        resident = frozenset(id(node) for slot in self._slots for node in slot.node.lineage())
        learns = self._policy.learns
        expected = self._returns.expected(self._running, anywhere=False, among=part.among) if learns else {}
        seconds = self._curves.seconds_per_token
        scales = Scales(self._now, seconds, True, True, resident, expected, self._returns.worth_unvisited)
        if self._disk is not None:
            scales = replace(scales, load_s=self._disk.load_s)
        return weigh(part.nodes, scales)

    def _evict(self, node: Node, *, is_state: bool) -> None:
        if is_state and node.checkpoint is not None:
            self._write_leaving(node)
            if node.checkpoint.parked is not None:
                self.tree.drop_state(node)
            else:
                self.tree.drop_checkpoint(node)
        elif not is_state and node.segment is not None:
            self.tree.drop_segment(node)
