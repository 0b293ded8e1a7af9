"""The RAM tier: between the tree and the arena, so that the next engine finds what is copied to RAM; and its memory, pinned
for a GPU.

Captures are placed in the arena; a thread of its own then writes their descriptions and digests, away from the steps. A
second thread does the same, at once, for objects that a reply's last frame waits for. A new engine adds what it finds
to its tree before the first request. Bytes of an earlier process are used only if their digest is right: the first
thread verifies all of them, and a restore that needs one sooner verifies it itself.

A GPU copies states and KV at the speed of the bus where the memory is pinned. ``Pinning`` does that on a thread of its own,
once enough of it is used, while the model loads or requests are served. A failure there is only logged.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import blake3
import msgspec
import numpy as np

from everwarm.engine.settings import PinRam
from everwarm.errors import StateRejected
from everwarm.llama.model import MemoryKind
from everwarm.llama.system.pinned_memory import Pinned, Runtime
from everwarm.prompt.prompt import MediaRow, Prompt
from everwarm.state.lineage import Chunks, is_volatile, keys, root_key
from everwarm.state.policy import CutKind, assumed_returns, victims
from everwarm.state.ram_eviction import WeighingFacts, weigh
from everwarm.state.store.arena import Arena, Found
from everwarm.state.tree import Checkpoint, Node, Segment, SegmentPiece, Tree, pin, unpin
from everwarm.types import Blob, Mark, Position, TokenCount

log = logging.getLogger("everwarm.ram")

FREE_SHARE = 0.5  # of the host's free memory: pinned pages are lost to all other processes
WORTH_BYTES = 64 << 20  # less is copied in a few milliseconds anyhow
_MIB = 1 << 20
NICENESS = 10  # steps come first
LARGE_BYTES = 4 << 20  # all cores take the digest of so much together, where a reply waits for it
PIN = "pin"


def why_not_pinned(wanted: PinRam, *, is_on_gpu: bool, n_bytes: int, free_bytes: int) -> str | None:
    """None: it may be pinned. ``on`` pins however little memory is free."""
    if wanted == "off":
        return "--pin-ram is off"
    if not is_on_gpu:
        return "the model is not on a GPU"
    if n_bytes == 0:
        return "there is no RAM tier"
    if wanted == "auto" and n_bytes > FREE_SHARE * free_bytes:
        return f"its {n_bytes // _MIB} MiB are more than half of the {free_bytes // _MIB} MiB that are free"
    return None


class Pinning:
    """Pins an arena once; undone by ``close``."""

    def __init__(self, arena: Arena, find_runtime: Callable[[], Runtime | None], *, at_once: bool = False) -> None:
        self._arena = arena
        self._find_runtime = find_runtime
        self._worth_bytes = 0 if at_once else WORTH_BYTES
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pinned: Pinned | None = None
        self.start_if_worth_it()

    @property
    def n_bytes(self) -> int:
        pinned = self._pinned
        return 0 if pinned is None else pinned.size_bytes

    def start_if_worth_it(self) -> None:
        """Starts pinning once enough memory is used. Call it from one thread at a time."""
        if self._thread is None and self._arena.n_used >= self._worth_bytes:
            self._thread = threading.Thread(target=self._run, name="everwarm-pin", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Unpins the memory. Waits for at most one piece of the work."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        if self._pinned is not None:
            self._pinned.close()
            self._arena.release()
            self._pinned = None

    # the thread

    def _run(self) -> None:
        try:
            self._pin()
            self._arena.look_at_found(self._stopped.is_set)
        except Exception:
            log.exception("RAM is not pinned")

    def _pin(self) -> None:
        runtime = self._find_runtime()
        if runtime is None:
            return log.info("RAM is not pinned: libllama brought no CUDA runtime along")
        try:
            pinned = Pinned(runtime, self._arena.hold(), self._stopped.is_set)
        except OSError as error:
            self._arena.release()
            return log.log(logging.INFO if self._stopped.is_set() else logging.WARNING, "RAM is not pinned: %s", error)
        self._pinned = pinned
        shown = (pinned.size_bytes // _MIB, pinned.committed_s, pinned.registered_s)
        log.info("%d MiB of RAM are pinned (committed in %.2f s, registered in %.2f s)", *shown)


class StateMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An object's description: enough to find its place in a tree again. Segments bring their own items; a state lies
    at the end of segments, and brings all its items where there are none."""

    namespace: str
    key: str
    start: str
    n_start: int
    n_items: int
    items: bytes
    clean: bool
    chunks: Chunks | None
    cut: str  # of a state; "": a segment; ``PIN``: only that the point is pinned
    n_stop: int  # where its cells end: beyond ``n_items`` they belong to another branch
    stop: tuple[int, int, int]  # the same as a mark
    media: tuple[MediaRow, ...] = ()
    pieces: tuple[tuple[int, int, str, int], ...] = ()  # of a segment: the objects that it was joined from

    @property
    def own(self) -> Prompt | None:
        """Its items; None: they are invalid."""
        return Prompt.of_rows(np.frombuffer(self.items, "<i4"), self.media) if len(self.items) % 4 == 0 else None

    @property
    def makes_sense(self) -> bool:
        n, (n_tokens, pos, lag) = self.n_items - self.n_start, self.stop
        right = 0 <= self.n_start <= self.n_items <= self.n_stop and len(self.items) in (0, 4 * n)
        return right and self.own is not None and 0 <= lag < max(1, pos) <= max(1, n_tokens)


