"""Putting a core together: the model, its context, what is remembered and where. The one place that knows all parts."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from everwarm.engine.admission import Admission
from everwarm.engine.archive import Archive
from everwarm.engine.core import Core
from everwarm.engine.fetch import Fetcher
from everwarm.engine.gallery import Gallery
from everwarm.engine.joining import Joiner
from everwarm.engine.keeper import Keeper
from everwarm.engine.offload import Offload
from everwarm.engine.pinning import Pinning, why_not
from everwarm.engine.ram import Ram
from everwarm.engine.restore import Restorer
from everwarm.engine.scheduler import Budget
from everwarm.engine.settings import EngineSettings
from everwarm.engine.sizes import Sizes, decide_sizes
from everwarm.engine.slots import Slot
from everwarm.engine.text import words_of
from everwarm.llama.context import Context
from everwarm.llama.lib import lib
from everwarm.llama.media import MediaModel
from everwarm.llama.memory import gpu_free_bytes, host_free_bytes, is_on_gpu
from everwarm.llama.model import Model, Progress, identity_of
from everwarm.llama.pinned import loaded_runtime
from everwarm.state.arena import Arena, memory_file
from everwarm.state.joining import most_joined
from everwarm.state.tree import Tree
from everwarm.types import SeqId

log = logging.getLogger("everwarm.ram")

LARGE_BYTES = 512 << 20  # of one whole conversation: then its first copy should find pinned memory


def assemble(path: Path, settings: EngineSettings, progress: Progress | None = None, memory: int | None = None) -> Core:
    """``memory`` is the RAM tier's file. What an earlier engine of the same model left in it is known from the start."""
    with contextlib.ExitStack() as undo:
        fd = memory_file() if memory is None else memory
        undo.callback(os.close, fd)
        left = _open_left(path, settings, fd)
        if left is not None:
            undo.callback(left.close)
        model = undo.enter_context(Model(path, settings.model, progress))
        gallery = None if settings.mmproj is None else _open_gallery(Path(settings.mmproj), model, settings)
        if gallery is not None:
            undo.callback(gallery.close)
        sizes = decide_sizes(model, settings)
        if left is not None and left.identity != model.identity:
            left.close()  # the file was replaced meanwhile
            left = None
        left = left or _open_memory(model, settings, sizes, fd)
        context = Context(model, settings.context(sizes.n_spares))
        undo.pop_all()  # all is well: the core closes them
        os.close(fd)  # the mapping holds on to it
    arena = left.arena
    tree = Tree()
    ram = Ram(arena, tree, model.memory_kind, left.pinning)
    context.place = ram.place
    slots = [Slot(SeqId(i), tree.root("")) for i in range(settings.n_slots)]
    for slot in slots:
        tree.hold(slot.node)
    keeper = Keeper(context, tree, slots, sizes.spacing, arena.budget_bytes, 1e-3, settings.namespace_share)
    keeper.most_joined = most_joined(arena.budget_bytes, sizes.shape.kv_bytes_per_token)
    keeper.spares = {SeqId(settings.n_slots + i): None for i in range(sizes.n_spares)}
    ram.adopt()
    keeper.enforce_budget()
    archive = fetcher = None
    kept = settings.store or settings.remote
    if kept is not None:
        words, print_of = partial(words_of, model.vocab), lambda: settings.fingerprint(model.fingerprint)
        archive = Archive(settings.store, print_of, keeper, ram, words, settings.remote)
        keeper.leaving = archive.offer
        fetcher = Fetcher(archive, keeper, ram, kept.restore_policy)
    restorer = Restorer(keeper, ram)
    admission = Admission(keeper, restorer, fetcher)
    budget = Budget(min(settings.n_ubatch, context.n_batch), settings.prefill_beside_decode)
    parts = (keeper, restorer, Joiner(keeper, ram), slots, admission, budget, ram, archive, fetcher, gallery)
    kv_bytes = sizes.shape.kv_bytes_per_token
    offload = None if memory is None else Offload(keeper, ram, archive, kv_bytes)  # else nobody comes after us
    return Core(model, settings, sizes, context, tree, *parts, offload=offload)


def _open_gallery(path: Path, model: Model, settings: EngineSettings) -> Gallery:
    on_gpu = settings.model.n_gpu_layers != 0
    return Gallery(MediaModel(path, model, n_threads=settings.n_threads, use_gpu=on_gpu))


@dataclass(frozen=True, slots=True)
class Memory:
    """The RAM tier's memory, opened for a model of this identity."""

    identity: str
    arena: Arena
    pinning: Pinning | None

    def close(self) -> None:
        if self.pinning is not None:
            self.pinning.close()
        self.arena.close()


def _open_left(path: Path, settings: EngineSettings, fd: int) -> Memory | None:
    """What an earlier engine left is pinned and looked at while the model loads. None: nothing was left, or whether it will
    be needed on a GPU shows only later."""
    layers = settings.model.n_gpu_layers
    try:
        identity = identity_of(path, settings.model)
    except OSError:
        return None  # opening the model will say it
    owner = settings.fingerprint(identity)
    if layers >= 0 or not Arena.is_left(fd, owner, settings.ram_bytes) or gpu_free_bytes(lib()) == 0:
        return None
    arena = Arena(fd, owner, settings.ram_bytes, 0)
    return Memory(identity, arena, _pinning(arena, settings, on_gpu=True))


def _open_memory(model: Model, settings: EngineSettings, sizes: Sizes, fd: int) -> Memory:
    arena = Arena(fd, settings.fingerprint(model.identity), settings.ram_bytes, sizes.ram_bytes)
    is_large = sizes.shape.context_bytes(settings.n_ctx, 1) >= LARGE_BYTES
    return Memory(model.identity, arena, _pinning(arena, settings, on_gpu=is_on_gpu(model), at_once=is_large))


def _pinning(arena: Arena, settings: EngineSettings, *, on_gpu: bool, at_once: bool = False) -> Pinning | None:
    """Only memory that a GPU copies from gains by it; elsewhere there is nothing to say about it either."""
    free = host_free_bytes() + arena.n_used  # what is found in it needs no more memory
    reason = why_not(settings.pin_ram, is_on_gpu=on_gpu, n_bytes=arena.budget_bytes, free_bytes=free)
    if reason is None:
        return Pinning(arena, loaded_runtime, at_once=at_once or settings.pin_ram == "on")
    if on_gpu or settings.pin_ram == "on":
        log.info("RAM is not pinned: %s", reason)
    return None
