"""What the cache API shows of a core and does to it, asked without a server."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from everwarm.engine.core import Core
from everwarm.engine.inspect.cache_commands import CacheCommands
from everwarm.engine.inspect.cache_view import DiskView, NodePage, finish_page, turn_page
from everwarm.engine.process import messages as m
from support.drive import AtOnce, run, text
from support.kept_cores import put_away

SHARED = text(1, 200)
NAMESPACE = "ab" * 16


def talk(core: Core, seed: int = 2, n_turns: int = 3, namespace: str = NAMESPACE) -> list[int]:
    """A conversation whose turns each leave a state behind; returns its last prompt."""
    prompt = SHARED
    for turn in range(n_turns):
        prompt = [*prompt, *text(100 * seed + turn, 80)]
        run(core, prompt, stable=len(prompt) - 10, namespace=namespace)
        put_away(core)
    return prompt


def begin_page(core: Core, question: m.AskTree, disk: DiskView) -> NodePage:
    """The part of an answer that the loop's thread makes."""
    while not disk.copy_places(core.cache.tree):
        pass
    return turn_page(core, question, lambda id: id)


def ask_tree(core: Core, question: m.AskTree, disk: DiskView | None = None) -> m.TreeSeen:
    disk = disk or DiskView(core.cache.tiers)
    return finish_page(begin_page(core, question, disk), disk, core.model.vocab)


def pages(core: Core, limit: int = 1000, *, with_words: bool = False, namespace: str = "") -> list[m.NodeSeen]:
    found: list[m.NodeSeen] = []
    after, disk = None, DiskView(core.cache.tiers)
    while True:
        question = m.AskTree(1, limit, after, namespace, "" if with_words else None)
        seen = ask_tree(core, question, disk)
        assert len(seen.nodes) <= limit
        found += seen.nodes
        after = seen.next
        if after is None:
            assert namespace or seen.n_total == len(found)
            return found


def order(core: Core, action: Any, node: int | None, **more: Any) -> Any:
    """What whoever gives an order hears."""
    heard: list[m.Message] = []
    done = threading.Event()

    def send(message: m.Message) -> None:
        heard.append(message)
        done.set()

    CacheCommands(core, send, lambda id: id).handle(m.CacheOrder(1, action, node, **more), AtOnce(core))
    assert done.wait(20)
    return heard[0].data if isinstance(heard[0], m.Answer) else heard[0]


def on_disk(nodes: Iterable[m.NodeSeen]) -> list[m.NodeSeen]:
    return [node for node in nodes if node.id < 0]
