"""What the cache API shows: numbers, and the tree page by page. Reads only; decides and changes nothing.

``summary`` and ``turn_page`` run on the loop's thread and do a bounded amount of work there. ``finish`` looks up the
expensive parts, texts and what is on disk, on another thread, from immutable values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from everwarm.engine.core import Core
from everwarm.engine.inspect.disk_view import DiskSnapshot, DiskView, TreeSnapshot, with_pauses
from everwarm.engine.process import messages as m
from everwarm.errors import TreeChanged
from everwarm.prompt.prompt import Prompt
from everwarm.state.namespace import SHORT_NAMESPACE
from everwarm.state.null_tiers import NullDisk
from everwarm.state.tree import Node

MAX_PAGE = 1000
N_WORDS = 24  # tokens of a node that are shown

_TIERS: dict[tuple[bool, bool], tuple[str, ...]] = {
    (on_device, in_ram): ("device",) * on_device + ("ram",) * in_ram
    for on_device in (False, True)
    for in_ram in (False, True)
}

Number = Callable[[int], int]  # a core's request id to the gateway's number


def version_of(core: Core) -> int:
    """Changes with everything in RAM or on disk."""
    return core.tree.census.version + core.tier_writer.disk.version


def summary(core: Core) -> dict[str, Any]:
    census, stats = core.tree.census, core.checkpoint_stats
    n_parked = len(core.spares.parked())
    ram = {
        "bytes": core.tree.ram_bytes,
        "budget_bytes": core.ram_budget.n_bytes,
        "n_states": census.n_states,
        "n_segments": census.n_segments,
    }
    return {
        "version": version_of(core),
        "n_nodes": len(census.by_id),
        "engine": {
            "n_slots": len(core.slots),
            "n_running": sum(slot.request is not None and not slot.request.ask.ahead for slot in core.slots),
            "n_queued": len(core.queue),
            "n_ctx": core.context.n_ctx,
            "n_cells_used": core.context.cells.used,
        },
        "tiers": {
            "device": {"n_states": n_parked, "n_cells": core.context.cells.used},
            "ram": ram,
            "disk": _disk(core),
        },
        "evictions": sum(evictions(core).values()),
        "quarantines": stats.n_quarantined,
        "prewarm": {
            "turns": core.counts.n_prewarms,
            "used": stats.n_prewarms_used,
            "interrupted": core.counts.n_prewarms_interrupted,
            "tokens": core.counts.n_prewarm_tokens,
        },
        "seconds_per_token": core.speed.seconds_per_token if core.speed.n_measured else None,
    }


def _disk(core: Core) -> dict[str, Any] | None:
    """None: no disk tier is configured. One that cannot be used is shown as degraded and empty."""
    disk = core.tier_writer.disk
    if isinstance(disk, NullDisk):
        reason = core.tier_writer.degraded
        return None if reason is None else _NO_DISK | {"reason": reason}
    return {
        "bytes": disk.n_bytes,
        "budget_bytes": disk.budget_bytes,
        "n_objects": len(disk.names()),
        "written_bytes": disk.counts.n_bytes_written,
        "write_budget_bytes": disk.write_budget or None,
        "written_today_bytes": disk.n_written_today if disk.write_budget else None,
        "degraded": disk.degraded is not None,
        "reason": disk.degraded,
    }


_NO_DISK = {
    "bytes": 0,
    "budget_bytes": 0,
    "n_objects": 0,
    "written_bytes": 0,
    "write_budget_bytes": None,
    "written_today_bytes": None,
    "degraded": True,
}


def evictions(core: Core) -> dict[str, int]:
    """How many usable checkpoints were evicted, by reason."""
    return {**core.checkpoint_stats.evictions, "disk_budget": core.tier_writer.disk.counts.n_evicted}


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
    census, moment = core.tree.census, _moment(core, number)
    is_on_disk = question.after is not None and question.after < 0
    first = None if question.after is None else census.by_id.get(question.after)
    is_hidden = first is not None and not core.tree.namespace(first).startswith(question.namespace)
    if question.after is not None and (first is None or is_hidden) and not is_on_disk:
        raise tree_changed()
    shown = {name: root for name, root in core.tree.namespaces().items() if root.children or root.id in moment.running}
    view = view_of(core, shown)
    n_total = len(census.by_id) - (len(core.tree.roots()) - len(shown))
    roots = [root for name, root in shown.items() if name.startswith(question.namespace)]
    nodes = [] if is_on_disk else list(islice(walk(roots, first), question.limit + 1))
    following = nodes.pop().id if len(nodes) > question.limit else None
    name, rows = "" if first is None else core.tree.namespace(first), []
    for node in nodes:
        name = view.names.get(node.id, name)
        with_words = question.words_of is not None and name.startswith(question.words_of)
        rows.append(_row(node, name, moment, with_words=with_words))
    if question.alone:
        n_total = sum(1 for root in roots for _ in root.below())
    return NodePage(version_of(core), n_total, following, rows, view, question)


def view_of(core: Core, shown: dict[str, Node] | None = None) -> TreeSnapshot:
    """What another thread needs to know of the tree. ``shown``: the roots that people see."""
    roots = core.tree.namespaces()
    names = {root.id: name for name, root in roots.items()}
    seen = {name: root for name, root in roots.items() if root.children} if shown is None else shown
    nodes = list(core.tree.census.by_id.values())
    return TreeSnapshot(nodes, names, {name: root.id for name, root in seen.items()})


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
    ends += [node for _, node in core.spares.parked()]
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
    parent, checkpoint, segment = node.parent, node.checkpoint, node.segment
    kv_tiers = _TIERS[node.id in moment.resident, segment is not None]
    n_end, n_start = node.mark.n_tokens, 0 if parent is None else parent.mark.n_tokens
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
        namespace[:SHORT_NAMESPACE],
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


@dataclass(slots=True)
class CacheView:
    """Completes pages with what is on disk, and with words."""

    core: Core
    disk: DiskView = field(init=False)

    def __post_init__(self) -> None:
        self.disk = DiskView(self.core)

    def finish(self, page: NodePage) -> m.TreeSeen:
        """``TreeChanged`` as for ``turn_page``."""
        snapshot = self.disk.snapshot(page.view)
        found = page.rows
        if snapshot.files.names:
            found = [self._with_disk(row, snapshot) for row in with_pauses(page.rows)]
        rows = found if page.question.words_of is None else with_pauses(found)
        nodes = [self._with_words(row) if row.with_words else row.seen for row in rows]
        following = page.next
        question = page.question
        on_disk = (n for n in snapshot.tree.nodes if not question.alone or snapshot.is_in(n.space, question.namespace))
        n_total = page.n_total + sum(1 for _ in on_disk)
        if following is None:
            more = self.disk.rows(snapshot, question, question.limit - len(nodes))
            if more is None:
                raise tree_changed()
            nodes += more.nodes
            following = more.next
        return m.TreeSeen(page.version, n_total, following, nodes)

    def _with_disk(self, row: NodeRow, snapshot: DiskSnapshot) -> NodeRow:
        seen = row.seen
        kept = snapshot.state_at(seen.id)
        changes: dict[str, Any] = {"n_children": seen.n_children + snapshot.tree.n_children[seen.id]}
        if kept is not None and seen.kind is not None:
            changes["state_tiers"] = (*seen.state_tiers, "disk")
        elif kept is not None and (about := self.disk.about(kept.name)) is not None and about.cut:
            state = {"kind": about.cut, "state_tiers": ("disk",), "state_bytes": kept.size}
            changes |= {**state, "last_use": kept.used_at, "hits": kept.hits}
        if row.segment_name in snapshot.files.names:
            changes["kv_tiers"] = (*seen.kv_tiers, "disk")
        return msgspec.structs.replace(row, seen=msgspec.structs.replace(seen, **changes))

    def _with_words(self, row: NodeRow) -> m.NodeSeen:
        start, stop = row.span
        codes = [code for code in row.path.codes[start : min(stop, start + N_WORDS)].tolist() if code >= 0]
        text = self.core.model.vocab.detokenize(codes).decode("utf-8", "replace")
        return msgspec.structs.replace(row.seen, words=" ".join(text.split()))
