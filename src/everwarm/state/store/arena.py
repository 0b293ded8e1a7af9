"""The RAM tier's memory: one memory file that outlives the process that fills it.

    page 0: magic · version · file size · budget · owner      rows: which extents are kept objects      extents

Extents are handed out as arrays: a state is captured into one and restored out of it without another copy. An extent is
free again when its array is garbage. A kept object has a row with the digests of its bytes and of its description; the
row is valid from its last word on, so a process that is killed leaves whole objects or none. The next process that maps
the file scans the rows, checks every number, and uses bytes only if their digest is right. Knows no tree.

The first part, as large as the budget, may be held in place for a device that copies by physical address. No extent lies
across its end (the fence): such a copy is from inside or from outside.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import mmap
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import blake3
import numpy as np

from everwarm.state.store.arena_file import FIRST_EXTENT, N_ROWS, PAGE, ROW_BYTES, Super, read_super, write_super
from everwarm.state.store.files import in_shares
from everwarm.types import Blob, heap

ALIGN = 256
MAX_ABOUT = 64 << 20  # bytes of an object's description: its items, mostly
SLACK = 64 << 20  # extents do not lie tightly, and what is being written to disk outlives its eviction

TOUCHED_BYTES, N_TOUCHING = 64 << 20, 8  # what is worth a thread, and how many threads

_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEPT = 1
_ROW = np.dtype(
    [
        ("state", "<u8"),
        ("at", "<u8"),
        ("size", "<u8"),
        ("about_at", "<u8"),
        ("about_size", "<u8"),
        ("digest", "u1", 32),
        ("about_digest", "u1", 32),
        ("unused", "u1", 24),
    ]
)
assert _ROW.itemsize == ROW_BYTES


@dataclass(slots=True, eq=False)
class Extent:
    at: int
    room: int
    ref: weakref.ref[Blob]
    row: int | None = None
    about: tuple[int, int] | None = None  # where the description lies, and its capacity
    doubt: bytes | None = None  # the digest its bytes must have, until they are verified


Found = tuple[bytes, Blob]  # what an earlier process said of an object, and the object


class Arena:
    """Hands out arrays from any thread. With no room left they come from the process's own memory, and do not outlive
    it."""

    def __init__(self, fd: int, owner: str, budget_bytes: int | None, default_budget: int) -> None:
        """``owner`` names what the states in it depend on: states of another owner are forgotten. Without a budget of
        its own it keeps the one it had, so that a process started beside a full arena does not take that for a full
        machine. With a smaller one the file is cut; objects in the part that is left are found, and those that do not
        fit are dropped when they are adopted."""
        self._lock = threading.Lock()
        self._alive: dict[int, Extent] = {}
        self._dead: collections.deque[Extent] = collections.deque()
        self._free: list[tuple[int, int]] = []  # (at, room), by place
        self.n_used = 0
        self._n_warm = 0  # free but touched: the system still holds memory for it
        self.n_outside = 0  # arrays that found no room
        self._is_held = False  # pages before the fence stay where they are
        name = _name_of(owner)
        before = self._read_left(fd, name, budget_bytes)
        is_new = before is None
        if before is not None:
            self.budget_bytes = before.budget_bytes if budget_bytes is None else budget_bytes
            size = min(before.size, _size_for(self.budget_bytes))
        else:
            self.budget_bytes = default_budget if budget_bytes is None else budget_bytes
            size = _size_for(self.budget_bytes)
            os.ftruncate(fd, 0)  # discards earlier content
        os.ftruncate(fd, size)
        self._fence = min(_paged(FIRST_EXTENT + self.budget_bytes), size)
        self._map = mmap.mmap(fd, size)
        self._base = np.frombuffer(self._map, np.uint8).ctypes.data
        self._rows = np.frombuffer(self._map, _ROW, N_ROWS, PAGE)
        self._found = [] if is_new else list(self._adopt(size))
        taken = {extent.row for extent in self._alive.values()}
        self._empty_rows = collections.deque(row for row in range(N_ROWS) if row not in taken)
        self._lay_out_free(size)
        write_super(self._map, Super(size, self.budget_bytes, name))

    def hand_to(self, owner: str) -> None:
        """Changes the owner by which the next process recognises what is kept here."""
        write_super(self._map, Super(len(self._map), self.budget_bytes, _name_of(owner)))

    @classmethod
    def is_left(cls, fd: int, owner: str, budget_bytes: int | None) -> bool:
        """Whether an earlier process of the same owner left something in this file that fits the budget."""
        return cls._read_left(fd, _name_of(owner), budget_bytes) is not None

    @staticmethod
    def _read_left(fd: int, name: bytes, budget_bytes: int | None) -> Super | None:
        found = read_super(fd)
        if found is None or found.owner != name:
            return None
        return found if budget_bytes is None or budget_bytes <= found.budget_bytes else None

    # handing out

    def place(self, n_bytes: int) -> Blob:
        """Allocates an array, to be filled by the caller."""
        with self._lock:
            self._reap()
            at = self._take(n_bytes)
        if at is None:
            self.n_outside += 1
            return heap(n_bytes)
        return self._hand_out(at, n_bytes)

    def lend(self, n_bytes: int) -> Blob:
        """A temporary array for a device's copy: from the held part if there is room, else from the process's own memory,
        which is allocated faster than the file's."""
        found = self._lend_held(n_bytes)
        if found is None:
            return _touched(n_bytes) if self._is_held else heap(n_bytes)
        return found

    def lend_to_readers(self, n_bytes: int) -> Blob:
        """The same for several threads that fill it from a file: they touch its pages themselves."""
        found = self._lend_held(n_bytes)
        return heap(n_bytes) if found is None else found

    def _lend_held(self, n_bytes: int) -> Blob | None:
        with self._lock:
            self._reap()
            at = self._take(n_bytes, self._fence) if self._is_held else None
        return None if at is None else self._hand_out(at, n_bytes)

    def has_room(self, n_bytes: int) -> bool:
        """Whether an array of this size would get a place, and in the held part if some of the arena is held."""
        with self._lock:
            self._reap()
            stop = self._fence if self._is_held else None
            return self._hole(_room(n_bytes), stop) is not None

    def _hand_out(self, at: int, n_bytes: int) -> Blob:
        blob = np.frombuffer(self._map, np.uint8, n_bytes, at)
        extent = Extent(at, _room(n_bytes), weakref.ref(blob, lambda _: self._let_go(at)))
        self._alive[at] = extent
        return blob

    def _let_go(self, at: int) -> None:
        """Runs when the last holder releases an array, at any moment: so it takes no lock."""
        extent = self._alive.pop(at, None)
        if extent is None:
            return
        if extent.row is not None:
            self._rows["state"][extent.row] = 0
            self._empty_rows.append(extent.row)
        self._dead.append(extent)

    def _extent(self, blob: Blob) -> Extent | None:
        return self._alive.get(blob.ctypes.data - self._base)

    # keeping

    def keep(self, blob: Blob, about: bytes, max_threads: int = 1) -> bool:
        """Records this object and its description for the next process. False: it lies outside the arena, or there is
        no room for the description. Two threads may do this for the same object: one of them writes its row."""
        extent = self._extent(blob)
        if extent is None or len(about) > MAX_ABOUT or not self.is_sound(blob):
            return False
        digest = blake3.blake3(blob.data, max_threads=max_threads).digest()
        with self._lock:
            return extent.row is not None or self._write_row(extent, blob, about, digest)

    def _write_row(self, extent: Extent, blob: Blob, about: bytes, digest: bytes) -> bool:
        self._reap()
        at = self._take(len(about)) if self._empty_rows else None
        if at is None:
            return False
        row = self._empty_rows.popleft()
        extent.about = at, _room(len(about))
        self._map[at : at + len(about)] = about
        words = (_bytes(digest), _bytes(blake3.blake3(about).digest()), 0)
        self._rows[row] = (0, extent.at, blob.nbytes, at, len(about), *words)
        self._rows["state"][row] = _KEPT
        extent.row = row  # last: a thread that sees it knows that the row is whole
        return True

    @property
    def n_rows_left(self) -> int:
        """How many more objects can be kept."""
        return len(self._empty_rows)

    def has(self, blob: Blob) -> bool:
        """Whether it lies here, and not in the process's own memory."""
        return self._extent(blob) is not None

    def is_kept(self, blob: Blob) -> bool:
        extent = self._extent(blob)
        return extent is not None and extent.row is not None

    def digest_of(self, blob: Blob) -> str | None:
        """The digest of a kept object's bytes; None: it is not kept."""
        extent = self._extent(blob)
        row = None if extent is None or extent.doubt is not None else extent.row
        if extent is None or row is None or blob.nbytes != int(self._rows["size"][row]):
            return None
        return bytes(self._rows["digest"][row]).hex()

    def found(self) -> Iterator[Found]:
        """What an earlier process kept, once. What is not adopted is forgotten."""
        while self._found:
            yield self._found.pop()

    def look_at_found(self, is_stopped: Callable[[], bool]) -> None:
        """Verify everything that was found and is not adopted yet, before a request needs it."""
        for _, blob in list(self._found):
            if not is_stopped():
                self.is_sound(blob)

    def is_sound(self, blob: Blob) -> bool:
        """Whether the bytes are unchanged since they were kept. Takes time once for each object found."""
        extent = self._extent(blob)
        doubt = None if extent is None else extent.doubt  # another thread may be looking as well
        if extent is None or doubt is None:
            return True
        if blake3.blake3(blob.data, max_threads=blake3.blake3.AUTO).digest() != doubt:
            return False
        extent.doubt = None
        return True

    def doubt(self, blob: Blob, digest: str) -> bool:
        """Marks bytes from elsewhere, to be verified before they are used. False: the array lies outside the arena,
        where nothing verifies it later."""
        extent = self._extent(blob)
        if extent is None or not _DIGEST.fullmatch(digest):
            return False
        extent.doubt = bytes.fromhex(digest)
        return True

    # what an earlier process left

    def _adopt(self, size: int) -> Iterator[Found]:
        taken: list[tuple[int, int]] = []
        for row in np.flatnonzero(self._rows["state"]).tolist():
            found = self._adopt_row(row, size, taken)
            if found is None:
                self._rows["state"][row] = 0
            else:
                yield found

    def _adopt_row(self, row: int, size: int, taken: list[tuple[int, int]]) -> Found | None:
        kept = self._rows[row]
        at = int(kept["at"])
        n_bytes = int(kept["size"])
        about_at = int(kept["about_at"])
        n_about = int(kept["about_size"])
        extents = [(at, _room(n_bytes)), (about_at, _room(n_about))]
        sane = int(kept["state"]) == _KEPT and n_bytes > 0 and 0 < n_about <= MAX_ABOUT
        if not sane or any(start < FIRST_EXTENT or start % ALIGN or start + room > size for start, room in extents):
            return None
        if any(start < self._fence < start + room for start, room in extents):
            return None
        about = bytes(self._map[about_at : about_at + n_about])
        if blake3.blake3(about).digest() != kept["about_digest"].tobytes() or not _claim(taken, extents):
            return None
        blob = self._hand_out(at, n_bytes)
        extent = self._alive[at]
        extent.row = row
        extent.about = extents[1]
        extent.doubt = kept["digest"].tobytes()
        return about, blob

    def _lay_out_free(self, size: int) -> None:
        spans = [span for e in self._alive.values() for span in ((e.at, e.room), e.about) if span is not None]
        at = FIRST_EXTENT
        for start, room in sorted([*spans, (self._fence, 0), (size - size % ALIGN, 0)]):
            if start > at:
                self._free.append((at, start - at))
            at = max(at, start + room)
            self.n_used += room

    def trim(self) -> None:
        """Returns all unused memory to the system, also what an earlier process left behind."""
        with self._lock:
            self._reap()
            if not self._is_held:
                for at, room in self._free:
                    self._return_pages(at, room)
                self._n_warm = 0

    def close(self) -> None:
        """Releases the memory as soon as all its arrays are garbage. What is kept stays in the file."""
        self._found.clear()
        self._alive.clear()

    # holding

    def hold(self) -> Blob:
        """The part before the fence. Its pages stay where they are until ``release``: the device would still use the
        old page if one were freed."""
        with self._lock:
            self._is_held = True
        return np.frombuffer(self._map, np.uint8, self._fence)

    def release(self) -> None:
        """The device no longer uses the pages; unused ones are returned to the system."""
        with self._lock:
            self._is_held = False
            for at, room in self._free:
                self._return_pages(at, room)
            self._n_warm = 0

    # room

    def _take(self, n_bytes: int, stop: int | None = None) -> int | None:
        room = _room(n_bytes)
        i = self._hole(room, stop)
        if i is None:
            return None
        at, size = self._free[i]
        self._free[i : i + 1] = [(at + room, size - room)] if size > room else []
        self.n_used += room
        self._n_warm -= min(self._n_warm, room)
        return at

    def _hole(self, room: int, stop: int | None = None) -> int | None:
        """Where an extent of this size fits: the tightest hole of the held part, so that large ones stay large, else
        the first hole. Low addresses were used before, so the system has pages there already."""
        if self._is_held:
            inside = [(size, i) for i, (at, size) in enumerate(self._free) if at < self._fence and size >= room]
            if inside:
                return min(inside)[1]
        fits = (i for i, (at, size) in enumerate(self._free) if size >= room and (stop is None or at < stop))
        return next(fits, None)

    def _reap(self) -> None:
        while self._dead:
            extent = self._dead.popleft()
            self._give_back(extent.at, extent.room)
            if extent.about is not None:
                self._give_back(*extent.about)

    def _give_back(self, at: int, room: int) -> None:
        self.n_used -= room
        is_over = self.n_used + self._n_warm + room > self.budget_bytes
        if at >= self._fence if self._is_held else is_over:
            self._return_pages(at, room)
        else:
            self._n_warm += room
        i = bisect.bisect(self._free, (at, 0))
        if i < len(self._free) and at + room == self._free[i][0] != self._fence:
            room += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == at != self._fence:
            before = self._free.pop(i := i - 1)
            at = before[0]
            room = before[1] + room
        self._free.insert(i, (at, room))

    def _return_pages(self, at: int, room: int) -> None:
        start = _paged(at)
        stop = (at + room) // PAGE * PAGE
        if stop > start and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):  # an ordinary file may not know how
                self._map.madvise(mmap.MADV_REMOVE, start, stop - start)

    def check(self) -> None:
        """Every byte is in exactly one extent or free, for tests."""
        with self._lock:
            self._reap()
            spans = [span for e in self._alive.values() for span in ((e.at, e.room), e.about) if span is not None]
            at = FIRST_EXTENT
            for start, room in sorted(spans + self._free):
                assert not start < self._fence < start + room, f"{start} to {start + room} lies across the fence"
                assert start == at, f"{at} to {start} belongs to no extent or to two"
                at += room
            assert self.n_used == sum(room for _, room in spans)


