"""The prefix tree: which prefixes are known, where checkpoints and KV segments of them are kept, and what they weigh.

A radix tree over items, shared by all conversations. Nodes lie at cuts and at branches. Attention KV belongs to edges
(a segment covers an interval), recurrent state to points (a checkpoint sits at a node's end). What was evicted leaves a
ghost (``Ghosts``): enough to say why a prompt was read again, nothing to restore. Knows items and bytes; knows no
libllama, and decides nothing: policy does.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import Chunks, is_volatile
from everwarm.state.policy import MESSAGE_ENDS, CutKind
from everwarm.types import START, Blob, Mark, SeqId

MAX_GHOSTS = 64
MAX_GHOST_ITEMS = 1 << 20  # of all ghosts, four bytes each
MAX_EVICTIONS = 1024  # that are remembered with their reasons

_ids = itertools.count(int(time.time()) << 20)  # a later engine's are greater; all of them are exact in JavaScript


def new_id() -> int:
    return next(_ids)


@dataclass(frozen=True, slots=True)
class SegmentPiece:
    """An object outside of RAM that holds KV of these items. It is used from the end of the piece before to the start
    of the next."""

    n_start: int
    n_stop: int
    name: str
    size: int  # of its file


@dataclass(slots=True, eq=False)
class Segment:
    """The KV of one interval. Several nodes may use parts of it; it is freed when the last one releases it."""

    blob: Blob
    start: Mark
    stop: Mark
    clean: bool
    chunks: Chunks | None = None  # the history of its cells, over the chunk that ``stop`` lies in; None: unknown
    n_users: int = 0
    items: tuple[int, int] | None = None  # the same interval in items; None: text, one cell each
    path: Prompt | None = None  # any prompt that leads to its end; None: that is not known any more
    pieces: tuple[SegmentPiece, ...] = ()  # what was written of it, from its beginning on

    @property
    def n_start(self) -> int:
        return int(self.start.n_tokens) if self.items is None else self.items[0]

    @property
    def n_stop(self) -> int:
        return int(self.stop.n_tokens) if self.items is None else self.items[1]

    @property
    def n_cells(self) -> int:
        return self.stop.n_tokens - self.start.n_tokens

    def name_at(self, n_items: int) -> str | None:
        """The name of the object that holds the item before that one."""
        return next((piece.name for piece in reversed(self.pieces) if piece.n_start < n_items <= piece.n_stop), None)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state after a node's last item: parked on the device, copied to RAM, or both."""

    kind: CutKind
    clean: bool  # a cold replay with the same chunks and cuts gives the same bytes
    chunks: Chunks
    parked: SeqId | None = None
    state: Blob | None = None
    logits: NDArray[np.float32] | None = None
    used_at: float = 0.0
    hits: int = 0
    tidied: bool = False  # idle work has tried to copy it down once

    @property
    def is_held(self) -> bool:
        """Whether the device or RAM has its state."""
        return self.parked is not None or self.state is not None

    @property
    def size_bytes(self) -> int:
        """Bytes in RAM."""
        return (0 if self.state is None else self.state.nbytes) + (0 if self.logits is None else self.logits.nbytes)

    @property
    def tiers(self) -> str:
        names = [name for name, held in (("device", self.parked), ("ram", self.state)) if held is not None]
        return "+".join(names) or "none"


