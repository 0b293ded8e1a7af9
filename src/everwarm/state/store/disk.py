"""The disk tier: objects as files, made durable before they are acknowledged, and an index of them.

    STATE_DIR/<model>/lock · index.sqlite · pins.json · state-….ew · kv-….ew

The files are authoritative; the index (SQLite, WAL) only records their content and how they were used. Opening lists
the folder and reads from the index which of the files are states, and how long: enough to find one. Its header is read
before it is given out. A pass in the background reads the headers of all others and puts the index right,
whether it was missing, damaged, behind or wrong; nothing is evicted or forgotten before the pass is through. One
process at a time holds a model's directory. Every failure is a miss: the tier reports that it is degraded and
continues. Knows no tree and no libllama.

Pins lie in a small durable file of their own, because the index may be thrown away. A pin names a lineage, whether or
not a state of it is kept, and the points on the way there, which stay with it. A file that cannot be decoded counts
as empty.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from sys import intern

import msgspec
import numpy as np
from numpy.typing import NDArray

from everwarm.errors import EngineStopped, EverwarmError
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import Point, keys, point_of
from everwarm.state.store.disk_eviction import VictimQueue
from everwarm.state.store.files import TEMPORARY, Files, make_folder
from everwarm.state.store.index import INDEX, Index, IndexedObject, ObjectTable, RememberedObject
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
    state_name,
)
from everwarm.state.tier import DiskTier, Dropped, InSpaces, OnPrompts, Pin, Selection

log = logging.getLogger("everwarm.disk")

PINS = "pins.json"
MAX_PINS = 4096
MOST_TEXTS = 256  # objects whose items are read for drafts
MAX_ABOVE = 512  # points of one pin that are remembered; the deepest
PAUSE_EVERY = 32  # files of a pass; afterwards its thread rests for as long as they took
FEW_FILES, HEAD_START_S = 1000, 0.25  # opening waits for so long for the pass over so many files: all are known then
_MAX_BYTES = 64 << 20
_DAY_S = 86_400.0
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_SLACK = 1 << 20  # what a file system and the index need beside an object
_BATCH = 256  # rows that the pass stores in one transaction


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
        self.marked = self._marks()
        self.trouble = None

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


class Disk(DiskTier):
    is_on = True

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        write_budget: int = 0,
        files: Files | None = None,
        space_share: float = 1.0,
        free_share: float | None = None,
    ) -> None:
        """``free_share``: the budget is at most what is here already and this share of what the file system has free.
        None: no such limit."""
        super().__init__()
        self.directory = directory
        self.budget_bytes = budget_bytes
        self._space_share = space_share  # of the budget, for each space at most
        self._free_share = free_share
        self.write_budget = write_budget  # bytes per day; 0: any number
        self._written_today = (0.0, 0)
        self._files = files or Files()
        self._lock = threading.RLock()
        self._writing = threading.RLock()  # taken before the other
        self._failed_to = ""
        self._fresh: set[str] = set()
        self._stuck: dict[str, int] = {}  # files that could not be removed
        self._objects = ObjectTable()
        self._victims = VictimQueue(self._objects, by_space=space_share < 1.0)
        self._changed: list[str] = []  # what the pass found and has not stored yet
        self._in_hand = ""  # the object that is being written
        make_folder(directory, self._files)
        self._held = hold(directory)
        try:
            self._pins = Pins(directory / PINS, self._files)
            if self._pins.trouble is not None:
                self._fail("read", self._pins.trouble)
            self._index = Index(directory / INDEX)
            with self._indexing():
                self._written_today = self._index.written()
            self._pass = self._load()
            self._pass.start(HEAD_START_S if len(self._objects.unopened()) <= FEW_FILES else 0.0)
        except BaseException:
            os.close(self._held)
            raise

    def close(self) -> None:
        self._pass.stop()
        with self._lock:
            self._index.close()
            os.close(self._held)

    # questions

    @property
    def pins(self) -> tuple[Pin, ...]:
        return self._pins.all()

    @property
    def pinned_points(self) -> frozenset[Point]:
        return self._pins.marked

    def names(self) -> frozenset[str]:
        with self._lock:
            return self._objects.names()

    def has(self, name: str) -> bool:
        """Whether it is there with everything it needs: it need not be written again. False for a state that was not
        opened yet: ``put`` will open it. KV needs nothing."""
        with self._lock:
            return self._objects.is_whole(name) or (name.startswith("kv-") and self._objects.is_unopened(name))

    @property
    def n_bytes(self) -> int:
        """Of all files, also of those that should be gone and could not be removed."""
        with self._lock:
            return self._objects.total_bytes + sum(self._stuck.values())

    def has_room(self, n_bytes: int) -> bool:
        return self.n_bytes + n_bytes <= self.budget_bytes

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
        """The deepest whole state that these items begin with, of at most so many of them. Reads its header, if the
        pass has not done so yet."""
        with self._lock:
            lengths = self._objects.lengths(most)
        named = keys(root, prompt, lengths)
        names = [state_name(named[n_items]) for n_items in sorted(named, reverse=True)]
        with self._lock:
            names = [name for name in names if self._objects.is_there(name)]
        for name in names:
            self._look(name)
            with self._lock:
                kept = self._objects.get(name)
                if kept is not None and kept.key == named.get(kept.n_items) and self._objects.is_whole(name):
                    return kept
        return None

    def newest_texts(self, space: str, n_most: int) -> list[NDArray[np.int32]]:
        """The items of the KV in a space, what was used last first, of at most so many items in all. A damaged file is
        left to the first request that needs it."""
        among = (kept for kept in self.objects() if kept.kind == "kv" and kept.space == space)
        found: list[NDArray[np.int32]] = []
        for kept in heapq.nlargest(MOST_TEXTS, among, key=lambda kept: kept.used_at):
            with contextlib.suppress(Damaged), self._verified(kept.name) as (reader, _):
                items = reader.read("items")
                found.append(items[: len(items) // 4 * 4].view("<i4")[-n_most:])
                n_most -= len(found[-1])
            if n_most <= 0:
                break
        return found

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[ObjectReader]:
        """Opens an object, whose sections are verified as they are read. A ``Damaged`` one is removed."""
        if Path(name).name != name:
            raise Damaged(f"{name!r} is not the name of an object")
        with self._verified(name) as (reader, stat):
            self._admit(name, reader, stat)
            yield reader
        self.counts.n_read += 1

    @contextlib.contextmanager
    def _verified(self, name: str) -> Iterator[tuple[ObjectReader, os.stat_result]]:
        """Opens a file whose header is whole and belongs to its name."""
        fd = self._open(name)
        try:
            stat = os.fstat(fd)
            reader = ObjectReader(fd)
            if name_of(reader.header) != name:
                raise Damaged("it is another object than its name says")
            yield reader, stat
        except Damaged as error:
            if not error.name:  # else it is about another object, and was seen to there
                error.name = name
                self._lose(name, stat, error)
            raise
        finally:
            os.close(fd)
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

    def _lose(self, name: str, stat: os.stat_result, error: Damaged) -> None:
        if isinstance(error, Unreadable):
            self._fail("read", error)
            self._forget(name)
            return
        log.warning("%s is damaged and forgotten: %s", name, error)
        self.counts.n_damaged += 1
        with self._lock:
            if not self._is_replaced(name, stat):
                self.drop(name)

    def _is_replaced(self, name: str, stat: os.stat_result) -> bool:
        """Whether the name belongs to another file by now than the one that was opened."""
        try:
            return not os.path.samestat(os.lstat(self.directory / name), stat)
        except OSError:
            return False

    # changes

    def put(self, header: ObjectHeader, parts: Mapping[str, ObjectPart]) -> bool:
        """Writes an object: True means durable, False not kept, which costs only time later."""
        name = name_of(header)
        with self._writing:
            for each in (name, *header.needs):
                self._look(each)
            if self.has(name):
                return True
            try:
                size = file_size(header, parts)
                if size + self.size_of(header.needs) > self.budget_bytes or not self._may_write(size):
                    return False
                with self._lock:
                    self._forget(name)
                    self._in_hand = name
                self._write(header, parts, size)
            except (OSError, ValueError) as error:
                self._in_hand = ""
                self._fail("written", error)
                return False
            self.degraded = None
            kept = _kept(header, size, time.time())
            with self._lock:
                self._in_hand = ""
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
            self._read_all_headers()
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
            if self._pass.is_over and (unopened := self._objects.unopened()):  # what could not be read then
                self._pass = BackgroundPass(unopened, self._look, partial(self._end_pass, ()))
                self._pass.start()

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
                    used = msgspec.structs.replace(kept, used_at=time.time(), hits=kept.hits + 1)
                    self._victims.update(used, time.time())
                    self._store(used)

    def pin(self, pin: Pin) -> None:
        """Pins points: their states are evicted last. Durable when this returns, unless the tier is degraded."""
        self._change_pins(lambda: self._pins.put(pin))

    def unpin(self, keys: Collection[str]) -> None:
        self._change_pins(lambda: self._pins.remove(keys))

    def _change_pins(self, change: Callable[[], bool]) -> None:
        with self._writing:
            try:
                self.version += change()
            except OSError as error:
                self.version += 1
                self._fail("pinned", error)
            with self._lock:
                self._victims.note_pins(self.pinned_points, time.time())

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
                return False
            return True

    def forget(self, what: Selection) -> Dropped:
        """Drop states with their pins, and the KV that no other state needs then. ``EngineStopped``: some files cannot
        be removed."""
        self.settle()
        match what:
            case OnPrompts():
                lengths = {kept.n_items for kept in self.objects()} | {pin.n_items for pin in self.pins}
                named = what.keys(lengths)
                self.unpin(named)
                return self._drop_states([k for k in self.objects() if k.kind == "state" and k.key in named])
            case tuple():
                points = {point_of(kept.key, kept.n_items) for kept in what}
                self.unpin({pin.key for pin in self.pins if points & set(pin.points)})
                names = self.names()
                return self._drop_states([kept for kept in what if kept.name in names])
            case InSpaces():
                self.unpin({pin.key for pin in self.pins if what.has(pin.space)})
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

    # opening

    def _load(self) -> BackgroundPass:
        """What is there, without opening a file."""
        there = self._list()
        known, gone = self._from_index(there)
        self._objects.load(known, there)
        return BackgroundPass(self._unopened_names(), self._look, partial(self._end_pass, gone))

    def _unopened_names(self) -> Iterator[str]:
        """Those first that the index does not know: they cannot be found yet."""
        names = sorted(self._objects.unopened())
        yield from (name for name in names if self._objects.remembered(name) is None)
        yield from names

    def _list(self) -> set[str]:
        """The objects in the folder. Temporary files are removed: this process has not begun to write any."""
        names = os.listdir(self.directory)
        for name in names:
            if name.startswith(TEMPORARY):
                self.drop(name)
        return {name for name in names if name.endswith(SUFFIX) and not name.startswith(TEMPORARY)}

    def _from_index(self, names: set[str]) -> tuple[list[RememberedObject], list[str]]:
        try:
            return self._index.load(names)
        except sqlite3.Error as error:
            self._fail("found in the index", error)
            return [], []

    def settle(self) -> None:
        """Waits until every file was compared with the index, and the budget is kept to."""
        self._pass.join()

    def _read_all_headers(self) -> None:
        """Before that it is not known which KV is needed."""
        self._pass.finish()
        for name in self._objects.unopened():  # what could not be opened then
            self._look(name)

    def _look(self, name: str) -> None:
        """Reads the header of a file, unless another thread did that before."""
        if self._objects.is_unopened(name):
            with contextlib.suppress(Damaged), self._verified(name) as (reader, stat):
                self._admit(name, reader, stat)

    def _admit(self, name: str, reader: ObjectReader, stat: os.stat_result) -> None:
        """From now on the table has what the header of this file says."""
        with self._lock:
            if not self._objects.is_unopened(name) or name == self._in_hand or self._is_replaced(name, stat):
                return  # another thread has seen to it, or will
            before = self._objects.remembered(name)
            now = time.time()
            use = (now, 0) if before is None else (min(before.used_at, now), before.hits)
            kept = _kept(reader.header, stat.st_size, *use)
            self._remember(kept)
            with self._indexing():
                if not self._index.describes(kept):
                    self._changed.append(name)
            if len(self._changed) >= _BATCH:
                self._store_changed()

    def _store_changed(self) -> None:
        names = self._changed
        self._changed = []
        with self._indexing():
            self._index.store_all(self._objects[name] for name in names if name in self._objects)

    def _end_pass(self, gone: Collection[str]) -> None:
        with self._lock:
            self._store_changed()
            with self._indexing():
                self._index.delete_all(name for name in gone if name not in self._objects)
        with self._writing:
            if self._free_share is not None:
                with contextlib.suppress(OSError):
                    free = int(self._free_share * self._files.free_bytes(self.directory))
                    self.budget_bytes = min(self.budget_bytes, self.n_bytes + free)
            self._evict(frozenset(self._fresh), self.budget_bytes)

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
        if self._crowded_space() is None and self.n_bytes <= most:
            return False
        self._read_all_headers()
        before = self.counts.n_evicted
        while (space := self._crowded_space()) is not None or self.n_bytes > most:
            name = self._next_victim(space, spare)
            if name is None:
                break
            self.counts.n_evicted += 1
            self.drop(name)
        return self.counts.n_evicted > before

    def _crowded_space(self) -> str | None:
        """The space that has more than its share of the budget: it evicts its own objects first. None: no space has."""
        if self._space_share >= 1.0:
            return None
        most = self._space_share * self.budget_bytes
        with self._lock:
            return next((space for space, size in self._objects.largest_space().items() if size > most), None)

    def _next_victim(self, space: str | None, spare: frozenset[str]) -> str | None:
        """KV that no state needs goes first, then the states that save least."""
        now = time.time()
        with self._lock:
            stranded = self._objects.stranded(spare, space)
        while stranded is None:
            with self._lock:  # released in between: after a long pause there may be much to catch up on
                if self._victims.advance(space, now):
                    found = self._victims.choose(space, self.pinned_points, spare, now)
                    return None if found is None else found.name
        return stranded

    # the index

    def _remember(self, kept: IndexedObject) -> None:
        self._stuck.pop(kept.name, None)
        self._victims.add(kept, time.time())
        self.version += 1

    def _forget(self, name: str) -> int:
        """Removes an object from the index; returns its size."""
        with self._lock:
            stuck = self._stuck.pop(name, 0)
            was_there = self._objects.is_there(name)
            size = self._objects.n_bytes([name])
            self._victims.remove(name, time.time())
            if was_there:
                self.version += 1
                self._delete_row(name)
            return size if was_there else stuck

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
        except sqlite3.Error as error:  # the files are the truth: the next pass puts it right
            self._fail("indexed", error)

    def _fail(self, what: str, error: Exception) -> None:
        self.counts.n_failures += 1
        if self.degraded is None:
            log.warning("the disk tier is degraded: an object could not be %s (%s)", what, error)
        self.degraded = str(error)
        self._failed_to = what


def _kept(head: ObjectHeader, size: int, used_at: float, hits: int = 0) -> IndexedObject:
    span = (head.kind, head.key, head.n_items, size, tuple(map(intern, head.needs)))
    return IndexedObject(intern(name_of(head)), *span, used_at, hits, head.space, head.reaches)


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


class BackgroundPass:
    """A pass over many files on a thread of its own, which works half of the time until it is waited for. Knows nothing of
    what is done to a file."""

    def __init__(self, names: Iterable[str], look: Callable[[str], None], end: Callable[[], None]) -> None:
        """``look`` is called for every name, then ``end``, unless the pass is stopped before. Both must not fail. The
        names are asked for on the thread, too."""
        self._names = names
        self._look = look
        self._end = end
        self._is_urgent = threading.Event()
        self._is_stopped = False
        self._has_looked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everwarm-reconcile", daemon=True)

    def start(self, head_start_s: float = 0.0) -> None:
        """Waits for so long, and does without pauses meanwhile: a short pass is over when this returns."""
        self._is_urgent.set()
        self._thread.start()
        self._thread.join(head_start_s)
        self._is_urgent.clear()

    @property
    def is_over(self) -> bool:
        return self._has_looked.is_set()

    def finish(self) -> None:
        """Waits until every file was looked at, without pauses from now on; not for ``end``."""
        self._is_urgent.set()
        self._has_looked.wait()

    def stop(self) -> None:
        """Ends the pass after the file that it is looking at, and waits for its thread."""
        self._is_stopped = True
        self._is_urgent.set()
        if self._thread.ident is not None:
            self._thread.join()

    def join(self) -> None:
        """Waits until the pass and its end are over."""
        self._is_urgent.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._look_at_all()
        except Exception:
            log.exception("not every file on disk could be looked at")
        self._has_looked.set()
        if not self._is_stopped:
            self._end()

    def _look_at_all(self) -> None:
        began = time.monotonic()
        for i, name in enumerate(self._names, start=1):
            if self._is_stopped:
                return
            self._look(name)
            if i % PAUSE_EVERY == 0:
                self._is_urgent.wait(time.monotonic() - began)
                began = time.monotonic()
