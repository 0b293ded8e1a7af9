"""Looking into a tree of 10,000 nodes, a page of 1,000 at a time. Wanted: at most about 2 ms of the loop's time per page.

Also how much a client that reads twenty pages a second, with text, slows down a reply.
"""

from __future__ import annotations

import statistics
import threading
import time

import numpy as np

from bench.measure import EMBEDDED, median_s, table
from everwarm.config import GREEDY
from everwarm.engine.build import assemble
from everwarm.engine.core import Core
from everwarm.engine.inspect.cache_view import DiskView, finish_page, turn_page
from everwarm.engine.inspect.report import summary
from everwarm.engine.loop import Loop, start
from everwarm.engine.process import messages as m
from everwarm.engine.request import Ask, Event, Finished
from everwarm.engine.settings import EngineSettings
from everwarm.llama.system.process import collect_rarely
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CutKind
from everwarm.state.tree import Checkpoint, Segment

N_NODES, N_CUTS, EVERY = 10_000, 20, 100
N_REPLY, PAGE_EVERY_S = 1500, 0.05


def run() -> None:
    replies: dict[int, float] = {}
    done = threading.Event()

    def deliver(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                replies[event.request_id] = event.result.decode_s
                done.set()

    loop = start(_core, deliver, lambda _: None)
    core = loop.core
    _show_pages(core)
    quiet, watched = [], []
    for _ in range(3):
        quiet.append(_speed(loop, replies, done, None))
        watched.append(_speed(loop, replies, done, core))
    loop.stop()
    loop.thread.join()
    core.close()
    rows = [("no client reads pages", f"{statistics.median(quiet):.0f} tokens/s")]
    rows += [("twenty pages a second", f"{statistics.median(watched):.0f} tokens/s")]
    table(f"A reply of {N_REPLY} tokens of everwarm-tiny", ("", "decode"), rows)


def _core() -> Core:
    core = assemble(EMBEDDED, EngineSettings(n_slots=1, n_ctx=4096, n_threads=1, n_spares=0, ram_bytes=512 << 20))
    rng, root = np.random.default_rng(0), core.cache.tree.root("ab" * 16)
    shared = rng.integers(12, 2000, EVERY)
    while len(core.cache.tree.by_id) < N_NODES:
        prompt = Prompt.of_tokens(np.concatenate([shared, rng.integers(12, 2000, (N_CUTS - 1) * EVERY)]))
        node = root
        for at in range(EVERY, len(prompt) + 1, EVERY):
            node = core.cache.tree.grow(node, prompt, at)
            if node.checkpoint is None and node.parent is not None:
                state, kv = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
                core.cache.tree.set_checkpoint(node, Checkpoint(CutKind.BOUNDARY, True, (), state=state))
                core.cache.tree.set_segment(node, Segment(kv, node.parent.mark, node.mark, True))
    collect_rarely()  # as the engine's process does
    return core


def _show_pages(core: Core) -> None:
    """On this thread: nothing runs yet."""
    on_loop, aside, after = [], [], None
    while True:
        began = time.perf_counter()
        page = turn_page(core, m.AskTree(1, 1000, after, words_of=""), int)
        turned = time.perf_counter()
        seen = finish_page(page, DiskView(core.cache.tiers), core.model.vocab)
        aside.append(time.perf_counter() - turned)
        on_loop.append(turned - began)
        assert len(seen.nodes) == len(page.rows)
        after = page.next
        if after is None:
            break
    rows = [
        ("one page of 1,000, on the loop's thread", f"{1e3 * statistics.median(on_loop):.2f} ms"),
        ("its words, on another", f"{1e3 * statistics.median(aside):.2f} ms"),
        ("GET /cache, on the loop's thread", f"{1e3 * median_s(lambda: summary(core), 15):.3f} ms"),
    ]
    table(f"Looking into a tree of {len(core.cache.tree.by_id):,} nodes", ("", "time"), rows)


def _speed(loop: Loop, replies: dict[int, float], done: threading.Event, pages_of: Core | None) -> float:
    """Tokens per second of one reply, with a client that reads pages beside it or without."""
    done.clear()
    replies.clear()
    ask = Ask(Prompt.of_tokens([20] * 64), sampling=GREEDY, max_tokens=N_REPLY, ignore_eos=True, use_cache=False)
    loop.post(lambda core: core.submit(ask) and None)
    page_turned = threading.Event()
    disk = None if pages_of is None else DiskView(pages_of.cache.tiers)
    while not done.wait(PAGE_EVERY_S):
        if disk is None:
            continue
        page_turned.clear()

        def turn(core: Core) -> None:
            page = turn_page(core, m.AskTree(1, 1000, words_of=""), int)
            threading.Thread(target=lambda: (finish_page(page, disk, core.model.vocab), page_turned.set())).start()

        loop.post(turn)
        page_turned.wait(5)
    (seconds,) = replies.values()
    return N_REPLY / seconds
