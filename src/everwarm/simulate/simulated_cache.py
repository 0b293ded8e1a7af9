"""One tree of states and KV under a budget, driven by a policy: what an engine does with a trace, without the engine.

Uses the real tree and the real weighing, with blobs that weigh what they would and take no memory. Requests run one after
the other; between two of them everything worth keeping is copied to RAM. No spares: every checkpoint lies in RAM. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from everwarm.prompt.prompt import Prompt
from everwarm.simulate.curves import Curves
from everwarm.simulate.policies import Policy
from everwarm.simulate.trace import TraceTurn
from everwarm.state import policy as state_policy
from everwarm.state.eviction import Scales, weigh
from everwarm.state.policy import CutKind, KeptCheckpoint, Seat
from everwarm.state.tree import Checkpoint, Match, Node, Segment, Tree
from everwarm.types import Blob

LOW_WATER = 0.97
IDLE_CELLS = 256  # that other conversations may keep on the device while one runs
_EMPTY = Prompt.of_tokens([])
_BYTE = np.zeros(1, np.uint8)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request cost, in tokens and bytes."""

    n_from: int  # tokens it did not have to read
    n_to: int  # tokens of the prompt when it was over
    loaded_bytes: int = 0


@dataclass(slots=True)
class HeldState:
    """Bytes of a memory so far."""

    written: int = 0
    most: int = 0


@dataclass(slots=True, eq=False)
class _Slot:
    node: Node
    items: Prompt = field(default_factory=lambda: _EMPTY)
    n_fed: int = 0
    used_at: float = 0.0


class SimulatedCache:
    def __init__(self, policy: Policy, curves: Curves, budget: int, n_slots: int) -> None:
        self.held = HeldState()
        self.tree = Tree()
        self._policy = policy
        self._curves = curves
        self._budget = budget
        self._spacing = policy.spacing(curves)
        self._slots = [_Slot(self.tree.root("")) for _ in range(n_slots)]
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
        common = [int(turn.prompt.common_prefix(slot.items)) for slot in self._slots]
        seats = [Seat(i, s.n_fed, common[i], s.used_at) for i, s in enumerate(self._slots)]
        number = state_policy.seat(seats)
        slot = self._slots[number]
        match = self.tree.match("", turn.prompt, max(common))
        n_items, loaded = self._bring(slot, turn.prompt, match, common, number)
        self._limit_idle(slot)
        self._read(slot, turn, match, n_items)
        slot.used_at = self._now
        self._save(slot)
        self.held.most = max(self.held.most, self.tree.ram_bytes)
        return Outcome(turn.prompt.n_tokens(n_items), turn.prompt.n_tokens(max(n_items, turn.n_stop)), loaded)

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
            self._save(slot)
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

    def _limit_idle(self, running: _Slot) -> None:
        """Idle conversations keep few cells: the least recently used ones are evicted."""
        used = sum(slot.n_fed for slot in self._slots)
        for slot in sorted((s for s in self._slots if s is not running and s.n_fed), key=lambda s: s.used_at):
            if used <= running.n_fed + IDLE_CELLS:
                return
            used -= slot.n_fed
            self._vacate(slot)

    def _vacate(self, slot: _Slot) -> None:
        self._save(slot)
        self._seat(slot, self.tree.root(""))
        slot.n_fed = 0
        slot.items = _EMPTY

    # reading

    def _read(self, slot: _Slot, turn: TraceTurn, match: Match, n_items: int) -> None:
        stop = turn.n_stop
        path = turn.path_from(n_items)
        for cut in self._policy.cuts(turn, n_items, match.n_shared, self._spacing):
            if n_items < cut.at <= stop:
                self._take(slot, path, cut.at, cut.kind)
        n_end = len(path)
        if n_end != len(turn.prompt) and n_end > slot.node.n_items and self._policy.keeps_ends:
            self._take(slot, path, n_end, CutKind.CANCEL if turn.stop_at is not None else CutKind.REPLY)
        else:
            self._mark(slot, path, n_end)
        slot.items = path
        slot.n_fed = n_end

    def _mark(self, slot: _Slot, path: Prompt, n_items: int) -> Node:
        node = self.tree.grow(slot.node, path, n_items) if n_items > slot.node.n_items else slot.node
        self._seat(slot, node)
        return node

    def _take(self, slot: _Slot, path: Prompt, n_items: int, kind: CutKind) -> None:
        node = self._mark(slot, path, n_items)
        checkpoint = node.checkpoint
        if self._spacing.max_checkpoints == 0:
            return
        if checkpoint is not None:
            checkpoint.used_at = self._now
            if checkpoint.kind in (CutKind.END, CutKind.NEAR_END, CutKind.EVERY):
                checkpoint.kind = kind
            return
        state = _weightless(self._curves.state_bytes)
        self.held.written += state.nbytes
        self.tree.set_checkpoint(node, Checkpoint(kind, True, (), state=state, used_at=self._now))
        self._thin(node)
        self._enforce_budget()

    def _thin(self, node: Node) -> None:
        for end in [n for n in node.below() if n.checkpoint is not None and not n.children] or [node]:
            kept = {n.n_items: n for n in end.lineage() if n.checkpoint is not None}
            path = [KeptCheckpoint(n.n_items, n.checkpoint.kind) for n in kept.values() if n.checkpoint is not None]
            for n_items in state_policy.thin(path, self._spacing.max_checkpoints):
                self.tree.drop_checkpoint(kept[n_items])

    # keeping

    def _save(self, slot: _Slot) -> None:
        """Copy to RAM the KV of a slot that a later request can use."""
        lineage = slot.node.lineage()
        while lineage and not any(n.checkpoint is not None for n in lineage[-1].below()):
            lineage.pop()
        for node in lineage:
            if node.segment is None and node.parent is not None:
                n_tokens = node.mark.n_tokens - node.parent.mark.n_tokens
                blob = _weightless(n_tokens * self._curves.kv_bytes_per_token)
                items = node.start, node.n_items
                self.tree.set_segment(node, Segment(blob, node.parent.mark, node.mark, True, (), items=items))
                self.held.written += blob.nbytes
        self._enforce_budget()

    def _enforce_budget(self) -> None:
        if self.tree.ram_bytes <= self._budget:
            return
        goal = int(self._budget * LOW_WATER)
        while self.tree.ram_bytes > goal:
            nodes = list(self.tree.nodes())
            chosen = self._policy.victims(self._weigh(nodes), self.tree.ram_bytes - goal, self._curves)
            if not chosen:
                return
            for key in chosen:
                self._evict(nodes[key // 2], is_state=key % 2 == 0)

    def _weigh(self, nodes: Sequence[Node]) -> list[state_policy.Entry]:
        resident = frozenset(id(node) for slot in self._slots for node in slot.node.lineage())
        return weigh(nodes, Scales(self._now, self._curves.seconds_per_token, True, True, resident))

    def _evict(self, node: Node, *, is_state: bool) -> None:
        if is_state and node.checkpoint is not None:
            self.tree.drop_checkpoint(node)
        elif not is_state and node.segment is not None:
            self.tree.drop_segment(node)


def _weightless(n_bytes: int) -> Blob:
    """An array that claims a size in bytes and takes no memory."""
    return np.broadcast_to(_BYTE, (n_bytes,))
