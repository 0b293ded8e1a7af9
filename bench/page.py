"""What looking at the page costs a reply that is being written. Wanted: at most 1 %.

A client reads the stream of events, as the page does, or a real headless Chromium shows the live view or the tree. Before
and after each such reply comes one without an observer, and the two together are what it is compared with. A machine's
speed drifts by ten per cent within a minute, hardly within three seconds: so medians of many such comparisons say
something, with the standard errors shown. The engine's work for a token drowns in that drift, the gateway's does not: its
CPU time is shown by itself, as a share of the time that a token takes. Chromium also draws: where cores are few it takes
them from the engine, which a page on another machine does not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.measure import EMBEDDED, table
from bench.server import Server, ask, everwarm

N_REPLY, ROUNDS, IDLE_S = 1000, 15, 10.0

Looking = Callable[[Server], AbstractContextManager[None]]


def run() -> None:
    flags = ("-c", "4096", "-np", "2", "-t", "1", "--disk-cache", "0")
    with everwarm(str(EMBEDDED), *flags) as server, _browser() as browser:
        cases: dict[str, Looking] = {"no observer": _no_observer, "the stream of events is read": _listener}
        if browser is not None:
            cases |= {f"Chromium shows the {view} view": _page(browser, view) for view in ("live", "tree")}
        found: dict[str, list[Cost]] = {name: [] for name in cases}
        before = _looked_at(server, _no_observer)
        for _ in range(ROUNDS):
            for name, looking in cases.items():
                here, after = _looked_at(server, looking), _looked_at(server, _no_observer)
                found[name].append(_compared(here, before, after))
                before = after
        idle = [(name, _idle(server, looking)) for name, looking in cases.items()]
    title = f"A reply of {N_REPLY} tokens of everwarm-tiny, 1 thread, {os.cpu_count()} cores, {ROUNDS} comparisons"
    rows = [(name, *(_median(list(values)) for values in zip(*each, strict=True))) for name, each in found.items()]
    table(title, ("more than unwatched", "time", "the gateway's CPU", "the engine's CPU"), rows)
    print()
    table("Without requests", ("", "server CPU, of one core"), idle)
    if browser is None:
        print("Chromium or playwright is not here: the page itself was not measured.")


class Cost(NamedTuple):
    """Of a token, in seconds: of the clock, and of the two processes' CPU time."""

    wall: float
    gateway: float
    engine: float


def _compared(here: Cost, before: Cost, after: Cost) -> Cost:
    """How much more than without an observer, as shares of a token's time."""
    usual = Cost(*((a + b) / 2 for a, b in zip(before, after, strict=True)))
    return Cost(*((now - then) / usual.wall for now, then in zip(here, usual, strict=True)))


def _median(values: list[float]) -> str:
    low, middle, high = np.percentile(values, (25, 50, 75))
    error = 1.253 * (high - low) / 1.349 / len(values) ** 0.5  # of a median, its spread taken from the quartiles
    return f"{100 * middle:+.2f} % ± {100 * error:.2f}"


def _looked_at(server: Server, looking: Looking) -> Cost:
    with looking(server):
        return _reply(server)


def _reply(server: Server) -> Cost:
    prompt = np.random.default_rng(1).integers(12, 2000, 64).tolist()
    before = _cpu_s(server)
    reply = ask(server, prompt, N_REPLY, cache_prompt=False)
    gateway, engine = ((now - then) / N_REPLY for now, then in zip(_cpu_s(server), before, strict=True))
    return Cost(1 / float(reply.timings["predicted_per_second"]), gateway, engine)


def _idle(server: Server, looking: Looking) -> str:
    """What looking alone takes: exact where replies are too noisy to tell."""
    with looking(server):
        before = sum(_cpu_s(server))
        time.sleep(IDLE_S)
        return f"{100 * (sum(_cpu_s(server)) - before) / IDLE_S:.2f} %"


def _cpu_s(server: Server) -> tuple[float, float]:
    """Of the gateway, and of the engine it started."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return _process_s(server.pid), sum(map(_process_s, children))


def _process_s(pid: object) -> float:
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@contextlib.contextmanager
def _no_observer(_server: Server) -> Iterator[None]:
    time.sleep(0.5)
    yield


@contextlib.contextmanager
def _listener(server: Server) -> Iterator[None]:
    name, port = server.host.split(":")
    with socket.create_connection((name, int(port))) as sock:
        sock.sendall(f"GET /cache/events HTTP/1.1\r\nHost: {server.host}\r\n\r\n".encode())

        def read() -> None:
            while sock.recv(1 << 16):
                pass

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.5)
        try:
            yield
        finally:
            sock.shutdown(socket.SHUT_RDWR)
            thread.join()


def _page(browser: Any, view: str) -> Looking:
    @contextlib.contextmanager
    def looking(server: Server) -> Iterator[None]:
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        page = context.new_page()
        page.goto(f"http://{server.host}/#{view}")
        page.wait_for_function("() => window.everwarm?.feed.overview")
        time.sleep(1.0)  # the page has drawn what there is
        try:
            yield
        finally:
            context.close()

    return looking


@contextlib.contextmanager
def _browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        yield None
        return
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.getuid() == 0 else [])
        try:
            yield browser
        finally:
            browser.close()
