"""Looking into what is kept: numbers, and the tree page by page. Reads only; decides and changes nothing.

``summary`` and ``turn_page`` run on the loop's thread and do a bounded amount of work there. What costs more, the words and
the names under which the disk knows states, ``finish`` looks up on another thread, from what nobody changes any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import msgspec

from everwarm.engine import messages as m
from everwarm.engine.core import Core
from everwarm.errors import Forbidden
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key
from everwarm.state.tree import Node

MAX_PAGE = 1000
N_WORDS = 24  # tokens of a node that are shown
SHORT_NAMESPACE = 12
BREATH = 32
MOST_KEYS = 1 << 16  # that are remembered

_TIERS: dict[tuple[bool, bool], tuple[str, ...]] = {
    (on_device, in_ram): ("device",) * on_device + ("ram",) * in_ram
    for on_device in (False, True)
    for in_ram in (False, True)
}

Number = Callable[[int], int]  # a core's request id to the gateway's number


def summary(core: Core) -> dict[str, Any]:
    census, keeper = core.tree.census, core.keeper
    n_parked = sum(node is not None for node in keeper.spares.values())
    ram = {
        "bytes": core.tree.ram_bytes,
        "budget_bytes": keeper.ram_budget,
        "n_states": census.n_states,
        "n_segments": census.n_segments,
    }
    return {
        "version": census.version,
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
        "quarantines": keeper.counts.n_quarantined,
        "prewarm": {
            "turns": core.counts.n_prewarms,
            "used": keeper.counts.n_prewarms_used,
            "interrupted": core.counts.n_prewarms_interrupted,
            "tokens": core.counts.n_prewarm_tokens,
        },
        "seconds_per_token": keeper.seconds_per_token if core.n_measured else None,
    }


def _disk(core: Core) -> dict[str, Any] | None:
    disk = None if core.archive is None else core.archive.disk
    if disk is None:
        return None
    return {
        "bytes": disk.n_bytes,
        "budget_bytes": disk.budget_bytes,
        "n_objects": len(disk.names()),
        "written_bytes": disk.counts.n_bytes_written,
        "write_budget_bytes": disk.write_budget or None,
        "written_today_bytes": disk.n_written_today if disk.write_budget else None,
        "degraded": disk.degraded is not None,
    }


def evictions(core: Core) -> dict[str, int]:
    """What good things went, by why."""
    disk = None if core.archive is None else core.archive.disk
    return {**core.keeper.counts.evictions, "disk_budget": 0 if disk is None else disk.counts.n_evicted}


# the tree


class Row(msgspec.Struct, frozen=True):  # made by the thousand on the loop's thread
    """A node as it was, with what is still to be looked up about it."""

    seen: m.NodeSeen
    path: Prompt
    span: tuple[int, int]  # in items
    namespace: str
    has_checkpoint: bool
    segment_name: str | None


@dataclass(frozen=True, slots=True)
class Page:
    version: int
    n_total: int
    next: int | None
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class _Moment:
    """What the rows of one page have in common."""

    to_unix: float  # from the loop's clock
    resident: frozenset[int]  # nodes whose KV is on the device, by id
    running: dict[int, tuple[int, int, int]]


def turn_page(core: Core, question: m.AskTree, number: Number) -> Page:
    """``Forbidden`` (409): the place is not in the tree any more."""
    census, moment = core.tree.census, _moment(core, number)
    first = None if question.after is None else census.by_id.get(question.after)
    if question.after is not None and first is None:
        raise Forbidden(409, "tree_changed", "that place is not in the tree any more; start again without after")
    shown = {
        name: root
        for name, root in core.tree.namespaces().items()
        if (root.children or root.id in moment.running) and name.startswith(question.namespace)
    }
    names = {root.id: name for name, root in shown.items()}
    nodes = list(islice(walk(shown.values(), first), question.limit + 1))
    following = nodes.pop().id if len(nodes) > question.limit else None
    name, rows = "" if first is None else core.tree.namespace(first), []
    for node in nodes:
        name = names.get(node.id, name)
        rows.append(_row(node, name, moment))
    n_hidden = sum(not root.children and root.id not in moment.running for root in core.tree.roots())
    return Page(census.version, len(census.by_id) - n_hidden, following, rows)


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


def _moment(core: Core, number: Number) -> _Moment:
    ends = [slot.node for slot in core.slots if slot.n_fed]
    ends += [node for node in core.keeper.spares.values() if node is not None]
    running = {}
    for slot in core.slots:
        request = slot.request
        if request is not None:
            at = (number(request.id), request.n_tokens(slot.n_fed), request.n_prompt_tokens)
            running[slot.node.id] = at
    has_kv = core.context.kind.has_attention
    resident = frozenset(node.id for end in ends for node in end.lineage()) if has_kv else frozenset()
    return _Moment(time.time() - time.monotonic(), resident, running)


def _row(node: Node, namespace: str, moment: _Moment) -> Row:
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
    return Row(
        seen,
        node.path,
        span,
        namespace,
        checkpoint is not None,
        None if segment is None else segment.name_at(node.n_items),
    )


# on another thread


def _politely(rows: Iterable[Row]) -> Iterator[Row]:
    """With pauses: the loop's thread waits for the interpreter no longer than a few rows take."""
    for i, row in enumerate(rows):
        if i % BREATH == 0:
            time.sleep(1e-4)
        yield row


@dataclass(slots=True)
class Lookup:
    """Where the disk and the vocabulary are asked; remembers under which names the disk knows nodes."""

    core: Core
    _keys: dict[int, str] = field(default_factory=dict)  # of checkpoints, by the node's id

    def finish(self, page: Page, *, with_words: bool) -> m.TreeSeen:
        archive = self.core.archive
        disk = None if archive is None else archive.disk
        found: Iterable[Row] = page.rows
        if archive is not None and disk is not None:
            self._learn_keys(page.rows, archive.fingerprint)
            states = {kept.key for kept in disk.objects() if kept.kind == "state"}
            names = disk.names()
            found = [self._with_disk(row, states, names) for row in _politely(page.rows)]
        nodes = [self._with_words(row) for row in _politely(found)] if with_words else [row.seen for row in found]
        return m.TreeSeen(page.version, page.n_total, page.next, nodes)

    def _learn_keys(self, rows: Iterable[Row], fingerprint: str) -> None:
        if len(self._keys) > MOST_KEYS:
            self._keys.clear()
        new = [row for row in rows if row.has_checkpoint and row.seen.id not in self._keys]
        for _, group in groupby(new, key=lambda row: id(row.path)):  # one pass over what they have in common
            same = list(group)
            path, root = same[0].path, root_key(fingerprint, same[0].namespace)
            named = keys(root, path, {row.span[1] for row in same})
            self._keys |= {row.seen.id: named[row.span[1]] for row in same}

    def _with_disk(self, row: Row, states: set[str], names: frozenset[str]) -> Row:
        seen = row.seen
        if row.has_checkpoint and self._keys[seen.id] in states:
            seen = msgspec.structs.replace(seen, state_tiers=(*seen.state_tiers, "disk"))
        if row.segment_name in names:
            seen = msgspec.structs.replace(seen, kv_tiers=(*seen.kv_tiers, "disk"))
        return msgspec.structs.replace(row, seen=seen)

    def _with_words(self, row: Row) -> m.NodeSeen:
        start, stop = row.span
        codes = [code for code in row.path.codes[start : min(stop, start + N_WORDS)].tolist() if code >= 0]
        text = self.core.model.vocab.detokenize(codes).decode("utf-8", "replace")
        return msgspec.structs.replace(row.seen, words=" ".join(text.split()))
