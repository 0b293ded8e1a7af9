"""What looking at the page costs a reply that is being written. Wanted: at most 1 %.

Cases take turns: nobody looks; somebody reads the stream of events, as the page does; a real headless Chromium shows the
live view or the tree. Chromium also draws: where cores are few it takes them from the engine, and where others are at work
tokens/s say little. So the CPU time of the server alone (gateway and engine) is shown beside them.
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
from typing import Any

import numpy as np

from bench.measure import EMBEDDED, table
from bench.server import Server, ask, everwarm

N_REPLY, ROUNDS, IDLE_S = 2000, 9, 10.0

Looking = Callable[[Server], AbstractContextManager[None]]


def run() -> None:
    flags = ("-c", "4096", "-np", "2", "-t", "1", "--disk-cache", "0")
    with everwarm(str(EMBEDDED), *flags) as server, _browser() as browser:
        cases: dict[str, Looking] = {"nobody looks": _nobody, "the stream of events is read": _listener}
        if browser is not None:
            cases |= {f"Chromium shows the {view} view": _page(browser, view) for view in ("live", "tree")}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for nth in range(ROUNDS + 1):  # the first one warms up
            for name, looking in list(cases.items())[:: 1 if nth % 2 else -1]:
                with looking(server):
                    found[name].append(_reply(server, nth))
        idle = [(name, _idle(server, looking)) for name, looking in cases.items()]
    quiet = found["nobody looks"][1:]
    rows = [(name, *_shown(each[1:], quiet)) for name, each in found.items()]
    title = f"A reply of {N_REPLY} tokens of everwarm-tiny, 1 thread, {os.cpu_count()} cores, best of {ROUNDS}"
    table(title, ("", "tokens/s", "", "server CPU per token", ""), rows)
    print()
    table("While nothing is asked", ("", "server CPU, of one core"), idle)
    if browser is None:
        print("Chromium or playwright is not here: the page itself was not measured.")


def _shown(found: list[tuple[float, float]], quiet: list[tuple[float, float]]) -> tuple[str, str, str, str]:
    """The best of all rounds: what others do on the machine only ever makes it worse."""
    speed, cpu_s = max(each[0] for each in found), min(each[1] for each in found)
    faster, dearer = speed / max(each[0] for each in quiet) - 1, cpu_s / min(each[1] for each in quiet) - 1
    return f"{speed:.0f}", f"{100 * faster:+.1f} %", f"{1e6 * cpu_s:.0f} µs", f"{100 * dearer:+.1f} %"


def _reply(server: Server, seed: int) -> tuple[float, float]:
    """Tokens per second of decoding, and what a token took of the server's CPU time."""
    prompt = np.random.default_rng(seed).integers(12, 2000, 64).tolist()
    before = _cpu_s(server)
    reply = ask(server, prompt, N_REPLY, cache_prompt=False)
    return float(reply.timings["predicted_per_second"]), (_cpu_s(server) - before) / N_REPLY


def _idle(server: Server, looking: Looking) -> str:
    """What looking alone takes: exact where replies are too noisy to tell."""
    with looking(server):
        before = _cpu_s(server)
        time.sleep(IDLE_S)
        return f"{100 * (_cpu_s(server) - before) / IDLE_S:.2f} %"


def _cpu_s(server: Server) -> float:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return sum(_process_s(pid) for pid in (server.pid, *children))


def _process_s(pid: object) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _nobody(_server: Server) -> Iterator[None]:
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
