"""How a sequence came about: the sizes of the chunks it was decoded in, run-length coded.

Bits depend on it, so it is kept with everything that is kept: a cold replay needs it, and a state belongs exactly only to
KV of the same history. A chunk of size 0 says that a window was seated anew there. Pure.
"""

from __future__ import annotations

Chunks = tuple[tuple[int, int], ...]  # (items per decode, how many times), from the beginning

SEATED = 0


def record(chunks: list[tuple[int, int]], size: int) -> None:
    """One more chunk; a whole reply stays one entry."""
    if chunks and chunks[-1][0] == size:
        chunks[-1] = (size, chunks[-1][1] + 1)
    else:
        chunks.append((size, 1))


def history_at(chunks: Chunks | list[tuple[int, int]], n_items: int) -> Chunks | None:
    """The part that leads to exactly ``n_items``, or None where that lies inside a chunk or beyond the end."""
    kept: list[tuple[int, int]] = []
    left = n_items
    for size, times in chunks:
        if left == 0 and size != SEATED:
            break
        if size == SEATED:
            kept.append((size, times))
        elif size * times <= left:
            kept.append((size, times))
            left -= size * times
        elif left % size == 0:
            kept.append((size, left // size))
            left = 0
            break
        else:
            return None
    return tuple(kept) if left == 0 else None