@dataclass(slots=True, eq=False)
class Node:
    """The items from ``parent``'s end to ``n_items`` of ``path``."""

    path: Prompt  # any prompt that leads here: its first ``n_items`` items are this lineage
    n_items: int
    mark: Mark
    parent: Node | None
    children: dict[int | bytes, Node] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    segment: Segment | None = None
    pins: int = 0  # must not be evicted: it is being restored
    holders: int = 0  # slots that stand here: must not be pruned
    evicted: bool = False  # something of it was evicted
    n_evicted: int = 0  # the first point on its edge of which that is true; 0: there is none
    ram_bytes: int = 0  # of a root: what everything below it weighs
    is_volatile: bool = False  # of a root: nothing below it is ever written down, shared, or left to the next engine
    id: int = field(default_factory=new_id)  # never another node's, nor one of an earlier engine
    is_pinned: bool = False  # by a user: evicted last
    n_pinned: int = 0  # pinned ones at or below it
    n_below: int = 1  # nodes at or below it

    @property
    def start(self) -> int:
        return 0 if self.parent is None else self.parent.n_items

    @property
    def is_junction(self) -> bool:
        """Whether lineages part here."""
        return len(self.children) > 1

    def lineage(self) -> list[Node]:
        """Root's first child first, this node last."""
        found: list[Node] = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def root(self) -> Node:
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def below(self) -> Iterator[Node]:
        """This node and everything under it."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())


def pin(node: Node) -> None:
    """Pins a node: its whole lineage is evicted last."""
    if not node.is_pinned:
        node.is_pinned = True
        _add_pins(node, 1)


def unpin(node: Node) -> None:
    if node.is_pinned:
        node.is_pinned = False
        _add_pins(node, -1)


def _add_nodes(above: Node | None, n: int) -> None:
    while above is not None:
        above.n_below += n
        above = above.parent


def _add_pins(node: Node, n: int) -> None:
    above: Node | None = node
    while above is not None:
        above.n_pinned += n
        above = above.parent


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a prompt. ``usable`` are the checkpoints that can be restored, deepest first."""

    n_shared: int  # items that were read before
    n_kv: int  # items whose KV is available
    usable: tuple[Node, ...]
    path: tuple[Node, ...]  # the nodes it passes, the last perhaps only in part


def first_message_end(lineage: Iterable[Node]) -> Node | None:
    """Where the first message of a conversation ends, usually the system prompt: other conversations will begin with it."""
    kept = ((node, node.checkpoint) for node in lineage)
    return next((node for node, point in kept if point is not None and point.kind in MESSAGE_ENDS), None)


Told = Callable[[Node], None]


