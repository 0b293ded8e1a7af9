"""The disk tier: objects as files, made durable before they are acknowledged, and an index of them.

    STATE_DIR/<model>/lock · index.sqlite · pins.json · state-….ew · kv-….ew

The files are authoritative; the index (SQLite, WAL) only records their content and how they were used, and is rebuilt
from them whenever it is missing, damaged or behind. One process at a time holds a model's directory. Every failure is a
miss: the tier reports that it is degraded and continues. Knows no tree and no libllama.

Pins lie in a small durable file of their own, because the index may be thrown away. A pin names a lineage, whether or
not a state of it is kept, and the points on the way there, which stay with it. A file that cannot be decoded counts
as empty.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from everwarm.errors import EngineStopped, EverwarmError
from everwarm.prompt.prompt import Prompt
from everwarm.state.eviction import DiskLimits, EvictionCandidates, candidates, ranked
from everwarm.state.lineage import Point, keys, point_of
from everwarm.state.store.files import TEMPORARY, Files, make_folder
from everwarm.state.store.index import INDEX, Index, IndexedObject, ObjectTable
from everwarm.state.store.object import (
    SUFFIX,
    Damaged,
    ObjectHeader,
    ObjectPart,
    ObjectReader,
    Unreadable,
    encode,
    file_size,
    name_of,
)
from everwarm.state.tier import Dropped, InSpaces, OnPrompts, Selection, TheseStates

log = logging.getLogger("everwarm.disk")

PINS = "pins.json"
MAX_PINS = 4096
MAX_ABOVE = 512  # points of one pin that are remembered; the deepest
_MAX_BYTES = 64 << 20
_DAY_S = 86_400.0
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_SLACK = 1 << 20  # what a file system and the index need beside an object
_RANKED_SHARE = 0.02  # of the bytes on disk: so much is ranked for eviction at once
_RANKING_SHARE = 0.02  # of the time may go into that


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    n_items: int
    space: str
    above: tuple[Point, ...] = ()

    @property
    def points(self) -> tuple[Point, ...]:
        return (*self.above, point_of(self.key, self.n_items))


class Pins:
    """Changed by one thread at a time; read by any."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files
        self._by_key: dict[str, Pin] = {}
        self.marked: frozenset[Point] = frozenset()  # points whose states are evicted last
        self.trouble: OSError | None = None  # why the file could not be read: it is tried again before it is written
        try:
            self._read()
        except OSError as error:
            self.trouble = error

    def _read(self) -> None:
        self._by_key = {pin.key: pin for pin in _read(self._path, self._files)}
        self.marked, self.trouble = self._marks(), None

    def all(self) -> tuple[Pin, ...]:
        return tuple(self._by_key.values())

    def put(self, pin: Pin) -> bool:
        """Adds a pin. False: it exists already, or there are too many. Raises ``OSError``: it will not outlive this
        process."""
        if self.trouble is not None:
            self._read()
        pin = msgspec.structs.replace(pin, above=pin.above[-MAX_ABOVE:])
        if self._by_key.get(pin.key) == pin:
            return False
        if pin.key not in self._by_key and len(self._by_key) >= MAX_PINS:
            log.warning("%d pins are written down already: this one will not outlive the engine", MAX_PINS)
            return False
        self._set({**self._by_key, pin.key: pin})
        return True

    def remove(self, keys: Collection[str]) -> bool:
        """Removes pins. False: none of them existed. Raises ``OSError``: they will come back in the next process."""
        if self.trouble is not None:
            self._read()
        kept = {key: pin for key, pin in self._by_key.items() if key not in keys}
        if len(kept) == len(self._by_key):
            return False
        self._set(kept)
        return True

    def _set(self, pins: dict[str, Pin]) -> None:
        self._by_key = pins
        self.marked = self._marks()
        whole = self._path.with_name(f"{TEMPORARY}{self._path.name}")  # what is there stays until this is
        self._files.write(whole, [msgspec.json.encode(tuple(pins.values()))])
        self._files.rename(whole, self._path)
        self._files.sync_directory(self._path.parent)

    def _marks(self) -> frozenset[Point]:
        return frozenset(point for pin in self._by_key.values() for point in pin.points)


