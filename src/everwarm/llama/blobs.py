"""Reading the beginning of libllama's state blobs, because some that it does not like abort the process."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from everwarm.llama.model import MemoryKind
from everwarm.types import Mark

_MAGIC = 0xAF143CD8
_RECURRENT = struct.Struct("<IiIiI")  # magic, sequence, cells, position, sequences of the cell
_WINDOW = struct.Struct("<IiII")  # magic, sequence, streams, cells


def describes_end(blob: NDArray[np.uint8], kind: MemoryKind, mark: Mark) -> bool:
    """Whether a partial blob is one sequence's state that ends right before ``mark``."""
    if kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT):
        if len(blob) < _RECURRENT.size:
            return False
        magic, _, n_cells, pos, n_seqs = _RECURRENT.unpack_from(blob.data)
        return bool(magic == _MAGIC and n_cells == 1 and pos == mark.pos - 1 and n_seqs == 0)
    if len(blob) < _WINDOW.size:
        return False
    magic, _, n_streams, n_cells = _WINDOW.unpack_from(blob.data)
    return bool(magic == _MAGIC and n_streams == 1 and n_cells <= mark.n_tokens)