class Tree:
    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self.ram_bytes = 0
        self.forgotten = Ghosts()
        self._on_state: Told | None = None
        self._on_segment: Told | None = None
        self.by_id: dict[int, Node] = {}
        self.version = 0  # another one: something is different
        self.n_states = 0  # in RAM
        self.n_segments = 0

    def tell(self, on_state: Told, on_segment: Told) -> None:
        """Calls these, which know the tree and so come after it, for everything that is copied to RAM from now on and may
        outlive the engine."""
        self._on_state = on_state
        self._on_segment = on_segment

    def changed(self, n_states: int = 0, n_segments: int = 0) -> None:
        """Counts, and notes that something is different."""
        self.n_states += n_states
        self.n_segments += n_segments
        self.version += 1

    def _came(self, node: Node) -> None:
        node.n_pinned = sum(child.n_pinned for child in node.children.values())
        node.n_below = 1 + sum(child.n_below for child in node.children.values())
        _add_nodes(node.parent, 1)
        self.by_id[node.id] = node
        self.version += 1

    def _went(self, node: Node) -> None:
        unpin(node)
        _add_nodes(node.parent, -1)
        self.by_id.pop(node.id, None)
        self.version += 1

    def _add_bytes(self, node: Node, n_bytes: int, *, n_states: int = 0, n_segments: int = 0) -> None:
        self.changed(n_states, n_segments)
        self.ram_bytes += n_bytes
        node.root().ram_bytes += n_bytes

    def roots(self) -> list[Node]:
        """One for each namespace."""
        return list(self._roots.values())

    def namespaces(self) -> dict[str, Node]:
        return dict(self._roots)

    def root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            volatile = is_volatile(namespace)
            root = self._roots[namespace] = Node(Prompt.of_tokens([]), 0, START, None, is_volatile=volatile)
            self._came(root)
        return root

    def namespace(self, node: Node) -> str:
        root = node.root()
        return next((name for name, other in self._roots.items() if other is root), "")

    def nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from root.below()

    # questions

    def match(self, namespace: str, prompt: Prompt, n_resident: int, *, needs_kv: bool = True) -> Match:
        """How much of ``prompt`` is known. ``n_resident`` items of it have their KV on the device already."""
        n_shared = 0
        n_kv = n_resident if needs_kv else len(prompt)
        usable: list[Node] = []
        path: list[Node] = []
        for node, n_agree in _walk(self._roots[namespace], prompt) if namespace in self._roots else ():
            path.append(node)
            n_shared = n_agree if n_agree < node.n_items else node.n_items
            if n_kv < n_shared and node.segment is not None and node.segment.n_start <= n_kv:
                n_kv = n_shared
            if node.checkpoint is not None and n_agree >= node.n_items and _is_usable(node, n_kv):
                usable.append(node)
        return Match(n_shared, n_kv, tuple(reversed(usable)), tuple(path))

    # changes

    def grow(self, above: Node, prompt: Prompt, n_items: int) -> Node:
        """The node at the end of the prompt's first ``n_items`` items; ``above`` is on the way there."""
        assert above.n_items <= n_items <= len(prompt)
        node = above
        while node.n_items < n_items:
            key = _key(prompt, node.n_items)
            child = node.children.get(key)
            if child is None:
                child = Node(prompt, n_items, prompt.mark(n_items), node)
                node.children[key] = child
                self._came(child)
                for (
                    other
                ) in child.lineage():  # one path for all: a walk compares it once, however many turns there were
                    other.path = prompt
                return child
            n_agree = min(int(prompt.common_prefix(child.path, node.n_items)), n_items)
            node = child if n_agree >= child.n_items else self._split(child, n_agree)
        return node

    def _split(self, node: Node, n_items: int) -> Node:
        """Splits an edge with a new node. Objects are not rewritten: both halves use the same segment."""
        parent = node.parent
        assert parent is not None and parent.n_items < n_items < node.n_items
        upper = Node(node.path, n_items, node.path.mark(n_items), parent)
        if 0 < node.n_evicted <= n_items:
            upper.n_evicted = node.n_evicted
            node.n_evicted = 0
        upper.children[_key(node.path, n_items)] = node
        parent.children[_key(node.path, parent.n_items)] = upper
        node.parent = upper
        if node.segment is not None:
            upper.segment = node.segment
            node.segment.n_users += 1
        self._came(upper)
        return upper

    def set_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        assert node.parent is not None and node.checkpoint is None
        node.checkpoint = checkpoint
        node.evicted = False
        self._add_bytes(node, checkpoint.size_bytes, n_states=checkpoint.state is not None)
        self._tell_of_state(node)

    def set_state(self, node: Node, state: Blob) -> None:
        checkpoint = node.checkpoint
        assert checkpoint is not None and checkpoint.state is None
        checkpoint.state = state
        self._add_bytes(node, state.nbytes, n_states=1)
        self._tell_of_state(node)

    def _tell_of_state(self, node: Node) -> None:
        is_copied = node.checkpoint is not None and node.checkpoint.state is not None
        if is_copied and self._on_state is not None and not node.root().is_volatile:
            self._on_state(node)

    def _tell_of_segment(self, node: Node) -> None:
        if self._on_segment is not None and not node.root().is_volatile:
            self._on_segment(node)

    def add_logits(self, node: Node, logits: NDArray[np.float32]) -> None:
        assert node.checkpoint is not None and node.checkpoint.logits is None
        node.checkpoint.logits = logits
        self._add_bytes(node, logits.nbytes)

    def drop_checkpoint(self, node: Node) -> Checkpoint:
        """Forget it in every tier; the caller gives its spare sequence back."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        node.checkpoint = None
        self._add_bytes(node, -checkpoint.size_bytes, n_states=-(checkpoint.state is not None))
        self._prune(node)
        return checkpoint

    def drop_state(self, node: Node) -> None:
        """Forget the RAM copy only."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        self._add_bytes(node, -checkpoint.size_bytes, n_states=-(checkpoint.state is not None))
        checkpoint.state = checkpoint.logits = None

    def set_segment(self, node: Node, segment: Segment, first: Node | None = None) -> None:
        """Sets the segment that ends at this node, replacing earlier ones: all nodes of its interval use it, or those
        from ``first`` on. It may begin before that."""
        at = segment.start if first is None or first.parent is None else first.parent.mark
        users = [n for n in node.lineage() if n.parent is not None and n.parent.mark >= at]
        assert users and users[0].parent is not None and users[0].parent.mark == at
        assert segment.start <= at and node.mark <= segment.stop
        for user in users:
            self._let_go(user)
            user.segment = segment
        segment.n_users = len(users)
        if node.mark == segment.stop:
            segment.path = node.path
        self._add_bytes(node, segment.blob.nbytes, n_segments=1)
        self._tell_of_segment(node)

    def lay_segment(
        self, above: Node, prompt: Prompt, segment: Segment, n_start: int, n_stop: int, *, instead: bool = False
    ) -> None:
        """Adds a loaded segment: every node of its interval that has none uses it, and the last one ``instead`` of its
        own."""
        self.grow(above, prompt, n_start)
        end = self.grow(above, prompt, n_stop)
        inside = (node for node in end.lineage() if node.start >= n_start)
        users = [node for node in inside if node.segment is None or (instead and node is end)]
        for node in users:
            self._let_go(node)
            node.segment = segment
        segment.n_users = len(users)
        if users:
            self._add_bytes(end, segment.blob.nbytes, n_segments=1)
            self._tell_of_segment(users[-1])

    def drop_segment(self, node: Node) -> None:
        """Drops a segment from this node on: without its beginning the rest cannot be used."""
        segment = node.segment
        assert segment is not None
        users = [node]
        while (child := next((c for c in users[-1].children.values() if c.segment is segment), None)) is not None:
            users.append(child)
        for user in reversed(users):
            self._let_go(user)
            self._prune(user)

    def _let_go(self, node: Node) -> None:
        segment = node.segment
        node.segment = None
        if segment is not None:
            segment.n_users -= 1
            if segment.n_users == 0:
                self._add_bytes(node, -segment.blob.nbytes, n_segments=-1)

    @contextlib.contextmanager
    def pinned(self, node: Node) -> Iterator[None]:
        """Protects a lineage from eviction while it is being restored."""
        lineage = node.lineage()
        for n in lineage:
            n.pins += 1
        try:
            yield
        finally:
            for n in lineage:
                n.pins -= 1
            self._prune(node)
            for n in reversed(lineage[:-1]):
                self._merge(n)

    def unpinned(self, node: Node) -> None:
        """After an unpin: removes the node if it holds nothing."""
        self.changed()
        self._prune(node)

    def hold(self, node: Node) -> None:
        node.holders += 1

    def release(self, node: Node) -> None:
        assert node.holders > 0
        node.holders -= 1
        self._prune(node)

    def _prune(self, node: Node) -> None:
        end = node
        while node.parent is not None and _is_bare(node):
            parent = node.parent
            key = _key(node.path, parent.n_items)
            if parent.children.get(key) is not node:
                return
            if node is end:
                self._note_forgotten(node)
            del parent.children[key]
            self._went(node)
            node = parent
        if node.parent is None and _is_bare(node):
            self._went(node)
            self._roots = {name: root for name, root in self._roots.items() if root is not node}
        above = node.parent
        self._merge(node)
        if above is not None:
            self._merge(above)  # it may be mergeable now, too

    def _merge(self, node: Node) -> None:
        """Merges an empty node with a single child into that child's edge. So each node that holds something adds at
        most two empty ones: one at a branch, and one where KV begins."""
        parent = node.parent
        child = next(iter(node.children.values()), None)
        if parent is None or child is None or len(node.children) > 1 or not _has_nothing(node) or node.is_pinned:
            return
        key = _key(node.path, parent.n_items)
        if child.segment is not None or parent.children.get(key) is not node:
            return
        evicted = (node.n_evicted, node.n_items if node.evicted else 0, child.n_evicted)
        child.n_evicted = min((n_items for n_items in evicted if n_items), default=0)
        parent.children[key], child.parent = child, parent
        self._went(node)

    def shorten_path(self, end: Node) -> None:
        """Gives a lineage a copy of its own items: its path may be part of a much larger array."""
        items = end.path.first(end.n_items)
        path = end.path
        copied = Prompt(np.array(items.codes, np.int32), items.media)
        for node in end.lineage():
            if node.path is path:
                node.path = copied

    def has(self, node: Node) -> bool:
        """Whether it is still in the tree."""
        return self.by_id.get(node.id) is node

    def _note_forgotten(self, end: Node) -> None:
        root = end.root()
        for name, other in self._roots.items():
            if other is root:
                self.forgotten.note(name, end.path, end.n_items)

    # self-check

    def check(self) -> None:
        """Asserts that every sum and link is right."""
        users: dict[int, tuple[Segment, int]] = {}
        n_bytes = n_states = 0
        listed = list(self.nodes())
        for node in listed:
            _check_node(node)
            if node.checkpoint is not None:
                n_bytes += node.checkpoint.size_bytes
                n_states += node.checkpoint.state is not None
            if node.segment is not None:
                seen = users.get(id(node.segment), (node.segment, 0))[1]
                users[id(node.segment)] = (node.segment, seen + 1)
        for segment, n_users in users.values():
            assert segment.n_users == n_users
            n_bytes += segment.blob.nbytes
        assert self.ram_bytes == sum(node.ram_bytes for node in listed if node.parent is None)
        assert n_bytes == self.ram_bytes, f"the ledger says {self.ram_bytes} bytes, the parts weigh {n_bytes}"
        assert {node.id: node for node in listed} == self.by_id, "the index knows other nodes than there are"
        assert (n_states, len(users)) == (self.n_states, self.n_segments), "the index counts otherwise"


