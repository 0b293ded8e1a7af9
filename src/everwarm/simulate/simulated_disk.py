"""The disk of a simulated cache: a tree of its own, with blobs that weigh what they would.

What the next turn of a conversation needs is written at the end of a turn: the state nearest to the prompt's end, those
of shared points above it, and the KV before them. The end of a reply is written when RAM evicts it, where turns continue
from replies. When the disk is full, what saves least goes first, by age and hits, as on the engine's disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everwarm.prompt.prompt import Prompt
from everwarm.simulate.curves import Curves
from everwarm.simulate.weightless import weightless
from everwarm.state.policy import CutKind, assumed_returns, victims
from everwarm.state.ram_eviction import WeighingFacts, weigh
from everwarm.state.tree import Checkpoint, Node, Segment, Tree

LOW_WATER = 0.97


@dataclass(frozen=True, slots=True)
class DiskSize:
    n_bytes: int
    bytes_per_s: float


@dataclass(slots=True)
class SimulatedDisk:
    size: DiskSize
    curves: Curves
    written_bytes: int = 0
    _tree: Tree = field(default_factory=Tree)
    _copies: dict[int, Node] = field(default_factory=dict)  # of nodes in RAM, by their ids

    def write(self, node: Node, now: float) -> None:
        """Keeps a node's state and the KV before it, as far as they are not there yet."""
        copy = self._tree.grow(self._tree.root(""), node.path, node.n_items)
        self._copies[node.id] = copy
        if copy.checkpoint is None:
            state = weightless(self.curves.state_bytes)
            self._tree.set_checkpoint(copy, Checkpoint(CutKind.STABLE, True, (), state=state, used_at=now))
            self.written_bytes += self.curves.state_bytes
        for each in copy.lineage():
            if each.segment is None and each.parent is not None:
                n_tokens = each.mark.n_tokens - each.parent.mark.n_tokens
                blob, items = weightless(n_tokens * self.curves.kv_bytes_per_token), (each.start, each.n_items)
                self._tree.set_segment(each, Segment(blob, each.parent.mark, each.mark, True, (), items=items))
                self.written_bytes += blob.nbytes
        self._shrink(now)

    @property
    def has_room(self) -> bool:
        """Whether more can be written without evicting anything."""
        return self._tree.ram_bytes < self.size.n_bytes

    def seconds(self, n_bytes: int) -> float:
        """To load so many bytes."""
        return n_bytes / self.size.bytes_per_s

    def load_s(self, node: Node, n_bytes: int) -> float | None:
        """Seconds to load so many bytes of what a node in RAM keeps; None: they are not here."""
        copy = self._copies.get(node.id)
        is_here = copy is not None and copy.checkpoint is not None and self._tree.has(copy)
        return self.seconds(n_bytes) if is_here else None

    def deepest(self, prompt: Prompt, now: float) -> int:
        """How many items of a prompt the deepest state here has; 0: there is none."""
        match = self._tree.match("", prompt, 0)
        found = next((node for node in match.usable if node.n_items < len(prompt)), None)
        if found is None or found.checkpoint is None:
            return 0
        found.checkpoint.used_at = now
        found.checkpoint.hits += 1
        return found.n_items

    def note_loaded(self, node: Node) -> None:
        """A node in RAM was loaded from here."""
        self._copies[node.id] = self._tree.grow(self._tree.root(""), node.path, node.n_items)

    def _shrink(self, now: float) -> None:
        if self._tree.ram_bytes <= self.size.n_bytes:
            return
        facts = WeighingFacts(now, self.curves.seconds_per_token, True, True, frozenset(), {}, assumed_returns)
        goal = int(LOW_WATER * self.size.n_bytes)
        while self._tree.ram_bytes > goal:  # KV goes after the states that needed it
            nodes = list(self._tree.nodes())
            keys = victims(weigh(nodes, facts), self._tree.ram_bytes - goal)
            if not keys:
                break
            for key in keys:
                self._drop(nodes[key // 2], is_state=key % 2 == 0)
        self._copies = {key: node for key, node in self._copies.items() if self._tree.has(node)}

    def _drop(self, node: Node, *, is_state: bool) -> None:
        if is_state and node.checkpoint is not None:
            self._tree.drop_checkpoint(node)
        elif not is_state and node.segment is not None:
            self._tree.drop_segment(node)