@dataclass(frozen=True, slots=True)
class Note:
    """What a thread will write about an object, if it still exists by then."""

    blob: weakref.ref[Blob]
    path: Prompt
    namespace: str
    n_start: int
    n_items: int
    clean: bool
    chunks: Chunks | None
    cut: str
    n_stop: int
    stop: Mark
    pieces: tuple[SegmentPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What must be safe before a reply's last frame leaves."""

    ended_at: float
    notes: tuple[Note, ...] | None  # None: it is not in RAM as a whole
    blobs: tuple[Blob, ...]
    on_disk: str | None  # the object there, where it was offered


_Notes = queue.SimpleQueue[Note | Callable[[], object] | None]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StateMeta)


class Ram:
    """``is_right`` says whether everything that was captured until now may be left to the next engine."""

    def __init__(
        self,
        arena: Arena,
        tree: Tree,
        kind: MemoryKind,
        pinning: Pinning | None = None,
        is_right: Callable[[], bool] = lambda: True,
    ) -> None:
        self.arena = arena
        self._tree = tree
        self._kind = kind
        self._notes: _Notes = queue.SimpleQueue()
        self._awaited: _Notes = queue.SimpleQueue()
        self.n_adopted = 0
        self.n_unsound = 0
        self._pins: dict[int, Blob] = {}  # an object for each pinned node, by its id
        self._pinning = pinning
        self._is_right = is_right
        self._threads = [
            threading.Thread(target=self._run, args=(self._notes, NICENESS), name="everwarm-ram", daemon=True),
            threading.Thread(target=self._run, args=(self._awaited, 0), name="everwarm-ram-awaited", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def place(self, n_bytes: int) -> Blob:
        return self.arena.place(n_bytes)

    def stats(self) -> dict[str, float]:
        arena = self.arena
        sizes = {
            "ram_arena_bytes": arena.n_used,
            "ram_n_outside": arena.n_outside,
            "ram_n_waiting": self._notes.qsize() + self._awaited.qsize(),
            "ram_pinned_bytes": 0 if self._pinning is None else self._pinning.n_bytes,
        }
        return {**sizes, "ram_n_adopted": self.n_adopted, "ram_n_unsound": self.n_unsound}

    # keeping

    def on_segment(self, node: Node) -> None:
        """Records the segment at this node for the next engine."""
        self._notes.put(self.note_of_segment(node))

    def on_state(self, node: Node) -> None:
        """Records the state at this node for the next engine."""
        self._notes.put(self.note_of_state(node))

    def note_of_segment(self, node: Node) -> Note:
        """``node``: the last one that uses it."""
        segment = node.segment
        assert segment is not None
        return Note(
            blob=weakref.ref(segment.blob),
            path=node.path,
            namespace=self._tree.namespace(node),
            n_start=segment.n_start,
            n_items=node.n_items,
            clean=segment.clean,
            chunks=segment.chunks,
            cut="",
            n_stop=segment.n_stop,
            stop=segment.stop,
            pieces=segment.pieces,
        )

    def note_of_state(self, node: Node) -> Note:
        checkpoint = node.checkpoint
        assert checkpoint is not None and checkpoint.state is not None
        return Note(
            blob=weakref.ref(checkpoint.state),
            path=node.path,
            namespace=self._tree.namespace(node),
            n_start=node.n_items if self._kind.has_attention else 0,
            n_items=node.n_items,
            clean=checkpoint.clean,
            chunks=checkpoint.chunks,
            cut=checkpoint.kind.value,
            n_stop=node.n_items,
            stop=node.mark,
        )

    def keep_now(self, notes: Sequence[Note], blobs: Sequence[Blob], done: Callable[[bool], None]) -> None:
        """Records these before anything else, then calls ``done`` on another thread with whether the next engine will
        find all of them. ``blobs`` are what the notes are about: they are held until then."""

        def keep() -> None:
            for note in notes:
                self._keep(note, is_awaited=True)
            done(all(self.arena.is_kept(blob) for blob in blobs))

        self._awaited.put(keep)

    def pin(self, node: Node) -> None:
        """Evicts it last, also in the next engine."""
        if node.is_pinned:
            return
        pin(node)
        self._tree.changed()
        if node.root().is_volatile:
            return
        self._pins = {id: blob for id, blob in self._pins.items() if id in self._tree.by_id}
        blob = self._pins[node.id] = self.arena.place(1)
        blob[:] = 0
        self._notes.put(
            Note(
                blob=weakref.ref(blob),
                path=node.path,
                namespace=self._tree.namespace(node),
                n_start=node.n_items if self._kind.has_attention else 0,
                n_items=node.n_items,
                clean=False,
                chunks=None,
                cut=PIN,
                n_stop=node.n_items,
                stop=node.mark,
            )
        )

    def unpin(self, node: Node) -> None:
        self._pins.pop(node.id, None)
        if node.is_pinned:
            unpin(node)
            self._tree.unpinned(node)

    def keep_meanwhile(self, blobs: list[Blob]) -> None:
        """Keeps these alive until everything noted so far is recorded for the next engine."""
        self._notes.put(blobs.clear)

    def require_sound(self, blob: Blob) -> None:
        """``StateRejected``: bytes of an earlier process have changed."""
        if not self.arena.is_sound(blob):
            self.n_unsound += 1
            raise StateRejected(f"{blob.nbytes} bytes in RAM have changed since they were written")

    # adopting what an earlier engine left

    def adopt(self) -> int:
        """Adds everything that is found to the tree; returns the number of objects."""
        whole = [(about, blob) for about, blob in map(_read, self.arena.found()) if about is not None]
        found = [(about, blob) for about, blob in whole if about.cut != PIN]
        ends = sorted({number for about, _ in whole for number in (about.n_start, about.n_items)})
        known: dict[str, Prompt] = {}
        for about, blob in sorted(found, key=lambda pair: (bool(pair[0].cut), pair[0].n_start, pair[0].n_items)):
            path = _path_of(about, known, ends)
            if path is not None:  # else its lineage is not known any more
                self._lay(about, blob, path)
                self.n_adopted += 1
        for about, blob in whole:
            path = _path_of(about, known, ends) if about.cut == PIN else None
            if path is not None:
                self._pin_again(about, blob, path)
        blobs = [weakref.ref(blob) for _, blob in found]
        self._notes.put(lambda: self._verify(blobs))
        return self.n_adopted

    def shrink(self, seconds_per_token: float) -> None:
        """Evicts the least valuable of what was found until the rest fits the budget; the memory is freed at once."""
        tree = self._tree
        kind = self._kind
        budget = self.arena.budget_bytes
        resident: frozenset[int] = frozenset()
        while tree.ram_bytes > budget:
            nodes = list(tree.nodes())
            about = (time.monotonic(), seconds_per_token, kind.needs_checkpoints, kind.has_attention, resident)
            facts = WeighingFacts(*about, {}, assumed_returns)
            chosen = victims(weigh(nodes, facts), tree.ram_bytes - budget)
            for key in chosen:
                node = nodes[key // 2]
                if key % 2 == 1 and node.segment is not None:
                    tree.drop_segment(node)
                elif key % 2 == 0 and node.checkpoint is not None:
                    tree.drop_checkpoint(node)
            if not chosen:
                break
        self.arena.trim()

    def _lay(self, about: StateMeta, blob: Blob, path: Prompt) -> None:
        root = self._tree.root(about.namespace)
        now = time.monotonic()
        if not about.cut:
            segment = Segment(
                blob,
                start=path.mark(about.n_start),
                stop=Mark(TokenCount(about.stop[0]), Position(about.stop[1]), about.stop[2]),
                clean=about.clean,
                chunks=about.chunks,
                items=(about.n_start, about.n_stop),
                path=path if about.n_stop == about.n_items else None,
                pieces=tuple(SegmentPiece(*piece) for piece in about.pieces),
            )
            return self._tree.lay_segment(root, path, segment, about.n_start, about.n_items)
        node = self._tree.grow(root, path, about.n_items)
        if node.checkpoint is None:
            cut = CutKind.named(about.cut)
            self._tree.set_checkpoint(
                node, Checkpoint(cut, about.clean, about.chunks or (), state=blob, used_at=now, tidied=True)
            )

    def _pin_again(self, about: StateMeta, blob: Blob, path: Prompt) -> None:
        items = path.first(about.n_items)
        if self._tree.match(about.namespace, items, 0).n_shared == about.n_items:  # else nothing is left to be pinned
            node = self._tree.grow(self._tree.root(about.namespace), items, about.n_items)
            pin(node)
            self._pins[node.id] = blob

    # the thread

    def flush(self) -> None:
        """Waits until everything noted so far is recorded for the next engine."""
        for notes in (self._awaited, self._notes):
            done = threading.Event()
            notes.put(done.set)
            done.wait()

    def close(self) -> None:
        for notes in (self._awaited, self._notes):
            notes.put(None)
        for thread in self._threads:
            thread.join()
        if self._pinning is not None:
            self._pinning.close()
        self.arena.close()

    def _run(self, notes: _Notes, niceness: int) -> None:
        with contextlib.suppress(OSError, AttributeError):
            if niceness:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while (note := notes.get()) is not None:
            try:
                self._keep_and_pin(note) if isinstance(note, Note) else note()
            except Exception:
                log.exception("an object in RAM will not outlive the engine")
            del note  # while this waits it must not keep an object alive that is to be forgotten

    def _keep_and_pin(self, note: Note) -> None:
        self._keep(note)
        if self._pinning is not None:
            self._pinning.start_if_worth_it()

    def _keep(self, note: Note, *, is_awaited: bool = False) -> None:
        blob = note.blob()
        if blob is None or self.arena.is_kept(blob) or is_volatile(note.namespace):
            return
        named = keys(root_key("", note.namespace), note.path, (note.n_start, note.n_items))
        about = StateMeta(
            namespace=note.namespace,
            key=named[note.n_items],
            start=named[note.n_start],
            n_start=note.n_start,
            n_items=note.n_items,
            items=np.ascontiguousarray(note.path.codes[note.n_start : note.n_items], "<i4").tobytes(),
            clean=note.clean,
            chunks=note.chunks,
            cut=note.cut,
            n_stop=note.n_stop,
            stop=(int(note.stop.n_tokens), int(note.stop.pos), note.stop.lag),
            media=note.path.rows(note.n_start, note.n_items),
            pieces=tuple(dataclasses.astuple(piece) for piece in note.pieces),
        )
        if not self._is_right():
            return
        max_threads = blake3.blake3.AUTO if is_awaited and blob.nbytes >= LARGE_BYTES else 1
        self.arena.keep(blob, _encoder.encode(about), max_threads)

    def _verify(self, blobs: list[weakref.ref[Blob]]) -> None:
        for ref in blobs:
            blob = ref()
            if blob is not None and not self.arena.is_sound(blob):
                self.n_unsound += 1
                log.warning("%d bytes that an earlier engine left failed their check", blob.nbytes)


def _read(found: Found) -> tuple[StateMeta | None, Blob]:
    written, blob = found
    try:
        about = _decoder.decode(written)
    except (msgspec.MsgspecError, UnicodeError):
        return None, blob
    return (about if about.makes_sense else None), blob


def _path_of(about: StateMeta, known: dict[str, Prompt], ends: list[int]) -> Prompt | None:
    """The prompt that passes through the object, found by the name of the object's start. Adds the names of all ends on
    it."""
    if about.key in known:
        return known[about.key]
    above = known.get(about.start) if about.n_start else Prompt.of_tokens([])
    own = about.own
    if above is None or own is None:
        return None
    path = above.followed_by(about.n_start, own)
    inside = ends[bisect.bisect(ends, about.n_start) : bisect.bisect(ends, len(path))]
    named = keys(root_key("", about.namespace), path, inside)
    if named.get(about.n_items) != about.key:
        return None
    for key in named.values():
        known.setdefault(key, path)
    return path
