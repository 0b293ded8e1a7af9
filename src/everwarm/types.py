"""The types that all folders share: counters, and bytes.

A token count and a position are both integers and must never be mixed: under M-RoPE an image of 60 cells may advance
the position by 8. They are distinct types here, and only ``everwarm.prompt`` converts between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NewType, TypeAlias

if TYPE_CHECKING:  # the gateway uses these types and makes no arrays: it starts without numpy
    import numpy as np
    from numpy.typing import NDArray

ItemCount = NewType("ItemCount", int)  # prompt elements: a text token is one, a whole image is one
TokenCount = NewType("TokenCount", int)  # KV cells
Position = NewType("Position", int)  # what RoPE sees
SeqId = NewType("SeqId", int)  # a libllama sequence


class Mark(NamedTuple):
    """A point of a prompt in both counters at once. ``lag``: right after an image whose cells all share one position, by
    how much that lies behind where a text's last cell would."""

    n_tokens: TokenCount
    pos: Position
    lag: int = 0

    @property
    def last_pos(self) -> int:
        """The position of the last cell."""
        return self.pos - 1 - self.lag


START = Mark(TokenCount(0), Position(0))


Blob: TypeAlias = "NDArray[np.uint8]"
Json = dict[str, Any]  # an object of a request or an answer
Place: TypeAlias = "Callable[[int], Blob]"  # gives memory for so many bytes


def heap(n_bytes: int) -> Blob:
    """Ordinary memory of this process: the ``Place`` for bytes that need not outlive it."""
    import numpy as np

    return np.empty(n_bytes, np.uint8)


def token_mark(n_items: int) -> Mark:
    """Where a text of so many items ends: one cell and one position each."""
    return Mark(TokenCount(n_items), Position(n_items))
