"""Saves a slot's conversation to a file, restores it, and erases it, as llama-server's slot actions do.

``capture``, ``put_back`` and ``erase`` run on the loop's thread while the slot is idle; ``write`` and ``read`` do the
file work and may run anywhere. The main file is llama.cpp's, with the last few checkpoints behind its state, as
llama-server appends them; the companion has the others, so that after a restore any next request is warm, not only one that
continues, and says which model and namespace the file belongs to: a file without one is refused, or kept apart from
everything else (``unverified``). No state is in both.

``read`` brings what the next request most likely needs. The rest of the checkpoints follow one by one (``Later``), each
verified by its own digest.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import blake3
import msgspec
import numpy as np
from numpy.typing import NDArray

from everwarm.engine.cache.prewarm import prewarmed_branches
from everwarm.engine.cache.provenance import cover, is_part_of
from everwarm.engine.cache.restore import Goal
from everwarm.engine.core import Core
from everwarm.engine.slots import Slot
from everwarm.errors import BadRequest, MemoryFault, StateRejected
from everwarm.llama.blobs import HEADER_BYTES, in_streams, trunk
from everwarm.llama.model import MemoryKind
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import is_adapted, is_unverified, owner_of, unverified
from everwarm.state.policy import Cut, CutKind, worth_saving
from everwarm.state.returns import Continuation
from everwarm.state.store.arena import Arena
from everwarm.state.store.files import Files, sweep
from everwarm.state.store.object import Damaged, ObjectHeader, ObjectReader, SlotPoint, encode, fill
from everwarm.state.store.slot_file import (
    NO_FILE,
    Appended,
    Claim,
    Pair,
    Scattered,
    SequenceState,
    UnknownOrigin,
    appended_at,
    encode_main,
    main_digest,
    open_pair,
    owner_digest,
    parts_of,
    publish,
    read_open_main,
    require_appendix,
    split_appendix,
)
from everwarm.state.store.slot_names import COMPANION, NAMESPACE, companion_of
from everwarm.state.tree import Checkpoint, Node
from everwarm.types import Blob, Place, heap

MAX_APPENDED = 4  # checkpoints that lie in llama-server's place
MAX_SAVED = 8  # checkpoints of a file
HEAD = "head"  # the section with what the model's MTP head knows of the conversation
COMPARED_BYTES = 4 << 20  # at once
OF_NO_NAMESPACE = (
    "it is from before slot files were bound to a namespace; restore it without a cache_salt, and save it again"
)


class SavedPoint(NamedTuple):
    point: SlotPoint
    state: Blob | None  # None: it is the state of the whole sequence
    logits: Blob | None
    digest: str | None = None  # of the state, where it is known


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation outside of the engine."""

    prompt: Prompt
    state: SequenceState
    points: tuple[SavedPoint, ...] = ()
    appended: tuple[Appended, ...] = ()  # the last of them, for llama-server
    head: Blob | None = None  # what the model's MTP head knows of it
    later: Later | None = None  # points that were not read yet
    unverified: str = ""  # the digest of a file of unknown origin that it came from

    @property
    def n_tokens(self) -> int:
        return self.prompt.n_tokens(len(self.prompt))


def capture(core: Core, slot: Slot, namespace: str) -> Saved:
    """The slot's last conversation, restored first if it has left the context."""
    if not len(slot.content) or owner_of(slot.namespace) != namespace:
        raise BadRequest(
            f"slot {slot.seq} holds no conversation of yours; a slot's content is the last conversation that ran in it "
            "since the engine started"
        )
    if is_unverified(slot.namespace):
        raise BadRequest(
            f"the conversation of slot {slot.seq} goes on from a slot file of unknown origin, and nothing that stems from "
            "such a file is saved; send its prompt with cache_prompt false, and save it then"
        )
    if is_adapted(slot.namespace):
        raise BadRequest(
            f"the conversation of slot {slot.seq} was read with other scales of LoRA adapters than the server's, which a "
            "slot file cannot say; send its prompt without lora, and save it then"
        )
    _bring_back(core, slot)
    if not slot.n_fed:
        raise BadRequest(f"the conversation of slot {slot.seq} is not kept any more")
    points = [point for node in _worth_saving(slot) if (point := _saved_point(core, node)) is not None]
    head = core.context.capture_head(slot.seq)
    state = _in_ram(core, slot, points) or _captured(core, slot)
    return Saved(slot.items.first(slot.n_fed), state, tuple(points), _for_llama_server(core, slot, points), head)


