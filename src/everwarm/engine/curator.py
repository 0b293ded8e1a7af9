"""Questions about what is kept, and orders to pin or forget some of it, from frames.

Everything that touches the tree happens on the loop's thread, a bounded piece at a time; what can be done elsewhere is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from everwarm.engine import discard
from everwarm.engine import messages as m
from everwarm.engine.archive import Archive
from everwarm.engine.core import Core
from everwarm.engine.discard import Dropped
from everwarm.engine.look import MAX_PAGE, Lookup, Number, summary, turn_page, view_of
from everwarm.engine.loop import Loop
from everwarm.engine.ondisk import View, pin_of
from everwarm.errors import BadRequest, EverwarmError, Forbidden
from everwarm.state.forest import point_of
from everwarm.state.tree import Node

log = logging.getLogger("everwarm.engine")


class Curator:
    def __init__(self, core: Core, send: Callable[[m.Message], None], number: Number) -> None:
        self._core = core
        self._send = send
        self._number = number
        self._lookup = Lookup(core)
        self._aside = ThreadPoolExecutor(1, "everwarm-look")

    def handle(self, message: m.CacheQuestion, loop: Loop) -> None:
        """On the reader's thread."""
        match message:
            case m.AskCache():
                loop.post(lambda core: self._answer(message.id, lambda: summary(core)))
            case m.AskTree():
                if not 1 <= message.limit <= MAX_PAGE:
                    raise BadRequest(f"limit is {message.limit}; give 1 to {MAX_PAGE}")
                loop.post(lambda core: self._turn_page(core, message))
            case m.CacheOrder():
                loop.post(lambda core: self._obey(core, message))

    @contextmanager
    def _telling(self, id: int) -> Iterator[None]:
        """Whatever goes wrong is said to whoever asked."""
        try:
            yield
        except EverwarmError as error:
            self._send(m.failed(id, error))
        except Exception:
            log.exception("a question about what is kept could not be answered")
            self._send(m.failed(id, EverwarmError("internal error")))

    def _answer(self, id: int, work: Callable[[], Any]) -> None:
        with self._telling(id):
            self._send(m.Answer(id, work()))

    # on the loop's thread

    def _turn_page(self, core: Core, question: m.AskTree) -> None:
        with self._telling(question.id):
            page = turn_page(core, question, self._number)
            with_words = question.with_words
            self._aside.submit(self._answer, question.id, lambda: self._lookup.finish(page, with_words=with_words))

    def _obey(self, core: Core, order: m.CacheOrder) -> None:
        with self._telling(order.id):
            if order.action == "drop":
                self._drop(core, order)
            elif order.node is not None and order.node < 0 and core.archive is not None:
                self._aside.submit(self._pin_on_disk, core.archive, order, view_of(core))
            else:
                self._pin(core, order)

    def _pin(self, core: Core, order: m.CacheOrder) -> None:
        """The answer comes when it is written down."""
        node, archive = _find(core, order.node), core.archive
        if node.parent is None:
            raise _is_root()
        (core.ram.pin if order.action == "pin" else core.ram.unpin)(node)
        said = {"id": node.id, "pinned": node.n_pinned > 0, "bytes": _weight(node)}
        if archive is None:
            return self._send(m.Answer(order.id, said))
        archive.keep_pinned(node) if order.action == "pin" else archive.after_all(archive.pins.strike(node))
        archive.after_all(lambda: self._send(m.Answer(order.id, said)))

    def _drop(self, core: Core, order: m.CacheOrder) -> None:
        """The answer comes when it is gone from the disk as well."""
        doomed = _out_of_ram(core, order)
        if core.archive is not None:
            self._aside.submit(self._drop_on_disk, core.archive, order, doomed)
        elif order.node is not None and order.node < 0:
            raise _not_found(order.node)
        else:
            self._answer(order.id, lambda: _said(order, doomed.dropped))

    # on another

    def _pin_on_disk(self, archive: Archive, order: m.CacheOrder, view: View) -> None:
        """What is only there; as above, the answer comes when it is written down."""

        def change() -> dict[str, Any]:
            disk = archive.disk
            assert disk is not None and kept is not None
            disk.pin(pin_of(kept)) if order.action == "pin" else disk.unpin([kept.key])
            n_bytes = disk.size_of([kept.name, *kept.needs])
            is_pinned = point_of(kept.key, kept.n_items) in disk.pins.marked
            return {"id": order.node, "pinned": is_pinned, "bytes": n_bytes}

        with self._telling(order.id):
            twig = self._lookup.disk.find(view, order.node or 0)
            if twig is None:
                raise _not_found(order.node)
            if (kept := twig.kept) is None:
                raise _is_root()
            archive.after_all(lambda: self._answer(order.id, change))

    def _drop_on_disk(self, archive: Archive, order: m.CacheOrder, doomed: Doomed) -> None:
        """What hangs below the nodes is looked up here, and goes on the disk's own thread."""

        def drop() -> dict[str, Any]:
            if order.node is None:
                return _said(order, doomed.dropped + discard.drop_all_on_disk(archive))
            on_the_way = sum((discard.drop_on_disk(archive, lineage) for lineage in doomed.lineages), Dropped())
            return _said(order, doomed.dropped + on_the_way + discard.drop_states(archive, states))

        with self._telling(order.id):
            states = [] if order.node is None else self._lookup.disk.below(doomed.view, doomed.ids)
            if order.node is not None and order.node < 0 and not states:
                raise _not_found(order.node)
            archive.after_all(lambda: self._answer(order.id, drop))


@dataclass(frozen=True, slots=True)
class Doomed:
    """What somebody wants forgotten, and what of it is gone from RAM already."""

    view: View  # of the tree before
    ids: list[int]
    lineages: list[discard.Lineages]
    dropped: Dropped


def _out_of_ram(core: Core, order: m.CacheOrder) -> Doomed:
    view = view_of(core)
    if order.node is not None and order.node < 0:
        return Doomed(view, [order.node], [], Dropped())
    nodes = core.tree.roots() if order.node is None else [_find(core, order.node)]
    ids = [n.id for node in nodes for n in node.below()]
    lineages = [discard.lineages(core, node) for node in nodes] if core.archive is not None else []
    return Doomed(view, ids, lineages, sum((discard.drop(core, node) for node in nodes), Dropped()))


def _said(order: m.CacheOrder, dropped: Dropped) -> dict[str, Any]:
    return {"id": order.node, "dropped": dropped.n_objects, "bytes": dropped.n_bytes}


def _not_found(id: int | None) -> Forbidden:
    return Forbidden(404, "node_not_found", f"there is no node {id}; GET /cache/tree lists those there are")


def _is_root() -> BadRequest:
    return BadRequest("a root keeps nothing itself; name a node below it")


def _find(core: Core, id: int | None) -> Node:
    node = None if id is None else core.tree.census.by_id.get(id)
    if node is None:
        raise _not_found(id)
    return node


def _weight(node: Node) -> int:
    """Bytes in RAM of everything on the way to a node; a segment that several share counts once."""
    segments = {id(n.segment): n.segment.blob.nbytes for n in node.lineage() if n.segment is not None}
    return sum(segments.values()) + sum(n.checkpoint.size_bytes for n in node.lineage() if n.checkpoint is not None)
