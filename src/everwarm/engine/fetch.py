"""From the disk back into the tree: what a prompt needs is read and verified on other threads, then laid where it belongs.

The loop's thread decides and lays; it never waits for a file while there is anything else to do. Everything here may fail
without harm: then a prompt is read again.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from everwarm.engine.archive import Archive
from everwarm.engine.keeper import Keeper
from everwarm.engine.ram import Ram
from everwarm.engine.settings import RestorePolicy
from everwarm.prompt.prompt import Prompt
from everwarm.state.index import Kept
from everwarm.state.lineage import root_key
from everwarm.state.object import Damaged, Header, Reader
from everwarm.state.policy import GUARD, CutKind
from everwarm.state.tree import Checkpoint, Match, Segment

log = logging.getLogger("everwarm.archive")

FIRST_READ_RATE = 500e6  # bytes per second, until measured
N_READERS = 4
N_FETCHERS = 2  # prompts at once that are brought back; each keeps the readers busy
_RATE_MEMORY = 0.7
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """A point as it was on disk, with the KV that was missing and how far each part of that is used."""

    checkpoint: Checkpoint | None
    segments: list[tuple[Segment, int]]
    seconds: float

    @property
    def n_bytes(self) -> int:
        state = 0 if self.checkpoint is None else self.checkpoint.size_bytes
        return state + sum(segment.blob.nbytes for segment, _ in self.segments)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A point that is being read for a prompt."""

    kept: Kept
    prompt: Prompt
    namespace: str
    future: Future[Loaded]

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def wait(self, seconds: float) -> None:
        """Not longer than that."""
        wait((self.future,), seconds)


@dataclass(frozen=True, slots=True)
class Brought:
    """What the disk did for a prompt, in items of it."""

    n_items: int = 0  # brought into the tree
    n_passed: int = 0  # there, but reading them again is faster
    n_spoilt: int = 0  # there, but they could not be used
    n_elsewhere: int = 0  # there, for another fingerprint


class Fetcher:
    def __init__(self, archive: Archive, keeper: Keeper, ram: Ram, policy: RestorePolicy) -> None:
        self._archive = archive
        self._keeper = keeper
        self._ram = ram
        self._policy = policy
        self._read_rate = FIRST_READ_RATE
        self._readers = ThreadPoolExecutor(N_READERS, "everwarm-disk")
        self._fetchers = ThreadPoolExecutor(N_FETCHERS, "everwarm-fetch")
        self.n_brought = 0

    def close(self) -> None:
        self._fetchers.shutdown()
        self._readers.shutdown()

    def bring(self, prompt: Prompt, namespace: str, match: Match) -> int:
        """Lay into the tree the deepest point on disk that is worth it. Returns where it is; 0: there was none."""
        fetch = self.seek(prompt, namespace, match)
        return self.lay(fetch) if isinstance(fetch, Fetch) else 0

    def seek(self, prompt: Prompt, namespace: str, match: Match) -> Fetch | Brought:
        """Begin to read the deepest point on disk that is worth it, on other threads; or say what there is instead."""
        disk = self._archive.disk
        if disk is None:
            return Brought()
        needs_checkpoints = self._keeper.context.kind.needs_checkpoints
        n_have = (match.usable[0].n_items if match.usable else 0) if needs_checkpoints else match.n_kv
        kept = disk.find(root_key(self._archive.fingerprint, namespace), prompt, len(prompt) - 1)
        if kept is None or kept.n_items <= n_have + GUARD:
            is_more_new = len(prompt) - max(n_have, match.n_shared) > GUARD
            return Brought(n_elsewhere=self._archive.elsewhere.n_known(namespace, prompt) if is_more_new else 0)
        if not self._is_worth_it(kept, kept.n_items - n_have):
            return Brought(n_passed=kept.n_items)
        return Fetch(kept, prompt, namespace, self._fetchers.submit(self._load, kept, prompt, match.n_kv))

    def lay(self, fetch: Fetch) -> int:
        """What was read, into the tree. Returns where it is; 0: it could not be used."""
        assert self._archive.disk is not None
        kept = fetch.kept
        try:
            loaded = fetch.future.result()
        except Damaged as error:
            log.warning("%d tokens on disk could not be used: %s", kept.n_items, error)
            return 0
        tree, root = self._keeper.tree, self._keeper.tree.root(fetch.namespace)
        for segment, reach in loaded.segments:
            tree.lay_segment(root, fetch.prompt, segment, segment.n_start, reach)
        node = tree.grow(root, fetch.prompt, kept.n_items)
        if loaded.checkpoint is not None and node.checkpoint is None:
            tree.set_checkpoint(node, loaded.checkpoint)
        self._read_rate = _RATE_MEMORY * self._read_rate + (1 - _RATE_MEMORY) * loaded.n_bytes / loaded.seconds
        self._archive.disk.touch((kept.name, *kept.needs))
        self.n_brought += 1
        log.info("brought %d tokens from disk: %.1f MiB in %.3f s", kept.n_items, loaded.n_bytes / _MIB, loaded.seconds)
        return kept.n_items

    def _is_worth_it(self, kept: Kept, n_saved: int) -> bool:
        assert self._archive.disk is not None
        sizes = {other.name: other.size for other in self._archive.disk.objects()}
        load_s = (kept.size + sum(sizes.get(name, 0) for name in kept.needs)) / self._read_rate
        read_s = n_saved * self._keeper.seconds_per_token
        if self._policy == "auto" and load_s > read_s:
            log.info("reading %d tokens again (%.3f s) is faster than loading them (%.3f s)", n_saved, read_s, load_s)
            return False
        return True

    def _load(self, kept: Kept, prompt: Prompt, n_kv: int) -> Loaded:
        """Everything is read before anything is changed: a damaged object changes nothing."""
        assert self._archive.disk is not None
        began = time.monotonic()
        kind = self._keeper.context.kind
        with self._archive.disk.reading(kept.name) as reader:
            head = self._checked(reader, prompt, kept.n_items)
            state = reader.read("state", self._ram.place) if kind.needs_checkpoints else None
        if len(head.needs) != len(head.reaches) or any(reach > head.n_items for reach in head.reaches):
            raise Damaged("it does not say how far its parts reach")
        load = partial(self._load_segment, prompt, n_kv)
        segments = [part for part in self._readers.map(load, head.needs, head.reaches) if part is not None]
        checkpoint = None
        if state is not None:
            cut = CutKind.named(head.cut)
            checkpoint = Checkpoint(cut, head.clean, head.chunks or (), state=state, used_at=time.monotonic())
        return Loaded(checkpoint, segments, max(1e-6, time.monotonic() - began))

    def _load_segment(self, prompt: Prompt, n_kv: int, name: str, reach: int) -> tuple[Segment, int] | None:
        """None: its KV is here already."""
        assert self._archive.disk is not None
        with self._archive.disk.reading(name) as reader:
            head = self._checked(reader, prompt, reach)
            if reach <= n_kv:
                return None
            start, own = prompt.mark(head.n_start), self._own_items(reader)
            stop = prompt.followed_by(head.n_start, own).end
            span = (head.n_start, head.n_items)
            blob = reader.read("kv", self._ram.place)
            return Segment(blob, start, stop, head.clean, head.chunks, name=name, items=span), reach

    @staticmethod
    def _own_items(reader: Reader) -> Prompt:
        own = Prompt.of_rows(reader.read("items").view("<i4"), reader.header.media)
        if own is None:
            raise Damaged("its media are others than its items say")
        return own

    def _checked(self, reader: Reader, prompt: Prompt, stop: int) -> Header:
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
