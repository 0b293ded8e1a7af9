"""The memory file of the RAM tier and its first page: made by the gateway, filled and read by ``arena``.

    page 0: magic · version · file size · budget · owner      rows: which extents are kept objects      extents

The gateway makes the file and hands it to one engine after the other. It reads nothing but the budget, and needs no numpy.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

MAGIC = b"EWARENA\0"
VERSION = 1
PAGE = 4096
N_ROWS = 1 << 15
ROW_BYTES = 128
FIRST_EXTENT = PAGE + N_ROWS * ROW_BYTES  # where extents begin
_SUPER = struct.Struct("<8sQQQ32s")


def memory_file() -> int:
    """A file without a name, in memory where the system can; it is gone when the last process closes it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("everwarm", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def budget_in(fd: int) -> int | None:
    """The budget of the arena that a process left in this file; None: there is none."""
    found = read_super(fd)
    return None if found is None else found.budget_bytes


class Super(NamedTuple):
    """What page 0 says."""

    size: int
    budget_bytes: int
    owner: bytes


def read_super(fd: int) -> Super | None:
    data = os.pread(fd, _SUPER.size, 0)
    if len(data) < _SUPER.size:
        return None
    magic, version, size, budget, owner = _SUPER.unpack(data)
    if (magic, version) != (MAGIC, VERSION) or size != os.fstat(fd).st_size or size <= FIRST_EXTENT:
        return None
    return Super(size, budget, owner)


def write_super(memory: mmap.mmap, page: Super) -> None:
    _SUPER.pack_into(memory, 0, MAGIC, VERSION, *page)