def _captured(core: Core, slot: Slot) -> Blob:
    state = core.context.capture_sequence(slot.seq, core.cache.ram.arena.lend)
    if not core.settings.kv_unified:  # llama-server with the same flags has a stream for each slot
        state = in_streams(state, core.context.kind, len(core.slots), slot.seq)
    return state


def _in_ram(core: Core, slot: Slot, points: Sequence[SavedPoint]) -> Scattered | None:
    """The slot's sequence out of the KV and the state that RAM has of it. None: it does not have all of this very reading,
    whose bytes are known to be the same only if it is clean."""
    kind, node, chunks = core.context.kind, slot.node, tuple(slot.chunks)
    is_right = kind in (MemoryKind.HYBRID, MemoryKind.ATTENTION) and core.settings.kv_unified
    if not is_right or node.n_items != slot.n_fed or not core.context.is_clean(slot.seq):
        return None
    state = None
    if kind.needs_checkpoints:
        end = points[-1] if points and points[-1].point.n_items == slot.n_fed else None
        if end is None or end.state is None or not end.point.clean or end.point.chunks != chunks:
            return None
        state = end.state
    parts = []
    for part, stop in cover(node.lineage(), 0, slot.n_fed) or ():
        segment = part.segment
        if segment is None or not is_part_of(segment, chunks, stop) or not core.cache.ram.arena.is_sound(segment.blob):
            return None
        parts.append((segment.blob, segment.start, slot.items.mark(stop)))
    try:
        return Scattered(tuple(core.context.scattered_sequence(parts, state, slot.seq))) if parts else None
    except StateRejected:
        return None


def _worth_saving(slot: Slot) -> list[Node]:
    kept = {node.n_items: node for node in slot.node.lineage() if node.n_items <= slot.n_fed}
    path = [
        Cut(node.n_items, node.checkpoint.kind)
        for node in kept.values()
        if node.checkpoint is not None and node.checkpoint.is_held
    ]
    pinned = {n_items for n_items, node in kept.items() if node.n_pinned}
    return [kept[n_items] for n_items in worth_saving(path, MAX_SAVED, pinned)]


def _saved_point(core: Core, node: Node) -> SavedPoint | None:
    checkpoint = node.checkpoint
    assert checkpoint is not None
    if checkpoint.parked is not None:
        core.cache.ram_writer.copy_state(node)
    arena = core.cache.ram.arena
    if checkpoint.state is None or not arena.is_sound(checkpoint.state):
        return None
    logits = None if checkpoint.logits is None else checkpoint.logits.view(np.uint8)
    names = (f"state-{node.n_items}", "" if logits is None else f"logits-{node.n_items}")
    point = SlotPoint(node.n_items, checkpoint.kind.value, checkpoint.clean, checkpoint.chunks, *names)
    return SavedPoint(point, checkpoint.state, logits, arena.digest_of(checkpoint.state))


def _for_llama_server(core: Core, slot: Slot, points: list[SavedPoint]) -> tuple[Appended, ...]:
    """What it can read: recurrent states as libllama writes them, without what the head keeps behind them, at positions
    that are counts of tokens."""
    is_readable = core.context.kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT) and core.settings.state_type == "f32"
    if not is_readable or slot.items.first(slot.n_fed).media:
        return ()
    before = [(each.point, each.state) for each in points if each.point.n_items < slot.n_fed]
    return tuple(Appended(point.n_items, trunk(state)) for point, state in before[-MAX_APPENDED:] if state is not None)


def _bring_back(core: Core, slot: Slot) -> None:
    held = slot.resident()
    is_there = slot.node.root() is core.cache.tree.root(slot.namespace)
    if is_there and int(slot.content.common_prefix(held)) == len(slot.content) == slot.n_fed:
        return
    more = Prompt.of_tokens([0])  # so that the whole of it may be restored
    prompt = slot.content.followed_by(len(slot.content), more)
    sources = core.cache.restorer.sources(prompt, slot.namespace)
    match = core.cache.restorer.match(prompt, slot.namespace, sources)
    if core.cache.loader.bring(prompt, slot.namespace, match):
        match = core.cache.restorer.match(prompt, slot.namespace, sources)
    core.cache.restorer.bring(slot, Goal(prompt, slot.namespace), match, sources)


