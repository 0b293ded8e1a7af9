"""The machine of a simulated cache: what a model costs on it, slots and spares on its device, its disk.

``Curves`` are the seconds to read a token at a depth, the bytes of a state and of a token's KV, and the speed of loading.

The device is a record only: which lineages its slots and spares hold, and how many cells they take. What is copied to
RAM before something leaves is ``simulated_cache``'s business. Lineages that the tree shares are assumed to share their
cells, as they do in the engine.

The disk is a tree of its own, with blobs that weigh what they would. What the next turn of a conversation needs is
written at the end of a turn: the state nearest to the prompt's end, those of shared points above it, and the KV before
them. The end of a reply is written when RAM evicts it, where turns continue from replies. When the disk is full, what
saves least goes first; the code that says so is that of the engine's disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from everwarm.config import require
from everwarm.errors import BadRequest
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CutKind
from everwarm.state.returns import Continuation
from everwarm.state.store.disk_eviction import VictimQueue
from everwarm.state.store.index import IndexedObject, ObjectTable
from everwarm.state.tree import Checkpoint, Node, Segment, SegmentPiece, Tree
from everwarm.types import Blob, SeqId

_EMPTY = Prompt.of_tokens([])
_BYTE = np.zeros(1, np.uint8)


# what a model costs


class Curves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``prefill`` holds pairs of a depth and the seconds that one token takes there; between them lines are drawn."""

    name: str
    state_bytes: int
    kv_bytes_per_token: int
    load_bytes_per_s: float
    prefill: tuple[tuple[float, float], ...]
    logits_bytes: int = 0  # of one row, which is kept with the end of a prompt
    segment_bytes: int = 0  # that each segment takes beside its tokens

    def read_s(self, start: int, stop: int) -> float:
        """Seconds to read the tokens from ``start`` to ``stop``."""
        if stop <= start:
            return 0.0
        depths, seconds = zip(*self.prefill, strict=True)
        inner = [d for d in depths if start < d < stop]
        at = np.array([start, *inner, stop], float)
        return float(np.trapezoid(np.interp(at, depths, seconds), at))

    def load_s(self, n_bytes: int) -> float:
        return n_bytes / self.load_bytes_per_s

    @property
    def seconds_per_token(self) -> float:
        """At a middling depth; what an engine would have learned."""
        return self.read_s(0, 32_768) / 32_768


_BOUNDS: dict[str, tuple[float, float]] = {
    "state_bytes": (1, 1 << 40),
    "kv_bytes_per_token": (0, 1 << 30),
    "load_bytes_per_s": (1, 1e15),
    "logits_bytes": (0, 1 << 30),
    "segment_bytes": (0, 1 << 30),
}

# A 27B hybrid at Q8_0 on an H200: 26,549 tokens in 9.2 s, 149.6 MiB of state, 64 KiB of KV per token, 22 ms to set a state.
LARGE = Curves("27b", 156_867_000, 65_536, 7.1e9, ((0, 3.2e-4), (26_549, 3.7e-4), (131_072, 5.7e-4)))
# A hybrid of 9B parameters on a card of 24 GiB, from its shape: a third of the state, half of the KV, three times as fast.
MEDIUM = Curves("9b", 52_000_000, 32_768, 7.1e9, ((0, 1.1e-4), (26_549, 1.3e-4), (131_072, 2.2e-4)))
# The embedded model on two cores that others used as well, 5,000 tokens.
TINY = Curves("tiny", 430_252, 1_048, 2e9, ((0, 5.0e-4), (5_000, 1.1e-3)))
KNOWN = {curves.name: curves for curves in (LARGE, MEDIUM, TINY)}


def parse_curves(text: bytes) -> Curves:
    """Curves from JSON; what makes no sense is refused with a sentence."""
    try:
        curves = msgspec.json.decode(text, type=Curves)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the curves cannot be read: {error}") from None
    for name, (low, high) in _BOUNDS.items():
        value = getattr(curves, name)
        require(low <= value <= high, f"{name} is {value}; give {low:g} to {high:g}")
    depths = [depth for depth, _ in curves.prefill]
    require(
        bool(depths) and depths == sorted(set(depths)) and depths[0] >= 0, "prefill needs pairs with growing depths"
    )
    require(all(0 < s < 1e3 for _, s in curves.prefill), "prefill needs seconds per token above 0 and below 1000")
    return curves


# the device


@dataclass(frozen=True, slots=True)
class MachineSize:
    """What an engine has beside RAM."""

    n_slots: int = 2
    n_spares: int = 4  # states
    n_cells: int = 131_072
    disk_bytes: int = 0  # 0: there is no disk tier
    disk_bytes_per_s: float = 2e9


@dataclass(slots=True, eq=False)
class SimulatedSlot:
    node: Node
    items: Prompt = field(default_factory=lambda: _EMPTY)
    n_fed: int = 0
    n_settled: int = 0  # where its last request went on from
    n_prompt: int = 0  # of its last request
    continuation: Continuation | None = None  # of the request that runs; None: none does
    used_at: float = 0.0
    is_tidy: bool = True  # its KV was copied to RAM, as far as there was room


