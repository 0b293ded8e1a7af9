"""What the gateway's SQLite stores share: a file that is opened safely, transactions, and whose rows are evicted first.

After any crash a row is complete or absent. When a store is full, the namespace that holds most loses its least recently
used rows. Knows files and sizes; knows no rows.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everwarm.state.store.files import Files, make_folder

log = logging.getLogger("everwarm.gateway")

_BUSY_S = 5.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    max_rows: int
    max_bytes: int


class SqliteStore:
    """Opened at its first use; thread-safe. ``path``: None keeps everything in memory. ``what``: for messages."""

    def __init__(self, path: Path | None, tables: Sequence[str], version: int, what: str) -> None:
        self._path = path
        self._tables = tables
        self._version = version
        self._what = what
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            database = self._opened
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")

    def truncate_log(self) -> None:
        """Leaves no copy of deleted rows in the write-ahead log."""
        with self._lock:
            if self._opened is not None:
                self._opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _open(self) -> sqlite3.Connection:
        """A file that is damaged or of another version is moved aside, and a new one is created. If no file can be used,
        rows are kept in memory until the server stops."""
        if self._path is not None:
            for _ in range(2):
                try:
                    return self._prepared(_connect(self._path))
                except (sqlite3.OperationalError, OSError) as error:  # locked, full, read-only: the file may be good
                    log.warning("%s are kept in memory: %s", self._what, error)
                    break
                except sqlite3.DatabaseError as error:
                    log.warning("stored %s cannot be used: %s", self._what, error)
                    if not _move_aside(self._path):
                        break
        return self._prepared(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))

    def _prepared(self, database: sqlite3.Connection) -> sqlite3.Connection:
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.execute("PRAGMA secure_delete=ON")
            if database.execute("PRAGMA user_version").fetchone()[0] not in (0, self._version):
                raise sqlite3.DatabaseError("it is of another version")
            if database.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("it is damaged")
            for table in self._tables:
                database.execute(table)
            database.execute(f"PRAGMA user_version={self._version}")
        except sqlite3.Error:
            database.close()
            raise
        return database


def victims(database: sqlite3.Connection, table: str, order: str, newest: object, limits: StoreLimits) -> list[str]:
    """The ids to evict until the limits hold: always of the largest namespace, in this order; never the newest."""
    rows = f"SELECT id, n_bytes FROM {table} WHERE namespace = ? AND id != ? ORDER BY {order}"
    sums = f"SELECT namespace, COUNT(*), SUM(n_bytes) FROM {table} GROUP BY namespace"
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for namespace, n, n_bytes in database.execute(sums).fetchall():
        counts[namespace] = n
        sizes[namespace] = n_bytes
    left = {namespace: database.execute(rows, (namespace, newest)) for namespace in counts}
    n_over = sum(counts.values()) - limits.max_rows
    bytes_over = sum(sizes.values()) - limits.max_bytes
    gone = []
    while left and (n_over > 0 or bytes_over > 0):
        by = sizes if bytes_over > 0 else counts
        largest = max(left, key=by.__getitem__)
        row = next(left[largest], None)
        if row is None:
            del left[largest]
            continue
        gone.append(row[0])
        counts[largest] -= 1
        sizes[largest] -= row[1]
        n_over -= 1
        bytes_over -= row[1]
    return gone


def _connect(path: Path) -> sqlite3.Connection:
    make_folder(path.parent, Files())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    os.fchmod(fd, 0o600)
    os.close(fd)
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def _move_aside(path: Path) -> bool:
    """The file is not deleted: a later version may read it, or an operator may repair it."""
    aside = next(p for i in itertools.count(1) if not (p := path.with_name(f"{path.name}.aside-{i}")).exists())
    try:
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    except OSError as error:
        log.warning("%s cannot be moved aside: %s", path, error)
        return False
    log.warning("%s was moved to %s, and a new file was created", path, aside)
    return True
