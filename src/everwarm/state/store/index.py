"""What the disk tier knows of its files: in SQLite (``Index``), and in memory (``ObjectTable``).

The SQLite file (WAL) says what the files say and how they were used. It can be thrown away at any time: it may be
damaged, behind the files, or say anything. So it is only believed about where to look (which files may be states of how
many items), how large files are until they are opened, and how they were used, which is not in the files.

The table has objects by name, which needs which, which state is above which on a lineage, and sums that are kept up to
date. As a mapping it has the objects whose headers were read. Of files that are *unopened* it knows only what the index
remembers: they count as there, but what they need is not known, so nothing may be evicted while there are any. The cost
of a change grows with the object's needs, and ``around`` with the states of its conversation; that of a lookup with its
result: only ``values`` walks over all objects.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import sqlite3
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
_FEW_SIZES = 64
_STATE = "state-"
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


# in SQLite


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


# in memory


class ObjectTable(Mapping[str, IndexedObject]):
    """What is on disk."""

    def __init__(self) -> None:
        self._kept: dict[str, IndexedObject] = {}
        self._unopened: dict[str, RememberedObject | None] = {}  # None: the index says nothing of it
        self._n_users: Counter[str] = Counter()  # how many objects need each name, also names that are not here
        self._users: dict[str, set[str]] | None = None  # which these are; found when it is asked for
        self._ends: dict[str, tuple[str, ...]] = {}  # the states whose lineage ends in each KV
        self._lengths: Counter[int] = Counter()  # of states, in items
        self._stranded: OrderedDict[str, None] = OrderedDict()  # in the order in which they became so
        self._stranded_in: dict[str, OrderedDict[str, None]] = {}  # by space
        self.total_bytes = 0  # also of unopened files, as far as the index knows them
        self.space_bytes: Counter[str] = Counter()
        self._by_size: list[tuple[int, str]] = []  # spaces, the largest first; also sizes that they had before

    def __getitem__(self, name: str) -> IndexedObject:
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    # questions

    def is_there(self, name: str) -> bool:
        return name in self._kept or name in self._unopened

    def is_unopened(self, name: str) -> bool:
        return name in self._unopened

    def unopened(self) -> list[str]:
        return list(self._unopened)

    def remembered(self, name: str) -> RememberedObject | None:
        """What the index says of an unopened file."""
        return self._unopened.get(name)

    def names(self) -> frozenset[str]:
        return frozenset(self._kept.keys() | self._unopened.keys())

    def lengths(self, most: int) -> set[int]:
        """The lengths of states in items, up to ``most``; also of unopened ones."""
        return {n_items for n_items in self._lengths if n_items <= most}

    @property
    def n_lengths(self) -> int:
        return len(self._lengths)

    def is_whole(self, name: str) -> bool:
        """Whether an object was opened, and everything that it needs is there."""
        kept = self._kept.get(name)
        return kept is not None and all(map(self.is_there, kept.needs))

    def n_bytes(self, names: Iterable[str]) -> int:
        """Bytes of those objects that are here, each counted once."""
        found = (self._kept.get(name) or self._unopened.get(name) for name in set(names))
        return sum(each.size for each in found if each is not None)

    def own_bytes(self, kept: IndexedObject) -> int:
        """What goes with an object: its own bytes, and those of the KV that nothing else needs."""
        return kept.size + self.n_bytes(need for need in kept.needs if self._n_users[need] == 1)

    def above(self, kept: IndexedObject) -> IndexedObject | None:
        """The deepest other state on the lineage of a state, as far as their KV tells: its name says which items it is
        of, and where it is used by both, so are all items before it. None: there is none."""
        for i in range(len(kept.needs) - 1, -1, -1) if _has_lineage(kept) else ():
            ending = [self._kept[name] for name in self._ends.get(kept.needs[i], ())]
            inside = [other for other in ending if other.n_items <= kept.reaches[i] and other.n_items < kept.n_items]
            if inside:
                return max(inside, key=lambda other: other.n_items)
        return None

    def directly_below(self, kept: IndexedObject) -> Iterator[IndexedObject]:
        """The states for which this one is the one above."""
        if _has_lineage(kept) and self._n_users[kept.needs[-1]] > 1:
            for name in self._users_of(kept.needs[-1]):
                other = self._kept[name]
                if other.n_items > kept.n_items and (above := self.above(other)) and above.name == kept.name:
                    yield other

    def around(self, kept: IndexedObject) -> set[str]:
        """The states whose worth depends on whether this object is there: those right above and right below it, and
        those that need KV which only they and this one need."""
        found = {user for need in kept.needs if self._n_users[need] == 2 for user in self._users_of(need)}
        found |= {other.name for other in self.directly_below(kept)}
        if (above := self.above(kept)) is not None:
            found.add(above.name)
        if self._n_users[kept.name] == 1:
            found |= set(self._users_of(kept.name))
        return found - {kept.name}

    def stranded(self, besides: Collection[str], space: str | None) -> str | None:
        """KV that no state needs, or a state that is not whole; of one space, or of any."""
        names = self._stranded if space is None else self._stranded_in.get(space, ())
        return next((name for name in names if name not in besides), None)

    def largest_space(self) -> dict[str, int]:
        """The space with the most bytes, and how many; empty if there is nothing."""
        heap = self._by_size
        while heap and self.space_bytes.get(heap[0][1]) != -heap[0][0]:
            heapq.heappop(heap)
        return {space: -size for size, space in heap[:1]}

    # changes

    def load(self, objects: Iterable[RememberedObject], names: Iterable[str]) -> None:
        """Adds unopened files to an empty table: what the index remembers, and the names of all."""
        known = {each.name: each for each in objects}
        self._unopened = {**dict.fromkeys(names), **known}
        self._lengths = Counter([each.n_items for name, each in known.items() if name.startswith(_STATE)])
        self.total_bytes = sum([each.size for each in known.values()])

    def add(self, kept: IndexedObject) -> None:
        """Adds an object, in place of one of the same name."""
        self._remove_unopened(kept.name)
        self.remove(kept.name)
        self._kept[kept.name] = kept
        self._count(kept.space, kept.size)
        if kept.kind == "state":
            self._lengths[kept.n_items] += 1
        if _has_lineage(kept):
            self._ends[kept.needs[-1]] = (*self._ends.get(kept.needs[-1], ()), kept.name)
        for need in kept.needs:
            self._n_users[need] += 1
            if self._users is not None:
                self._users.setdefault(need, set()).add(kept.name)
        self._judge({kept.name, *kept.needs, *self._users_of(kept.name)})

    def remove(self, name: str) -> IndexedObject | None:
        kept = self._kept.pop(name, None)
        if kept is None:
            self._remove_unopened(name)
            self._judge(set(self._users_of(name)))
            return None
        self._unstrand(kept)
        self._count(kept.space, -kept.size)
        if kept.kind == "state":
            self._remove_length(kept.n_items)
        if _has_lineage(kept):
            self._remove_end(kept.needs[-1], name)
        for need in kept.needs:
            self._n_users[need] -= 1
            if not self._n_users[need]:
                del self._n_users[need]
            if self._users is not None:
                self._users[need].discard(name)
        self._judge({*kept.needs, *self._users_of(name)})
        return kept

    def update(self, kept: IndexedObject) -> None:
        """The same object, used once more."""
        self._kept[kept.name] = kept

    def _remove_unopened(self, name: str) -> None:
        remembered = self._unopened.pop(name, None)
        if not self._unopened:
            self._unopened = {}  # a dict that was large is slow to walk over, though it is empty
        if remembered is not None:
            self.total_bytes -= remembered.size
            if _is_state(name):
                self._remove_length(remembered.n_items)

    def _remove_length(self, n_items: int) -> None:
        self._lengths[n_items] -= 1
        if not self._lengths[n_items]:
            del self._lengths[n_items]

    def _remove_end(self, need: str, name: str) -> None:
        left = tuple(other for other in self._ends[need] if other != name)
        if left:
            self._ends[need] = left
        else:
            del self._ends[need]

    def _count(self, space: str, n_bytes: int) -> None:
        self.total_bytes += n_bytes
        self.space_bytes[space] += n_bytes
        if not self.space_bytes[space]:
            del self.space_bytes[space]
        else:
            heapq.heappush(self._by_size, (-self.space_bytes[space], space))
        if len(self._by_size) > 2 * len(self.space_bytes) + _FEW_SIZES:
            self._sort_spaces()

    def _sort_spaces(self) -> None:
        self._by_size = [(-size, space) for space, size in self.space_bytes.items()]
        heapq.heapify(self._by_size)

    def _users_of(self, name: str) -> Collection[str]:
        """The objects that need this one. Seldom asked until something is evicted: most KV comes before its first state
        and goes after its last."""
        if not self._n_users.get(name):
            return ()
        if self._users is None:
            self._users = {}
            for kept in self._kept.values():
                for need in kept.needs:
                    self._users.setdefault(need, set()).add(kept.name)
        return self._users.get(name, ())

    def _judge(self, names: set[str]) -> None:
        for name in sorted(names):
            kept = self._kept.get(name)
            if kept is not None:
                if self._is_stranded(kept):
                    self._strand(kept)
                else:
                    self._unstrand(kept)

    def _is_stranded(self, kept: IndexedObject) -> bool:
        return kept.name not in self._n_users if kept.kind == "kv" else not self.is_whole(kept.name)

    def _strand(self, kept: IndexedObject) -> None:
        self._stranded.setdefault(kept.name)
        self._stranded_in.setdefault(kept.space, OrderedDict()).setdefault(kept.name)

    def _unstrand(self, kept: IndexedObject) -> None:
        self._stranded.pop(kept.name, None)
        inside = self._stranded_in.get(kept.space)
        if inside is not None:
            inside.pop(kept.name, None)
            if not inside:
                del self._stranded_in[kept.space]

    def check(self) -> None:
        """Checks that the sums match the objects."""
        sizes: Counter[str] = Counter()
        for kept in self._kept.values():
            sizes[kept.space] += kept.size
        known = [each for each in self._unopened.values() if each is not None]
        assert +self.space_bytes == +sizes and self.total_bytes == sizes.total() + sum(each.size for each in known)
        lengths = [kept.n_items for kept in self._kept.values() if kept.kind == "state"]
        lengths += [each.n_items for each in known if _is_state(each.name)]
        assert self._lengths == Counter(lengths)
        assert not self._kept.keys() & self._unopened.keys()
        needed = {need for kept in self._kept.values() for need in kept.needs}
        ends = [(kept.needs[-1], name) for name, kept in self._kept.items() if _has_lineage(kept)]
        assert sorted((need, name) for need, names in self._ends.items() for name in names) == sorted(ends)
        assert self._n_users == Counter(need for kept in self._kept.values() for need in kept.needs)
        lost = {
            k.name
            for k in self._kept.values()
            if (k.name not in needed if k.kind == "kv" else not self.is_whole(k.name))
        }
        assert self._stranded.keys() == lost == {name for names in self._stranded_in.values() for name in names}
        assert list(self.largest_space().values()) == sorted(sizes.values())[-1:]


def _has_lineage(kept: IndexedObject) -> bool:
    """Whether it says which KV its lineage is made of. A state of a model without KV does not."""
    return kept.kind == "state" and 0 < len(kept.needs) == len(kept.reaches)


def _is_state(name: str) -> bool:
    return name.startswith(_STATE)
