"""The tree as the cache API shows it, page by page. Reads only; decides and changes nothing.

``turn_page`` runs on the loop's thread and does a bounded amount of work there. ``finish_page`` looks up the
expensive parts, texts and what is on disk, on another thread, from immutable values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from everwarm.engine.core import Core
from everwarm.engine.inspect.disk_view import DiskSnapshot, DiskView, TreeSnapshot, with_pauses
from everwarm.engine.inspect.report import version_of
from everwarm.engine.process import messages as m
from everwarm.errors import TreeChanged
from everwarm.llama.vocab import Vocab
from everwarm.prompt.prompt import Prompt
from everwarm.state.tree import Node, Tree

MAX_PAGE = 1000
N_WORDS = 24  # tokens of a node that are shown

_TIERS: dict[tuple[bool, bool], tuple[str, ...]] = {
    (on_device, in_ram): ("device",) * on_device + ("ram",) * in_ram
    for on_device in (False, True)
    for in_ram in (False, True)
}

Number = Callable[[int], int]  # a core's request id to the gateway's number


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
