"""Saving a slot's conversation to a file, bringing it back, and forgetting it: what llama-server's slot actions do.

``capture``, ``put_back`` and ``erase`` run on the loop's thread while the slot is idle; ``write`` and ``read`` do the file
work and may run anywhere. The main file is llama.cpp's; the companion holds every checkpoint of the conversation, so that
after a restore any next request is warm, not only one that goes on.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from everwarm.engine.core import Core
from everwarm.engine.restore import Goal
from everwarm.engine.slots import Slot
from everwarm.errors import BadRequest, MemoryFault
from everwarm.prompt.prompt import Codes, Prompt
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
        if checkpoint.state is not None:
            logits = None if checkpoint.logits is None else checkpoint.logits.view(np.uint8)
            names = (f"state-{node.n_items}", "" if logits is None else f"logits-{node.n_items}")
            point = Point(node.n_items, checkpoint.kind.value, checkpoint.clean, checkpoint.chunks, *names)
            points.append(SavedPoint(point, checkpoint.state, logits))
    return Saved(slot.items.first(slot.n_fed), core.context.capture_sequence(slot.seq), tuple(points))


def _bring_back(core: Core, slot: Slot) -> None:
    if slot.n_fed or not len(slot.content):
        return
    more = Prompt.of_tokens([0])  # so that the whole of it may be restored
    prompt = slot.content.followed_by(len(slot.content), more)
    sources = core.restorer.sources(prompt, slot.namespace)
    match = core.restorer.match(prompt, slot.namespace, sources)
    if core.fetcher is not None and core.fetcher.bring(prompt, slot.namespace, match):
        match = core.restorer.match(prompt, slot.namespace, sources)
    core.restorer.bring(slot, Goal(prompt, slot.namespace), match, sources)


def write(path: Path, saved: Saved, fingerprint: str, files: Files | None = None) -> int:
    """Both files, each whole or not at all; returns their bytes."""
    files = files or Files()
    companion = path.with_name(path.name + COMPANION)
    companion.unlink(missing_ok=True)  # never an old companion beside a new file
    cells = saved.prompt.cells
    n_bytes = files.write(path, encode_main(cells, saved.state))
    items = np.ascontiguousarray(saved.prompt.codes, "<i4").view(np.uint8)
    header = Header(
        kind="slot",
        fingerprint=fingerprint,
        key="",
        start="",
        n_start=0,
        n_items=len(saved.prompt),
        media=saved.prompt.rows(0, len(saved.prompt)),
        points=tuple(saved_point.point for saved_point in saved.points),
        main=main_digest(cells, saved.state),
    )
    parts = {"items": items}
    for saved_point in saved.points:
        parts |= saved_point.sections
    return n_bytes + files.write(companion, encode(header, parts))


def read(path: Path, fingerprint: str, max_tokens: int, place: Place = heap) -> tuple[Saved, int]:
    """The conversation in a slot file, with its checkpoints if the companion is there and belongs to it; and its bytes."""
    cells, state = read_main(path, max_tokens)
    companion = path.with_name(path.name + COMPANION)
    try:
        prompt, points, n_bytes = _read_companion(companion, cells, state, fingerprint, place)
    except Damaged:  # none, an older or a foreign one: the main file alone goes as far as it goes
        if int(cells.min()) < 0:
            raise Damaged("it holds pictures, and the companion that says which is missing or another's") from None
        prompt, points, n_bytes = Prompt.of_tokens(cells), (), 0
    return Saved(prompt, state, points), path.stat().st_size + n_bytes


def _read_companion(
    path: Path, cells: Codes, state: Blob, fingerprint: str, place: Place
) -> tuple[Prompt, tuple[SavedPoint, ...], int]:
    fd = open_plain(path)
    try:
        reader = Reader(fd)
        head = reader.header
        same = head.kind == "slot" and head.fingerprint == fingerprint and head.main == main_digest(cells, state)
        prompt = Prompt.of_rows(reader.read("items").view("<i4"), head.media) if same else None
        if prompt is None or prompt.n_tokens(len(prompt)) != len(cells) or not np.array_equal(prompt.cells, cells):
            raise Damaged("it belongs to another file or model")
        if any(not 0 < point.n_items <= len(prompt) for point in head.points):
            raise Damaged("a checkpoint lies outside of the conversation")
        points = [
            SavedPoint(p, reader.read(p.section, place), reader.read(p.logits) if p.logits else None)
            for p in head.points
        ]
        return prompt, tuple(points), os.fstat(fd).st_size
    finally:
        os.close(fd)


def put_back(core: Core, slot: Slot, saved: Saved, namespace: str) -> int:
    """The conversation into the slot, whatever was there before; returns how many tokens a next request can reuse."""
    empty(core, slot)
    prompt, n = saved.prompt, saved.n_tokens
    if n >= core.context.n_ctx:
        raise BadRequest(f"the file holds {n} tokens but the context {core.context.n_ctx}")
    if int(prompt.codes.max()) >= core.model.vocab.n_tokens:
        raise BadRequest("the file holds tokens that this model does not have")
    root = core.tree.root(namespace)
    if not core.keeper.make_room(n, keep=slot):
        raise BadRequest(f"there is no room for {n} tokens beside what is running; try again later")
    try:
        core.context.restore_sequence(slot.seq, saved.state, prompt.end)
    except MemoryFault as error:
        raise BadRequest(f"the file is not a state of this model: {error}") from None
    slot.n_fed, slot.items, slot.content, slot.namespace = len(prompt), prompt, prompt, namespace
    for point, state, logits in saved.points:
        node = core.tree.grow(root, prompt, point.n_items)
        if node.checkpoint is None:
            cut = CutKind.named(point.cut)
            kept = Checkpoint(cut, point.clean, point.chunks, state=state, used_at=time.monotonic())
            if logits is not None and logits.nbytes == 4 * core.model.vocab.n_tokens:
                kept.logits = logits.view(np.float32)
            core.tree.set_checkpoint(node, kept)
    core.keeper.seat(slot, root)
    core.keeper.mark_end(slot)
    core.keeper.take(slot, CutKind.REPLY)
    core.keeper.enforce_budget()
    return n


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