class SimulatedDevice:
    def __init__(self, size: MachineSize, tree: Tree) -> None:
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


# the disk


class SimulatedDisk:
    """A tree finds what a prompt begins with. What is evicted next, the table and the queue of the engine's disk say."""

    def __init__(self, size: MachineSize, curves: Curves) -> None:
        self.size = size
        self.curves = curves
        self.written_bytes = 0
        self._tree = Tree()
        self._copies: dict[int, Node] = {}  # of nodes in RAM, by their ids
        self._objects = ObjectTable()
        self._victims = VictimQueue(self._objects, by_space=False)
        self._segments: dict[str, Segment] = {}  # by the names of their objects
        self._n_segments = 0

    # questions

    def has_room(self, n_bytes: int = 1) -> bool:
        """Whether so many bytes more can be written without evicting anything."""
        return self._objects.total_bytes + n_bytes <= self.size.disk_bytes

    def seconds(self, n_bytes: int) -> float:
        """To load so many bytes."""
        return n_bytes / self.size.disk_bytes_per_s

    def load_s(self, node: Node, n_bytes: int) -> float | None:
        """Seconds to load so many bytes of what a node in RAM keeps; None: they are not here."""
        copy = self._copies.get(node.id)
        is_here = copy is not None and copy.checkpoint is not None and self._tree.has(copy)
        return self.seconds(n_bytes) if is_here else None

    def deepest(self, prompt: Prompt) -> int:
        """How many items of a prompt the deepest state here has; 0: there is none."""
        match = self._tree.match("", prompt, 0)
        return next((node.n_items for node in match.usable if node.n_items < len(prompt)), 0)

    # changes

    def write(self, node: Node, now: float) -> None:
        """Keeps a node's state and the KV before it, as far as they are not there yet."""
        n_bytes = self.curves.state_bytes + node.mark.n_tokens * self.curves.kv_bytes_per_token
        if n_bytes > self.size.disk_bytes:
            return
        copy = self._tree.grow(self._tree.root(""), node.path, node.n_items)
        self._copies[node.id] = copy
        if copy.checkpoint is not None:
            return
        reaches = {self._kv_of(each, now): each.n_items for each in copy.lineage() if each.parent is not None}
        state = weightless(self.curves.state_bytes)
        self._tree.set_checkpoint(copy, Checkpoint(CutKind.STABLE, True, (), state=state))
        kept = IndexedObject(
            _state_name(copy),
            "state",
            key="",
            n_items=copy.n_items,
            size=state.nbytes,
            needs=tuple(reaches),
            used_at=now,
            reaches=tuple(reaches.values()),
        )
        self._add(kept)
        self._evict({_state_name(copy), *reaches}, now)

    def note_loaded(self, node: Node, now: float) -> None:
        """A node in RAM was loaded from here."""
        copy = self._copies[node.id] = self._tree.grow(self._tree.root(""), node.path, node.n_items)
        kept = self._objects[_state_name(copy)]
        self._victims.update(msgspec.structs.replace(kept, used_at=now, hits=kept.hits + 1), now)

    def _kv_of(self, node: Node, now: float) -> str:
        """The name of the object with the KV of a node, which is written if there is none."""
        if node.segment is None:
            assert node.parent is not None
            n_bytes = (node.mark.n_tokens - node.parent.mark.n_tokens) * self.curves.kv_bytes_per_token
            items, self._n_segments = (node.start, node.n_items), self._n_segments + 1
            piece = SegmentPiece(*items, f"kv-{self._n_segments}", n_bytes)
            segment = Segment(weightless(n_bytes), node.parent.mark, node.mark, True, (), items=items, pieces=(piece,))
            self._tree.set_segment(node, segment)
            self._segments[piece.name] = segment
            self._add(IndexedObject(piece.name, "kv", "", node.n_items, n_bytes, (), now))
        assert node.segment is not None
        return node.segment.pieces[0].name

    def _add(self, kept: IndexedObject) -> None:
        self._victims.add(kept, kept.used_at)
        self.written_bytes += kept.size

    def _evict(self, spare: Collection[str], now: float) -> None:
        """As the engine's disk does: KV that no state needs, then the states that save least."""
        while self._objects.total_bytes > self.size.disk_bytes:
            stranded = self._objects.stranded(spare, None)
            found = self._objects.get(stranded or "") or self._victims.choose(None, frozenset(), spare, now)
            if found is None:
                break
            self._drop(found, now)
        self._copies = {key: node for key, node in self._copies.items() if self._tree.has(node)}

    def _drop(self, kept: IndexedObject, now: float) -> None:
        self._victims.remove(kept.name, now)
        if kept.kind == "state":
            self._tree.drop_checkpoint(self._tree.by_id[int(kept.name.removeprefix(_STATE))])
            return
        segment = self._segments.pop(kept.name)
        self._tree.drop_segment(next(node for node in self._tree.nodes() if node.segment is segment))


_STATE = "state-"


def _state_name(copy: Node) -> str:
    return f"{_STATE}{copy.id}"


def weightless(n_bytes: int) -> Blob:
    """An array that claims a size in bytes and takes no memory."""
    return np.broadcast_to(_BYTE, (n_bytes,))