def _walk(root: Node, prompt: Prompt) -> Iterator[tuple[Node, int]]:
    """The nodes a prompt passes, each with how many items agree. One comparison serves all nodes of one path."""
    node = root
    path = None
    n_agree = 0
    n_items = len(prompt)
    while node.n_items < n_items:
        child = node.children.get(_key(prompt, node.n_items))
        if child is None:
            return
        if child.path is not path:
            path = child.path
            n_agree = int(prompt.common_prefix(path, node.n_items))
        yield child, n_agree
        if n_agree < child.n_items:
            return
        node = child


def _is_usable(node: Node, n_kv: int) -> bool:
    checkpoint = node.checkpoint
    if checkpoint is None:
        return False
    return checkpoint.parked is not None or (checkpoint.state is not None and n_kv >= node.n_items)


def _is_bare(node: Node) -> bool:
    return not node.children and _has_nothing(node)


def _has_nothing(node: Node) -> bool:
    return not (node.checkpoint or node.segment or node.pins or node.holders)


def _key(prompt: Prompt, index: int) -> int | bytes:
    """What tells siblings apart: the item itself, for media its digest."""
    code: int = prompt.codes.item(index)
    return code if code >= 0 else prompt.media[index].digest


def _check_node(node: Node) -> None:
    assert node.pins >= 0 and node.holders >= 0
    assert node.n_pinned == node.is_pinned + sum(child.n_pinned for child in node.children.values())
    assert node.n_below == 1 + sum(child.n_below for child in node.children.values())
    for first, child in node.children.items():
        assert child.parent is node and child.n_items > node.n_items
        assert first == _key(child.path, node.n_items)
        assert int(child.path.common_prefix(node.path)) >= node.n_items, "a child leaves its parent's lineage"
    assert node.mark == node.path.mark(node.n_items)
    if node.parent is None:
        assert node.checkpoint is None and node.segment is None
    if node.segment is not None:
        above = node.parent.mark if node.parent else START
        assert node.segment.start <= above and node.mark <= node.segment.stop


