"""From the disk or the remote store back into the tree: what a prompt needs is read and verified on other threads, then
laid where it belongs.

The loop's thread decides and lays; it never waits for a file while there is anything else to do. Everything here may fail
without harm: then a prompt is read again.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from everwarm.engine.cache.checkpointing import Keeper
from everwarm.engine.cache.compaction import join
from everwarm.engine.cache.provenance import CoveredRange, is_exact, n_of
from everwarm.engine.settings import RestorePolicy
from everwarm.engine.tiers.disk_writer import DiskWriter
from everwarm.engine.tiers.ram import Ram
from everwarm.errors import StateRejected
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import root_key
from everwarm.state.namespace import is_unverified
from everwarm.state.policy import GUARD, CutKind
from everwarm.state.segment_merge import fetched
from everwarm.state.store.disk import Disk
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import Damaged, ObjectHeader, ObjectReader, size_of
from everwarm.state.tree import Checkpoint, Match, Segment, SegmentPiece

if TYPE_CHECKING:  # without a remote store, none of its modules is loaded
    from everwarm.state.remote.pointer import Pointer
    from everwarm.state.remote.remote_tier import RemoteTier

log = logging.getLogger("everwarm.archive")

FIRST_READ_RATE = 500e6  # bytes per second, until measured
FIRST_REMOTE_RATE = 100e6
PATIENCE_S = 60.0  # for an answer of the remote store that is wanted whatever it takes
N_READERS = 4
N_FETCHERS = 4  # prompts at once that are looked up or brought back; two keep the readers busy
MAX_LENGTHS_HERE = 256  # digests of a prompt that the loop's thread computes itself to find it on disk
_RATE_MEMORY = 0.7
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedPoint:
    """A point as it was kept, with the KV that was missing and how far each part of that is used."""

    n_items: int
    names: tuple[str, ...]
    checkpoint: Checkpoint | None
    segments: list[tuple[Segment, int]]
    seconds: float
    tier: str = "disk"
    exact: bool = False  # it goes in place of what is here of other readings

    @property
    def n_bytes(self) -> int:
        state = 0 if self.checkpoint is None else self.checkpoint.size_bytes
        return state + sum(segment.blob.nbytes for segment, _ in self.segments)


@dataclass(frozen=True, slots=True)
class Brought:
    """What other tiers did for a prompt, in items of it."""

    n_items: int = 0  # brought into the tree
    n_passed: int = 0  # there, but reading them again is faster
    n_spoilt: int = 0  # there, but they could not be used
    n_elsewhere: int = 0  # there, for another fingerprint
    tier: str = "disk"


@dataclass(frozen=True, slots=True)
class Fetch:
    """A point that is being looked for or read for a prompt."""

    n_items: int  # as far as is known yet
    prompt: Prompt
    namespace: str
    future: Future[LoadedPoint | Brought]

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def wait(self, seconds: float) -> None:
        """Not longer than that."""
        wait((self.future,), seconds)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a prompt could use, and what is here already."""

    prompt: Prompt
    namespace: str
    ends: tuple[int, ...]
    n_have: int  # items that can be gone on from
    n_kv: int
    n_shared: int
    exact: bool = False  # only with KV of the same clean reading
    kept: tuple[CoveredRange, ...] = ()

    def n_kv_of(self, head: ObjectHeader) -> int:
        """Items whose KV need not be fetched for a state."""
        return n_of(self.kept, head.chunks or ()) if self.exact else self.n_kv


def _n_here(wish: LoadRequest, found: IndexedObject | Brought) -> int:
    """Items that can be gone on from without the remote store."""
    return found.n_items if isinstance(found, IndexedObject) else wish.n_have


class PointStore(Protocol):
    """Where objects are read from."""

    def reading(self, name: str) -> AbstractContextManager[ObjectReader]: ...


