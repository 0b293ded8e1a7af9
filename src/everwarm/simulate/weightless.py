"""Blobs of a simulated cache."""

from __future__ import annotations

import numpy as np

from everwarm.types import Blob

_BYTE = np.zeros(1, np.uint8)


def weightless(n_bytes: int) -> Blob:
    """An array that claims a size in bytes and takes no memory."""
    return np.broadcast_to(_BYTE, (n_bytes,))
