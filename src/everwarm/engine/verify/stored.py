"""A state from disk with all its KV in memory, and how to read the same items cold. Nothing a file says is believed: what
does not fit together is ``Damaged`` before libllama sees any of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everwarm.config import MAX_BATCH, MAX_CTX
from everwarm.llama.model import MemoryKind
from everwarm.prompt.prompt import Codes
from everwarm.state.lineage import SEATED, Chunks, history_over, n_items_of
from everwarm.state.store.object import Damaged, ObjectHeader, ObjectReader
from everwarm.state.tools.inventory import Lineage, Object, open_object
from everwarm.types import Blob

_MAX_SEATS = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredKv:
    """KV of which a state uses the cells up to ``reach``."""

    name: str
    head: ObjectHeader
    reach: int
    codes: Codes
    blob: Blob

    @property
    def n_cells(self) -> int:
        return self.head.n_items - self.head.n_start

    def is_of(self, chunks: Chunks) -> bool:
        """Whether it comes from a clean reading in these chunks."""
        own = self.head.chunks
        history = None if not self.head.clean or own is None else history_over(own, self.reach)
        return history is not None and history == history_over(chunks, self.reach)


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    head: ObjectHeader
    codes: Codes
    state: Blob | None
    parts: tuple[StoredKv, ...]

    @property
    def n_items(self) -> int:
        return self.head.n_items


@dataclass(frozen=True, slots=True)
class Reading:
    """Items and the chunks to read them in; ``clean``: they were read so alone, and gave the same bytes."""

    codes: Codes
    chunks: Chunks
    clean: bool


def load_stored(lineage: Lineage, kind: MemoryKind, n_vocab: int) -> Stored:
    state, head = lineage.state, lineage.state.header
    with open_object(state.path) as reader:
        codes = _codes(reader, n_vocab)
        blob = reader.read("state") if kind.needs_checkpoints else None
    parts: list[StoredKv] = []
    if kind.has_attention:
        if len(lineage.kv) != len(head.reaches) or head.reaches[-1:] != (head.n_items,):
            raise Damaged("it does not say how far its parts reach")
        for thing, reach in zip(lineage.kv, head.reaches, strict=True):
            parts.append(_load_part(thing, parts[-1].reach if parts else 0, reach, codes, n_vocab))
    return Stored(state.name, head, codes, blob, tuple(parts))


def _load_part(thing: Object, at: int, reach: int, codes: Codes, n_vocab: int) -> StoredKv:
    head = thing.header
    with open_object(thing.path) as reader:
        own = _codes(reader, n_vocab)
        if not (head.n_start <= at < reach <= min(head.n_items, len(codes))):
            raise Damaged(f"{thing.name} does not reach from {at} to {reach}")
        if not np.array_equal(own[: reach - head.n_start], codes[head.n_start : reach]):
            raise Damaged(f"{thing.name} belongs to other items")
        return StoredKv(thing.name, head, reach, own, reader.read("kv"))


def is_plausible(lineage: Lineage) -> bool:
    """Whether a context may be made as large as these say they are."""
    head = lineage.state.header
    reaches_inside = all(0 < reach <= head.n_items for reach in head.reaches)
    return reaches_inside and all(_has_items(thing.header) for thing in (lineage.state, *lineage.kv))


def _has_items(head: ObjectHeader) -> bool:
    n = head.n_items - (head.n_start if head.kind == "kv" else 0)
    lengths = [section.length for section in head.sections if section.name == "items"]
    return 0 < n <= MAX_CTX and lengths == [4 * n]


def _codes(reader: ObjectReader, n_vocab: int) -> Codes:
    """The items an object is about, which must all be tokens of the model."""
    if not _has_items(reader.header):
        raise Damaged("it has another number of items than it says")
    codes = reader.read("items").view("<i4").astype(np.int32)
    if int(codes.min()) < 0 or int(codes.max()) >= n_vocab:
        raise Damaged("it has items that are no tokens of this model")
    return codes


# reading them again


def reading_of(stored: Stored, n_batch: int) -> Reading:
    """As the state was read; where it does not say, as the last of its KV was; else in the largest chunks there are."""
    chunks = stored.head.chunks or ()
    if _leads_to(chunks, stored.n_items):
        return Reading(stored.codes, chunks, stored.head.clean)
    last = stored.parts[-1] if stored.parts else None
    if last is not None and stored.state is None and _leads_to(last.head.chunks or (), last.head.n_items):
        codes = np.concatenate([stored.codes[: last.head.n_start], last.codes])
        read = last.head.chunks or ()
        return Reading(codes, read, all(part.is_of(read) for part in stored.parts))
    whole, rest = divmod(stored.n_items, n_batch)
    plain = (((n_batch, whole),) if whole else ()) + (((rest, 1),) if rest else ())
    return Reading(stored.codes, plain, clean=False)


def _leads_to(chunks: Chunks, n_items: int) -> bool:
    """Whether these can be the chunks of so many items."""
    if any(not SEATED <= size <= MAX_BATCH or times < 1 for size, times in chunks):
        return False
    return n_items_of(chunks) == n_items and sum(times for size, times in chunks if size == SEATED) <= _MAX_SEATS


def n_chunk_of(lineage: Lineage) -> int:
    """The largest chunk that a replay may decode."""
    known = (thing.header.chunks or () for thing in (lineage.state, *lineage.kv))
    return max((size for chunks in known for size, _ in chunks if 0 < size <= MAX_BATCH), default=1)


def n_cells_of(lineage: Lineage) -> int:
    """How much room it takes to bring it back and to read it again, with one more item behind it."""
    head = lineage.state.header
    n, at = head.n_items, 0
    for kv, reach in zip(lineage.kv, head.reaches, strict=False):
        n = max(n, kv.header.n_items, at + kv.header.n_items - kv.header.n_start)
        at = reach
    return min(MAX_CTX, n + 1)
