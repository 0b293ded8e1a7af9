"""One object on its way from the remote store: all its pieces are requested at once and come in any order.

Reading a section waits for the pieces it needs, and no longer than ``patience_s``. The MAC is checked before anything of
the header is believed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import numpy as np

from everwarm.state.remote.pointer import MAC_BYTES, Mac
from everwarm.state.store.object import Damaged, ObjectReader

PIECE = 8 << 20
SLACK = 1 << 20  # headers of the same object may differ in length

Piece = tuple[memoryview, int] | None  # bytes and the size of the whole; None: there is no such object
Begin = Callable[[int, int], Future[Piece]]


class Download:
    def __init__(self, begin: Begin, size: int, patience_s: float) -> None:
        self._begin = begin
        self._until = time.monotonic() + patience_s
        self.size = size
        self._pieces = self._ask()

    def _ask(self) -> dict[int, Future[Piece]]:
        return {at: self._begin(at, min(at + PIECE, self.size)) for at in range(0, self.size, PIECE)}

    def cancel(self) -> None:
        for future in self._pieces.values():
            future.cancel()

    def reader(self, name: str, mac: Mac) -> ObjectReader:
        """``FileNotFoundError``: it is gone. ``Damaged``: it was not written under this name with this key."""
        size = self._answer(0)[1]
        if size != self.size:  # another writer's, of another size: request it again
            self.cancel()
            if not MAC_BYTES < size <= 2 * self.size + SLACK:
                raise Damaged(f"it has {size} bytes, and about {self.size} were announced")
            self.size = size
            self._pieces = self._ask()
        return _Fetched(self, name, mac)

    def fill(self, view: memoryview, offset: int) -> None:
        into, done = np.frombuffer(view, np.uint8), 0
        while done < len(into):
            at = (offset + done) // PIECE * PIECE
            data = np.frombuffer(self._answer(at)[0], np.uint8)[offset + done - at :]
            n = min(len(data), len(into) - done)
            if n <= 0:
                raise Damaged("it ends early")
            into[done : done + n] = data[:n]
            done += n

    def _answer(self, at: int) -> tuple[memoryview, int]:
        future = self._pieces.get(at)
        if future is None:
            raise Damaged("it is too short")
        try:
            piece = future.result(max(0.0, self._until - time.monotonic()))
        except CancelledError:
            raise TimeoutError("the store was closed") from None
        if piece is None:
            raise FileNotFoundError
        return piece


class _Fetched(ObjectReader):
    def __init__(self, download: Download, name: str, mac: Mac) -> None:
        self._download = download
        self._name = name
        self._mac = mac
        super().__init__(-1, 0, download.size - MAC_BYTES)

    def _raw_head(self) -> tuple[int, bytes]:
        length, head = super()._raw_head()
        own = bytearray(MAC_BYTES)
        self._fill(memoryview(own), self._size)
        if not self._mac.is_right(bytes(own), self._name, self._size, head):
            raise Damaged("its MAC is not one of this key, name and model")
        return length, head

    def _fill(self, view: memoryview, offset: int) -> None:
        self._download.fill(view, offset)
