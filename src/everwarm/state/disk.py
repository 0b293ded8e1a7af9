"""The disk tier: objects as files, made durable before they are acknowledged, and an index of them.

    STATE_DIR/<model>/lock · index.sqlite · state-….ew · kv-….ew

The files are the truth; the index (SQLite, WAL) only remembers what they say and how they were used, and is rebuilt from
them whenever it is missing, damaged or behind. One process at a time holds a model's directory. Every failure is a miss:
the tier says that it is degraded and goes on. Knows no tree and no libllama.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from everwarm.errors import EverwarmError
from everwarm.prompt.prompt import Codes
from everwarm.state import policy
from everwarm.state.files import TEMPORARY, Files
from everwarm.state.lineage import keys
from everwarm.state.object import SUFFIX, Blob, Damaged, Header, Kind, Reader, encode, name_of

log = logging.getLogger("everwarm.disk")

_TABLE = """
CREATE TABLE IF NOT EXISTS objects (
  name TEXT PRIMARY KEY, kind TEXT, key TEXT, n_items INTEGER, size INTEGER, needs TEXT, used_at REAL, hits INTEGER
)"""
_DAY_S = 86_400.0


class DirectoryTaken(EverwarmError):
    """Another process has this model's directory."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What the index knows of an object."""

    name: str
    kind: Kind
    key: str
    n_items: int
    size: int
    needs: tuple[str, ...]
    used_at: float
    hits: int = 0


@dataclass(slots=True)
class DiskCounts:
    n_written: int = 0
    n_bytes_written: int = 0
    n_read: int = 0
    n_damaged: int = 0
    n_failures: int = 0
    n_evicted: int = 0


