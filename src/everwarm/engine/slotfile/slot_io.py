"""Saves a slot's conversation to a file, restores it, and erases it, as llama-server's slot actions do.

``capture``, ``put_back`` and ``erase`` run on the loop's thread while the slot is idle; ``write`` and ``read`` do the
file work and may run anywhere. The main file is llama.cpp's; the companion holds every checkpoint of the conversation,
so that after a restore any next request is warm, not only one that continues, and says which model and namespace the
file belongs to: a file without one is refused, or kept apart from everything else (``unverified``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import blake3
import numpy as np

from everwarm.engine.cache.prewarm import prewarmed_branches
from everwarm.engine.cache.restore import Goal
from everwarm.engine.core import Core
from everwarm.engine.slots import Slot
from everwarm.errors import BadRequest, MemoryFault
from everwarm.llama.blobs import HEADER_BYTES, in_streams
from everwarm.llama.model import MemoryKind
from everwarm.llama.mtp.tail import trunk
from everwarm.prompt.prompt import Codes, Prompt
from everwarm.state.namespace import is_adapted, is_unverified, owner_of, unverified
from everwarm.state.policy import CutKind
from everwarm.state.store.arena import Arena
from everwarm.state.store.files import Files, sweep
from everwarm.state.store.object import Damaged, ObjectHeader, ObjectReader, SlotPoint, encode
from everwarm.state.store.slot_file import (
    NO_FILE,
    Appended,
    Claim,
    UnknownOrigin,
    encode_main,
    main_digest,
    open_pair,
    owner_digest,
    publish,
    read_open_main,
    split_appendix,
)
from everwarm.state.store.slot_names import COMPANION, NAMESPACE, companion_of
from everwarm.state.tree import Checkpoint
from everwarm.types import Blob, Place, heap

MAX_APPENDED = 4  # checkpoints that a file has twice: in llama-server's place, too
OF_NO_NAMESPACE = (
    "it is from before slot files were bound to a namespace; restore it without a cache_salt, and save it again"
)


class SavedPoint(NamedTuple):
    point: SlotPoint
    state: Blob
    logits: Blob | None

    @property
    def sections(self) -> dict[str, Blob]:
        logits = {} if self.logits is None else {self.point.logits: self.logits}
        return {self.point.section: self.state} | logits


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation outside of the engine."""

    prompt: Prompt
    state: Blob
    points: tuple[SavedPoint, ...] = ()
    appended: tuple[Appended, ...] = ()  # the last of them, for llama-server
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
    points = []
    for node in slot.node.lineage():
        checkpoint = node.checkpoint
        if checkpoint is None or node.n_items > slot.n_fed:
            continue
        if checkpoint.parked is not None:
            core.cache.ram_writer.copy_state(node)
        if checkpoint.state is not None and core.cache.ram.arena.is_sound(checkpoint.state):
            logits = None if checkpoint.logits is None else checkpoint.logits.view(np.uint8)
            names = (f"state-{node.n_items}", "" if logits is None else f"logits-{node.n_items}")
            point = SlotPoint(node.n_items, checkpoint.kind.value, checkpoint.clean, checkpoint.chunks, *names)
            points.append(SavedPoint(point, checkpoint.state, logits))
    state = core.context.capture_sequence(slot.seq, core.cache.ram.arena.lend)
    if not core.settings.kv_unified:  # llama-server with the same flags has a stream for each slot
        state = in_streams(state, core.context.kind, len(core.slots), slot.seq)
    return Saved(slot.items.first(slot.n_fed), state, tuple(points), _for_llama_server(core, slot, points))


def _for_llama_server(core: Core, slot: Slot, points: list[SavedPoint]) -> tuple[Appended, ...]:
    """What it can read: recurrent states as libllama writes them, without what the head keeps behind them, at positions
    that are counts of tokens."""
    is_readable = core.context.kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT) and core.settings.state_type == "f32"
    if not is_readable or slot.items.first(slot.n_fed).media:
        return ()
    before = [saved_point for saved_point in points if saved_point.point.n_items < slot.n_fed]
    return tuple(Appended(point.n_items, trunk(state)) for point, state, _ in before[-MAX_APPENDED:])


def _bring_back(core: Core, slot: Slot) -> None:
    held, is_there = slot.resident(), slot.node.root() is core.cache.tree.root(slot.namespace)
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
    main = main_digest(saved.prompt.cells, saved.state, saved.appended)
    header = ObjectHeader(
        kind="slot",
        fingerprint=claim.fingerprint,
        key="",
        start="",
        n_start=0,
        n_items=len(saved.prompt),
        media=saved.prompt.rows(0, len(saved.prompt)),
        points=tuple(saved_point.point for saved_point in saved.points),
        main=main,
        owner=owner_digest(claim.fingerprint, main, claim.namespace),
    )
    parts = {"items": np.ascontiguousarray(saved.prompt.codes, "<i4").view(np.uint8)}
    for saved_point in saved.points:
        parts |= saved_point.sections
    return encode(header, parts, max_threads=blake3.blake3.AUTO)


