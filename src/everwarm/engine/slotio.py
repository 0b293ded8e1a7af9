"""Saving a slot's conversation to a file, bringing it back, and forgetting it: what llama-server's slot actions do.

``capture``, ``put_back`` and ``erase`` run on the loop's thread while the slot is idle; ``write`` and ``read`` do the file
work and may run anywhere. The main file is llama.cpp's; the companion holds every checkpoint of the conversation, so that
after a restore any next request is warm, not only one that goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import blake3
import numpy as np

from everwarm.engine import discard
from everwarm.engine.core import Core
from everwarm.engine.restore import Goal
from everwarm.engine.slots import Slot
from everwarm.errors import BadRequest, MemoryFault
from everwarm.llama.blobs import HEADER_BYTES
from everwarm.prompt.prompt import Codes, Prompt
from everwarm.state.arena import Arena
from everwarm.state.files import Files
from everwarm.state.object import Damaged, Header, Point, Reader, encode
from everwarm.state.policy import CutKind
from everwarm.state.slotfile import COMPANION, encode_main, main_digest, open_plain, read_main
from everwarm.state.tree import Checkpoint
from everwarm.types import Blob, Place, heap


class SavedPoint(NamedTuple):
    point: Point
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

    @property
    def n_tokens(self) -> int:
        return self.prompt.n_tokens(len(self.prompt))


def capture(core: Core, slot: Slot, namespace: str) -> Saved:
    """The slot's last conversation, brought back into it first if it has left the context."""
    if not len(slot.content) or slot.namespace != namespace:
        raise BadRequest(f"slot {slot.seq} holds no conversation of yours")
    _bring_back(core, slot)
    if not slot.n_fed:
        raise BadRequest(f"the conversation of slot {slot.seq} is not kept any more")
    keeper = core.keeper
    points = []
    for node in slot.node.lineage():
        checkpoint = node.checkpoint
        if checkpoint is None or node.n_items > slot.n_fed:
            continue
        if checkpoint.parked is not None:
            keeper.copy_down(node)
        if checkpoint.state is not None and core.ram.arena.is_sound(checkpoint.state):
            logits = None if checkpoint.logits is None else checkpoint.logits.view(np.uint8)
            names = (f"state-{node.n_items}", "" if logits is None else f"logits-{node.n_items}")
            point = Point(node.n_items, checkpoint.kind.value, checkpoint.clean, checkpoint.chunks, *names)
            points.append(SavedPoint(point, checkpoint.state, logits))
    state = core.context.capture_sequence(slot.seq, core.ram.arena.lend)
    return Saved(slot.items.first(slot.n_fed), state, tuple(points))


def _bring_back(core: Core, slot: Slot) -> None:
    held = slot.resident()
    if not len(slot.content) or int(slot.content.common_prefix(held)) == len(slot.content) == slot.n_fed:
        return
    more = Prompt.of_tokens([0])  # so that the whole of it may be restored
    prompt = slot.content.followed_by(len(slot.content), more)
    sources = core.restorer.sources(prompt, slot.namespace)
    match = core.restorer.match(prompt, slot.namespace, sources)
    if core.fetcher is not None and core.fetcher.bring(prompt, slot.namespace, match):
        match = core.restorer.match(prompt, slot.namespace, sources)
    core.restorer.bring(slot, Goal(prompt, slot.namespace), match, sources)


def write(path: Path, saved: Saved, fingerprint: str, files: Files | None = None) -> int:
    """Both files at once, each whole or not at all; returns their bytes."""
    files = files or Files()
    companion = path.with_name(path.name + COMPANION)
    companion.unlink(missing_ok=True)  # never an old companion beside a new file
    with ThreadPoolExecutor(1, "everwarm-main-file") as aside:
        main = aside.submit(files.write, path, encode_main(saved.prompt.cells, saved.state))
        n_bytes = files.write(companion, _encode_companion(saved, fingerprint))
        return n_bytes + main.result()


def _encode_companion(saved: Saved, fingerprint: str) -> Iterator[bytes | memoryview]:
    header = Header(
        kind="slot",
        fingerprint=fingerprint,
        key="",
        start="",
        n_start=0,
        n_items=len(saved.prompt),
        media=saved.prompt.rows(0, len(saved.prompt)),
        points=tuple(saved_point.point for saved_point in saved.points),
        main=main_digest(saved.prompt.cells, saved.state),
    )
    parts = {"items": np.ascontiguousarray(saved.prompt.codes, "<i4").view(np.uint8)}
    for saved_point in saved.points:
        parts |= saved_point.sections
    return encode(header, parts, max_threads=blake3.blake3.AUTO)


def read(path: Path, fingerprint: str, max_tokens: int, arena: Arena | None = None) -> tuple[Saved, int]:
    """The conversation in a slot file, with its checkpoints if the companion is there and belongs to it; and its bytes."""
    main = read_main_file(path, max_tokens, heap if arena is None else arena.lend)
    companion = read_companion(path, fingerprint, arena)
    prompt = prompt_of(main, companion)
    if companion is None or not companion.belongs_to(main):
        return Saved(prompt, main.state), main.n_bytes
    return Saved(prompt, main.state, companion.points), main.n_bytes + companion.n_bytes


@dataclass(frozen=True)
class Main:
    """llama.cpp's file: the token of every cell, and the sequence's state."""

    cells: Codes
    state: Blob
    n_bytes: int

    @property
    def has_pictures(self) -> bool:
        return int(self.cells.min()) < 0

    @cached_property
    def digest(self) -> str:
        return main_digest(self.cells, self.state)


