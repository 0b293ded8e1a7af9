"""The disk tier's index: what its files say and how they were used, in SQLite (WAL). Can be thrown away at any time.

It may be damaged, behind the files, or say anything. So it is only believed about where to look (which files may be
states of how many items), how large files are until they are opened, and how they were used, which is not in the files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from everwarm.state.store.files import Files
from everwarm.state.store.object import MAX_COUNT, Kind

log = logging.getLogger("everwarm.disk")

INDEX = "index.sqlite"
MAX_INDEX = 1 << 30

T = TypeVar("T")

_TABLE = """
CREATE TABLE objects (
  name TEXT PRIMARY KEY, kind TEXT, key TEXT, n_items INTEGER, size INTEGER, needs TEXT, used_at REAL, hits INTEGER
)"""
_WRITTEN = "CREATE TABLE written (id INTEGER PRIMARY KEY, since REAL, n_bytes INTEGER)"
_OURS = {"objects", "written", "sqlite_autoindex_objects_1"}
_STORE = "INSERT OR REPLACE INTO objects VALUES (?,?,?,?,?,?,?,?)"
_LOAD = "SELECT name, n_items, size, used_at, hits FROM objects"
_MANY = 4096  # rows that are decoded at once
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Time = Annotated[float, msgspec.Meta(ge=0)]


class IndexedObject(msgspec.Struct, frozen=True, gc=False):
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


class RememberedObject(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What the index says of a file that was not opened yet; a row of ``_LOAD``."""

    name: str
    n_items: _Count
    size: _Count
    used_at: _Time
    hits: _Count


class Index:
    """Raises ``sqlite3.Error`` when it cannot; on one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._database = _open(path)

    def load(self, names: set[str]) -> tuple[list[RememberedObject], list[str]]:
        """What is known of the files that are there (``names``), and the rows without a file."""
        found: list[RememberedObject] = []
        gone: list[str] = []
        cursor = self._database.execute(_LOAD)
        while rows := cursor.fetchmany(_MANY):
            if not names.issuperset(map(itemgetter(0), rows)):
                gone.extend(row[0] for row in rows if row[0] not in names)
                rows = [row for row in rows if row[0] in names]
            found.extend(_decode(rows))
        return found, gone

    def describes(self, kept: IndexedObject) -> bool:
        """Whether the row of this object says what its file says."""
        row = self._database.execute("SELECT * FROM objects WHERE name = ?", (kept.name,)).fetchone()
        return row is not None and row[:6] == _to_row(kept)[:6]

    def store(self, kept: IndexedObject) -> None:
        self._database.execute(_STORE, _to_row(kept))

    def store_all(self, objects: Iterable[IndexedObject]) -> None:
        """In one transaction."""
        with self._transaction():
            self._database.executemany(_STORE, map(_to_row, objects))

    def delete(self, name: str) -> None:
        self._database.execute("DELETE FROM objects WHERE name = ?", (name,))

    def delete_all(self, names: Iterable[str]) -> None:
        """In one transaction."""
        with self._transaction():
            self._database.executemany("DELETE FROM objects WHERE name = ?", ((name,) for name in names))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def written(self) -> tuple[float, int]:
        """How many bytes were written, and since when they are counted."""
        row = self._database.execute("SELECT since, n_bytes FROM written").fetchone()
        return (float(row[0]), int(row[1])) if row is not None else (0.0, 0)

    def note_written(self, since: float, n_bytes: int) -> None:
        self._database.execute("INSERT OR REPLACE INTO written VALUES (0, ?, ?)", (since, n_bytes))

    def close(self) -> None:
        self._database.close()


def _to_row(kept: IndexedObject) -> tuple[object, ...]:
    needs = ",".join(kept.needs)
    return kept.name, kept.kind, kept.key, kept.n_items, kept.size, needs, kept.used_at, kept.hits


def _decode(rows: list[tuple[Any, ...]]) -> list[RememberedObject]:
    """Those rows that can be true. All at once, because there may be a hundred thousand."""
    try:
        return msgspec.convert(rows, list[RememberedObject])
    except msgspec.ValidationError:
        return [kept for row in rows for kept in _decode([row])] if len(rows) > 1 else []


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
        if index.execute("PRAGMA quick_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("it is damaged")
        _make_tables(index)
    except sqlite3.Error:
        index.close()
        raise
    return index


def _make_tables(index: sqlite3.Connection) -> None:
    """``sqlite3.DatabaseError``: there is something else, which may do anything when a row is stored."""
    made: dict[str, str | None] = dict(index.execute("SELECT name, sql FROM sqlite_master"))
    if not made:
        index.execute(_TABLE)
        index.execute(_WRITTEN)
    elif made.keys() != _OURS or not (_is_same(made["objects"], _TABLE) and _is_same(made["written"], _WRITTEN)):
        raise sqlite3.DatabaseError("its tables are others")


def _is_same(made: str | None, wanted: str) -> bool:
    return made is not None and made.split() == wanted.split()
