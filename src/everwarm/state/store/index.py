"""The disk tier's index: what its files say and how they were used, in SQLite (WAL). Can be thrown away at any time.

``ObjectTable`` is the same in memory: objects by name, which needs which, and sums that are kept up to date. The cost
of a change grows with the object's needs, that of a lookup with its result: only ``values`` walks over all objects.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from everwarm.state.store.files import Files
from everwarm.state.store.object import Kind

log = logging.getLogger("everwarm.disk")

INDEX = "index.sqlite"
MAX_INDEX = 1 << 30

T = TypeVar("T")

_TABLE = """
CREATE TABLE IF NOT EXISTS objects (
  name TEXT PRIMARY KEY, kind TEXT, key TEXT, n_items INTEGER, size INTEGER, needs TEXT, used_at REAL, hits INTEGER
)"""


@dataclass(frozen=True, slots=True)
class IndexedObject:
    """What the index knows of an object."""

    name: str
    kind: Kind
    key: str
    n_items: int
    size: int
    needs: tuple[str, ...]
    used_at: float
    hits: int = 0
    space: str = ""
    reaches: tuple[int, ...] = ()  # of its needs, as its header says


class Index:
    """Raises ``sqlite3.Error`` when it cannot; on one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._database = _open(path)

    def uses(self) -> dict[str, tuple[float, int]]:
        """When each object was used and how often: all that is not in the files."""
        return _uses(self._database)

    def store(self, kept: IndexedObject) -> None:
        row = (kept.name, kept.kind, kept.key, kept.n_items, kept.size, ",".join(kept.needs), kept.used_at, kept.hits)
        self._database.execute("INSERT OR REPLACE INTO objects VALUES (?,?,?,?,?,?,?,?)", row)

    def delete(self, name: str) -> None:
        self._database.execute("DELETE FROM objects WHERE name = ?", (name,))

    def written(self) -> tuple[float, int]:
        """How many bytes were written, and since when they are counted."""
        row = self._database.execute("SELECT since, n_bytes FROM written").fetchone()
        return (float(row[0]), int(row[1])) if row is not None else (0.0, 0)

    def note_written(self, since: float, n_bytes: int) -> None:
        self._database.execute("INSERT OR REPLACE INTO written VALUES (0, ?, ?)", (since, n_bytes))

    def close(self) -> None:
        self._database.close()


def _uses(database: sqlite3.Connection) -> dict[str, tuple[float, int]]:
    rows = database.execute("SELECT name, used_at, hits FROM objects").fetchall()
    return {name: (at, hits) for name, at, hits in rows if isinstance(at, float) and isinstance(hits, int)}


def _states(database: sqlite3.Connection) -> dict[str, int]:
    rows = database.execute("SELECT key, n_items FROM objects WHERE kind = 'state'").fetchall()
    return {key: n for key, n in rows if isinstance(key, str) and isinstance(n, int)}


def peek_uses(path: Path) -> dict[str, tuple[float, int]]:
    """The result of ``uses``, from a copy of the index: it takes no lock from a running engine and leaves no file
    behind."""
    return _peek(path, _uses) or {}


def peek_states(path: Path) -> dict[str, int]:
    """The keys of states with their lengths in items, from a copy."""
    return _peek(path, _states) or {}


def _peek(path: Path, question: Callable[[sqlite3.Connection], T]) -> T | None:
    with tempfile.TemporaryDirectory(prefix="everwarm-") as copy:
        try:
            for suffix in ("-wal", ""):
                _copy(path.with_name(path.name + suffix), Path(copy, path.name + suffix))
            with contextlib.closing(sqlite3.connect(Path(copy, path.name))) as index:
                return question(index)
        except (OSError, sqlite3.Error):
            return None


def _copy(path: Path, to: Path) -> None:
    try:
        fd = Files().open(path)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "rb") as file:
        to.write_bytes(file.read(MAX_INDEX))


def _open(path: Path) -> sqlite3.Connection:
    """Opens the index; recreates it if it cannot be used, and keeps it in memory if that fails: only the uses are not
    in the files."""
    for place in (path, path, ":memory:"):
        try:
            return _connect(place)
        except (sqlite3.Error, OSError) as error:
            log.warning("the index cannot be used and is rebuilt: %s", error)
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(OSError):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
    raise AssertionError("unreachable")