class Companion(NamedTuple):
    prompt: Prompt
    points: tuple[SavedPoint, ...]
    main: str  # digest of the file it belongs to
    n_bytes: int

    def belongs_to(self, main: Main) -> bool:
        return np.array_equal(self.prompt.cells, main.cells) and self.main == main.digest


def read_main_file(path: Path, max_tokens: int, place: Place) -> Main:
    cells, state = read_main(path, max_tokens, HEADER_BYTES, place)
    return Main(cells, state, path.stat().st_size)


def prompt_of(main: Main, companion: Companion | None) -> Prompt:
    """The items in a main file: only its companion knows which pictures."""
    if not main.has_pictures:
        return Prompt.of_tokens(main.cells)
    if companion is None or not companion.belongs_to(main):
        raise Damaged("it holds pictures, and the companion that says which is missing or another's")
    return companion.prompt


def read_companion(path: Path, fingerprint: str, arena: Arena | None = None) -> Companion | None:
    """What lies beside a main file; None, an older or a foreign one: the main file alone goes as far as it goes. States
    that are read into an arena are verified before they are used."""
    try:
        fd = open_plain(path.with_name(path.name + COMPANION))
    except Damaged:
        return None
    try:
        return _companion(Reader(fd), fingerprint, arena, os.fstat(fd).st_size)
    except Damaged:
        return None
    finally:
        os.close(fd)


def _companion(reader: Reader, fingerprint: str, arena: Arena | None, n_bytes: int) -> Companion:
    head = reader.header
    if head.kind != "slot" or head.fingerprint != fingerprint:
        raise Damaged("it belongs to another model")
    prompt = Prompt.of_rows(reader.read("items").view("<i4"), head.media)
    if prompt is None or any(not 0 < point.n_items <= len(prompt) for point in head.points):
        raise Damaged("a checkpoint lies outside of the conversation")
    where = (heap,) if arena is None else (arena.place, arena.doubt)
    points = [
        SavedPoint(p, reader.read(p.section, *where), reader.read(p.logits) if p.logits else None) for p in head.points
    ]
    return Companion(prompt, tuple(points), head.main, n_bytes)


def put_back(core: Core, slot: Slot, saved: Saved, namespace: str) -> int:
    """The conversation into the slot, whatever was there before; returns how many tokens a next request can reuse."""
    n = put_sequence(core, slot, saved.prompt, saved.state, namespace)
    put_points(core, slot, saved.points)
    return n


def put_sequence(core: Core, slot: Slot, prompt: Prompt, state: Blob, namespace: str) -> int:
    empty(core, slot)
    n = prompt.n_tokens(len(prompt))
    if n >= core.context.n_ctx:
        raise BadRequest(f"the file holds {n} tokens but the context {core.context.n_ctx}")
    if int(prompt.codes.max()) >= core.model.vocab.n_tokens:
        raise BadRequest("the file holds tokens that this model does not have")
    if not core.keeper.make_room(n, keep=slot):
        raise BadRequest(f"there is no room for {n} tokens beside what is running; try again later")
    try:
        core.context.restore_sequence(slot.seq, state, prompt.end)
    except MemoryFault as error:
        raise BadRequest(f"the file is not a state of this model: {error}") from None
    slot.n_fed, slot.items, slot.content, slot.namespace = len(prompt), prompt, prompt, namespace
    core.keeper.seat(slot, core.tree.root(namespace))
    core.keeper.mark_end(slot)
    return n


def put_points(core: Core, slot: Slot, points: tuple[SavedPoint, ...]) -> None:
    """The checkpoints of the conversation that was put into the slot; its end is kept, too."""
    prompt, root = slot.content, core.tree.root(slot.namespace)
    for point, state, logits in points:
        node = core.tree.grow(root, prompt, point.n_items)
        if node.checkpoint is None:
            cut = CutKind.named(point.cut)
            kept = Checkpoint(cut, point.clean, point.chunks, state=state, used_at=time.monotonic())
            if logits is not None and logits.nbytes == 4 * core.model.vocab.n_tokens:
                kept.logits = logits.view(np.float32)
            core.tree.set_checkpoint(node, kept)
        if point.n_items == slot.n_fed:
            slot.chunks = list(point.chunks)
    core.keeper.take(slot, CutKind.REPLY)
    core.keeper.enforce_budget()


def empty(core: Core, slot: Slot) -> None:
    """Nothing is in the slot afterwards; what was is still known."""
    core.keeper.vacate(slot, slot.node.root())
    slot.content = Prompt.of_tokens([])


def erase(core: Core, slot: Slot, namespace: str) -> int:
    """Forget the slot's conversation as far as no other one shares it; returns its tokens."""
    if slot.namespace != namespace:
        return 0
    content = slot.content
    n = content.n_tokens(len(content))
    _bring_back(core, slot)
    for branch in core.prewarm.forget(core, slot.node):
        discard.drop(core, branch)
    node = slot.node
    core.context.drop(slot.seq)
    core.keeper.seat(slot, node.root())
    slot.clear()
    slot.content = Prompt.of_tokens([])
    while node.parent is not None and not node.children and not node.holders:
        parent = node.parent
        if node.checkpoint is not None:
            core.keeper.drop_checkpoint(node, "erased")
        if node.segment is not None:
            core.tree.drop_segment(node)
        node = parent
    core.tree.forgotten.clear(namespace)
    if core.archive is not None:
        core.archive.forget(content, namespace, beyond=node.n_items)
    return n
