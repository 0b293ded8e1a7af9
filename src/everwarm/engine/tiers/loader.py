"""From the disk or the remote store back into the tree: other threads read what a prompt needs, then the loop's thread
adds it to the tree. ``state.store.object`` checks every digest as it reads; here items and fingerprint are compared.

The loop's thread decides, and never waits for a file while there is anything else to do. Any failure here only means
that a prompt is read again. Checkpoints that are still being read out of a slot file come the same way: a request that
needs one of them waits for it, as it waits for the disk.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial

from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.compaction import join
from everwarm.engine.cache.provenance import CoveredRange, is_exact, n_of
from everwarm.engine.settings import RestorePolicy
from everwarm.engine.stats import Speed
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.engine.tiers.packing import object_size
from everwarm.engine.tiers.pins import pin_again
from everwarm.engine.tiers.ram import Ram
from everwarm.errors import StateRejected
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import is_volatile, root_key
from everwarm.state.policy import GUARD, CutKind
from everwarm.state.segment_merge import fetched
from everwarm.state.store.folder_meta import n_foreign_items
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import Damaged, ObjectHeader
from everwarm.state.tier import OpenObject, PartReader
from everwarm.state.tree import Checkpoint, Match, Node, Segment, SegmentPiece, Tree

log = logging.getLogger("everwarm.tiers")

FIRST_READ_RATE = 500e6  # bytes per second, until measured
FIRST_REMOTE_RATE = 100e6
PATIENCE_S = 60.0  # for the remote store where the policy is ``always``
N_READERS = 4
N_FETCHERS = 4  # prompts at once that are looked up or brought back; two keep the readers busy
MAX_LENGTHS_HERE = 256  # digests of a prompt: up to so many the loop's thread computes itself to find it on disk
MOST_LOOKS = 8  # for a state of one clean reading
_RATE_MEMORY = 0.7
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedPoint:
    """A loaded point, with the KV that was missing and how far each part of it is used."""

    n_items: int
    names: tuple[str, ...]
    checkpoint: Checkpoint | None
    segments: list[tuple[Segment, int]]
    seconds: float
    tier: str = "disk"
    exact: bool = False  # it replaces what is in the tree of other readings

    @property
    def n_bytes(self) -> int:
        state = 0 if self.checkpoint is None else self.checkpoint.size_bytes
        return state + sum(segment.blob.nbytes for segment, _ in self.segments)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What was loaded from tiers beyond RAM for a prompt, in items."""

    n_items: int = 0  # brought into the tree
    n_passed: int = 0  # found, but reading them again is faster
    n_spoilt: int = 0  # found, but damaged
    n_elsewhere: int = 0  # found for another fingerprint
    n_unclean: int = 0  # found, but not of the one clean reading that the request wants
    tier: str = "disk"


@dataclass(slots=True, eq=False)
class Arriving:
    """Checkpoints that another thread is still reading out of a slot file, by how many items each has. Everything but
    reading happens on the loop's thread."""

    prompt: Prompt
    namespace: str
    points: dict[int, Future[LoadedPoint | LoadOutcome]]
    clean: frozenset[int]  # those of one clean reading
    lost: set[int] = field(default_factory=set)  # those that are damaged, or were erased meanwhile
    is_stopped: bool = False  # what comes now is not wanted any more

    @classmethod
    def of(cls, prompt: Prompt, namespace: str, points: Mapping[int, bool]) -> Arriving:
        """``points``: by their items, whether they are clean."""
        clean = frozenset(n_items for n_items, is_clean in points.items() if is_clean)
        return cls(prompt, namespace, {n_items: Future() for n_items in points}, clean)

    def best_for(self, prompt: Prompt, namespace: str, n_have: int, *, exact: bool = False) -> int | None:
        """The deepest one that a prompt begins with, if it is worth waiting for: ``n_have`` items are there already.
        ``exact``: only a clean one counts."""
        if self.is_stopped or namespace != self.namespace:
            return None
        most = min(int(prompt.common_prefix(self.prompt)), len(prompt) - 1)
        among = (self.clean if exact else self.points.keys()) - self.lost
        best = max((n_items for n_items in among if n_items <= most), default=0)
        return best if best > n_have + GUARD else None