class Loader:
    def __init__(self, archive: DiskWriter, keeper: Keeper, ram: Ram, policy: RestorePolicy) -> None:
        self._archive = archive
        self._keeper = keeper
        self._ram = ram
        self._policy = policy
        self._read_rate = FIRST_READ_RATE
        self._remote_rate = FIRST_REMOTE_RATE
        self._readers = ThreadPoolExecutor(N_READERS, "everwarm-disk")
        self._fetchers = ThreadPoolExecutor(N_FETCHERS, "everwarm-fetch")
        self.n_brought = 0

    def close(self) -> None:
        self._fetchers.shutdown()
        self._readers.shutdown()

    def bring(self, prompt: Prompt, namespace: str, match: Match) -> int:
        """Lay into the tree the deepest point that is kept and worth it. Returns where it is; 0: there was none."""
        fetch = self.seek(prompt, namespace, match)
        return self.lay(fetch).n_items if isinstance(fetch, Fetch) else 0

    def seek(
        self, prompt: Prompt, namespace: str, match: Match, ends: tuple[int, ...] = (), *, exact: bool = False
    ) -> Fetch | Brought:
        """Begin to read the deepest kept point that is worth it, on other threads; or say what there is instead.
        ``exact``: what is here counts only if it is of one clean reading."""
        if is_unverified(namespace):
            return Brought()  # nothing of it was ever written
        needs_checkpoints = self._keeper.context.kind.needs_checkpoints
        usable = (node.n_items for node in match.usable if not exact or is_exact(node))
        n_have = next(usable, 0) if needs_checkpoints else match.n_kv
        wish = LoadRequest(prompt, namespace, ends, n_have, match.n_kv, match.n_shared)
        if exact and needs_checkpoints:
            known = (min(node.n_items, match.n_shared) for node in match.path)  # the last may agree only in part
            kept = tuple(
                CoveredRange(node.start, end, node.segment) for node, end in zip(match.path, known, strict=True)
            )
            wish = replace(wish, n_kv=n_have, exact=True, kept=kept)
        disk = self._archive.disk
        are_many = disk is not None and disk.n_lengths() > MAX_LENGTHS_HERE
        found = None if are_many else self._on_disk(wish)
        if isinstance(found, Brought) and self._remote_for(wish, found) is None:
            return found
        n_known = found.n_items if isinstance(found, IndexedObject) else 0
        return Fetch(n_known, prompt, namespace, self._fetchers.submit(self._bring, wish, found))

    def _bring(self, wish: LoadRequest, found: IndexedObject | Brought | None) -> LoadedPoint | Brought:
        """``None``: what is on disk is still to be found; among many states that takes its time."""
        found = self._on_disk(wish) if found is None else found
        remote = self._remote_for(wish, found)
        if remote is not None:
            return self._from_afar(remote, wish, found)
        return self._from_disk(found, wish) if isinstance(found, IndexedObject) else found

    def _remote_for(self, wish: LoadRequest, found: IndexedObject | Brought) -> RemoteTier | None:
        """The remote store, if asking it can pay beside what is here."""
        remote = self._archive.remote
        may_help = remote is not None and self._may_help(remote, len(wish.prompt) - 1 - _n_here(wish, found))
        return remote if may_help else None

    def _on_disk(self, wish: LoadRequest) -> IndexedObject | Brought:
        """The deepest point on disk that is worth it, or what there is instead."""
        disk = self._archive.disk
        if disk is None:
            return Brought()
        root = root_key(self._archive.fingerprint, wish.namespace)
        kept = disk.find(root, wish.prompt, len(wish.prompt) - 1)
        if kept is None or kept.n_items <= wish.n_have + GUARD:
            is_more_new = len(wish.prompt) - max(wish.n_have, wish.n_shared) > GUARD
            elsewhere = self._archive.elsewhere
            return Brought(n_elsewhere=elsewhere.n_known(wish.namespace, wish.prompt) if is_more_new else 0)
        n_bytes = disk.size_of([kept.name, *kept.needs])
        if not self._is_worth_it(n_bytes, kept.n_items - wish.n_have, self._read_rate):
            return Brought(n_passed=kept.n_items)
        return kept

    def lay(self, fetch: Fetch) -> Brought:
        """What was read, into the tree."""
        try:
            loaded = fetch.future.result()
        except Damaged as error:
            log.warning("%d tokens on disk could not be used: %s", fetch.n_items, error)
            return Brought(n_spoilt=fetch.n_items)
        if isinstance(loaded, Brought):
            return loaded
        tree, root = self._keeper.tree, self._keeper.tree.root(fetch.namespace)
        for segment, reach in loaded.segments:
            for end in (piece.n_stop for piece in segment.pieces if piece.n_stop < reach):
                tree.grow(root, fetch.prompt, end)  # where turns ended; the disk may have a state there
            tree.lay_segment(root, fetch.prompt, segment, segment.n_start, reach, instead=loaded.exact)
        node = tree.grow(root, fetch.prompt, loaded.n_items)
        if loaded.exact and node.checkpoint is not None and not is_exact(node):
            self._keeper.drop_checkpoint(node, "brought, and clean")
            node = tree.grow(root, fetch.prompt, loaded.n_items)
        if loaded.checkpoint is not None and node.checkpoint is None:
            tree.set_checkpoint(node, loaded.checkpoint)
        self._archive.pins.renew(fetch.namespace, fetch.prompt, loaded.n_items)
        self._note(loaded)
        shown = (loaded.n_items, loaded.tier, loaded.n_bytes / _MIB, loaded.seconds)
        log.debug("brought %d tokens from %s: %.1f MiB in %.3f s", *shown)
        return Brought(loaded.n_items, tier=loaded.tier)

    def _note(self, loaded: LoadedPoint) -> None:
        rate = loaded.n_bytes / loaded.seconds
        if loaded.tier == "remote":
            self._remote_rate = _RATE_MEMORY * self._remote_rate + (1 - _RATE_MEMORY) * rate
            return
        self._read_rate = _RATE_MEMORY * self._read_rate + (1 - _RATE_MEMORY) * rate
        if (disk := self._archive.disk) is not None:
            self._archive.after_all(partial(disk.touch, loaded.names))
        self.n_brought += 1

    def _is_worth_it(self, n_bytes: int, n_saved: int, rate: float) -> bool:
        load_s, read_s = n_bytes / rate, n_saved * self._keeper.seconds_per_token
        if self._policy == "auto" and load_s > read_s:
            log.debug("reading %d tokens again (%.3f s) is faster than loading them (%.3f s)", n_saved, read_s, load_s)
            return False
        return True

    # the remote store

    def _may_help(self, remote: RemoteTier, n_new: int) -> bool:
        """Whether asking can pay: two round trips against reading what is new."""
        pays = self._policy == "always" or n_new * self._keeper.seconds_per_token > 2 * remote.answer_s
        return n_new > GUARD and pays and not remote.breaker.is_open

    def _from_afar(
        self, remote: RemoteTier, wish: LoadRequest, found: IndexedObject | Brought
    ) -> LoadedPoint | Brought:
        """From the remote store if that has more than there is here; else what is here."""
        root = root_key(self._archive.fingerprint, wish.namespace)
        post = remote.find(root, wish.prompt, wish.ends, least=_n_here(wish, found) + GUARD)
        if post is None:
            return self._from_disk(found, wish) if isinstance(found, IndexedObject) else found
        n_saved = post.n_items - wish.n_have
        if not self._is_worth_it(post.n_bytes(wish.n_kv), n_saved, self._remote_rate):
            remote.counts.n_misses += 1
            return self._from_disk(found, wish) if isinstance(found, IndexedObject) else Brought(n_passed=post.n_items)
        patience_s = (
            PATIENCE_S if self._policy == "always" else remote.wait_s + n_saved * self._keeper.seconds_per_token / 2
        )
        try:
            with RemoteFetch(remote, post, wish.n_kv, patience_s, self._archive.disk) as afar:
                loaded = self._load(afar, post.name, post.n_items, wish)
        except Damaged as error:
            log.warning("%d tokens in the remote store could not be used: %s", post.n_items, error)
            remote.counts.n_misses += 1
            return self._from_disk(found, wish) if isinstance(found, IndexedObject) else Brought(n_spoilt=post.n_items)
        remote.counts.n_hits += 1
        return replace(loaded, tier="remote")

    # reading

    def _from_disk(self, kept: IndexedObject, wish: LoadRequest) -> LoadedPoint | Brought:
        assert self._archive.disk is not None
        return self._load(self._archive.disk, kept.name, kept.n_items, wish)

    def _load(self, store: PointStore, name: str, n_items: int, wish: LoadRequest) -> LoadedPoint:
        """Everything is read before anything is changed: a damaged object changes nothing."""
        began = time.monotonic()
        kind = self._keeper.context.kind
        with store.reading(name) as reader:
            head = self._checked(reader, wish.prompt, n_items)
            state = reader.read("state", self._ram.place) if kind.needs_checkpoints else None
        if len(head.needs) != len(head.reaches) or any(reach > head.n_items for reach in head.reaches):
            raise Damaged("it does not say how far its parts reach")
        load = partial(self._load_segment, store, wish, wish.n_kv_of(head))
        parts = [part for part in self._readers.map(load, head.needs, head.reaches) if part is not None]
        segments = self._joined(parts)
        checkpoint = None
        if state is not None:
            cut = CutKind.named(head.cut)
            checkpoint = Checkpoint(cut, head.clean, head.chunks or (), state=state, used_at=time.monotonic())
        took_s = max(1e-6, time.monotonic() - began)
        return LoadedPoint(n_items, (name, *head.needs), checkpoint, segments, took_s, exact=wish.exact)

    def _joined(self, parts: list[tuple[Segment, int]]) -> list[tuple[Segment, int]]:
        """What many small objects hold, as few segments: each takes libllama its time."""
        whole = [segment for segment, reach in parts if reach == segment.n_stop]
        rest = [(segment, reach) for segment, reach in parts if reach < segment.n_stop]
        made = [segment for group in fetched(whole, self._keeper.most_joined) for segment in self._as_one(group)]
        return sorted([*((segment, segment.n_stop) for segment in made), *rest], key=lambda part: part[1])

    def _as_one(self, group: list[Segment]) -> list[Segment]:
        """Unless they do not belong together: restoring them will say so."""
        try:
            return [join(self._keeper.context, group)] if len(group) > 1 else group
        except StateRejected:
            return group

    def _load_segment(
        self, store: PointStore, wish: LoadRequest, n_kv: int, name: str, reach: int
    ) -> tuple[Segment, int] | None:
        """None: its KV is here already."""
        if reach <= n_kv:
            return None
        with store.reading(name) as reader:
            head = self._checked(reader, wish.prompt, reach)
            start, own = wish.prompt.mark(head.n_start), self._own_items(reader)
            path = wish.prompt.followed_by(head.n_start, own)
            span = (head.n_start, head.n_items)
            blob = reader.read("kv", self._ram.place)
            pieces = (SegmentPiece(*span, name, size_of(head)),)
            return Segment(blob, start, path.end, head.clean, head.chunks, 0, span, path, pieces), reach

    @staticmethod
    def _own_items(reader: ObjectReader) -> Prompt:
        own = Prompt.of_rows(reader.read("items").view("<i4"), reader.header.media)
        if own is None:
            raise Damaged("its media are others than its items say")
        return own

    def _checked(self, reader: ObjectReader, prompt: Prompt, stop: int) -> ObjectHeader:
        """A hash never decides alone: the items themselves are compared, as far as they are used."""
        head, stored = reader.header, self._own_items(reader)
        start = head.n_start if head.kind == "kv" else 0
        if len(stored) != head.n_items - start or head.fingerprint != self._archive.fingerprint:
            raise Damaged("it is not what the index said")
        if not start < stop <= min(head.n_items, len(prompt)):
            raise Damaged("it does not reach as far as it is needed")
        if int(prompt.common_prefix(prompt.followed_by(start, stored))) < stop:
            raise Damaged("its items are others than its name says")
        return head


_FIRST_GUESS = 1 << 20  # of the size of what no signpost names


class RemoteFetch:
    def __init__(self, remote: RemoteTier, post: Pointer, n_kv: int, patience_s: float, disk: Disk | None) -> None:
        self._remote = remote
        self._disk = disk
        self._patience_s = patience_s
        self._here = frozenset() if disk is None else disk.names()
        sizes = {post.name: post.size} | {need.name: need.size for need in post.needs if need.reach > n_kv}
        self._downloads = {
            name: remote.download(name, size, patience_s) for name, size in sizes.items() if name not in self._here
        }

    def __enter__(self) -> RemoteFetch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nobody waits for the rest."""
        for download in self._downloads.values():
            download.cancel()

    def reading(self, name: str) -> AbstractContextManager[ObjectReader]:
        if self._disk is not None and name in self._here:
            return self._disk.reading(name)
        download = self._downloads.pop(name, None) or self._remote.download(name, _FIRST_GUESS, self._patience_s)
        return self._remote.reading(name, download)
