"""What many objects on disk cost: on the loop's thread, and where the disk's own thread makes room."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.measure import table
from everwarm.prompt.prompt import Prompt
from everwarm.state.store.disk import Disk
from everwarm.state.store.index import IndexedObject

SIZES = (1_000, 10_000, 100_000)
N_LENGTHS = 8000


def run() -> None:
    table(
        "Objects on disk, ms",
        (
            "objects",
            "a turn's questions (loop)",
            "find (its own thread above 256 lengths)",
            "first eviction",
            "the next 100, each",
        ),
        [_row(n) for n in SIZES],
    )


def _row(n: int) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder), 64 << 30)
        names = _fill(disk, n // 2)
        prompt = Prompt.of_tokens(list(range(N_LENGTHS)))
        lookup = _ms(lambda: [disk.has(name) for name in names[:20]] and disk.size_of(names[:20]) and disk.n_lengths())
        found = _ms(lambda: disk.find("00" * 32, prompt, N_LENGTHS - 1))
        first = _ms(lambda: disk._evict(frozenset(), disk.n_bytes - 1))
        more = _ms(lambda: [disk._evict(frozenset(), disk.n_bytes - 1) for _ in range(100)]) / 100
        disk.close()
    return f"{n:,}", *(f"{ms:.2f}" for ms in (lookup, found, first, more))


def _fill(disk: Disk, n: int) -> list[str]:
    rng, names = random.Random(0), []
    for i in range(n):
        key = f"{rng.getrandbits(256):064x}"
        kv = IndexedObject(f"kv-{key[:16]}.ew", "kv", key, 500 + i % N_LENGTHS, 200_000, (), time.time())
        state = IndexedObject(
            f"state-{key[:16]}.ew", "state", key, 500 + i % N_LENGTHS, 100_000, (kv.name,), time.time(), 0, f"s{i % 50}"
        )
        for kept in (kv, state):
            disk._remember(kept)
        names.append(state.name)
    return names


def _ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)
