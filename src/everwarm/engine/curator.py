"""Questions about what is kept, and orders to pin or forget some of it, from frames.

Everything that touches the tree happens on the loop's thread, a bounded piece at a time; what can be done elsewhere is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from everwarm.engine import discard
from everwarm.engine import messages as m
from everwarm.engine.archive import Archive
from everwarm.engine.core import Core
from everwarm.engine.discard import Dropped
from everwarm.engine.look import MAX_PAGE, Lookup, Number, summary, turn_page
from everwarm.engine.loop import Loop
from everwarm.errors import BadRequest, EverwarmError, Forbidden
from everwarm.state.census import pin, unpin
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

    def _answer(self, id: int, work: Callable[[], Any]) -> None:
        """Whatever goes wrong is said to whoever asked."""
        try:
            self._send(m.Answer(id, work()))
        except EverwarmError as error:
            self._send(m.failed(id, error))
        except Exception:
            log.exception("a question about what is kept could not be answered")
            self._send(m.failed(id, EverwarmError("internal error")))

    # on the loop's thread

    def _turn_page(self, core: Core, question: m.AskTree) -> None:
        try:
            page = turn_page(core, question, self._number)
        except EverwarmError as error:
            return self._send(m.failed(question.id, error))
        with_words = question.with_words
        self._aside.submit(self._answer, question.id, lambda: self._lookup.finish(page, with_words=with_words))

    def _obey(self, core: Core, order: m.CacheOrder) -> None:
        if order.action == "drop":
            return self._drop(core, order)
        self._answer(order.id, lambda: self._pin(core, order))

    def _pin(self, core: Core, order: m.CacheOrder) -> dict[str, Any]:
        node = _find(core, order.node)
        if node.parent is None:
            raise BadRequest("a root keeps nothing itself; name a node below it")
        (pin if order.action == "pin" else unpin)(node)
        core.tree.census.changed()
        return {"id": node.id, "pinned": node.n_pinned > 0, "bytes": _weight(node)}

    def _drop(self, core: Core, order: m.CacheOrder) -> None:
        """The answer comes when it is gone from the disk as well."""
        archive = core.archive
        try:
            nodes = core.tree.roots() if order.node is None else [_find(core, order.node)]
            doomed = [discard.lineages(core, node) for node in nodes] if archive is not None else []
            dropped = sum((discard.drop(core, node) for node in nodes), Dropped())
        except EverwarmError as error:
            return self._send(m.failed(order.id, error))

        def said(more: Dropped) -> dict[str, Any]:
            total = dropped + more
            return {"id": order.node, "dropped": total.n_objects, "bytes": total.n_bytes}

        if archive is None:
            return self._answer(order.id, lambda: said(Dropped()))
        archive.after_all(lambda: self._answer(order.id, lambda: said(_off_disk(archive, order, doomed))))


def _off_disk(archive: Archive, order: m.CacheOrder, doomed: list[discard.Lineages]) -> Dropped:
    if order.node is None:
        return discard.drop_all_on_disk(archive)
    return sum((discard.drop_on_disk(archive, lineage) for lineage in doomed), Dropped())


def _find(core: Core, id: int | None) -> Node:
    node = None if id is None else core.tree.census.by_id.get(id)
    if node is None:
        raise Forbidden(404, "node_not_found", f"there is no node {id}; GET /cache/tree lists those there are")
    return node


def _weight(node: Node) -> int:
    """Bytes in RAM of everything on the way to a node; a segment that several share counts once."""
    segments = {id(n.segment): n.segment.blob.nbytes for n in node.lineage() if n.segment is not None}
    return sum(segments.values()) + sum(n.checkpoint.size_bytes for n in node.lineage() if n.checkpoint is not None)
