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


def n_items_of(chunks: Chunks) -> int:
    return sum(size * times for size, times in chunks)


def history_over(chunks: Chunks | list[tuple[int, int]], n_items: int) -> Chunks | None:
    """The part that leads to ``n_items``, with the whole of the chunk it lies in; None beyond the end.

    Two intervals of one reading agree in this wherever they were cut: KV from the middle of a chunk belongs exactly to a
    state only if that came from the same whole chunk.
    """
    kept: list[tuple[int, int]] = []
    left = n_items
    for size, times in chunks:
        if size == SEATED:
            if left < 0:
                break
            kept.append((size, times))
        elif left <= 0:
            break
        else:
            n = min(times, -(-left // size))
            kept.append((size, n))
            left -= n * size
    return tuple(kept) if left <= 0 else None