def _connect(place: Path | str) -> sqlite3.Connection:
    if isinstance(place, Path):
        fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
        os.close(fd)
    index = sqlite3.connect(place, isolation_level=None, check_same_thread=False)
    try:
        index.execute("PRAGMA journal_mode=WAL")
        index.execute("PRAGMA synchronous=NORMAL")
        index.execute(_TABLE)
        index.execute("CREATE TABLE IF NOT EXISTS written (id INTEGER PRIMARY KEY, since REAL, n_bytes INTEGER)")
        made = index.execute("SELECT sql FROM sqlite_master WHERE name = 'objects'").fetchone()[0]
        if made.split() != _TABLE.replace("IF NOT EXISTS ", "").split():
            raise sqlite3.DatabaseError("its table is another")
        if index.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("it is damaged")
    except sqlite3.Error:
        index.close()
        raise
    return index


class ObjectTable(Mapping[str, IndexedObject]):
    def __init__(self) -> None:
        self._kept: dict[str, IndexedObject] = {}
        self._states: dict[str, str] = {}  # names of states by key
        self._needed_by: dict[str, set[str]] = {}  # also of names that are not here
        self._lengths: Counter[int] = Counter()  # of states, in items
        self._stranded: dict[str, None] = {}  # in the order in which they became so
        self.space_bytes: Counter[str] = Counter()

    def __getitem__(self, name: str) -> IndexedObject:
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    # questions

    def state(self, key: str) -> IndexedObject | None:
        """The whole state at the end of this lineage."""
        name = self._states.get(key)
        return self._kept[name] if name is not None and self.is_whole(name) else None

    def lengths(self, most: int) -> set[int]:
        """The lengths of states in items, up to ``most``."""
        return {n_items for n_items in self._lengths if n_items <= most}

    @property
    def n_lengths(self) -> int:
        return len(self._lengths)

    def is_whole(self, name: str) -> bool:
        kept = self._kept.get(name)
        return kept is not None and all(need in self._kept for need in kept.needs)

    def is_needed(self, name: str) -> bool:
        return bool(self._needed_by.get(name))

    def n_bytes(self, names: Iterable[str]) -> int:
        """Bytes of those objects that are here, each counted once."""
        return sum(self._kept[name].size for name in set(names) if name in self._kept)

    def stranded(self, besides: Collection[str], space: str | None) -> str | None:
        """KV that no state needs, or a state that is not whole; of one space, or of any."""
        for name in self._stranded:
            if name not in besides and space in (None, self._kept[name].space):
                return name
        return None

    # changes

    def add(self, kept: IndexedObject) -> None:
        """Adds an object, in place of one of the same name."""
        self.remove(kept.name)
        self._kept[kept.name] = kept
        self.space_bytes[kept.space] += kept.size
        if kept.kind == "state":
            self._states[kept.key] = kept.name
            self._lengths[kept.n_items] += 1
        for need in kept.needs:
            self._needed_by.setdefault(need, set()).add(kept.name)
        self._judge({kept.name, *kept.needs, *self._needed_by.get(kept.name, ())})

    def remove(self, name: str) -> IndexedObject | None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return None
        self._stranded.pop(name, None)
        self.space_bytes[kept.space] -= kept.size
        if not self.space_bytes[kept.space]:
            del self.space_bytes[kept.space]
        if kept.kind == "state":
            self._remove_state(kept)
        for need in kept.needs:
            users = self._needed_by.get(need, set())
            users.discard(name)
            if not users:
                self._needed_by.pop(need, None)
        self._judge({*kept.needs, *self._needed_by.get(name, ())})
        return kept

    def update(self, kept: IndexedObject) -> None:
        """The same object, used once more."""
        self._kept[kept.name] = kept

    def _remove_state(self, kept: IndexedObject) -> None:
        if self._states.get(kept.key) == kept.name:
            del self._states[kept.key]
        self._lengths[kept.n_items] -= 1
        if not self._lengths[kept.n_items]:
            del self._lengths[kept.n_items]

    def _judge(self, names: set[str]) -> None:
        for name in sorted(names):
            kept = self._kept.get(name)
            if kept is None:
                continue
            is_stranded = not self.is_needed(name) if kept.kind == "kv" else not self.is_whole(name)
            if is_stranded:
                self._stranded.setdefault(name)
            else:
                self._stranded.pop(name, None)

    def check(self) -> None:
        """Checks that the sums match the objects."""
        sizes: Counter[str] = Counter()
        for kept in self._kept.values():
            sizes[kept.space] += kept.size
        assert +self.space_bytes == +sizes
        states = [kept for kept in self._kept.values() if kept.kind == "state"]
        assert self._lengths == Counter(kept.n_items for kept in states)
        needed = {need for kept in self._kept.values() for need in kept.needs}
        assert self._needed_by.keys() == needed
        lost = {
            k.name
            for k in self._kept.values()
            if (k.name not in needed if k.kind == "kv" else not self.is_whole(k.name))
        }
        assert self._stranded.keys() == lost
