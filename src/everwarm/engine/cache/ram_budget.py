"""Eviction from RAM: keeps what the tree holds within its budget of bytes, and each namespace within its share of it.

The decision, in order: ``state.returns`` expects what comes back, ``state.ram_eviction.weigh`` says by that what everything
in RAM is worth, ``state.policy.choose`` takes the least valuable, and ``RamBudget`` drops them here, after what is not on
disk yet was handed to the tiers below. What the disk evicts is decided in ``state.store.disk_eviction``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from everwarm.engine.slots import Residents
from everwarm.engine.stats import EngineStats, Speed
from everwarm.llama.model import MemoryKind
from everwarm.state import policy
from everwarm.state.ram_eviction import N_LEAST, Hand, Part, WeighingFacts, is_worth_copying, least_parked, weigh
from everwarm.state.returns import Returns
from everwarm.state.tree import Eviction, Node, Tree

Leaving = Callable[[Sequence[Node]], None]
LoadS = Callable[[Node, int], float | None]

ROOMY = 0.75  # at most so full: what is worth little may be kept
LOW_WATER = 0.97  # evict a little more than needed, so that not every checkpoint has to evict


class RamBudget:
    def __init__(
        self,
        n_bytes: int,
        namespace_share: float,
        tree: Tree,
        kind: MemoryKind,
        residents: Residents,
        returns: Returns,
        speed: Speed,
        journal: EngineStats,
    ) -> None:
        """``namespace_share``: the most that each namespace may take of it."""
        self.n_bytes = n_bytes
        self.namespace_share = namespace_share
        self._tree = tree
        self._kind = kind
        self._residents = residents
        self._returns = returns
        self._speed = speed
        self._journal = journal
        self._n_lifted = 0
        self._hand = Hand(tree)
        self.awaited: dict[int, Node] = {}  # where suspended requests will continue, by their ids: evicted last
        self.save_leaving: Leaving = lambda _nodes: None
        self.load_s: LoadS = lambda _node, _n_bytes: None

    def bind(self, save_leaving: Leaving, load_s: LoadS) -> None:
        """The tiers below RAM copy from the device through RAM, so RAM exists first; until they are bound there are none.
        ``save_leaving`` is told of nodes whose state or KV is about to be evicted; ``load_s`` says how long it takes to get
        it back, None: it is not there."""
        self.save_leaving = save_leaving
        self.load_s = load_s

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Suspends eviction inside the block, so that entries can be written elsewhere; after the outermost one the
        budget holds again."""
        self._n_lifted += 1
        try:
            yield
        finally:
            self._n_lifted -= 1
            self.enforce()

    def can_hold(self, n_bytes: int) -> bool:
        """Whether something of this size fits at all."""
        return n_bytes <= self.n_bytes * min(1.0, self.namespace_share)

    def would_keep_copy(self, end: Node, n_bytes: int, n_new: int) -> bool:
        """Whether a copy of a turn that the device holds, of ``n_bytes``, would stay; ``n_new`` of them are not here."""
        if n_new <= self.n_free:
            return True
        if not self.can_hold(n_bytes):
            return False
        seconds = end.n_items * self._speed.seconds_per_token
        turn = policy.Entry(0, n_bytes, seconds, self._returns.worth(end, 0.0))
        return is_worth_copying(turn, self._weigh(self._part(None)), n_new - self.n_free)

    def least_parked(self, parked: Sequence[Node], state_bytes: int) -> Node | None:
        """Which of the parked states gives way to a new one; None: RAM has room for that, or something that is worth
        less."""
        if self.n_free >= state_bytes:
            return None
        part = self._part(None)
        return least_parked(parked, part, self._facts(part.among), state_bytes, self.n_free)

    def is_roomy(self, namespace: str) -> bool:
        """Whether a good part of it is free, and of this namespace's share."""
        root = self._tree.namespaces().get(namespace)
        own = 0 if root is None else root.ram_bytes
        return max(self._tree.ram_bytes, own / self.namespace_share) < ROOMY * self.n_bytes

    @property
    def n_free(self) -> int:
        return self.n_bytes - self._tree.ram_bytes

    @property
    def is_exceeded(self) -> bool:
        most = int(self.n_bytes * self.namespace_share)
        return self._tree.ram_bytes > self.n_bytes or any(root.ram_bytes > most for root in self._tree.roots())

    def enforce(self) -> None:
        """Evicts the least valuable until the budget holds, and first in every namespace that is over its share: one client
        cannot push out what others keep."""
        if self._n_lifted:
            return
        most = int(self.n_bytes * self.namespace_share)
        for root in self._tree.roots() if most < self.n_bytes else ():
            self._shrink(root, lambda root=root: root.ram_bytes, most)  # type: ignore[misc]
        self._shrink(None, lambda: self._tree.ram_bytes, self.n_bytes)

    def make_room(self, n_bytes: int, root: Node) -> None:
        """Evicts the least valuable until so many bytes more fit below a namespace's root, within its share: what is read
        next then gets memory that was used before, and does not wait for new pages."""
        if self._n_lifted or not self.can_hold(n_bytes):
            return
        share = int(self.n_bytes * self.namespace_share)
        if share < self.n_bytes:
            self._shrink(root, lambda: root.ram_bytes, share - n_bytes)
        self._shrink(None, lambda: self._tree.ram_bytes, self.n_bytes - n_bytes)

    def _shrink(self, root: Node | None, weight: Callable[[], int], budget: int) -> None:
        """Evicts below a root, or anywhere. Of a large tree no more is evicted than must be, part by part."""
        goal = int(budget * LOW_WATER)
        most = budget
        n_left = 1 + self._hand.n_parts  # parts with nothing to evict
        while weight() > most and n_left > 0:
            part = self._part(root)
            most = goal if part.is_whole else budget
            entries = self._weigh(part)
            choice = policy.choose(entries, part.share(weight() - goal, entries), N_LEAST)
            n_left -= not choice.keys
            self._hand.note_least(part.nodes[key // 2] for key in choice.next_keys)
            self.tell_of([part.nodes[key // 2] for key in choice.keys])
            for key, worth in zip(choice.keys, choice.worths, strict=True):
                node = part.nodes[key // 2]
                why = Eviction(node.n_items, time.monotonic(), worth, choice.least_kept, budget)
                self._tree.forgotten.note_eviction(self._tree.namespace(node), node.path, why)
                self._evict(node, is_state=key % 2 == 0)

    def _part(self, root: Node | None) -> Part:
        return self._hand.part(root, [end for _, end in self._residents.ends()])

    def tell_of(self, nodes: Sequence[Node]) -> None:
        """Tells the tiers below what is about to be lost. What is copied meanwhile evicts nothing: the next round does."""
        self._n_lifted += 1
        try:
            self.save_leaving(nodes)
        finally:
            self._n_lifted -= 1

    def _evict(self, node: Node, *, is_state: bool) -> None:
        checkpoint = node.checkpoint
        node.evicted = True
        if not is_state:
            if node.segment is not None:
                self._journal.evicted("ram_budget")
                self._tree.drop_segment(node)
        elif checkpoint is not None and checkpoint.parked is not None:
            self._tree.drop_state(node)
        elif checkpoint is not None:
            self._journal.dropped(node, self._tree.drop_checkpoint(node), "ram_budget")

    def _weigh(self, part: Part) -> list[policy.Entry]:
        return weigh(part.nodes, self._facts(part.among))

    def _facts(self, among: set[Node] | None) -> WeighingFacts:
        kind = self._kind
        resident = frozenset(id(n) for _, end in self._residents.ends() for n in end.lineage())
        running = [
            self._returns.running_visit(slot.node, slot.request.n_prompt, slot.request.continuation)
            for slot in self._residents.slots
            if slot.request is not None and not slot.request.ask.is_background
        ]
        return WeighingFacts(
            now=time.monotonic(),
            seconds_per_token=self._speed.seconds_per_token,
            needs_checkpoints=kind.needs_checkpoints,
            needs_kv=kind.has_attention,
            resident=resident,
            expected=self._returns.expected(running, anywhere=not kind.needs_checkpoints, among=among),
            unvisited=self._returns.worth_unvisited,
            awaited=frozenset(node.id for node in self.awaited.values()),
            load_s=self.load_s,
        )