def read(path: Path, claim: Claim, max_tokens: int, arena: Arena | None = None) -> tuple[Saved, int]:
    """The conversation in a slot file with its checkpoints, and its bytes. ``Damaged``, with the reason, unless its
    companion says that it is the caller's, of this model, and belongs to this very file. States that are read into an
    arena are verified before they are used."""
    place = heap if arena is None else arena.lend
    with open_pair(path) as pair:
        if pair.companion is None:
            return _read_alone(pair.main, path.name, claim, max_tokens, place)
        with _blaming_companion(path.name):
            reader = _vouching(pair.companion, path.name, claim)
        with ThreadPoolExecutor(1, "everwarm-main-file") as aside:
            reading = aside.submit(read_main_file, pair.main, max_tokens, place)
            with _blaming_companion(path.name):
                prompt = _read_prompt(reader)
                points = _read_points(reader, arena)
            main = reading.result()
        if main.digest != reader.header.main or not np.array_equal(prompt.cells, main.cells):
            raise UnknownOrigin(
                f"its companion {path.name}{COMPANION} belongs to another file, so {path.name} was changed or written "
                "by another program since it was saved here; save it again"
            )
    return Saved(prompt, split_appendix(main.state)[0], points), main.n_bytes


def _read_alone(fd: int, name: str, claim: Claim, max_tokens: int, place: Place) -> tuple[Saved, int]:
    """Reads a file without a companion, as unverified."""
    if not claim.trusts_origin:
        raise UnknownOrigin(
            f"it has no companion {name}{COMPANION}, so it is unknown which model and build it is a state of. Restore a "
            "file that was saved here with its companion beside it; a file of llama-server with the very same model can "
            "be restored by an admin of a server that was started with --trust-slot-files"
        )
    main = read_main_file(fd, max_tokens, place)
    if main.has_images:
        raise UnknownOrigin("it holds pictures, and it has no companion that says which")
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


@dataclass(frozen=True, slots=True)
class Main:
    """llama.cpp's file: the token of every cell, and the sequence's state."""

    cells: Codes
    state: Blob
    n_bytes: int
    digest: str

    @property
    def has_images(self) -> bool:
        return int(self.cells.min()) < 0


def read_main_file(fd: int, max_tokens: int, place: Place) -> Main:
    cells, state = read_open_main(fd, max_tokens, HEADER_BYTES, place)
    return Main(cells, state, os.fstat(fd).st_size, main_digest(cells, state))


def _read_prompt(reader: ObjectReader) -> Prompt:
    head = reader.header
    prompt = Prompt.of_rows(reader.read("items").view("<i4"), head.media)
    if prompt is None or any(not 0 < point.n_items <= len(prompt) for point in head.points):
        raise Damaged("a checkpoint lies outside of the conversation")
    return prompt


def _read_points(reader: ObjectReader, arena: Arena | None) -> tuple[SavedPoint, ...]:
    where = (heap,) if arena is None else (arena.place, arena.doubt)
    return tuple(
        SavedPoint(point, reader.read(point.section, *where), reader.read(point.logits) if point.logits else None)
        for point in reader.header.points
    )


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
        core.intake.unverified.add(namespace, saved.prompt, (point.point.n_items for point in saved.points))
    kind = core.context.kind
    n = _put_sequence(core, slot, saved.prompt, in_streams(saved.state, kind, 1, 0), namespace)
    points = saved.points
    if saved.unverified and kind is MemoryKind.WINDOW:
        points = tuple(point._replace(state=_of_one_stream(point.state)) for point in points)
    _put_points(core, slot, points)
    return n


def _of_one_stream(state: Blob) -> Blob:
    """A window's checkpoint that llama-server wrote, which has a header and one cache."""
    return np.concatenate([state[:HEADER_BYTES], in_streams(state[HEADER_BYTES:], MemoryKind.ATTENTION, 1, 0)])


def _put_sequence(core: Core, slot: Slot, prompt: Prompt, state: Blob, namespace: str) -> int:
    n = prompt.n_tokens(len(prompt))
    if n >= core.context.n_ctx:
        raise BadRequest(f"the file holds {n} tokens but the context {core.context.n_ctx}")
    if int(prompt.codes.max()) >= core.model.vocab.n_tokens:
        raise BadRequest("the file holds tokens that this model does not have")
    empty(core, slot)
    if not core.cache.room.make_room(n, keep=slot):
        raise BadRequest(f"there is no room for {n} tokens beside what is running; try again later")
    try:
        core.context.restore_sequence(slot.seq, state, prompt.end)
    except MemoryFault as error:
        raise BadRequest(f"the file is not a state of this model: {error}") from None
    slot.hold(prompt, core.cache.tree.root(namespace), ())
    slot.remember(namespace)
    core.cache.checkpointer.mark_end(slot)
    return n


def _put_points(core: Core, slot: Slot, points: tuple[SavedPoint, ...]) -> None:
    """Keeps the checkpoints of the conversation that was put into the slot, and its end."""
    prompt, root = slot.content, core.cache.tree.root(slot.namespace)
    for point, state, logits in points:
        node = core.cache.tree.grow(root, prompt, point.n_items)
        if node.checkpoint is None:
            cut = CutKind.named(point.cut)
            kept = Checkpoint(cut, point.clean, point.chunks, state=state, used_at=time.monotonic())
            if logits is not None and logits.nbytes == 4 * core.model.vocab.n_tokens:
                kept.logits = logits.view(np.float32)
            core.cache.tree.set_checkpoint(node, kept)
        if point.n_items == slot.n_fed:
            slot.hold(slot.items, slot.node, point.chunks)
    core.cache.checkpointer.take(slot, CutKind.REPLY)
    core.cache.ram_budget.enforce()


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
        core.cache.dropper.drop(branch)
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
    core.cache.tiers.forget(content, namespace, beyond=node.n_items)
    return n