def write(path: Path, saved: Saved, claim: Claim, files: Files | None = None) -> int:
    """Both files at once, each whole or not at all; returns the bytes of the first, which has the name."""
    files = files or Files()
    if path.parent.name.startswith(NAMESPACE):
        path.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as both, ThreadPoolExecutor(1, "everwarm-main-file") as aside:
        pieces = encode_main(saved.prompt.cells, saved.state, saved.appended)
        first = aside.submit(both.enter_context, files.aside(path, pieces, is_awaited=True))
        checkpoints = _encode_companion(saved, claim)
        companion = both.enter_context(files.aside(companion_of(path), checkpoints, is_awaited=True))
        main = first.result()
        publish(path, main, companion, claim, files)
    sweep(path.parent)
    return main.size


def _encode_companion(saved: Saved, claim: Claim) -> Iterator[bytes | memoryview]:
    main = main_digest(saved.prompt.cells, saved.state)
    parts: dict[str, Blob] = {"items": np.ascontiguousarray(saved.prompt.codes, "<i4").view(np.uint8)}
    if saved.head is not None:
        parts[HEAD] = saved.head
    places = appended_at(len(saved.prompt.cells), len(saved.state), saved.appended)
    points = [_placed(saved, each, places, parts) for each in saved.points]
    header = ObjectHeader(
        kind="slot",
        fingerprint=claim.fingerprint,
        key="",
        start="",
        n_start=0,
        n_items=len(saved.prompt),
        media=saved.prompt.rows(0, len(saved.prompt)),
        points=tuple(points),
        main=main,
        state_bytes=len(saved.state),
        owner=owner_digest(claim.fingerprint, main, claim.namespace),
    )
    return encode(header, parts, max_threads=blake3.blake3.AUTO)


def _placed(saved: Saved, each: SavedPoint, places: dict[int, int], parts: dict[str, Blob]) -> SlotPoint:
    """Where a checkpoint is in the pair. What the main file does not have is added to the companion's parts."""
    point, state, logits, known = each
    assert state is not None
    if logits is not None:
        parts[point.logits] = logits
    if point.n_items == len(saved.prompt) and _ends_with(saved.state, trunk(state)):
        return msgspec.structs.replace(point, section="")
    if point.n_items not in places:
        parts[point.section] = state
        return point
    n_bytes = len(trunk(state))
    tail = f"tail-{point.n_items}" if n_bytes < len(state) else ""
    if tail:
        parts[tail] = state[n_bytes:]
    digest = known or blake3.blake3(state.data, max_threads=blake3.blake3.AUTO).hexdigest()
    at = places[point.n_items]
    return msgspec.structs.replace(point, section="", at=at, n_bytes=n_bytes, tail=tail, digest=digest)


def _ends_with(whole: SequenceState, state: Blob) -> bool:
    """Whether a sequence's state is this one: it has the same bytes behind the header, which a file does not have."""
    body, last = state[HEADER_BYTES:], parts_of(whole)[-1]
    if not len(body) or len(body) > len(last):
        return False
    end = last[len(last) - len(body) :]
    if end.ctypes.data == body.ctypes.data:
        return True
    starts = range(0, len(body), COMPARED_BYTES)
    return all(np.array_equal(body[at : at + COMPARED_BYTES], end[at : at + COMPARED_BYTES]) for at in starts)


class Later:
    """Checkpoints of a slot file that are read after the conversation was put back. Holds both files open, so
    deleting or replacing them meanwhile has no effect."""

    def __init__(self, pair: Pair, points: Sequence[SlotPoint], arena: Arena) -> None:
        assert pair.companion is not None
        self.points = tuple(points)
        self._arena = arena
        self._fds = (os.dup(pair.main), os.dup(pair.companion))
        self._reader = ObjectReader(self._fds[1])

    def read(self, point: SlotPoint) -> SavedPoint:
        """``Damaged``: this one cannot be used. It is verified here, so that the loop's thread need not."""
        saved = _read_point(self._fds[0], self._reader, point, self._arena)
        if saved.state is not None and not self._arena.is_sound(saved.state):
            raise Damaged(f"its checkpoint at {point.n_items} has changed")
        return saved

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def n_bytes_of(points: Sequence[SlotPoint], reader: ObjectReader) -> int:
    """What these checkpoints take in RAM."""
    sizes = {section.name: section.length for section in reader.header.sections}
    return sum(point.n_bytes or sizes.get(point.section, 0) for point in points)