def _size_for(budget_bytes: int) -> int:
    return _paged(FIRST_EXTENT + 2 * budget_bytes + SLACK)


def _touched(n_bytes: int) -> Blob:
    """Memory whose pages exist already, made on several threads: a device's copy to new pages waits for each of them."""
    blob = heap(n_bytes)
    in_shares(n_bytes, TOUCHED_BYTES, N_TOUCHING, lambda start, stop: blob[start:stop].fill(0))
    return blob


def _name_of(owner: str) -> bytes:
    return bytes(blake3.blake3(owner.encode()).digest())


def _claim(taken: list[tuple[int, int]], extents: list[tuple[int, int]]) -> bool:
    """Add extents to those that are taken, unless one of them overlaps any."""
    for n_added, (at, room) in enumerate(extents):
        i = bisect.bisect(taken, (at, 0))
        overlaps = (i < len(taken) and at + room > taken[i][0]) or (i > 0 and sum(taken[i - 1]) > at)
        if overlaps:
            for extent in extents[:n_added]:
                taken.remove(extent)
            return False
        taken.insert(i, (at, room))
    return True


def _room(n_bytes: int) -> int:
    return max(1, -(-n_bytes // ALIGN)) * ALIGN


def _paged(n: int) -> int:
    return -(-n // PAGE) * PAGE


def _bytes(digest: bytes) -> Blob:
    return np.frombuffer(digest, np.uint8)