def _read(path: Path, files: Files) -> tuple[Pin, ...]:
    try:
        fd = files.open(path)
    except FileNotFoundError:
        return ()
    with os.fdopen(fd, "rb") as file:
        try:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=tuple[Pin, ...])[:MAX_PINS]
        except (msgspec.MsgspecError, UnicodeError) as error:
            log.warning("what was pinned cannot be understood: %s", error)
            return ()


class DirectoryTaken(EverwarmError):
    """Another process has locked this model's directory."""


@dataclass(slots=True)
class _Ranking:
    """The unpinned states that save least, the next victim last; valid until ``until``."""

    among: EvictionCandidates
    states: list[IndexedObject]
    until: float


@dataclass(slots=True)
class DiskCounts:
    n_written: int = 0
    n_bytes_written: int = 0
    n_read: int = 0
    n_damaged: int = 0
    n_failures: int = 0
    n_evicted: int = 0


class Disk:
    is_on = True

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        write_budget: int = 0,
        files: Files | None = None,
        space_share: float = 1.0,
    ) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self.counts = DiskCounts()
        self.degraded: str | None = None  # why, while it is
        self._space_share = space_share  # of the budget, for each space at most
        self.write_budget = write_budget  # bytes per day; 0: any number
        self._written_today = (0.0, 0)
        self._files = files or Files()
        self._lock = threading.RLock()
        self._writing = threading.RLock()  # taken before the other
        self._failed_to = ""
        self._fresh: set[str] = set()
        self._stuck: dict[str, int] = {}  # files that could not be removed
        self._objects = ObjectTable()
        self._ranking: _Ranking | None = None
        self.n_bytes = 0
        self.version = 0  # another one: something came or went
        make_folder(directory, self._files)
        self._held = hold(directory)
        try:
            self.pins = Pins(directory / PINS, self._files)
            if self.pins.trouble is not None:
                self._fail("read", self.pins.trouble)
            self._index = Index(directory / INDEX)
            with self._indexing():
                self._written_today = self._index.written()
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
            return frozenset(self._objects)

    def has(self, name: str) -> bool:
        """Whether it is there with everything it needs: it need not be written again."""
        with self._lock:
            return self._objects.is_whole(name)

    def size_of(self, names: Sequence[str]) -> int:
        """Bytes of those objects that are here."""
        with self._lock:
            return self._objects.n_bytes(names)

    @property
    def n_written_today(self) -> int:
        """Bytes; a day begins with its first one."""
        since, written = self._written_today
        return written if 0 <= time.time() - since <= _DAY_S else 0

    def objects(self) -> list[IndexedObject]:
        with self._lock:
            return list(self._objects.values())

    def n_lengths(self) -> int:
        """How many digests of a prompt ``find`` may have to compute."""
        with self._lock:
            return self._objects.n_lengths

    def find(self, root: str, prompt: Prompt, most: int) -> IndexedObject | None:
        """The deepest whole state that these items begin with, of at most so many of them."""
        with self._lock:
            lengths = self._objects.lengths(most)
        named = keys(root, prompt, lengths)
        with self._lock:
            found = (self._objects.state(named[n_items]) for n_items in sorted(named, reverse=True))
            return next((kept for kept in found if kept is not None), None)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[ObjectReader]:
        """Opens an object, whose sections are verified as they are read. A ``Damaged`` one is removed."""
        if Path(name).name != name:
            raise Damaged(f"{name!r} is not the name of an object")
        try:
            fd = self._open(name)
            try:
                reader = ObjectReader(fd)
                if name_of(reader.header) != name:
                    raise Damaged("it is another object than its name says")
                yield reader
            finally:
                os.close(fd)
        except Damaged as error:
            if not error.name:  # else it is about another object, and was seen to there
                error.name = name
                self._lose(name, error)
            raise
        self.counts.n_read += 1
        if self._failed_to == "read":
            self.degraded = None

    def _open(self, name: str) -> int:
        try:
            return self._files.open(self.directory / name)
        except FileNotFoundError:
            with self._lock:
                if not (self.directory / name).exists():  # else it has just been written again
                    self._forget(name)
            error = Damaged("it is gone")
        except OSError as failure:
            self._fail("read", failure)
            if failure.errno not in _PASSING:
                self._forget(name)
            error = Unreadable(f"it cannot be read: {failure.strerror}")
        error.name = name
        raise error

    def _lose(self, name: str, error: Damaged) -> None:
        if isinstance(error, Unreadable):
            self._fail("read", error)
            self._forget(name)
            return
        log.warning("%s is damaged and forgotten: %s", name, error)
        self.counts.n_damaged += 1
        self.drop(name)

    # changes

    def put(self, header: ObjectHeader, parts: Mapping[str, ObjectPart]) -> bool:
        """Writes an object: True means durable, False not kept, which costs only time later."""
        name = name_of(header)
        with self._writing:
            if self.has(name):
                return True
            try:
                size = file_size(header, parts)
                if size + self.size_of(header.needs) > self.budget_bytes or not self._may_write(size):
                    return False
                self._forget(name)
                self._write(header, parts, size)
            except (OSError, ValueError) as error:
                self._fail("written", error)
                return False
            self.degraded = None
            kept = _kept(header, size, time.time())
            with self._lock:
                self._remember(kept)
                self._store(kept)
                self.counts.n_written += 1
                self.counts.n_bytes_written += size
                self._note_written(size)
            self._make_room(kept)
        return True

    def _write(self, header: ObjectHeader, parts: Mapping[str, ObjectPart], size: int) -> None:
        """Writes the file; if the file system is full, evicts objects that save less and tries again."""
        path = self.directory / name_of(header)
        try:
            self._files.write(path, encode(header, parts))
        except OSError as error:
            spare = frozenset(header.needs) | self._fresh
            n_missing = self._n_missing(size, error)
            if n_missing <= 0 or not self._evict(spare, max(0, self.n_bytes - n_missing)):
                raise
            self._files.write(path, encode(header, parts))

    def _n_missing(self, size: int, error: OSError) -> int:
        """How many bytes must be freed to write a file of this size; 0: space was not the problem."""
        if error.errno not in _FULL:
            return 0
        quota = error.errno == errno.EDQUOT  # the system does not say how much of it is left
        return size + _FULL_SLACK - (0 if quota else self._files.free_bytes(self.directory))

    def probe(self) -> None:
        """Tests a degraded tier with a small file, so that it recovers although nothing is written."""
        with self._writing:
            path = self.directory / f"{TEMPORARY}probe"
            try:
                self._files.write(path, [b"probe"])
                self._files.unlink(path)
            except OSError as error:
                self._fail("written", error)
                return
            for name in list(self._stuck):
                self.drop(name)
            if not self._stuck:
                self.degraded = None

    def _make_room(self, new: IndexedObject) -> None:
        """Evicts for a new object. KV written since the last state is spared: its state is still to come."""
        spare = {new.name, *new.needs}
        self._fresh = {new.name} | self._fresh if new.kind == "kv" else set()
        if self.size_of([*spare, *self._fresh]) > self.budget_bytes:
            self._fresh = set()
        self._evict(frozenset(spare | self._fresh), self.budget_bytes)

    def touch(self, names: Sequence[str]) -> None:
        """Note that these were used."""
        with self._lock:
            for name in names:
                kept = self._objects.get(name)
                if kept is not None:
                    self._objects.update(replace(kept, used_at=time.time(), hits=kept.hits + 1))
                    self._store(self._objects[name])

    def pin(self, pin: Pin) -> None:
        """Pins points: their states are evicted last. Durable when this returns, unless the tier is degraded."""
        self._change_pins(lambda: self.pins.put(pin))

    def unpin(self, keys: Collection[str]) -> None:
        self._change_pins(lambda: self.pins.remove(keys))

    def _change_pins(self, change: Callable[[], bool]) -> None:
        with self._writing:
            self._ranking = None
            try:
                self.version += change()
            except OSError as error:
                self.version += 1
                self._fail("pinned", error)

    def drop(self, name: str) -> bool:
        """Removes an object; returns whether it is gone. A file that cannot be removed is tried again when the tier is
        probed."""
        with self._lock:
            size = self._forget(name)
            try:
                self._files.unlink(self.directory / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._fail("removed", error)
                self._stuck[name] = size
                self.n_bytes += size
                return False
            return True

    def forget(self, what: Selection) -> Dropped:
        """Drop states with their pins, and the KV that no other state needs then. ``EngineStopped``: some files cannot
        be removed."""
        match what:
            case OnPrompts():
                lengths = {kept.n_items for kept in self.objects()} | {pin.n_items for pin in self.pins.all()}
                named = what.keys(lengths)
                self.unpin(named)
                return self._drop_states([k for k in self.objects() if k.kind == "state" and k.key in named])
            case TheseStates():
                points = {point_of(kept.key, kept.n_items) for kept in what.states}
                self.unpin({pin.key for pin in self.pins.all() if points & set(pin.points)})
                names = self.names()
                return self._drop_states([kept for kept in what.states if kept.name in names])
            case InSpaces():
                self.unpin({pin.key for pin in self.pins.all() if what.has(pin.space)})
                return self._drop_all([kept for kept in self.objects() if what.has(kept.space)])

    def _drop_states(self, states: Sequence[IndexedObject]) -> Dropped:
        dropped = self._drop_all(states)
        left = self.objects()
        needed = {name for kept in left for name in kept.needs}
        freed = {name for kept in states for name in kept.needs} - needed
        return dropped + self._drop_all([kept for kept in left if kept.name in freed])

    def _drop_all(self, objects: Sequence[IndexedObject]) -> Dropped:
        stuck = [kept.name for kept in objects if not self.drop(kept.name)]
        if stuck:
            raise EngineStopped(f"{len(stuck)} files cannot be removed from disk now ({self.degraded}): try again")
        return Dropped(len(objects), sum(kept.size for kept in objects))

    def stats(self) -> dict[str, float]:
        shown: dict[str, float] = {f"disk_{name}": value for name, value in asdict(self.counts).items()}
        sizes = {"disk_bytes": self.n_bytes, "disk_budget_bytes": self.budget_bytes}
        return {**shown, **sizes, "disk_is_degraded": self.degraded is not None}

    def scan(self) -> None:
        """Bring the index up to date with the files."""
        with self._writing, self._lock:
            self._objects, self._ranking, self._stuck, self.n_bytes = ObjectTable(), None, {}, 0
            uses = self._uses()
            for path in sorted(self.directory.iterdir()):
                if path.name.startswith(TEMPORARY):
                    self.drop(path.name)
                elif path.name.endswith(SUFFIX):
                    self._admit(path, *uses.get(path.name, (time.time(), 0)))
            for name in uses.keys() - self._objects.keys():
                self._delete_row(name)
            self._evict(frozenset(), self.budget_bytes)

    def _admit(self, path: Path, used_at: float, hits: int) -> None:
        try:
            size = path.lstat().st_size
            with self.reading(path.name) as reader:
                head = reader.header
        except (Damaged, OSError):
            return
        kept = _kept(head, size, used_at, hits)
        self._remember(kept)
        self._store(kept)

    # room

    def _note_written(self, size: int) -> None:
        since, written = self._written_today
        self._written_today = (since, written + size)
        if self.write_budget:  # a day is a day, however often the server is restarted
            with self._indexing():
                self._index.note_written(*self._written_today)

    def _may_write(self, size: int) -> bool:
        if not self.write_budget:
            return True
        since, written = self._written_today
        if not 0 <= time.time() - since <= _DAY_S:
            self._written_today = since, written = time.time(), 0
        return written + size <= self.write_budget

    def _evict(self, spare: frozenset[str], most: int) -> bool:
        """Drops what saves least until at most so many bytes are left; returns whether anything was dropped."""
        before = self.counts.n_evicted
        while (among := self._candidates(most)) is not None and (name := self._next_victim(among, spare)) is not None:
            self.counts.n_evicted += 1
            self.drop(name)
        return self.counts.n_evicted > before

    def _candidates(self, most: int) -> EvictionCandidates | None:
        with self._lock:
            limits = DiskLimits(self.budget_bytes, self._space_share)
            return candidates(self._objects.space_bytes, self.n_bytes, limits, most)

    def _next_victim(self, among: EvictionCandidates, spare: frozenset[str]) -> str | None:
        """KV that no state needs goes first, then the states that save least."""
        with self._lock:
            stranded = self._objects.stranded(spare, among.space)
        if stranded is not None:
            return stranded
        ranking = self._ranking
        if ranking is not None and ranking.among == among and time.monotonic() < ranking.until:
            found = self._pop(ranking.states, spare)
            if found is not None:
                return found
        return self._rank(among, spare, _RANKED_SHARE) or self._rank(among, spare, 1.0)

    def _rank(self, among: EvictionCandidates, spare: frozenset[str], share: float) -> str | None:
        """The state that saves least. Ranking looks at every state, so it runs without the lock, and its result is
        reused for a while."""
        began, marked = time.monotonic(), self.pins.marked
        states = ranked(self.objects(), among, marked, time.time(), share)[::-1]
        found = self._pop(states, spare)
        rest = [state for state in states if point_of(state.key, state.n_items) not in marked]
        ended = time.monotonic()
        self._ranking = _Ranking(among, rest, ended + (ended - began) / _RANKING_SHARE)
        return found

    def _pop(self, states: list[IndexedObject], spare: frozenset[str]) -> str | None:
        """The next victim of a ranking. A state that was used since is skipped; one that is spared now may be a victim
        later."""
        spared, found = [], None
        while states and found is None:
            state = states.pop()
            if state.name in spare:
                spared.append(state)
            elif self._objects.get(state.name) is state:
                found = state.name
        states += spared[::-1]
        return found

    # the index

    def _remember(self, kept: IndexedObject) -> None:
        before = self._objects.get(kept.name)
        self.n_bytes += kept.size - (before.size if before else 0) - self._stuck.pop(kept.name, 0)
        self._objects.add(kept)
        self.version += 1

    def _forget(self, name: str) -> int:
        """Removes an object from the index; returns its size."""
        with self._lock:
            stuck = self._stuck.pop(name, 0)
            self.n_bytes -= stuck
            kept = self._objects.remove(name)
            if kept is None:
                return stuck
            self.n_bytes -= kept.size
            self.version += 1
            self._delete_row(name)
            return kept.size

    def _uses(self) -> dict[str, tuple[float, int]]:
        try:
            return self._index.uses()
        except sqlite3.Error as error:
            self._fail("found in the index", error)
            return {}

    def _store(self, kept: IndexedObject) -> None:
        with self._indexing():
            self._index.store(kept)

    def _delete_row(self, name: str) -> None:
        with self._indexing():
            self._index.delete(name)

    @contextlib.contextmanager
    def _indexing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:  # the files are the truth: the next scan puts it right
            self._fail("indexed", error)

    def _fail(self, what: str, error: Exception) -> None:
        self.counts.n_failures += 1
        if self.degraded is None:
            log.warning("the disk tier is degraded: an object could not be %s (%s)", what, error)
        self.degraded, self._failed_to = str(error), what


def _kept(head: ObjectHeader, size: int, used_at: float, hits: int = 0) -> IndexedObject:
    span = (head.kind, head.key, head.n_items, size, head.needs)
    return IndexedObject(name_of(head), *span, used_at, hits, head.space, head.reaches)


def hold(directory: Path) -> int:
    """Lock a model's directory until the descriptor is closed. ``DirectoryTaken``: another process has it."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise DirectoryTaken(
            f"another Everwarm keeps this model's states in {directory}: give one of them another --state-dir"
        ) from None
    return fd