def read(
    path: Path,
    claim: Claim,
    max_tokens: int,
    arena: Arena | None = None,
    make_room: Callable[[int], None] | None = None,
) -> tuple[Saved, int]:
    """The conversation in a slot file with its checkpoints, and its bytes. ``Damaged``, with the reason, unless its
    companion says that it is the caller's, of this model, and belongs to this very file. States that are read into an
    arena are verified before they are used, and only those are read that the next request may need at once: the others are
    in ``later``. ``make_room`` is told how many bytes the arena will get now."""
    place = heap if arena is None else arena.lend_to_readers
    with open_pair(path) as pair:
        if pair.companion is None:
            return _read_alone(pair.main, path.name, claim, max_tokens, place)
        with _blaming_companion(path.name):
            reader = _vouching(pair.companion, path.name, claim)
            prompt = _read_prompt(reader)
            head = reader.read(HEAD) if any(section.name == HEAD for section in reader.header.sections) else None
        _require_layout(path.name, pair, reader.header, prompt)
        now, then = _in_two(reader.header) if arena is not None else (reader.header.points, ())
        if make_room is not None:
            make_room(n_bytes_of(now, reader))
        with ThreadPoolExecutor(1, "everwarm-main-file") as aside:
            n_state = reader.header.state_bytes
            reading = aside.submit(read_open_main, pair.main, max_tokens, HEADER_BYTES, place, n_state)
            with _blaming_companion(path.name):
                points = tuple(_read_point(pair.main, reader, point, arena) for point in now)
            main = reading.result()
        if main.digest != reader.header.main or not np.array_equal(prompt.cells, main.cells):
            raise _of_another_file(path.name)
        state = main.state if n_state else split_appendix(main.state)[0]
        later = Later(pair, then, arena) if arena is not None and then else None
    return Saved(prompt, state, points, head=head, later=later), main.n_bytes


def _require_layout(name: str, pair: Pair, head: ObjectHeader, prompt: Prompt) -> None:
    """That the main file has everything where the companion says, before any of it is read."""
    if head.state_bytes:
        try:
            appended = [point for point in head.points if point.at]
            require_appendix(pair.main, len(prompt.cells), head.state_bytes, appended)
        except Damaged:
            raise _of_another_file(name) from None


def _of_another_file(name: str) -> UnknownOrigin:
    return UnknownOrigin(
        f"its companion {name}{COMPANION} belongs to another file, so {name} was changed or written by another program "
        "since it was saved here; save it again"
    )


def _in_two(head: ObjectHeader) -> tuple[list[SlotPoint], list[SlotPoint]]:
    """What a next request may need at once, and the rest, the deepest first. At once: the end of the conversation, the last
    checkpoint before it, which the same prompt continues from, and the last stable one, which all next turns share."""
    ends = [point for point in head.points if point.n_items == head.n_items]
    before = [point for point in head.points if point.n_items < head.n_items]
    stable = [point for point in before if point.cut == CutKind.STABLE.value]
    first = {point.n_items for point in (*ends, *before[-1:], *stable[-1:])}
    now = [point for point in head.points if point.n_items in first]
    return now, [point for point in reversed(head.points) if point.n_items not in first]


def _read_alone(fd: int, name: str, claim: Claim, max_tokens: int, place: Place) -> tuple[Saved, int]:
    """Reads a file without a companion, as unverified."""
    if not claim.trusts_origin:
        raise UnknownOrigin(
            f"it has no companion {name}{COMPANION}, so it is unknown which model and build it is a state of. Restore a "
            "file that was saved here with its companion beside it; a file of llama-server with the very same model can "
            "be restored by an admin of a server that was started with --trust-slot-files"
        )
    main = read_open_main(fd, max_tokens, HEADER_BYTES, place)
    if main.has_images:
        raise UnknownOrigin("it holds images, and it has no companion that says which")
    state, appended = split_appendix(main.state)
    points = tuple(
        SavedPoint(SlotPoint(each.n_tokens, CutKind.REPLY.value, False, (), ""), each.state, None)
        for each in appended
        if 0 < each.n_tokens <= len(main.cells)
    )
    return Saved(Prompt.of_tokens(main.cells), state, points, unverified=main.digest), main.n_bytes


