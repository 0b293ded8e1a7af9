"""The engine's end of the cache API: answers questions about the cache, and pins or drops parts of it.

Everything that touches the tree happens on the loop's thread, a bounded piece at a time; the rest on other threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from everwarm.engine.cache import drop
from everwarm.engine.core import OPEN_WAIT_S, Core
from everwarm.engine.inspect.cache_view import MAX_PAGE, CacheView, Number, summary, turn_page, view_of
from everwarm.engine.inspect.disk_view import TreeSnapshot, pin_of
from everwarm.engine.loop import Loop
from everwarm.engine.process import messages as m
from everwarm.engine.tiers.disk_pins import MOST_PINS, HeldPin, pinned_below, pinned_on_disk
from everwarm.engine.tiers.tier_writer import TierWriter
from everwarm.errors import BadRequest, EverwarmError, Forbidden, NotFound
from everwarm.state.lineage import point_of, root_key, short_key
from everwarm.state.tier import Dropped, InSpaces, Selection, TheseStates
from everwarm.state.tree import Node

log = logging.getLogger("everwarm.engine")


class CacheCommands:
    def __init__(self, core: Core, send: Callable[[m.Message], None], number: Number) -> None:
        self._core = core
        self._send = send
        self._number = number
        self._lookup = CacheView(core)
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
                loop.post(lambda core: self._carry_out(core, message, loop))

    @contextmanager
    def _reporting(self, id: int) -> Iterator[None]:
        """An error becomes the answer."""
        try:
            yield
        except EverwarmError as error:
            self._send(m.failed(id, error))
        except Exception:
            log.exception("a question about what is kept could not be answered")
            self._send(m.failed(id, EverwarmError("internal error")))

    def _answer(self, id: int, work: Callable[[], Any]) -> None:
        with self._reporting(id):
            self._send(m.Answer(id, work()))

    # on the loop's thread

    def _turn_page(self, core: Core, question: m.AskTree) -> None:
        with self._reporting(question.id):
            page = turn_page(core, question, self._number)
            self._aside.submit(self._answer, question.id, lambda: self._lookup.finish(page))

    def _carry_out(self, core: Core, order: m.CacheOrder, loop: Loop) -> None:
        with self._reporting(order.id):
            if order.action == "drop":
                self._drop(core, order)
            elif order.node is not None and order.node < 0:
                self._aside.submit(self._pin_on_disk, core.tier_writer, order, view_of(core))
            elif order.action == "pin" and order.pin_quota is not None:
                request = _checked_in_ram(core, order)
                self._aside.submit(self._pin_if_allowed, order, request, loop)
            else:
                self._pin(core, order)

    def _pin(self, core: Core, order: m.CacheOrder) -> None:
        """Answers when the pin is durable."""
        node, writer = _find(core, order), core.tier_writer
        if node.parent is None:
            raise _is_root()
        (core.ram.pin if order.action == "pin" else core.ram.unpin)(node)
        answer = {"id": node.id, "pinned": node.n_pinned > 0, "bytes": _weight(node)}
        writer.keep_pinned(node) if order.action == "pin" else writer.after_all(writer.pins.strike(node))
        writer.after_all(lambda: self._send(m.Answer(order.id, answer)))

    def _drop(self, core: Core, order: m.CacheOrder) -> None:
        """Answers when it is gone from the disk, too; the answer names the namespace whose texts were forgotten."""
        plan = _out_of_ram(core, order)
        self._aside.submit(self._drop_on_disk, core.tier_writer, order, plan)

    # on another thread

    def _pin_if_allowed(self, order: m.CacheOrder, request: PinRequest, loop: Loop) -> None:
        """Checks the quota on disk here, then pins on the loop's thread."""

        def go_on(core: Core) -> None:
            with self._reporting(order.id):
                self._pin(core, order)

        with self._reporting(order.id):
            writer = self._core.tier_writer
            if writer.disk.is_on and not request.is_pinned:
                space = short_key(root_key(writer.fingerprint, request.namespace))
                held = pinned_on_disk(writer.disk, space)
                _require_quota(order, self._core, HeldPin(held.n_pins + 1, held.n_bytes + request.n_new_bytes))
            loop.post(go_on)

    def _pin_on_disk(self, writer: TierWriter, order: m.CacheOrder, view: TreeSnapshot) -> None:
        """Pins or unpins what is only on disk; answers when that is durable."""

        def change() -> dict[str, Any]:
            disk = writer.disk
            assert kept is not None
            disk.pin(pin_of(kept)) if order.action == "pin" else disk.unpin([kept.key])
            n_bytes = disk.size_of([kept.name, *kept.needs])
            is_pinned = point_of(kept.key, kept.n_items) in disk.pins.marked
            return {"id": order.node, "pinned": is_pinned, "bytes": n_bytes}

        with self._reporting(order.id):
            node = self._lookup.disk.find(view, order.node or 0, order.namespace)
            if node is None:
                raise _not_found(order.node)
            if (kept := node.kept) is None:
                raise _is_root()
            if order.action == "pin":
                _require_quota(order, self._core, pinned_on_disk(writer.disk, kept.space, pin_of(kept)))
            writer.after_all(lambda: self._answer(order.id, change))

    def _drop_on_disk(self, writer: TierWriter, order: m.CacheOrder, plan: DropPlan) -> None:
        """Looks up what is below the nodes here, and drops it on the disk's own thread."""

        def forget() -> dict[str, Any]:
            selections: list[Selection] = [InSpaces(spaces)]
            if order.node is not None:
                ways = plan.lineages
                on_the_way = [writer.on_prompts(way.namespace, way.prompts, way.beyond) for way in ways]
                selections = [*on_the_way, TheseStates(tuple(states))]
            dropped = sum((writer.forget_now(what) for what in selections), plan.dropped)
            return _drop_answer(order, plan, dropped)

        with self._reporting(order.id):
            writer.wait_open(OPEN_WAIT_S)
            writer.require_disk()
            spaces = self._lookup.disk.spaces(plan.view, order.namespace)
            states = [] if order.node is None else self._lookup.disk.below(plan.view, plan.ids, order.namespace)
            if order.node is not None and order.node < 0 and not states:
                raise _not_found(order.node)
            writer.after_all(lambda: self._answer(order.id, forget))


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What is to be forgotten, and what of it is gone from RAM already."""

    namespace: str  # a prefix: in these namespaces words are forgotten
    view: TreeSnapshot  # of the tree before
    ids: list[int]
    lineages: list[drop.Lineages]
    dropped: Dropped


def _out_of_ram(core: Core, order: m.CacheOrder) -> DropPlan:
    """Drops nodes from RAM, and the texts that could quote them: these are forgotten in the whole namespace."""
    is_in_ram = order.node is not None and order.node >= 0
    namespace = core.tree.namespace(_find(core, order)) if is_in_ram else order.namespace
    drop.forget_ahead(core, namespace)
    view = view_of(core)
    if order.node is not None and order.node < 0:
        drop.forget_words(core, namespace)
        return DropPlan(namespace, view, [order.node], [], Dropped())
    roots = [root for name, root in core.tree.namespaces().items() if name.startswith(order.namespace)]
    nodes = roots if order.node is None else [_find(core, order)]
    ids = [n.id for node in nodes for n in node.below()]
    lineages = [drop.lineages(core, node) for node in nodes]
    dropped = sum((drop.drop(core, node) for node in nodes), Dropped())
    drop.forget_words(core, namespace)
    return DropPlan(namespace, view, ids, lineages, dropped)


def _drop_answer(order: m.CacheOrder, plan: DropPlan, dropped: Dropped) -> dict[str, Any]:
    about = {"id": order.node, "dropped": dropped.n_objects, "bytes": dropped.n_bytes}
    return {**about, "namespace": plan.namespace}


def _not_found(id: int | None) -> NotFound:
    return NotFound(f"there is no node {id}; GET /cache/tree lists those there are", "node_not_found")


def _is_root() -> BadRequest:
    return BadRequest("a root keeps nothing itself; name a node below it")


def _find(core: Core, order: m.CacheOrder) -> Node:
    """``NotFound`` also for a node of another namespace, so that its existence is not revealed."""
    node = None if order.node is None else core.tree.census.by_id.get(order.node)
    if node is None or not core.tree.namespace(node).startswith(order.namespace):
        raise _not_found(order.node)
    return node


@dataclass(frozen=True, slots=True)
class PinRequest:
    """A node that a user wants to pin: whether it is pinned, its namespace, and the bytes of its path that are not
    pinned yet."""

    is_pinned: bool
    namespace: str
    n_new_bytes: int


def _checked_in_ram(core: Core, order: m.CacheOrder) -> PinRequest:
    """Checks the quota in RAM. It is checked on disk as well: what is pinned may be in only one of them."""
    node = _find(core, order)
    if not node.is_pinned:
        pinned = [*pinned_below(node.root()), node]
        on_the_way = {id(n): n for end in pinned for n in end.lineage()}.values()
        _require_quota(order, core, HeldPin(len(pinned), _full_weight(core, on_the_way)))
    new = [n for n in node.lineage() if not n.n_pinned]
    return PinRequest(node.is_pinned, core.tree.namespace(node), _full_weight(core, new))


def _require_quota(order: m.CacheOrder, core: Core, held: HeldPin) -> None:
    if order.pin_quota is None:
        return
    most = int(order.pin_quota * core.ram_budget.n_bytes)
    if held.n_bytes > most or held.n_pins > MOST_PINS:
        shown = f"{held.n_pins} pins with {held.n_bytes:,} bytes; {MOST_PINS} with {most:,} bytes are allowed"
        message = f"with this one your namespace would have {shown}: unpin others, or use an admin key"
        raise Forbidden(message, "pin_quota_exceeded")


def _weight(node: Node) -> int:
    """Bytes in RAM of a node's lineage; a shared segment counts once."""
    segments = {id(n.segment): n.segment.blob.nbytes for n in node.lineage() if n.segment is not None}
    return sum(segments.values()) + sum(n.checkpoint.size_bytes for n in node.lineage() if n.checkpoint is not None)


def _full_weight(core: Core, nodes: Iterable[Node]) -> int:
    """Bytes that these nodes will take in RAM; some may be only on the device now."""
    shape, kept = core.sizes.shape, [node for node in nodes if node.parent is not None]
    n_tokens = sum(int(n.mark.n_tokens) - int(n.parent.mark.n_tokens) for n in kept if n.parent is not None)
    return n_tokens * shape.kv_bytes_per_token + shape.state_bytes * sum(n.checkpoint is not None for n in kept)
