"""The slots and spares of a simulated engine: which lineages the device holds, and how many cells they take.

A record only: what is copied to RAM before something leaves is ``simulated_cache``'s business. Lineages that the tree
shares are assumed to share their cells, as they do in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CutKind
from everwarm.state.tree import Node, Tree
from everwarm.types import SeqId

_EMPTY = Prompt.of_tokens([])


@dataclass(frozen=True, slots=True)
class DeviceSize:
    """What an engine has beside RAM."""

    n_slots: int = 2
    n_spares: int = 4  # states
    n_cells: int = 131_072


@dataclass(slots=True, eq=False)
class SimulatedSlot:
    node: Node
    items: Prompt = field(default_factory=lambda: _EMPTY)
    n_fed: int = 0
    n_settled: int = 0  # where its last request went on from
    used_at: float = 0.0
    is_tidy: bool = True  # its KV was copied to RAM, as far as there was room


class SimulatedDevice:
    def __init__(self, size: DeviceSize, tree: Tree) -> None:
        self._tree = tree
        self._n_cells = size.n_cells
        self.slots = [SimulatedSlot(tree.root("")) for _ in range(size.n_slots)]
        self.spares: list[Node | None] = [None] * size.n_spares  # whose states lie in them
        for slot in self.slots:
            tree.hold(slot.node)

    # questions

    def parked(self) -> list[Node]:
        return [node for node in self.spares if node is not None]

    def parked_by_age(self) -> list[Node]:
        """Ends of prompts first: only an identical prompt can use them."""
        return sorted(self.parked(), key=lambda node: (_kind(node) is not CutKind.END, _used_at(node)))

    def parked_by_use(self) -> list[Node]:
        return sorted(self.parked(), key=_used_at)

    def ends(self, *, but: SimulatedSlot | Node | None = None) -> Iterator[Node]:
        """The last node of every sequence; ``but`` that of one slot or spare."""
        yield from (slot.node for slot in self.slots if slot is not but)
        yield from (node for node in self.parked() if node is not but)

    def passed(self, *, but: SimulatedSlot | Node | None = None) -> dict[int, Node]:
        """The nodes whose KV the device holds, by their Python ids."""
        found: dict[int, Node] = {}
        for node in self.ends(but=but):
            while node.parent is not None and id(node) not in found:
                found[id(node)] = node
                node = node.parent
        return found

    def n_common(self, prompt: Prompt) -> int:
        """How many items of a prompt have their KV here."""
        own = [int(prompt.common_prefix(slot.items)) for slot in self.slots]
        return max([*own, *(min(int(prompt.common_prefix(node.path)), node.n_items) for node in self.parked())])

    @property
    def n_used(self) -> int:
        """Cells."""
        nodes = self.passed().values()
        tails = (slot.items.n_tokens(slot.n_fed) - slot.node.mark.n_tokens for slot in self.slots)
        return sum(n.mark.n_tokens - n.parent.mark.n_tokens for n in nodes if n.parent is not None) + sum(tails)

    @property
    def n_free(self) -> int:
        return self._n_cells - self.n_used

    # changes

    def stand(self, slot: SimulatedSlot, node: Node) -> None:
        self._tree.hold(node)
        self._tree.release(slot.node)
        slot.node = node

    def hold(self, slot: SimulatedSlot, node: Node, items: Prompt) -> None:
        """The slot holds exactly these items now."""
        self.stand(slot, node)
        slot.items, slot.n_fed, slot.is_tidy = items, len(items), not items

    def park(self, spare: int, node: Node) -> None:
        assert self.spares[spare] is None and node.checkpoint is not None
        self.spares[spare] = node
        node.checkpoint.parked = SeqId(spare)

    def release(self, node: Node) -> int:
        """Empties the spare of a node: returns which it was."""
        spare = self.spares.index(node)
        self.spares[spare] = None
        if node.checkpoint is not None:
            node.checkpoint.parked = None
        return spare


def _kind(node: Node) -> CutKind:
    assert node.checkpoint is not None
    return node.checkpoint.kind


def _used_at(node: Node) -> float:
    return 0.0 if node.checkpoint is None else node.checkpoint.used_at