def _vouching(fd: int, name: str, claim: Claim) -> ObjectReader:
    """The companion of a file, if it allows restoring the file here. Only its header is read."""
    reader = ObjectReader(fd)
    head = reader.header
    if head.kind != "slot":
        raise UnknownOrigin(f"{name}{COMPANION} is no companion of a slot file but a {head.kind} object; save it again")
    if not claim.owns(head):
        raise UnknownOrigin(NO_FILE if head.owner else OF_NO_NAMESPACE)
    if head.fingerprint != claim.fingerprint:
        raise UnknownOrigin(
            f"it was saved by another model, or by this one with other settings or another build (fingerprint "
            f"{head.fingerprint[:12]}, here {claim.fingerprint[:12]}); save it again with this one"
        )
    return reader


def _read_prompt(reader: ObjectReader) -> Prompt:
    head = reader.header
    prompt = Prompt.of_rows(reader.read("items").view("<i4"), head.media)
    if prompt is None or any(not 0 < point.n_items <= len(prompt) for point in head.points):
        raise Damaged("a checkpoint lies outside of the conversation")
    return prompt


def _read_point(main: int, reader: ObjectReader, point: SlotPoint, arena: Arena | None) -> SavedPoint:
    logits = reader.read(point.logits) if point.logits else None
    if point.section:
        where = (heap,) if arena is None else (arena.place, arena.doubt)
        return SavedPoint(point, reader.read(point.section, *where), logits)
    if not point.at:
        return SavedPoint(point, None, logits)
    tail = reader.read(point.tail) if point.tail else np.empty(0, np.uint8)
    if not 0 < point.n_bytes <= os.fstat(main).st_size - point.at:
        raise Damaged(f"its checkpoint at {point.n_items} is not where it should be")
    state = (heap if arena is None else arena.place)(point.n_bytes + len(tail))
    fill(main, state.data[: point.n_bytes], point.at)
    state[point.n_bytes :] = tail
    is_left = arena is not None and arena.doubt(state, point.digest)
    if not is_left and blake3.blake3(state.data, max_threads=blake3.blake3.AUTO).hexdigest() != point.digest:
        raise Damaged(f"its checkpoint at {point.n_items} has changed")
    return SavedPoint(point, state, logits)


@contextlib.contextmanager
def _blaming_companion(name: str) -> Iterator[None]:
    try:
        yield
    except UnknownOrigin:
        raise
    except Damaged as error:
        raise UnknownOrigin(f"its companion {name}{COMPANION} is damaged ({error}); save it again") from None


def put_back(core: Core, slot: Slot, saved: Saved, namespace: str) -> int:
    """Replaces the slot's content by the conversation; returns how many tokens a next request can reuse."""
    if saved.prompt.media and core.images is None:
        raise BadRequest(
            "Cannot restore media tokens without an mmproj: start the server with --mmproj, as it was saved"
        )
    if saved.unverified:
        namespace = unverified(namespace, saved.unverified)
        core.unverified.add(namespace, saved.prompt, (point.point.n_items for point in saved.points))
    kind = core.context.kind
    assert isinstance(saved.state, np.ndarray), "only what was read from a file is put back"
    n = _put_sequence(core, slot, saved, in_streams(saved.state, kind, 1, 0), namespace)
    points = saved.points
    if saved.unverified and kind is MemoryKind.WINDOW:
        points = tuple(p._replace(state=_of_one_stream(p.state)) for p in points if p.state is not None)
    _put_points(core, slot, points)
    return n


def _of_one_stream(state: Blob) -> Blob:
    """A window's checkpoint that llama-server wrote, which has a header and one cache."""
    return np.concatenate([state[:HEADER_BYTES], in_streams(state[HEADER_BYTES:], MemoryKind.ATTENTION, 1, 0)])


def _put_sequence(core: Core, slot: Slot, saved: Saved, state: Blob, namespace: str) -> int:
    prompt, n = saved.prompt, saved.n_tokens
    if n >= core.context.n_ctx:
        raise BadRequest(f"the file holds {n} tokens but the context {core.context.n_ctx}")
    if int(prompt.codes.max()) >= core.model.vocab.n_tokens:
        raise BadRequest("the file holds tokens that this model does not have")
    empty(core, slot)
    if not core.cache.room.make_room(n, keep=slot):
        raise BadRequest(f"there is no room for {n} tokens beside what is running; try again later")
    try:
        core.context.restore_sequence(slot.seq, state, prompt.end, saved.head)
    except MemoryFault as error:
        raise BadRequest(f"the file is not a state of this model: {error}") from None
    slot.hold(prompt, core.cache.tree.root(namespace), ())
    slot.remember(namespace)
    core.cache.checkpointer.mark_end(slot)
    return n