# what was evicted


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a prompt differs from what is known: after ``at`` items; ``known`` has at least one more, or ends there."""

    at: int
    known: Prompt


@dataclass(frozen=True, slots=True)
class Eviction:
    """Why the state or the KV of a point was evicted. A worth is a ``policy.score``."""

    n_items: int
    at: float
    worth: float
    least_kept: float | None  # the worth of what would have been evicted next
    budget_bytes: int


class Ghosts:
    """Prefixes that were evicted: items only, a bounded number of them; the oldest are forgotten first. Knows no tree."""

    def __init__(self) -> None:
        self._evictions: OrderedDict[tuple[str, bytes], Eviction] = OrderedDict()
        self._lineages: OrderedDict[tuple[str, bytes], Prompt] = OrderedDict()
        self._n_items = 0

    def __len__(self) -> int:
        return len(self._lineages)

    def note(self, namespace: str, path: Prompt, n_items: int) -> None:
        """Records that the first ``n_items`` of a path were evicted. Copies them: a path may be part of a large
        array."""
        n = min(n_items, MAX_GHOST_ITEMS)
        items = path.first(n)
        key = _ghost_key(namespace, path, n)
        self._drop(key)
        self._lineages[key] = Prompt(np.array(items.codes, np.int32), items.media)
        self._n_items += n
        while len(self._lineages) > MAX_GHOSTS or self._n_items > MAX_GHOST_ITEMS:
            self._drop(next(iter(self._lineages)))

    def note_eviction(self, namespace: str, path: Prompt, eviction: Eviction) -> None:
        """Records why something at the end of the first items of a path was evicted."""
        key = _ghost_key(namespace, path, eviction.n_items)
        self._evictions.pop(key, None)
        self._evictions[key] = eviction
        while len(self._evictions) > MAX_EVICTIONS:
            self._evictions.popitem(last=False)

    def eviction(self, namespace: str, prompt: Prompt, beyond: int) -> Eviction | None:
        """The deepest point of a prompt after ``beyond`` items that was evicted; None: none is remembered."""
        fits = [(key, each) for key, each in self._evictions.items() if beyond < each.n_items <= len(prompt)]
        own = [each for key, each in fits if key == _ghost_key(namespace, prompt, each.n_items)]
        return max(own, key=lambda each: each.n_items, default=None)

    def clear(self, namespace: str) -> None:
        """Forgets everything in namespaces with this prefix."""
        for key in [key for key in self._evictions if key[0].startswith(namespace)]:
            del self._evictions[key]
        for key in [key for key in self._lineages if key[0].startswith(namespace)]:
            self._drop(key)

    def parting(self, namespace: str, prompt: Prompt) -> Parting | None:
        """The ghost that shares the longest prefix with a prompt; None: there is none in this namespace."""
        own = (path for (space, _), path in reversed(self._lineages.items()) if space == namespace)
        found = (Parting(int(prompt.common_prefix(path)), path) for path in own)
        return max(found, key=lambda parting: parting.at, default=None)

    def _drop(self, key: tuple[str, bytes]) -> None:
        gone = self._lineages.pop(key, None)
        self._n_items -= 0 if gone is None else len(gone)


def _ghost_key(namespace: str, path: Prompt, n_items: int) -> tuple[str, bytes]:
    """Names a point by its last items and their number: enough to tell what is reported from anything like it."""
    return namespace, path.codes[max(0, n_items - 64) : n_items].tobytes() + n_items.to_bytes(8, "little")
