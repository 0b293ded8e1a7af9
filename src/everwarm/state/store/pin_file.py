"""Which points are pinned on disk, in a small durable file of its own: the index may be thrown away.

A pin names a lineage, whether or not a state of it is kept, and the points on the way there, which stay with it. A file
that cannot be decoded counts as empty.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from everwarm.state.lineage import Point, point_of
from everwarm.state.store.files import TEMPORARY, Files

log = logging.getLogger("everwarm.disk")

PINS = "pins.json"
MAX_PINS = 4096
MAX_ABOVE = 512  # points of one pin that are remembered; the deepest
_MAX_BYTES = 64 << 20


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
        self.marked: frozenset[Point] = frozenset()  # points whose states go last
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
        """False: it is there already, or there are too many. Raises ``OSError``: it will not outlive this process."""
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
        """False: there was none of them. Raises ``OSError``: they will come back in the next process."""
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