def _put_points(core: Core, slot: Slot, points: Sequence[SavedPoint]) -> None:
    """Keeps the checkpoints of the conversation that was put into the slot, and its end. RAM evicts for them only when it
    is known that the conversation will be continued: before that they are worth nothing."""
    with core.cache.ram_budget.lifted():
        for each in points:
            if each.state is not None:
                keep_point(core, slot.content, slot.namespace, each)
            if each.point.n_items == slot.n_fed:
                slot.hold(slot.items, slot.node, each.point.chunks)
        is_new = slot.node.checkpoint is None
        core.cache.checkpointer.take(slot, CutKind.REPLY)
        for each in points:
            if is_new and each.state is None and each.point.n_items == slot.n_fed:
                _describe_end(core, slot.node, each)
        ends = [each.point.n_items for each in points if each.point.cut == CutKind.END.value]
        core.cache.returns.leave(slot.node, max(ends, default=slot.n_fed), Continuation())


def keep_point(core: Core, prompt: Prompt, namespace: str, each: SavedPoint) -> None:
    """Adds a checkpoint of a conversation to the tree, unless there is one already."""
    node = core.cache.tree.grow(core.cache.tree.root(namespace), prompt, each.point.n_items)
    if node.checkpoint is None:
        core.cache.tree.set_checkpoint(node, checkpoint_of(core, each))


def checkpoint_of(core: Core, each: SavedPoint) -> Checkpoint:
    point = each.point
    cut = CutKind.named(point.cut)
    kept = Checkpoint(cut, point.clean, point.chunks, state=each.state, used_at=time.monotonic())
    kept.logits = _logits(core, each)
    return kept


def _logits(core: Core, each: SavedPoint) -> NDArray[np.float32] | None:
    is_right = each.logits is not None and each.logits.nbytes == 4 * core.model.vocab.n_tokens
    return each.logits.view(np.float32) if is_right and each.logits is not None else None


def _describe_end(core: Core, node: Node, each: SavedPoint) -> None:
    """The checkpoint at the end was taken of the sequence itself just now: it has the very bytes of the one that was saved,
    so what was known of that is true of it."""
    checkpoint, logits = node.checkpoint, _logits(core, each)
    if checkpoint is None:
        return
    checkpoint.kind = CutKind.named(each.point.cut)
    checkpoint.clean = each.point.clean
    checkpoint.chunks = each.point.chunks
    if checkpoint.logits is None and logits is not None:
        core.cache.tree.add_logits(node, logits)


def empty(core: Core, slot: Slot) -> None:
    """Empties the slot; what it held stays cached."""
    core.cache.room.vacate(slot)
    slot.forget_content()


def erase(core: Core, slot: Slot, namespace: str) -> int:
    """Forgets the part of the slot's conversation that no other shares; returns its tokens."""
    content = slot.content
    if not len(content) or owner_of(slot.namespace) != namespace:
        return 0  # what was read ahead in it since may be another's
    namespace = slot.namespace
    n = content.n_tokens(len(content))
    _bring_back(core, slot)
    core.prewarm.drop_waiting(core.cache.tree.namespace(slot.node))
    for branch in prewarmed_branches(slot.node):
        core.cache.drop(branch)
    node = slot.node
    slot.vacate()
    slot.forget_content()
    core.cache.returns.forget(node.lineage())
    core.cache.returns.forget_empty(node.lineage())
    while node.parent is not None and not node.children and not node.holders:
        parent = node.parent
        if node.checkpoint is not None:
            core.cache.checkpointer.drop(node, "erased")
        if node.segment is not None:
            core.cache.tree.drop_segment(node)
        node = parent
    core.cache.returns.forget_pruned()
    core.cache.tree.forgotten.clear(namespace)
    core.speculator.forget()
    core.cache.loader.forget_arriving(content, namespace, beyond=node.n_items)
    core.cache.tiers.forget(content, namespace, beyond=node.n_items)
    return n
