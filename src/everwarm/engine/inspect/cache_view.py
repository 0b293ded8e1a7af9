"""The tree as the cache API shows it, page by page, with the states that are only on disk as nodes of it. Reads only;
decides and changes nothing.

``turn_page`` and ``copy_places`` run on the loop's thread and do a bounded amount of work there. Everything else runs
on a thread of its own, beside the loop: ``finish_page`` looks up texts and what is on disk, from immutable values. It
never reads the tree, which changes meanwhile: the loop's thread copies what is needed of it.

What the index knows places the states on disk, and their headers describe them; KV and states are never read. An
object that is removed meanwhile, or whose header is damaged, is not shown. Nothing is built before the first request
for the tree.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec

from everwarm.engine.core import Core
from everwarm.engine.inspect.report import version_of
from everwarm.engine.process import messages as m
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.errors import TreeChanged
from everwarm.llama.vocab import Vocab
from everwarm.prompt.prompt import Prompt
from everwarm.state.disk_tree import DiskNode, DiskTree, TreePoint, build_disk_tree, kv_on_path
from everwarm.state.lineage import Point, keys, point_of, root_key, short_key
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import Damaged, ObjectHeader
from everwarm.state.tier import DiskTier, Pin
from everwarm.state.tree import Node, Tree

PAUSE_EVERY, LONG_PAUSE_EVERY = 32, 128  # things between two pauses; of the simple ones
MOST_COPIED = 2048  # places, between two steps of the loop
MOST_POINTS = 1 << 16  # remembered points of removed nodes
MOST_HEADERS = 1 << 14
BETWEEN = " … "  # the beginning and the end of a text

T = TypeVar("T")
MAX_PAGE = 1000
N_WORDS = 24  # tokens of a node that are shown

_TIERS: dict[tuple[bool, bool], tuple[str, ...]] = {
    (on_device, in_ram): ("device",) * on_device + ("ram",) * in_ram
    for on_device in (False, True)
    for in_ram in (False, True)
}

Number = Callable[[int], int]  # a core's request id to the gateway's number


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """Which nodes and namespaces the tree had at a moment."""

    ids: list[int]  # of all nodes, the newest last
    names: dict[int, str]  # namespaces by the ids of their roots
    roots: dict[str, int]  # the ids of the roots that are shown, by namespace

    @property
    def members(self) -> tuple[int, ...]:
        """Changes with the set of nodes: a new one has a greater id than all before."""
        return len(self.ids), self.ids[-1] if self.ids else 0, *self.roots.values()


class NodePlace(NamedTuple):
    """Where a node is in the tree. That never changes while the node exists."""

    id: int
    path: Prompt
    n_items: int
    namespace: str


@dataclass(frozen=True, slots=True)
class DiskNodeMeta:
    """What is remembered of a header."""

    cut: str
    words: str
    media: tuple[tuple[int, int], ...]  # index of an item, and its cells beyond one

    def n_tokens(self, n_items: int) -> int:
        return n_items + sum(n_more for index, n_more in self.media if index < n_items)


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """What is on disk."""

    version: int
    names: frozenset[str]
    states: list[IndexedObject]  # that are whole
    kv_sizes: dict[str, int]
    marked: frozenset[Point]  # what is pinned


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    """What is on disk, and where it hangs in the tree in RAM."""

    files: StoredFiles
    tree: DiskTree
    here: dict[int, IndexedObject]  # states on disk at nodes in RAM, by the nodes' ids
    spaces: dict[str, str]  # known namespaces, by the names that headers have for them
    fingerprint: str

    def is_pinned(self, kept: IndexedObject) -> bool:
        return point_of(kept.key, kept.n_items) in self.files.marked

    def namespace(self, space: str) -> str:
        """A space whose namespace was not used since the start is shown by its own name."""
        return self.spaces.get(space, space)

    def is_in(self, space: str, namespace: str) -> bool:
        """Whether a space belongs to a namespace with this prefix, or to exactly this one."""
        return self.namespace(space).startswith(namespace) or short_key(root_key(self.fingerprint, namespace)) == space


EMPTY = DiskSnapshot(StoredFiles(0, frozenset(), [], {}, frozenset()), DiskTree(), {}, {}, "")


@dataclass(slots=True)
class DiskView:
    tiers: LowerTiers
    most_copied: int = MOST_COPIED
    _places: queue.SimpleQueue[NodePlace] = field(default_factory=queue.SimpleQueue)  # copied, and not looked at yet
    _last_copied: int = 0  # the id of the newest node whose place was copied
    _points: dict[int, tuple[Point, TreePoint]] = field(default_factory=dict)  # of nodes in RAM, by id
    _headers: dict[str, DiskNodeMeta] = field(default_factory=dict)
    _spaces: dict[str, str] = field(default_factory=dict)
    _files: StoredFiles | None = None
    _last: tuple[tuple[object, ...], DiskSnapshot] | None = None

    def copy_places(self, tree: Tree) -> bool:
        """On the loop's thread, before a ``TreeSnapshot`` is taken: copies the places of nodes that came since the last
        time, a bounded number of them. False: there are more."""
        if not self.tiers.disk.is_on and not self.tiers.is_opening:
            self._last_copied = 0
            return True
        new = []
        for node in reversed(tree.by_id.values()):  # a newer node has a greater id
            if node.id <= self._last_copied:
                break
            new.append(node)
        names = {root.id: name for name, root in tree.namespaces().items()} if new else {}
        oldest = new[-self.most_copied :]
        for node in reversed(oldest):
            if node.parent is not None:
                self._places.put(NodePlace(node.id, node.path, node.n_items, names.get(node.root().id, "")))
            self._last_copied = node.id
        return len(oldest) == len(new)

    # on another thread

    def snapshot(self, view: TreeSnapshot) -> DiskSnapshot:
        """What is on disk now. The same as before while nothing has changed."""
        disk = self.tiers.disk
        if not disk.is_on:
            return EMPTY
        if self._files is None or self._files.version != disk.version:
            self._files = _files(disk)
        seen = (self._files.version, *view.members)
        if self._last is None or self._last[0] != seen:
            self._learn_points(view, self.tiers.fingerprint)
            self._last = seen, self._build(view, self._files, self.tiers.fingerprint)
        return self._last[1]

    def _learn_points(self, view: TreeSnapshot, fingerprint: str) -> None:
        if len(self._points) > MOST_POINTS + len(view.ids):
            alive = set(view.ids)
            self._points = {id: point for id, point in self._points.items() if id in alive}
        new: dict[tuple[int, str], list[NodePlace]] = defaultdict(list)
        for place in with_pauses(self._new_places(), LONG_PAUSE_EVERY):
            new[id(place.path), place.namespace].append(place)
        for (_, namespace), same in with_pauses(new.items()):  # one pass over what they have in common
            root = root_key(fingerprint, namespace)
            named = keys(root, same[0].path, {place.n_items for place in same})
            for place in same:
                point = TreePoint(place.id, place.n_items, short_key(root))
                self._points[place.id] = point_of(named[place.n_items], place.n_items), point

    def _new_places(self) -> Iterator[NodePlace]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._places.get_nowait()

    def _build(self, view: TreeSnapshot, files: StoredFiles, fingerprint: str) -> DiskSnapshot:
        for name in view.names.values():
            self._spaces[short_key(root_key(fingerprint, name))] = name
        roots = {short_key(root_key(fingerprint, name)): id for name, id in view.roots.items()}
        in_ram = dict(self._points[id] for id in view.ids if id in self._points)
        tree = build_disk_tree(
            files.states, files.kv_sizes, in_ram, roots, partial(with_pauses, every=LONG_PAUSE_EVERY)
        )
        named = ((in_ram.get(point_of(each.key, each.n_items)), each) for each in files.states)
        here = {point.id: each for point, each in named if point is not None}
        return DiskSnapshot(files, tree, here, dict(self._spaces), fingerprint)

    def below(self, view: TreeSnapshot, ids: Iterable[int], namespace: str = "") -> list[IndexedObject]:
        """The states that are only on disk, at or below these nodes, in namespaces that begin so."""
        snapshot = self.snapshot(view)
        return [kept for kept in snapshot.tree.below(ids) if snapshot.is_in(kept.space, namespace)]

    def find(self, view: TreeSnapshot, id: int, namespace: str = "") -> DiskNode | None:
        snapshot = self.snapshot(view)
        at = snapshot.tree.place.get(id)
        found = None if at is None else snapshot.tree.nodes[at]
        return found if found is not None and snapshot.is_in(found.space, namespace) else None

    def spaces(self, view: TreeSnapshot, namespace: str) -> frozenset[str] | None:
        """Those of namespaces that begin so, whether or not there is a state of theirs; None: all there are."""
        if not namespace:
            return None
        snapshot = self.snapshot(view)
        disk = self.tiers.disk
        there = {kept.space for kept in disk.objects()} | {pin.space for pin in disk.pins}
        return frozenset(space for space in (*there, *snapshot.spaces) if snapshot.is_in(space, namespace))

    # rows

    def rows(self, snapshot: DiskSnapshot, question: m.AskTree, most: int) -> list[m.NodeSeen] | None:
        """At most so many rows, from ``after`` on or from the beginning. None: there is no such node."""
        nodes = snapshot.tree.nodes
        after = question.after
        at = 0
        if after is not None and after < 0:
            if after not in snapshot.tree.place:
                return None
            at = snapshot.tree.place[after]
        found: list[m.NodeSeen] = []
        gone: dict[int, DiskNode] = {}
        for node in with_pauses(nodes[at:]):
            if not snapshot.is_in(node.space, question.namespace):
                continue
            if len(found) == most:
                break
            about = None if node.kept is None else self.about(node.kept.name)
            if node.kept is not None and about is None:
                gone[node.id] = node
            else:
                with_words = question.words_of is not None and snapshot.is_in(node.space, question.words_of)
                found.append(_seen(_above(node, gone), about, snapshot, with_words=with_words))
        return found

    def about(self, name: str) -> DiskNodeMeta | None:
        """None: it is gone, or damaged."""
        about = self._headers.get(name)
        if about is None:
            try:
                with self.tiers.disk.reading(name) as reader:
                    about = _about(reader.header)
            except Damaged:
                return None
            while len(self._headers) >= MOST_HEADERS:
                del self._headers[next(iter(self._headers))]
            self._headers[name] = about
        return about


def _files(disk: DiskTier) -> StoredFiles:
    version = disk.version
    kept = {each.name: each for each in disk.objects()}
    states = [
        each
        for each in with_pauses(kept.values(), LONG_PAUSE_EVERY)
        if each.kind == "state" and all(n in kept for n in each.needs)
    ]
    sizes = {each.name: each.size for each in kept.values() if each.kind == "kv"}
    return StoredFiles(version, frozenset(kept), states, sizes, disk.pinned_points)


def _about(header: ObjectHeader) -> DiskNodeMeta:
    media = tuple((index, max(0, n_tokens - 1)) for index, _, n_tokens, _, _ in header.media)
    return DiskNodeMeta(header.cut, header.words, media)


def pin_of(kept: IndexedObject) -> Pin:
    """The pin of a state, with the known points of its lineage."""
    ways = [
        point for _, _, *both in kv_on_path(kept) for point in both if point is not None and point[1] < kept.n_items
    ]
    return Pin(kept.key, kept.n_items, kept.space, tuple(sorted(set(ways), key=lambda point: point[1])))


def _above(node: DiskNode, gone: dict[int, DiskNode]) -> DiskNode:
    """Attached to the nearest node above that still exists."""
    lost = gone.get(node.parent or 0)
    if lost is None:
        return node
    higher = _above(lost, gone)
    return replace(node, parent=higher.parent, n_above=higher.n_above)


def _seen(node: DiskNode, about: DiskNodeMeta | None, snapshot: DiskSnapshot, *, with_words: bool) -> m.NodeSeen:
    kept = node.kept
    root = m.NodeSeen(
        id=node.id,
        parent=None,
        start=0,
        end=0,
        namespace=snapshot.namespace(node.space)[: m.SHORT_NAMESPACE],
        n_children=snapshot.tree.n_children[node.id],
        last_use=None,
        hits=0,
        pinned=False,
        kind=None,
        state_tiers=(),
        state_bytes=0,
        kv_tiers=(),
        kv_bytes=0,
        running=None,
        words="" if with_words else None,
    )
    if kept is None or about is None:
        return root
    has_state = bool(about.cut)
    return msgspec.structs.replace(
        root,
        parent=node.parent,
        start=about.n_tokens(node.n_above),
        end=about.n_tokens(kept.n_items),
        last_use=kept.used_at,
        hits=kept.hits,
        pinned=snapshot.is_pinned(kept),
        kind=about.cut or None,
        state_tiers=("disk",) if has_state else (),
        state_bytes=kept.size if has_state else 0,
        kv_tiers=("disk",) if node.has_kv else (),
        kv_bytes=node.kv_bytes,
        words=_words(about.words, node.n_above) if with_words else None,
    )


def _words(words: str, n_above: int) -> str:
    """A header has the beginning and the end of the text; below another node only the end is shown."""
    _, between, end = words.rpartition(BETWEEN)
    return f"… {end}" if n_above and between else words


def with_pauses(things: Iterable[T], every: int = PAUSE_EVERY) -> Iterator[T]:
    """Sleeps briefly every so often, so that the loop's thread does not wait long for the interpreter."""
    for i, thing in enumerate(things):
        if i % every == 0:
            time.sleep(1e-4)
        yield thing


