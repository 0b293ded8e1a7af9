"""Names for lineages and namespaces. A lineage's is a digest of everything from the root to a point, the same in every
process. Pure.

A history is how a sequence was decoded: the sizes of its chunks, run-length coded. Bits depend on it, so it is stored
with every state and segment: a cold replay needs it, and a state is exact only with KV of the same history. A chunk of
size 0 says that a window was seated anew there.

Some namespaces hold what came from a file of unknown origin, or was read with other scales of LoRA adapters than the
engine's: their names say so. What such a file brought, and everything that is decoded on top of it, lives below a root
of its own in the prefix tree. No other conversation finds it, and all code that stores states checks the root first, so
nothing derived from such a file can leave RAM. The same holds for what is read with other scales: the fingerprint of
what is stored has the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import blake3
import numpy as np

from everwarm.prompt.prompt import Prompt

N_SHORT = 16  # hexadecimal digits that stand for the whole name of a lineage, where its length is known as well
SEATED = 0


def root_key(fingerprint: str, namespace: str) -> str:
    """Different models, settings and namespaces never share a name."""
    return blake3.blake3(f"everwarm\0{len(fingerprint)}\0{fingerprint}\0{namespace}".encode()).hexdigest()


Point = tuple[str, int]  # a lineage's short name, and how many items it has


def short_key(key: str) -> str:
    """The beginning of a lineage's name. That of a root stands for its namespace in headers, as their ``space``."""
    return key[:N_SHORT]


def point_of(key: str, n_items: int) -> Point:
    return short_key(key), n_items


def keys(root: str, prompt: Prompt, ends: Iterable[int]) -> dict[int, str]:
    """The names of the lineages that end after these numbers of items, all in one pass. A media item counts with its
    whole digest: its code is too short to tell images apart."""
    hasher = blake3.blake3(bytes.fromhex(root))
    found, done, wanted = {}, 0, set(ends)
    data = np.ascontiguousarray(prompt.codes, dtype="<i4")
    for end in sorted(wanted | {index + 1 for index in prompt.media}):
        if end > done:
            hasher.update(data[done:end].data.cast("B"))
        done = end
        if (item := prompt.media.get(end - 1)) is not None:
            hasher.update(item.digest)
        if end in wanted:
            found[end] = hasher.hexdigest()
    return found


Chunks = tuple[tuple[int, int], ...]  # (items per decode, how many times), from the beginning


def record(chunks: list[tuple[int, int]], size: int) -> None:
    """Adds a chunk; a whole reply stays one entry."""
    if chunks and chunks[-1][0] == size:
        chunks[-1] = (size, chunks[-1][1] + 1)
    else:
        chunks.append((size, 1))


def n_items_of(chunks: Chunks) -> int:
    return sum(size * times for size, times in chunks)


def history_over(chunks: Chunks | list[tuple[int, int]], n_items: int) -> Chunks | None:
    """The part up to ``n_items``, including the whole chunk that contains it; None beyond the end.

    Two intervals of one reading agree in this wherever they were cut: KV from the middle of a chunk is exact for a
    state only if both came from the same whole chunk.
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


def is_begun_by(chunks: Chunks, first: Chunks | list[tuple[int, int]]) -> bool:
    """Whether a reading in ``chunks`` began in just these ones. Seating a window twice is seating it once."""
    whole, begun = _seated_once(chunks), _seated_once(first)
    if not begun:
        return True
    if len(begun) > len(whole) or begun[:-1] != whole[: len(begun) - 1]:
        return False
    (size, times), (size_then, times_then) = begun[-1], whole[len(begun) - 1]
    return size == size_then and times <= times_then


def chunk_at(chunks: Chunks, n_items: int) -> int | None:
    """The size of the chunk that begins there; None at the end and inside a chunk."""
    at = 0
    for size, times in chunks:
        if size and at <= n_items < at + size * times:
            return size if (n_items - at) % size == 0 else None
        at += size * times
    return None


def is_seated_at(chunks: Chunks, n_items: int) -> bool:
    at = 0
    for size, times in chunks:
        at += size * times
        if size == SEATED and at == n_items:
            return True
    return False


def _seated_once(chunks: Chunks | list[tuple[int, int]]) -> Chunks:
    return tuple((size, 1 if size == SEATED else times) for size, times in chunks)


# namespaces

_UNVERIFIED = "\0unverified\0"  # in no name that a client could have
_ADAPTED = "\0lora\0"


def unverified(namespace: str, digest: str) -> str:
    """The namespace of conversations that continue a file of unknown origin."""
    return f"{owner_of(namespace)}{_UNVERIFIED}{digest}"


def is_unverified(namespace: str) -> bool:
    return _UNVERIFIED in namespace


def adapted(namespace: str, scales: Sequence[float]) -> str:
    """The namespace of requests with these scales of the engine's adapters."""
    return f"{namespace}{_ADAPTED}{','.join(map(repr, scales))}"


def is_adapted(namespace: str) -> bool:
    return _ADAPTED in namespace


def is_volatile(namespace: str) -> bool:
    """Whether nothing of it leaves RAM, or outlives the engine."""
    return is_unverified(namespace) or is_adapted(namespace)


def owner_of(namespace: str) -> str:
    """The namespace of the client's request."""
    return namespace.partition(_UNVERIFIED)[0].partition(_ADAPTED)[0]
