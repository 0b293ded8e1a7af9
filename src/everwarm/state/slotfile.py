"""Slot files: llama.cpp's own sequence file, and our companion beside it. Formats and safe opening, nothing else.

    NAME               u32 "ggsq" · u32 version · u32 n · n × i32 tokens · libllama's sequence state
    NAME.checkpoints   an object (see ``object``) with the items, every checkpoint, and the digest of NAME

The first is llama-server's format. It writes its token list packed (−1, version, count, tokens, media) and may append
checkpoints of its own behind the state; both are read. A name never leaves its directory, and a symbolic link is never
followed.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import blake3
import numpy as np

from everwarm.errors import BadRequest
from everwarm.prompt.prompt import Codes
from everwarm.state.files import Files
from everwarm.state.object import Damaged, fill
from everwarm.types import Blob, Place, heap

MAGIC, VERSION = 0x67677371, 4
COMPANION = ".checkpoints"

_HEAD = struct.Struct("<III")
_PACKED = struct.Struct("<iII")  # −1, version, tokens
_PACKED_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name.endswith(COMPANION):
        raise BadRequest("filename must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit")
    return name


def encode_main(tokens: Codes, state: Blob) -> Iterator[bytes | memoryview]:
    yield _HEAD.pack(MAGIC, VERSION, len(tokens))
    yield np.ascontiguousarray(tokens, "<i4").tobytes()
    yield state.data


def main_digest(tokens: Codes, state: Blob) -> str:
    """By which a companion knows the file it belongs to."""
    hasher = blake3.blake3(np.ascontiguousarray(tokens, "<i4").tobytes(), max_threads=blake3.blake3.AUTO)
    return str(hasher.update(state.data).hexdigest())


def read_main(path: Path, max_tokens: int, n_before: int = 0, place: Place = heap) -> tuple[Codes, Blob]:
    """Tokens and state of a sequence file, its sizes checked before anything is allocated; ``Damaged`` otherwise. Room for
    ``n_before`` bytes is left before the state; ``place`` gives the memory for it."""
    fd = open_plain(path)
    try:
        size = os.fstat(fd).st_size
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            raise Damaged("it is too short")
        magic, version, n = _HEAD.unpack(head)
        if magic != MAGIC or version != VERSION:
            raise Damaged("it is not a sequence file of this libllama")
        end = _HEAD.size + 4 * n
        if end > size or n > 2 * max_tokens + 1024:
            raise Damaged(f"it says that it has {n} tokens")
        packed = np.frombuffer(os.pread(fd, 4 * n, _HEAD.size), "<i4")
        state = place(n_before + size - end)[n_before:]
        fill(fd, state.data, end)
    finally:
        os.close(fd)
    return _unpacked(packed), state


def _unpacked(packed: Codes) -> Codes:
    """A plain list of tokens (-1 for cells of pictures), or llama-server's packed one without media."""
    tokens = packed
    if len(packed) > 1 and (packed[0], packed[1]) == (-1, _PACKED_VERSION):
        data = packed.tobytes()
        if len(data) < _PACKED.size + 4:
            raise Damaged("its token list is too short")
        _, _, n = _PACKED.unpack_from(data)
        if len(packed) != n + 4 or packed[-1] != 0:
            raise Damaged("its token list cannot be read, or holds media")
        tokens = packed[3 : 3 + n]
        if len(tokens) and int(tokens.min()) < 0:
            raise Damaged("it has tokens that are none")
    if len(tokens) == 0 or int(tokens.min()) < -1:
        raise Damaged("it has no tokens, or some that are none")
    return np.ascontiguousarray(tokens, np.int32)


def open_plain(path: Path) -> int:
    """A regular file, never through a symbolic link."""
    try:
        return Files().open(path)
    except OSError as error:
        raise Damaged(f"it cannot be opened: {error.strerror}") from None