# the tree


class NodeRow(msgspec.Struct, frozen=True):  # made by the thousand on the loop's thread
    """A copy of a node, with what is still to be looked up about it."""

    seen: m.NodeSeen
    path: Prompt
    span: tuple[int, int]  # in items
    segment_name: str | None
    with_words: bool


@dataclass(frozen=True, slots=True)
class NodePage:
    """The part of a page that is in RAM, and the request, to continue it with what is on disk."""

    version: int
    n_total: int
    next: int | None
    rows: list[NodeRow]
    view: TreeSnapshot
    question: m.AskTree


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What the rows of one page have in common."""

    to_unix: float  # from the loop's clock
    resident: frozenset[int]  # nodes whose KV is on the device, by id
    running: dict[int, tuple[int, int, int]]


def turn_page(core: Core, question: m.AskTree, number: Number) -> NodePage:
    """``TreeChanged``: the starting node is not in the tree any more."""
    tree = core.cache.tree
    moment = _moment(core, number)
    is_on_disk = question.after is not None and question.after < 0
    first = None if question.after is None else tree.by_id.get(question.after)
    is_hidden = first is not None and not tree.namespace(first).startswith(question.namespace)
    if question.after is not None and (first is None or is_hidden) and not is_on_disk:
        raise tree_changed()
    shown = {name: root for name, root in tree.namespaces().items() if root.children or root.id in moment.running}
    view = view_of(tree, shown)
    n_total = len(tree.by_id) - (len(tree.roots()) - len(shown))
    roots = [root for name, root in shown.items() if name.startswith(question.namespace)]
    nodes = [] if is_on_disk else list(islice(walk(roots, first), question.limit + 1))
    following = nodes.pop().id if len(nodes) > question.limit else None
    name = "" if first is None else tree.namespace(first)
    rows = []
    for node in nodes:
        name = view.names.get(node.id, name)
        with_words = question.words_of is not None and name.startswith(question.words_of)
        rows.append(_row(node, name, moment, with_words=with_words))
    if question.alone:
        n_total = sum(1 for root in roots for _ in root.below())
    return NodePage(version_of(core), n_total, following, rows, view, question)


def view_of(tree: Tree, shown: dict[str, Node] | None = None) -> TreeSnapshot:
    """Taken when ``DiskView.copy_places`` has nothing left to do. ``shown``: the roots that people see."""
    roots = tree.namespaces()
    names = {root.id: name for name, root in roots.items()}
    seen = {name: root for name, root in roots.items() if root.children} if shown is None else shown
    return TreeSnapshot(list(tree.by_id), names, {name: root.id for name, root in seen.items()})


def tree_changed() -> TreeChanged:
    return TreeChanged("that place is not in the tree any more; start again without after")


def walk(roots: Iterable[Node], first: Node | None = None) -> Iterator[Node]:
    """All nodes from ``first`` on, each after its parent."""
    waiting = [iter(roots)]
    for node in () if first is None else (first.root(), *first.lineage()):
        if not any(other is node for other in waiting[-1]):  # what comes before it has been passed now
            return
        if node is first:
            yield node
        waiting.append(iter(node.children.values()))
    while waiting:
        following = next(waiting[-1], None)
        if following is None:
            waiting.pop()
        else:
            yield following
            waiting.append(iter(following.children.values()))


def _moment(core: Core, number: Number) -> _Snapshot:
    ends = [slot.node for slot in core.slots if slot.n_fed]
    ends += [node for _, node in core.cache.residents.spares.parked()]
    running = {}
    for slot in core.slots:
        request = slot.request
        if request is not None:
            at = (number(request.id), request.n_tokens(slot.n_fed), request.n_prompt_tokens)
            running[slot.node.id] = at
    has_kv = core.context.kind.has_attention
    resident = frozenset(node.id for end in ends for node in end.lineage()) if has_kv else frozenset()
    return _Snapshot(time.time() - time.monotonic(), resident, running)


def _row(node: Node, namespace: str, moment: _Snapshot, *, with_words: bool) -> NodeRow:
    parent = node.parent
    checkpoint = node.checkpoint
    segment = node.segment
    kv_tiers = _TIERS[node.id in moment.resident, segment is not None]
    n_end = node.mark.n_tokens
    n_start = 0 if parent is None else parent.mark.n_tokens
    kv_bytes = 0
    if segment is not None:
        n_cells = segment.stop.n_tokens - segment.start.n_tokens
        kv_bytes = segment.blob.nbytes * (n_end - n_start) // max(1, n_cells)  # several nodes may use one
    state_tiers = () if checkpoint is None else _TIERS[checkpoint.parked is not None, checkpoint.state is not None]
    seen = m.NodeSeen(
        node.id,
        None if parent is None else parent.id,
        n_start,
        n_end,
        namespace[: m.SHORT_NAMESPACE],
        len(node.children),
        None if checkpoint is None else checkpoint.used_at + moment.to_unix,
        0 if checkpoint is None else checkpoint.hits,
        node.n_pinned > 0,
        None if checkpoint is None else checkpoint.kind.value,
        state_tiers,
        0 if checkpoint is None else checkpoint.size_bytes,
        kv_tiers,
        kv_bytes,
        moment.running.get(node.id),
    )
    span = (0 if parent is None else parent.n_items, node.n_items)
    return NodeRow(seen, node.path, span, None if segment is None else segment.name_at(node.n_items), with_words)


# on another thread


def finish_page(page: NodePage, disk: DiskView, vocab: Vocab) -> m.TreeSeen:
    """Completes a page with what is on disk, and with words. ``TreeChanged`` as for ``turn_page``."""
    snapshot = disk.snapshot(page.view)
    question = page.question
    found = page.rows
    following = page.next
    if snapshot.files.names:
        found = [_with_disk(row, snapshot, disk) for row in with_pauses(page.rows)]
    rows = found if question.words_of is None else with_pauses(found)
    nodes = [_with_words(row, vocab) if row.with_words else row.seen for row in rows]
    on_disk = (n for n in snapshot.tree.nodes if not question.alone or snapshot.is_in(n.space, question.namespace))
    n_total = page.n_total + sum(1 for _ in on_disk)
    if following is None:
        room = question.limit - len(nodes)
        more = disk.rows(snapshot, question, room + 1)
        if more is None:
            raise tree_changed()
        following = more.pop().id if len(more) > room else None
        nodes += more
    return m.TreeSeen(page.version, n_total, following, nodes)


def _with_disk(row: NodeRow, snapshot: DiskSnapshot, disk: DiskView) -> NodeRow:
    seen = row.seen
    kept = snapshot.here.get(seen.id)
    changes: dict[str, Any] = {"n_children": seen.n_children + snapshot.tree.n_children[seen.id]}
    if kept is not None and seen.kind is not None:
        changes["state_tiers"] = (*seen.state_tiers, "disk")
    elif kept is not None and (about := disk.about(kept.name)) is not None and about.cut:
        state = {"kind": about.cut, "state_tiers": ("disk",), "state_bytes": kept.size}
        changes |= {**state, "last_use": kept.used_at, "hits": kept.hits}
    if row.segment_name in snapshot.files.names:
        changes["kv_tiers"] = (*seen.kv_tiers, "disk")
    return msgspec.structs.replace(row, seen=msgspec.structs.replace(seen, **changes))


def _with_words(row: NodeRow, vocab: Vocab) -> m.NodeSeen:
    start, stop = row.span
    codes = [code for code in row.path.codes[start : min(stop, start + N_WORDS)].tolist() if code >= 0]
    text = vocab.detokenize(codes).decode("utf-8", "replace")
    return msgspec.structs.replace(row.seen, words=" ".join(text.split()))