@dataclass(frozen=True, slots=True)
class Fetch:
    """A point that is being looked for or read for a prompt."""

    n_items: int  # as far as is known yet
    prompt: Prompt
    namespace: str
    future: Future[LoadedPoint | LoadOutcome]
    file: Arriving | None = None  # the slot file that it comes from

    @property
    def is_done(self) -> bool:
        return self.future.done()

    @property
    def is_lost(self) -> bool:
        """Whether it will not come from its slot file; another point of that may."""
        return self.file is not None and (self.file.is_stopped or self.n_items in self.file.lost)

    def wait(self, seconds: float) -> None:
        """Waits at most this long."""
        wait((self.future,), seconds)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt, and what of it is in RAM already."""

    prompt: Prompt
    namespace: str
    ends: tuple[int, ...]
    most: int  # items of a state that is looked for
    n_have: int  # items up to the deepest state that can be restored
    n_kv: int
    n_shared: int
    exact: bool = False  # only with KV of the same clean reading
    kept: tuple[CoveredRange, ...] = ()

    def n_kv_of(self, head: ObjectHeader) -> int:
        """Items whose KV need not be fetched for a state."""
        return n_of(self.kept, head.chunks or ()) if self.exact else self.n_kv


def _n_here(request: LoadRequest, found: IndexedObject | LoadOutcome) -> int:
    """Items up to the deepest state that can be restored without the remote store."""
    return found.n_items if isinstance(found, IndexedObject) else request.n_have


class Loader:
    def __init__(
        self,
        tiers: LowerTiers,
        context: Context,
        tree: Tree,
        checkpointer: Checkpointer,
        ram: Ram,
        speed: Speed,
        policy: RestorePolicy,
        most_joined: int,
        stores: Callable[[Node], bool],
    ) -> None:
        """``most_joined``: tokens of a segment that is made of several. ``stores``: whether the disk has a node's state."""
        self._tiers = tiers
        self._stores = stores
        self._context = context
        self._tree = tree
        self._checkpointer = checkpointer
        self._ram = ram
        self._speed = speed
        self._policy = policy
        self._most_joined = most_joined
        self._read_rate = FIRST_READ_RATE
        self._remote_rate = FIRST_REMOTE_RATE
        self._readers = ThreadPoolExecutor(N_READERS, "everwarm-disk")
        self._fetchers = ThreadPoolExecutor(N_FETCHERS, "everwarm-fetch")
        self.n_brought = 0
        self._arriving: list[Arriving] = []

    @property
    def is_on(self) -> bool:
        """Whether there is anything to load from now."""
        return self._tiers.is_on or bool(self._arriving)

    def close(self) -> None:
        self.stop_arriving("")
        self._fetchers.shutdown()
        self._readers.shutdown()

    # out of slot files

    def expect(self, file: Arriving) -> None:
        """Its checkpoints come one by one; a request that needs one of them waits for it."""
        self._arriving.append(file)

    def expect_no_more(self, file: Arriving) -> None:
        self._arriving = [other for other in self._arriving if other is not file]

    def stop_arriving(self, namespace: str) -> None:
        """Nothing more of namespaces with this prefix is wanted."""
        for file in self._arriving:
            file.is_stopped |= file.namespace.startswith(namespace)
        self._arriving = [file for file in self._arriving if not file.is_stopped]

    def forget_arriving(self, prompt: Prompt, namespace: str, beyond: int) -> None:
        """This conversation was erased beyond so many items."""
        for file in self._arriving:
            if file.namespace == namespace:
                n_common = int(file.prompt.common_prefix(prompt))
                file.lost.update(n_items for n_items in file.points if beyond < n_items <= n_common)

    # of what is kept beyond RAM

    def bring(self, prompt: Prompt, namespace: str, match: Match) -> int:
        """Loads the deepest stored point that is worth it, and waits for it. Returns its items; 0: there was none."""
        fetch = self.seek(prompt, namespace, match)
        return self.lay(fetch).n_items if isinstance(fetch, Fetch) else 0

    def seek(
        self, prompt: Prompt, namespace: str, match: Match, ends: tuple[int, ...] = (), *, exact: bool = False
    ) -> Fetch | LoadOutcome:
        """Begin to read the deepest stored point that is worth it, on other threads; else say why there is none.
        ``exact``: what is in RAM counts only if it is of one clean reading."""
        needs_checkpoints = self._context.kind.needs_checkpoints
        usable = (node.n_items for node in match.usable if not exact or is_exact(node))
        n_have = next(usable, 0) if needs_checkpoints else match.n_kv
        for file in self._arriving:
            best = file.best_for(prompt, namespace, n_have, exact=exact)
            if best is not None:
                return Fetch(best, prompt, namespace, file.points[best], file)
        if is_volatile(namespace):
            return LoadOutcome()  # no prefix of it was ever written
        request = LoadRequest(prompt, namespace, ends, len(prompt) - 1, n_have, match.n_kv, match.n_shared)
        if exact and needs_checkpoints:
            known = (min(node.n_items, match.n_shared) for node in match.path)  # the last may agree only in part
            kept = tuple(
                CoveredRange(node.start, end, node.segment) for node, end in zip(match.path, known, strict=True)
            )
            request = replace(request, n_kv=n_have, exact=True, kept=kept)
        are_many = self._tiers.disk.n_lengths() > MAX_LENGTHS_HERE
        found = None if are_many else self._on_disk(request)
        if isinstance(found, LoadOutcome) and not self._may_remote_help(request, found):
            return found
        n_known = found.n_items if isinstance(found, IndexedObject) else 0
        return Fetch(n_known, prompt, namespace, self._fetchers.submit(self._bring, request, found))

    def _bring(self, request: LoadRequest, found: IndexedObject | LoadOutcome | None) -> LoadedPoint | LoadOutcome:
        """On another thread. ``found`` is None where the disk is still to be searched: with many states that takes time.
        A state that cannot be used exactly hides none before it."""
        brought = self._deepest(request, self._on_disk(request) if found is None else found)
        for _ in range(MOST_LOOKS - 1):
            if not isinstance(brought, LoadOutcome) or not brought.n_unclean:
                break
            request = replace(request, most=brought.n_unclean - 1)
            brought = self._deepest(request, self._on_disk(request))
        return brought

    def _deepest(self, request: LoadRequest, found: IndexedObject | LoadOutcome) -> LoadedPoint | LoadOutcome:
        if self._may_remote_help(request, found):
            return self._from_remote(request, found)
        return self._from_disk(found, request) if isinstance(found, IndexedObject) else found

    def _may_remote_help(self, request: LoadRequest, found: IndexedObject | LoadOutcome) -> bool:
        """Whether the remote store can be faster than prefilling what is not cached here."""
        n_new = request.most - _n_here(request, found)
        read_s = math.inf if self._policy == "always" else n_new * self._speed.seconds_per_token
        return n_new > GUARD and self._tiers.remote.answers_within(read_s)

    def _on_disk(self, request: LoadRequest) -> IndexedObject | LoadOutcome:
        """The deepest point on disk that is worth loading; else why there is none."""
        disk = self._tiers.disk
        if not disk.is_on:
            return LoadOutcome()
        root = root_key(self._tiers.fingerprint, request.namespace)
        kept = self._tiers.find(root, request.prompt, request.most)
        if kept is None or kept.n_items <= request.n_have + GUARD:
            is_more_new = len(request.prompt) - max(request.n_have, request.n_shared) > GUARD
            foreign = self._tiers.foreign_states if is_more_new else {}
            return LoadOutcome(n_elsewhere=n_foreign_items(foreign, request.namespace, request.prompt))
        n_bytes = disk.size_of([kept.name, *kept.needs])
        if not self._is_worth_it(n_bytes, kept.n_items - request.n_have, self._read_rate):
            return LoadOutcome(n_passed=kept.n_items)
        return kept

    def lay(self, fetch: Fetch) -> LoadOutcome:
        """Adds what was loaded to the tree."""
        if fetch.is_lost:
            return LoadOutcome(n_spoilt=fetch.n_items)
        try:
            loaded = fetch.future.result()
        except Damaged as error:
            log.warning("%d tokens on disk could not be used: %s", fetch.n_items, error)
            return LoadOutcome(n_spoilt=fetch.n_items)
        if isinstance(loaded, LoadOutcome):
            return loaded
        tree = self._tree
        root = self._tree.root(fetch.namespace)
        for segment, reach in loaded.segments:
            for end in (piece.n_stop for piece in segment.pieces if piece.n_stop < reach):
                tree.grow(root, fetch.prompt, end)  # where turns ended; the disk may have a state there
            tree.lay_segment(root, fetch.prompt, segment, segment.n_start, reach, instead=loaded.exact)
        node = tree.grow(root, fetch.prompt, loaded.n_items)
        if loaded.exact and node.checkpoint is not None and not is_exact(node):
            self._checkpointer.drop(node, "brought, and clean")
            node = tree.grow(root, fetch.prompt, loaded.n_items)
        if loaded.checkpoint is not None and node.checkpoint is None:
            tree.set_checkpoint(node, loaded.checkpoint)
        tiers = self._tiers
        pin_again(tree, self._ram, tiers.disk, tiers.fingerprint, fetch.namespace, fetch.prompt, loaded.n_items)
        self._note(loaded)
        shown = (loaded.n_items, loaded.tier, loaded.n_bytes / _MIB, loaded.seconds)
        log.debug("brought %d tokens from %s: %.1f MiB in %.3f s", *shown)
        return LoadOutcome(loaded.n_items, tier=loaded.tier)

    def _note(self, loaded: LoadedPoint) -> None:
        if loaded.tier == "ram":
            return
        rate = loaded.n_bytes / loaded.seconds
        if loaded.tier == "remote":
            self._remote_rate = _RATE_MEMORY * self._remote_rate + (1 - _RATE_MEMORY) * rate
            return
        self._read_rate = _RATE_MEMORY * self._read_rate + (1 - _RATE_MEMORY) * rate
        self._tiers.after_all(partial(self._tiers.disk.touch, loaded.names))
        self.n_brought += 1

    def load_s(self, node: Node, n_bytes: int) -> float | None:
        """Seconds to load what RAM would lose with a node; None: the disk does not have it."""
        return n_bytes / self._read_rate if self._stores(node) else None

    def disk_s(self, n_bytes: int) -> float:
        """Seconds to load so many bytes from the disk; infinite where it has no room for them, none where loading is
        always preferred. A full disk evicts, perhaps just these, before they are asked for."""
        if not self._tiers.disk_has_room(n_bytes):
            return math.inf
        return 0.0 if self._policy == "always" else n_bytes / self._read_rate

    def _is_worth_it(self, n_bytes: int, n_saved: int, rate: float) -> bool:
        load_s = n_bytes / rate
        read_s = n_saved * self._speed.seconds_per_token
        if self._policy == "auto" and load_s > read_s:
            log.debug("reading %d tokens again (%.3f s) is faster than loading them (%.3f s)", n_saved, read_s, load_s)
            return False
        return True

    # the remote store

    def _from_remote(self, request: LoadRequest, found: IndexedObject | LoadOutcome) -> LoadedPoint | LoadOutcome:
        """Loads from the remote store if it has more than the disk, else from the disk."""
        remote = self._tiers.remote
        disk = self._tiers.disk
        root = root_key(self._tiers.fingerprint, request.namespace)
        least = _n_here(request, found) + GUARD
        pointer = remote.find(root, request.prompt, request.ends, least=least, most=request.most)
        if pointer is None:
            return self._from_disk(found, request) if isinstance(found, IndexedObject) else found
        n_saved = pointer.n_items - request.n_have
        if not self._is_worth_it(pointer.n_bytes(request.n_kv), n_saved, self._remote_rate):
            remote.note_declined()
            return (
                self._from_disk(found, request)
                if isinstance(found, IndexedObject)
                else LoadOutcome(n_passed=pointer.n_items)
            )
        patience_s = (
            PATIENCE_S if self._policy == "always" else remote.wait_s + n_saved * self._speed.seconds_per_token / 2
        )
        try:
            with remote.fetching(pointer, request.n_kv, patience_s, disk.reading, disk.names()) as open_object:
                loaded = self._load(open_object, pointer.name, pointer.n_items, request)
        except Damaged as error:
            log.warning("%d tokens in the remote store could not be used: %s", pointer.n_items, error)
            return (
                self._from_disk(found, request)
                if isinstance(found, IndexedObject)
                else LoadOutcome(n_spoilt=pointer.n_items)
            )
        return replace(loaded, tier="remote")

    # reading

    def _from_disk(self, kept: IndexedObject, request: LoadRequest) -> LoadedPoint | LoadOutcome:
        return self._load(self._tiers.reading, kept.name, kept.n_items, request)

    def _load(
        self, open_object: OpenObject, name: str, n_items: int, request: LoadRequest
    ) -> LoadedPoint | LoadOutcome:
        """Everything is read before anything is changed: a damaged object changes nothing."""
        began = time.monotonic()
        kind = self._context.kind
        with open_object(name) as reader:
            head = self._checked(reader, request.prompt, n_items)
            if request.exact and not head.clean:
                return LoadOutcome(n_unclean=n_items)
            state = reader.read("state", self._ram.place) if kind.needs_checkpoints else None
        if len(head.needs) != len(head.reaches) or any(reach > head.n_items for reach in head.reaches):
            raise Damaged("it does not say how far its parts reach")
        load = partial(self._load_segment, open_object, request, request.n_kv_of(head))
        parts = [part for part in self._readers.map(load, head.needs, head.reaches) if part is not None]
        segments = self._joined(parts)
        checkpoint = None
        if state is not None:
            cut = CutKind.named(head.cut)
            checkpoint = Checkpoint(cut, head.clean, head.chunks or (), state=state, used_at=time.monotonic())
        took_s = max(1e-6, time.monotonic() - began)
        return LoadedPoint(n_items, (name, *head.needs), checkpoint, segments, took_s, exact=request.exact)

    def _joined(self, parts: list[tuple[Segment, int]]) -> list[tuple[Segment, int]]:
        """Joins many small objects into few segments: each segment costs a restore call."""
        whole = [segment for segment, reach in parts if reach == segment.n_stop]
        rest = [(segment, reach) for segment, reach in parts if reach < segment.n_stop]
        made = [segment for group in fetched(whole, self._most_joined) for segment in self._as_one(group)]
        return sorted([*((segment, segment.n_stop) for segment in made), *rest], key=lambda part: part[1])

    def _as_one(self, group: list[Segment]) -> list[Segment]:
        """Joins them into one segment, unless they do not belong together: the restore will then fail."""
        try:
            return [join(self._context, group)] if len(group) > 1 else group
        except StateRejected:
            return group

    def _load_segment(
        self, open_object: OpenObject, request: LoadRequest, n_kv: int, name: str, reach: int
    ) -> tuple[Segment, int] | None:
        """None: its KV is in RAM already."""
        if reach <= n_kv:
            return None
        with open_object(name) as reader:
            head = self._checked(reader, request.prompt, reach)
            path = request.prompt.followed_by(head.n_start, self._own_items(reader))
            segment = Segment(
                reader.read("kv", self._ram.place),
                start=request.prompt.mark(head.n_start),
                stop=path.end,
                clean=head.clean,
                chunks=head.chunks,
                items=(head.n_start, head.n_items),
                path=path,
                pieces=(SegmentPiece(head.n_start, head.n_items, name, object_size(reader)),),
            )
            return segment, reach

    @staticmethod
    def _own_items(reader: PartReader) -> Prompt:
        own = Prompt.of_rows(reader.read("items").view("<i4"), reader.header.media)
        if own is None:
            raise Damaged("its media are others than its items say")
        return own

    def _checked(self, reader: PartReader, prompt: Prompt, stop: int) -> ObjectHeader:
        """Compares the items themselves, as far as they are used: a hash alone never decides."""
        head = reader.header
        stored = self._own_items(reader)
        start = head.n_start if head.kind == "kv" else 0
        if len(stored) != head.n_items - start or head.fingerprint != self._tiers.fingerprint:
            raise Damaged("it is not what the index says")
        if not start < stop <= min(head.n_items, len(prompt)):
            raise Damaged("it does not reach as far as it is needed")
        if int(prompt.common_prefix(prompt.followed_by(start, stored))) < stop:
            raise Damaged("its items are others than its name says")
        return head
