"""Objects made from a number, the same in every process, and a process that puts one after the other until killed.

``python crash_writer.py DIRECTORY`` reads lines "SEED FIRST BUDGET". For each it forks a writer, which says "pid N",
then "put I" after object I was acknowledged and "drop I" before it drops one. "dead" follows when it was killed.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key
from everwarm.state.store.disk import Disk
from everwarm.state.store.object import ObjectHeader, ObjectReader, encode, name_of
from everwarm.types import Blob

FINGERPRINT = "a model and its settings"
ROOT = root_key(FINGERPRINT, "")
STEP = 10  # items per KV object


@dataclass(frozen=True, slots=True)
class Thing:
    """An object as it is given to a Disk."""

    header: ObjectHeader
    parts: dict[str, Blob]

    @property
    def name(self) -> str:
        return name_of(self.header)

    @property
    def size(self) -> int:
        return len(self.data())

    def data(self) -> bytes:
        return b"".join(encode(self.header, self.parts))

    def put(self, disk: Disk) -> bool:
        return disk.put(self.header, self.parts)

    def is_in(self, disk: Disk) -> bool:
        """Read from it, every section verified, and the same as it was given."""
        with disk.reading(self.name) as reader:
            return contents(reader) == {name: bytes(part) for name, part in self.parts.items()}


def contents(reader: ObjectReader) -> dict[str, bytes]:
    return {section.name: reader.read(section.name).tobytes() for section in reader.header.sections}


def blob(n_bytes: int, seed: int = 0) -> Blob:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, np.uint8)


def codes_of(i: int, n_items: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 1 << 30, n_items).astype("<i4")


def kv(i: int, at: int = 0, n_bytes: int = 5000) -> Thing:
    """The KV of ``STEP`` items of conversation i, from item ``at`` on."""
    named = keys(ROOT, Prompt(codes_of(i, at + STEP)), (at, at + STEP))
    return Thing(_header("kv", named[at], named[at + STEP], at, at + STEP), {"kv": blob(n_bytes, i * 31 + at)})


def state(i: int, n_items: int = STEP, n_bytes: int = 9000, needs: Iterable[str] = ()) -> Thing:
    """The state of conversation i after so many items."""
    key = keys(ROOT, Prompt(codes_of(i, n_items)), (n_items,))[n_items]
    header = _header("state", key, key, n_items, n_items, needs=tuple(needs), cut="end")
    return Thing(header, {"items": codes_of(i, n_items).view(np.uint8), "state": blob(n_bytes, i * 37 + n_items)})


def conversation(i: int, n_kv: int = 1, n_bytes: int = 5000) -> list[Thing]:
    """All KV of a conversation and then the state at its end."""
    lineage = [kv(i, at, n_bytes) for at in range(0, n_kv * STEP, STEP)]
    return [*lineage, state(i, n_kv * STEP, needs=[thing.name for thing in lineage])]


def numbered(i: int) -> Thing:
    """The i-th of all things: KV and the state that needs it by turns, of many sizes."""
    n_bytes = (0, 1, 4095, 4096, 4097, 30_000, 200_000)[i // 2 % 7]
    need = kv(i // 2, n_bytes=n_bytes)
    return state(i // 2, n_bytes=n_bytes, needs=[need.name]) if i % 2 else need


def in_memory() -> tempfile.TemporaryDirectory[str]:
    """A directory in memory where there is one: most tests need the calls that make a file durable, not their time."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def _header(kind: str, start: str, key: str, n_start: int, n_items: int, **more: object) -> ObjectHeader:
    plain = {"cut": "", "clean": True, "chunks": ((n_start, n_items),), "fingerprint": FINGERPRINT}
    return ObjectHeader(kind=kind, start=start, key=key, n_start=n_start, n_items=n_items, **plain | more)


def _write_until_killed(directory: Path, seed: int, first: int, budget: int) -> None:
    rng = random.Random(seed)
    disk = Disk(directory, budget)
    i = first
    while True:
        if rng.random() < 0.1 and i > first:
            gone = rng.randrange(first, i)
            _say(f"drop {gone}")
            disk.drop(numbered(gone).name)
        if rng.random() < 0.2:
            disk.touch(sorted(disk.names())[:3])
        if numbered(i).put(disk):
            _say(f"put {i}")
        i += 1


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _main(directory: Path) -> None:
    for line in iter(sys.stdin.readline, ""):
        seed, first, budget = map(int, line.split())
        pid = os.fork()
        if pid == 0:
            _say(f"pid {os.getpid()}")
            _write_until_killed(directory, seed, first, budget)
        os.waitpid(pid, 0)
        _say("dead")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
