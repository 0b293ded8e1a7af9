"""What many objects on disk cost: opening them, a turn, an eviction, and memory. Real files, written without syncing.

Conversations of ten turns: each turn writes the KV of its own tokens and a state that needs all KV before it.
"""

from __future__ import annotations

import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.measure import table
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key, short_key
from everwarm.state.store.disk import Disk
from everwarm.state.store.files import Files
from everwarm.state.store.object import ObjectHeader, encode, name_of

SIZES = (1_000, 10_000, 100_000)
N_TURNS, N_SPACES, N_EVICTED, N_REPEATS = 10, 50, 100, 3
MOST_TRACED = 10_000  # objects: counting memory takes long
FINGERPRINT = "a model"
PLENTY = 1 << 44
_NOTHING = np.zeros(64, np.uint8)


class Unsynced(Files):
    """What is measured is our own work, not the disk's."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


@dataclass(frozen=True, slots=True)
class DiskCosts:
    """In seconds of CPU, the least of several where it can be repeated."""

    n_objects: int
    open_s: float
    open_clock_s: float  # by the clock; few files with their headers
    pass_s: float  # opening, and reading every header
    turn_s: float  # what the loop's thread asks in a turn
    find_s: float  # where a prompt is looked up
    put_s: float  # KV and a state, without syncing
    evict_s: float
    bytes_each: float | None  # of the process's memory, per object; None: not counted


def run() -> None:
    table(
        "Objects on disk",
        (
            "objects",
            "open: CPU",
            "clock",
            "every header read",
            "a turn's questions",
            "find",
            "put a turn",
            "evict one",
            "memory each",
        ),
        [_row(measure(n)) for n in SIZES],
    )


def _row(costs: DiskCosts) -> tuple[str, ...]:
    times = (costs.open_s, costs.open_clock_s, costs.pass_s, costs.turn_s, costs.find_s, costs.put_s, costs.evict_s)
    memory = "–" if costs.bytes_each is None else f"{costs.bytes_each:.0f} bytes"
    return f"{costs.n_objects:,}", *(f"{1e3 * seconds:.2f} ms" for seconds in times), memory


def measure(n: int) -> DiskCosts:
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name), Unsynced()
        last = _fill(folder, n)
        open_s, clock_s, pass_s = zip(*(_open_s(folder) for _ in range(N_REPEATS)), strict=True)
        bytes_each = _memory(folder) / n if n <= MOST_TRACED else None
        disk = Disk(folder, PLENTY, files=files)
        disk.settle()
        kept = [name_of(header) for _, header in last.headers]
        turn_s = _least(lambda: [disk.has(each) for each in kept] and disk.size_of(kept) and disk.n_lengths())
        find_s = _least(lambda: _require(disk.find(last.root, last.prompt, len(last.prompt) - 1)))
        new = iter([header for i in range(N_REPEATS) for header in _conversation(random.Random(f"new {i}"), 0).headers])
        put_s = _least(lambda: [_put(disk, next(new)) for _ in range(2)])
        disk._evict(frozenset(), disk.n_bytes - 1)
        evict_s = _seconds(lambda: _evict_some(disk, N_EVICTED)) / N_EVICTED
        disk.close()
    return DiskCosts(n, min(open_s), min(clock_s), min(pass_s), turn_s, find_s, put_s, evict_s, bytes_each)


@dataclass(frozen=True, slots=True)
class Conversation:
    root: str
    prompt: Prompt
    headers: list[tuple[str, ObjectHeader]]  # with the names of their sections


def _conversation(rng: random.Random, number: int) -> Conversation:
    root = root_key(FINGERPRINT, f"namespace {number % N_SPACES}")
    ends = [0]
    for _ in range(N_TURNS):
        ends.append(ends[-1] + rng.randrange(50, 1500))
    prompt = Prompt(np.frombuffer(rng.randbytes(4 * ends[-1] + 4), "<i4") & 0xFFFF)
    named, space = keys(root, prompt, ends), short_key(root)
    headers, needs = [], list[str]()
    for start, end in pairwise(ends):
        plain = {
            "fingerprint": FINGERPRINT,
            "n_items": end,
            "clean": True,
            "space": space,
            "chunks": ((512, 3), (7, 1)),
        }
        kv = ObjectHeader(kind="kv", key=named[end], start=named[start], n_start=start, **plain)
        needs.append(name_of(kv))
        state = ObjectHeader(
            kind="state",
            key=named[end],
            start=named[end],
            n_start=end,
            cut="stable",
            needs=tuple(needs),
            reaches=tuple(ends[1 : len(needs) + 1]),
            words="how it begins … and how it ends",
            **plain,
        )
        headers += [("kv", kv), ("state", state)]
    return Conversation(root, prompt, headers)


def _put(disk: Disk, header: tuple[str, ObjectHeader]) -> None:
    section, head = header
    _require(disk.put(head, {"items": _NOTHING, section: _NOTHING}))


def _fill(folder: Path, n: int) -> Conversation:
    """Writes the files, and lets the tier make its index of them. Returns the last conversation."""
    last = None
    for number in range(n // (2 * N_TURNS)):
        last = _conversation(random.Random(number), number)
        for section, header in last.headers:
            parts = {"items": _NOTHING, section: _NOTHING}
            (folder / name_of(header)).write_bytes(b"".join(encode(header, parts)))
    _open_s(folder)
    assert last is not None
    return last


def _open_s(folder: Path) -> tuple[float, float, float]:
    """Seconds of this thread's CPU and by the clock until it is open; of all CPU until every header is read."""
    began, thread_began, process_began = time.perf_counter(), time.thread_time(), time.process_time()
    disk = Disk(folder, PLENTY)
    thread_s, clock_s = time.thread_time() - thread_began, time.perf_counter() - began
    disk.settle()
    process_s = time.process_time() - process_began
    disk.close()
    return thread_s, clock_s, process_s


def _memory(folder: Path) -> float:
    tracemalloc.start()
    try:
        disk = Disk(folder, PLENTY)
        disk.settle()
        return tracemalloc.get_traced_memory()[0]
    finally:
        disk.close()
        tracemalloc.stop()


def _evict_some(disk: Disk, n: int) -> None:
    before = disk.counts.n_evicted
    while disk.counts.n_evicted < before + n:
        _require(disk._evict(frozenset(), disk.n_bytes - 1))


def _require(found: object) -> None:
    assert found, "nothing was measured"


def _least(work: Callable[[], object]) -> float:
    return min(_seconds(work) for _ in range(N_REPEATS))


def _seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
