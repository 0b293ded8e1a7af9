"""The engine's end of the cache API: answers questions about the cache, and pins or drops parts of it.

Everything that touches the tree happens on the loop's thread, a bounded piece at a time; the rest on other threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from everwarm.engine.core import OPEN_WAIT_S, Core
from everwarm.engine.inspect.cache_view import (
    MAX_PAGE,
    DiskView,
    Number,
    TreeSnapshot,
    finish_page,
    pin_of,
    turn_page,
    view_of,
)
from everwarm.engine.loop import Job, Loop
from everwarm.engine.process import messages as m
from everwarm.engine.tiers.pins import MOST_PINS, pinned_below, pinned_on_disk
from everwarm.errors import BadRequest, EverwarmError, Forbidden, NotFound
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import point_of, root_key, short_key
from everwarm.state.tier import Dropped, InSpaces, Selection
from everwarm.state.tree import Node

log = logging.getLogger("everwarm.engine")


class CacheCommands:
    def __init__(self, core: Core, send: Callable[[m.Message], None], number: Number) -> None:
        self._tiers = core.cache.tiers
        self._ram_bytes = core.cache.ram_budget.n_bytes
        self._vocab = core.model.vocab
        self._send = send
        self._number = number
        self._disk_view = DiskView(core.cache.tiers)
        self._aside = ThreadPoolExecutor(1, "everwarm-look")

    def handle(self, message: m.CacheQuestion, loop: Loop) -> None:
        """On the reader's thread."""
        match message:
            case m.AskTree():
                if not 1 <= message.limit <= MAX_PAGE:
                    raise BadRequest(f"limit is {message.limit}; give 1 to {MAX_PAGE}")
                self._with_places(loop, lambda core: self._turn_page(core, message))
            case m.CacheOrder():
                self._with_places(loop, lambda core: self._carry_out(core, message, loop))

    def _with_places(self, loop: Loop, work: Job) -> None:
        """Runs ``work`` on the loop's thread when other threads can know the place of every node. A step may come
        before it."""

        def copy(core: Core) -> None:
            if self._disk_view.copy_places(core.cache.tree):
                work(core)
            else:
                loop.post(copy)

        loop.post(copy)

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

    def _require_quota(self, order: m.CacheOrder, n_pins: int, n_bytes: int) -> None:
        """On any thread."""
        if order.pin_quota is None:
            return
        most = int(order.pin_quota * self._ram_bytes)
        if n_bytes > most or n_pins > MOST_PINS:
            shown = f"{n_pins} pins with {n_bytes:,} bytes; {MOST_PINS} with {most:,} bytes are allowed"
            message = f"with this one your namespace would have {shown}: unpin others, or use an admin key"
            raise Forbidden(message, "pin_quota_exceeded")

    # on the loop's thread

    def _turn_page(self, core: Core, question: m.AskTree) -> None:
        with self._reporting(question.id):
            core.cache.timed_pins.expire(time.monotonic())
            page = turn_page(core, question, self._number)
            self._aside.submit(self._answer, question.id, lambda: finish_page(page, self._disk_view, self._vocab))

    def _carry_out(self, core: Core, order: m.CacheOrder, loop: Loop) -> None:
        with self._reporting(order.id):
            if order.action == "drop":
                self._drop(core, order)
            elif order.node is not None and order.node < 0:
                if order.ttl_s is not None:
                    raise BadRequest(
                        "what is only on disk cannot be pinned for a while: prefetch its prompt, with ttl_s"
                    )
                self._aside.submit(self._pin_on_disk, order, view_of(core.cache.tree))
            elif order.action == "pin" and order.pin_quota is not None and not (node := _find(core, order)).is_pinned:
                namespace = core.cache.tree.namespace(node)
                n_bytes = self._new_bytes(core, order, node)
                self._aside.submit(self._pin_if_allowed, order, namespace, n_bytes, loop)
            else:
                self._pin(core, order)

    def hold(self, core: Core, question: m.AskPrompt, prompt: Prompt, loop: Loop) -> None:
        """Pins the deepest point of a prompt that a request could continue from, for a while."""
        restorer = core.cache.restorer
        namespace = question.submit.namespace
        match = restorer.match(prompt, namespace, restorer.sources(prompt, namespace))
        usable = match.usable
        if not core.context.kind.needs_checkpoints:
            usable = tuple(node for node in match.path if 0 < node.n_items <= min(match.n_kv, match.n_shared))[-1:]
        if not usable:
            return self._send(m.Answer(question.id, {"id": None, "pinned": False, "bytes": 0}))
        pin = m.CacheOrder(question.id, "pin", usable[0].id, namespace, question.pin_quota, question.ttl_s)
        return self._carry_out(core, pin, loop)

    def _new_bytes(self, core: Core, order: m.CacheOrder, node: Node) -> int:
        """The bytes of the node's lineage that are not pinned yet, after checking the quota in RAM. It is checked on disk
        as well: what is pinned may be in only one of them."""
        pinned = [*pinned_below(node.root()), node]
        on_the_way = {id(n): n for end in pinned for n in end.lineage()}.values()
        self._require_quota(order, len(pinned), _full_weight(core, on_the_way))
        return _full_weight(core, [n for n in node.lineage() if not n.n_pinned])

    def _pin(self, core: Core, order: m.CacheOrder) -> None:
        """Answers when the pin is durable."""
        cache = core.cache
        node = _find(core, order)
        writer = cache.tier_writer
        if node.parent is None:
            raise _is_root()
        if order.ttl_s is not None:
            cache.timed_pins.hold(node, time.monotonic() + order.ttl_s)
            return self._send(m.Answer(order.id, {"id": node.id, "pinned": True, "bytes": _weight(node)}))
        cache.timed_pins.release(node)
        if order.action == "pin":
            cache.ram.pin(node)
        else:
            cache.ram.unpin(node)
        answer = {"id": node.id, "pinned": node.n_pinned > 0, "bytes": _weight(node)}
        if order.action == "pin":
            writer.keep_pinned(node)
        else:
            writer.drop_pin(node)
        return self._tiers.after_all(lambda: self._send(m.Answer(order.id, answer)))

    def _drop(self, core: Core, order: m.CacheOrder) -> None:
        """Answers when it is gone from the disk, too; the answer names the namespace whose texts were forgotten."""
        plan = _out_of_ram(core, order)
        self._aside.submit(self._drop_on_disk, order, plan)

    # on another thread

    def _pin_if_allowed(self, order: m.CacheOrder, namespace: str, n_new_bytes: int, loop: Loop) -> None:
        """Checks the quota on disk here, then pins on the loop's thread."""

        def go_on(core: Core) -> None:
            with self._reporting(order.id):
                self._pin(core, order)

        with self._reporting(order.id):
            tiers = self._tiers
            if tiers.disk.is_on:
                space = short_key(root_key(tiers.fingerprint, namespace))
                n_pins, n_bytes = pinned_on_disk(tiers.disk, space)
                self._require_quota(order, n_pins + 1, n_bytes + n_new_bytes)
            loop.post(go_on)

    def _pin_on_disk(self, order: m.CacheOrder, view: TreeSnapshot) -> None:
        """Pins or unpins what is only on disk; answers when that is durable."""
        tiers = self._tiers

        def change() -> dict[str, Any]:
            disk = tiers.disk
            assert kept is not None
            disk.pin(pin_of(kept)) if order.action == "pin" else disk.unpin([kept.key])
            n_bytes = disk.size_of([kept.name, *kept.needs])
            is_pinned = point_of(kept.key, kept.n_items) in disk.pinned_points
            return {"id": order.node, "pinned": is_pinned, "bytes": n_bytes}

        with self._reporting(order.id):
            node = self._disk_view.find(view, order.node or 0, order.namespace)
            if node is None:
                raise _not_found(order.node)
            if (kept := node.kept) is None:
                raise _is_root()
            if order.action == "pin":
                self._require_quota(order, *pinned_on_disk(tiers.disk, kept.space, pin_of(kept)))
            tiers.after_all(lambda: self._answer(order.id, change))

    def _drop_on_disk(self, order: m.CacheOrder, plan: DropPlan) -> None:
        """Looks up what is below the nodes here, and drops it on the disk's own thread."""
        tiers = self._tiers

        def forget() -> dict[str, Any]:
            selections: list[Selection] = [InSpaces(spaces)]
            if order.node is not None:
                selections = [*(select() for select in plan.on_prompts), tuple(states)]
            dropped = sum((tiers.forget_now(what) for what in selections), plan.dropped)
            return _drop_answer(order, plan, dropped)

        with self._reporting(order.id):
            tiers.wait_open(OPEN_WAIT_S)
            tiers.require_disk()
            spaces = self._disk_view.spaces(plan.view, order.namespace)
            states = [] if order.node is None else self._disk_view.below(plan.view, plan.ids, order.namespace)
            if order.node is not None and order.node < 0 and not states:
                raise _not_found(order.node)
            tiers.after_all(lambda: self._answer(order.id, forget))


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What is to be forgotten, and what of it is gone from RAM already."""

    namespace: str  # a prefix: in these namespaces words are forgotten
    view: TreeSnapshot  # of the tree before
    ids: list[int]
    on_prompts: list[Callable[[], Selection]]  # what of it is on disk below nodes in RAM
    dropped: Dropped


def _out_of_ram(core: Core, order: m.CacheOrder) -> DropPlan:
    """Drops nodes from RAM, and the texts that could quote them: these are forgotten in the whole namespace."""
    cache = core.cache
    is_in_ram = order.node is not None and order.node >= 0
    namespace = cache.tree.namespace(_find(core, order)) if is_in_ram else order.namespace
    core.forget_ahead(namespace)
    view = view_of(cache.tree)
    if order.node is not None and order.node < 0:
        cache.forget_words(namespace)
        return DropPlan(namespace, view, [order.node], [], Dropped())
    roots = [root for name, root in cache.tree.namespaces().items() if name.startswith(order.namespace)]
    nodes = roots if order.node is None else [_find(core, order)]
    ids = [n.id for node in nodes for n in node.below()]
    on_prompts = [_on_prompts(core, node) for node in nodes]
    dropped = sum((cache.drop(node) for node in nodes), Dropped())
    cache.forget_words(namespace)
    return DropPlan(namespace, view, ids, on_prompts, dropped)


def _on_prompts(core: Core, node: Node) -> Callable[[], Selection]:
    """Selects every state that is on disk at or below a node. Called on another thread: the fingerprint may take long."""
    cache = core.cache
    ends = [n for n in node.below() if not n.children]
    prompts = tuple(n.path.first(n.n_items) for n in ends)
    return partial(cache.tiers.on_prompts, cache.tree.namespace(node), prompts, node.start)


def _drop_answer(order: m.CacheOrder, plan: DropPlan, dropped: Dropped) -> dict[str, Any]:
    about = {"id": order.node, "dropped": dropped.n_objects, "bytes": dropped.n_bytes}
    return {**about, "namespace": plan.namespace}


def _not_found(id: int | None) -> NotFound:
    return NotFound(f"there is no node {id}; GET /cache/tree lists those there are", "node_not_found")


def _is_root() -> BadRequest:
    return BadRequest("a root keeps nothing itself; name a node below it")


def _find(core: Core, order: m.CacheOrder) -> Node:
    """``NotFound`` also for a node of another namespace, so that its existence is not revealed."""
    tree = core.cache.tree
    node = None if order.node is None else tree.by_id.get(order.node)
    if node is None or not tree.namespace(node).startswith(order.namespace):
        raise _not_found(order.node)
    return node


def _weight(node: Node) -> int:
    """Bytes in RAM of a node's lineage; a shared segment counts once."""
    segments = {id(n.segment): n.segment.blob.nbytes for n in node.lineage() if n.segment is not None}
    return sum(segments.values()) + sum(n.checkpoint.size_bytes for n in node.lineage() if n.checkpoint is not None)


def _full_weight(core: Core, nodes: Iterable[Node]) -> int:
    """Bytes that these nodes will take in RAM; some may be only on the device now."""
    shape = core.sizes.shape
    kept = [node for node in nodes if node.parent is not None]
    n_tokens = sum(int(n.mark.n_tokens) - int(n.parent.mark.n_tokens) for n in kept if n.parent is not None)
    return n_tokens * shape.kv_bytes_per_token + shape.state_bytes * sum(n.checkpoint is not None for n in kept)
