"""The head's part of a kept blob, behind the model's own: KV of the same cells, or the row that its next token needs. Pure.

    the model's blob · the head's part · u64 its length · "EWHEAD01"

A blob without it is as good as one with it: the head then knows less of the text, and guesses worse for a while.
"""

from __future__ import annotations

import struct

import numpy as np

from everwarm.types import Blob, Place

_END = struct.Struct("<Q8s")
_MARK = b"EWHEAD01"


def split(blob: Blob) -> tuple[Blob, Blob | None]:
    """The model's blob, and the head's part if there is one."""
    if len(blob) < _END.size:
        return blob, None
    length, mark = _END.unpack_from(blob.data, len(blob) - _END.size)
    n_trunk = len(blob) - _END.size - length
    if mark != _MARK or n_trunk <= 0:
        return blob, None
    return blob[:n_trunk], blob[n_trunk : n_trunk + length]


def trunk(blob: Blob) -> Blob:
    return split(blob)[0]


def tail_bytes(n_tail: int) -> int:
    """What a part of so many bytes adds to a blob."""
    return n_tail + _END.size


class Room:
    """A place for a blob and the part behind it, so that the blob is written once."""

    def __init__(self, place: Place, tail: Blob | None) -> None:
        self._place = place
        self._tail = tail
        self._whole: Blob | None = None

    def __call__(self, n_bytes: int) -> Blob:
        if self._tail is None:
            return self._place(n_bytes)
        self._whole = self._place(n_bytes + tail_bytes(len(self._tail)))
        return self._whole[:n_bytes]

    def closed(self, blob: Blob) -> Blob:
        """The whole: ``blob``, which was placed here last or lies elsewhere, with the part behind it."""
        if self._tail is None:
            return blob
        whole, n = self._whole, len(blob)
        if whole is None or len(whole) != n + tail_bytes(len(self._tail)) or blob.ctypes.data != whole.ctypes.data:
            self(n)[:] = blob
            whole = self._whole
        assert whole is not None
        whole[n : n + len(self._tail)] = self._tail
        whole[n + len(self._tail) :] = np.frombuffer(_END.pack(len(self._tail), _MARK), np.uint8)
        return whole