class Disk:
    def __init__(self, directory: Path, budget_bytes: int, write_budget: int = 0, files: Files | None = None) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self.counts = DiskCounts()
        self.degraded: str | None = None  # why, while it is
        self._write_budget = write_budget  # bytes per day; 0: any number
        self._written_today = (time.time(), 0)
        self._files = files or Files()
        self._lock = threading.RLock()
        self._kept: dict[str, Kept] = {}
        self._states: dict[str, str] = {}  # names of states by key
        self.n_bytes = 0
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._held = _hold(directory)
        try:
            self._index = _open_index(directory / "index.sqlite")
            self.scan()
        except BaseException:
            os.close(self._held)
            raise

    def close(self) -> None:
        with self._lock:
            self._index.close()
            os.close(self._held)

    # questions

    def names(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._kept)

    def objects(self) -> list[Kept]:
        with self._lock:
            return list(self._kept.values())

    def find(self, root: str, codes: Codes, most: int) -> Kept | None:
        """The deepest whole state that these items begin with, of at most so many of them."""
        with self._lock:
            lengths = {kept.n_items for kept in self._kept.values() if kept.kind == "state" and kept.n_items <= most}
            named = keys(root, codes, lengths)
            for n_items in sorted(named, reverse=True):
                name = self._states.get(named[n_items])
                kept = self._kept.get(name or "")
                if kept is not None and all(need in self._kept for need in kept.needs):
                    return kept
        return None

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        """An object, whose sections are verified as they are read. ``Damaged`` ones are gone afterwards."""
        try:
            fd = self._files.open(self.directory / name)
            try:
                reader = Reader(fd)
                if name_of(reader.header) != name:
                    raise Damaged("it is another object than its name says")
                yield reader
            finally:
                os.close(fd)
        except Damaged as error:
            log.warning("%s is damaged and forgotten: %s", name, error)
            self.counts.n_damaged += 1
            self.drop(name)
            raise
        except OSError as error:
            self._fail("read", error)
            self._forget(name)
            raise Damaged(f"it cannot be read: {error.strerror}") from None
        self.counts.n_read += 1

    # changes

    def put(self, header: Header, parts: Mapping[str, Blob]) -> bool:
        """Durable when this returns True. False: not kept, and nothing is lost but time."""
        name = name_of(header)
        with self._lock:
            if name in self._kept:
                return True
        size = sum(len(part) for part in parts.values())
        if size > self.budget_bytes or not self._may_write(size):
            return False
        try:
            size = self._files.write(self.directory / name, encode(header, parts))
        except OSError as error:
            self._fail("written", error)
            return False
        self.degraded = None
        kept = Kept(name, header.kind, header.key, header.n_items, size, header.needs, time.time())
        with self._lock:
            self._remember(kept)
            self._store(kept)
            self.counts.n_written += 1
            self.counts.n_bytes_written += size
            self._written_today = (self._written_today[0], self._written_today[1] + size)
            self._evict(spare=frozenset((name, *header.needs)))
        return True

    def touch(self, names: Sequence[str]) -> None:
        """Somebody used these."""
        with self._lock:
            for name in names:
                kept = self._kept.get(name)
                if kept is not None:
                    self._kept[name] = replace(kept, used_at=time.time(), hits=kept.hits + 1)
                    self._store(self._kept[name])

    def drop(self, name: str) -> None:
        with self._lock:
            self._forget(name)
            try:
                self._files.unlink(self.directory / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._fail("removed", error)

    def scan(self) -> None:
        """Make the index say what the files say."""
        with self._lock:
            self._kept, self._states, self.n_bytes = {}, {}, 0
            known = {row.name: row for row in self._rows()}
            for path in sorted(self.directory.iterdir()):
                if path.name.startswith(TEMPORARY):
                    self._files.unlink(path)
                elif path.name.endswith(SUFFIX):
                    self._admit(path, known.get(path.name))
            for name in known.keys() - self._kept.keys():
                self._delete_row(name)
            self._evict(spare=frozenset())

    def _admit(self, path: Path, known: Kept | None) -> None:
        try:
            size = path.lstat().st_size
            if known is not None and known.size == size:
                return self._remember(known)
            with self.reading(path.name) as reader:
                head = reader.header
            kept = Kept(path.name, head.kind, head.key, head.n_items, size, head.needs, time.time())
        except (Damaged, OSError):
            return None
        self._remember(kept)
        self._store(kept)

    # room

    def _may_write(self, size: int) -> bool:
        if not self._write_budget:
            return True
        since, written = self._written_today
        if time.time() - since > _DAY_S:
            self._written_today = since, written = time.time(), 0
        return written + size <= self._write_budget

    def _evict(self, spare: frozenset[str]) -> None:
        """Within the budget again: KV that no state needs goes first, then the states that save least."""
        while self.n_bytes > self.budget_bytes:
            victims = self._stranded(spare) or self._least(spare)
            if not victims:
                return
            for name in victims:
                self.counts.n_evicted += 1
                self.drop(name)

    def _stranded(self, spare: frozenset[str]) -> list[str]:
        needed = {need for kept in self._kept.values() for need in kept.needs}
        whole = {kept.name for kept in self._kept.values() if all(need in self._kept for need in kept.needs)}
        return [
            kept.name
            for kept in self._kept.values()
            if kept.name not in spare and (kept.name not in needed if kept.kind == "kv" else kept.name not in whole)
        ]

    def _least(self, spare: frozenset[str]) -> list[str]:
        states = [kept for kept in self._kept.values() if kept.kind == "state" and kept.name not in spare]
        now = time.time()
        entries = [
            policy.Entry(i, kept.size, float(kept.n_items), now - kept.used_at, kept.hits)
            for i, kept in enumerate(states)
        ]
        return [states[i].name for i in policy.victims(entries, 1)]

    # the index

    def _remember(self, kept: Kept) -> None:
        self._kept[kept.name] = kept
        self.n_bytes += kept.size
        if kept.kind == "state":
            self._states[kept.key] = kept.name

    def _forget(self, name: str) -> None:
        with self._lock:
            kept = self._kept.pop(name, None)
            if kept is not None:
                self.n_bytes -= kept.size
                self._states.pop(kept.key, None)
                self._delete_row(name)

    def _rows(self) -> Iterator[Kept]:
        try:
            for name, kind, key, n_items, size, needs, used_at, hits in self._index.execute("SELECT * FROM objects"):
                yield Kept(name, kind, key, n_items, size, tuple(filter(None, needs.split(","))), used_at, hits)
        except sqlite3.Error as error:
            log.warning("the index cannot be read and is made anew: %s", error)

    def _store(self, kept: Kept) -> None:
        row = (kept.name, kept.kind, kept.key, kept.n_items, kept.size, ",".join(kept.needs), kept.used_at, kept.hits)
        self._execute("INSERT OR REPLACE INTO objects VALUES (?,?,?,?,?,?,?,?)", row)

    def _delete_row(self, name: str) -> None:
        self._execute("DELETE FROM objects WHERE name = ?", (name,))

    def _execute(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            self._index.execute(statement, values)
        except sqlite3.Error as error:  # the files are the truth: the next scan puts it right
            self._fail("indexed", error)

    def _fail(self, what: str, error: Exception) -> None:
        self.counts.n_failures += 1
        if self.degraded is None:
            log.warning("the disk tier is degraded: an object could not be %s (%s)", what, error)
        self.degraded = str(error)


def _hold(directory: Path) -> int:
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise DirectoryTaken(
            f"another Everwarm keeps this model's states in {directory}: give one of them another --state-dir"
        ) from None
    return fd


def _open_index(path: Path) -> sqlite3.Connection:
    """Made anew if it cannot be used: everything in it can be read from the files."""
    for attempt in range(2):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        index = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            index.execute("PRAGMA journal_mode=WAL")
            index.execute("PRAGMA synchronous=NORMAL")
            index.execute(_TABLE)
            index.execute("SELECT name, kind, key, n_items, size, needs, used_at, hits FROM objects LIMIT 1").fetchall()
        except sqlite3.Error:
            index.close()
            if attempt:
                raise
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
        else:
            return index
    raise AssertionError("unreachable")
