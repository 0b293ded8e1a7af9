"""Putting a core together: the model, its context, what is remembered and where. The one place that knows all parts."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from everwarm.engine.cache.checkpointing import Keeper
from everwarm.engine.cache.compaction import Joiner
from everwarm.engine.cache.offload import Offload
from everwarm.engine.cache.restore import Restorer
from everwarm.engine.core import Core
from everwarm.engine.images.image_cache import ImageCache
from everwarm.engine.memory_plan import Sizes, decide_sizes
from everwarm.engine.process.reply_text import words_of
from everwarm.engine.scheduling.admission import Admission
from everwarm.engine.scheduling.scheduler import Budget
from everwarm.engine.settings import EngineSettings
from everwarm.engine.slots import Slot
from everwarm.engine.tiers.disk_writer import DiskWriter
from everwarm.engine.tiers.loader import Loader
from everwarm.engine.tiers.pinned_arena import Pinning, why_not
from everwarm.engine.tiers.ram import Ram
from everwarm.errors import ModelFileError
from everwarm.llama.context import Context
from everwarm.llama.lib import lib
from everwarm.llama.media.media_model import MediaModel
from everwarm.llama.model import Model, Progress, identity_of
from everwarm.llama.rope import rope_limit_of
from everwarm.llama.system.memory_fit import gpu_free_bytes, host_free_bytes, is_on_gpu
from everwarm.llama.system.pinned_memory import loaded_runtime
from everwarm.state.segment_merge import most_joined
from everwarm.state.store.arena import Arena
from everwarm.state.store.arena_file import memory_file
from everwarm.state.tree import Tree
from everwarm.types import SeqId

log = logging.getLogger("everwarm.ram")

_MIB = 1 << 20
SECONDS_PER_TOKEN = 1e-3  # until it is measured
IsRight = Callable[[], bool]

LARGE_BYTES = 512 << 20  # of one whole conversation: then its first copy should find pinned memory


def assemble(path: Path, settings: EngineSettings, progress: Progress | None = None, memory: int | None = None) -> Core:
    """``memory`` is the RAM tier's file. What an earlier engine of the same model left in it is known from the start, and
    what of it has no room any more goes before the context asks for memory."""
    tree = Tree()
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
        if left is not None and left.identity != model.identity:
            left.close()  # the file was replaced meanwhile
            left = None
        is_right = partial(_is_right, model, gallery)
        left = left or _open_left_on_host(model, settings, fd)
        ram = None if left is None else _take_up(left, tree, model, is_right, undo)
        sizes = decide_sizes(model, settings, 0 if left is None else left.arena.n_used)
        if left is None or ram is None:
            left = _open_memory(model, settings, sizes, fd)
            ram = _take_up(left, tree, model, is_right, undo)
        _warn_of_limits(left.arena.budget_bytes, sizes)
        context = Context(model, settings.context(sizes.n_spares))
        undo.pop_all()  # all is well: the core closes them
        os.close(fd)  # the mapping holds on to it
    model.files.on_same = lambda: ram.arena.hand_to(settings.fingerprint(model.identity, model.rope_limit))
    sizes = replace(sizes, ram_bytes=left.arena.budget_bytes)
    core = (model, settings, sizes, context, tree, ram, gallery, is_right)
    return _core(*core, outlives_us=memory is not None)


def _is_right(model: Model, gallery: ImageCache | None) -> bool:
    """Whether everything that was computed until now is what the files say."""
    watched = [model.files, *([] if gallery is None else [gallery.media.files])]
    return all(files.is_right() for files in watched)


def _core(
    model: Model,
    settings: EngineSettings,
    sizes: Sizes,
    context: Context,
    tree: Tree,
    ram: Ram,
    gallery: ImageCache | None,
    is_right: IsRight,
    *,
    outlives_us: bool,
) -> Core:
    """``outlives_us``: somebody may go on with the RAM tier's memory after this process."""
    context.place = ram.place
    slots = [Slot(SeqId(i), tree.root("")) for i in range(settings.n_slots)]
    for slot in slots:
        tree.hold(slot.node)
    budget = sizes.ram_bytes
    keeper = Keeper(context, tree, slots, sizes.spacing, budget, SECONDS_PER_TOKEN, settings.namespace_share)
    keeper.most_joined = most_joined(budget, sizes.shape.kv_bytes_per_token)
    keeper.spares = {SeqId(settings.n_slots + i): None for i in range(sizes.n_spares)}
    keeper.enforce_budget()
    archive = fetcher = None
    kept = settings.store or settings.remote
    if kept is not None:
        words, print_of = partial(words_of, model.vocab), partial(_fingerprint, model, settings)
        archive = DiskWriter(settings.store, print_of, keeper, ram, words, settings.remote, is_right)
        keeper.leaving = archive.offer
        fetcher = Loader(archive, keeper, ram, kept.restore_policy)
    restorer = Restorer(keeper, ram)
    admission = Admission(keeper, restorer, fetcher)
    step = Budget(min(settings.n_ubatch, context.n_batch), settings.prefill_beside_decode)
    parts = (keeper, restorer, Joiner(keeper, ram), slots, admission, step, ram, archive, fetcher, gallery)
    kv_bytes = sizes.shape.kv_bytes_per_token
    offload = Offload(keeper, ram, archive, kv_bytes) if outlives_us else None
    return Core(model, settings, sizes, context, tree, *parts, offload=offload)


def _fingerprint(model: Model, settings: EngineSettings) -> str:
    return settings.fingerprint(model.fingerprint, model.rope_limit)


def _take_up(left: Memory, tree: Tree, model: Model, is_right: IsRight, undo: contextlib.ExitStack) -> Ram:
    """Lay what an earlier engine left into the tree, as far as the budget goes."""
    ram = Ram(left.arena, tree, model.memory_kind, left.pinning, is_right)
    undo.callback(ram.close)
    ram.adopt()
    ram.shrink(SECONDS_PER_TOKEN)
    return ram


def _warn_of_limits(budget_bytes: int, sizes: Sizes) -> None:
    if budget_bytes > sizes.ram_room:
        shown = (budget_bytes / _MIB, sizes.ram_room / _MIB)
        log.warning(
            "--cache-ram is %.0f MiB, but the memory limit of this process leaves %.0f MiB beside weights and context: "
            "the kernel will kill the engine when it is filled; give less, or raise the limit",
            *shown,
        )


def _open_gallery(path: Path, model: Model, settings: EngineSettings) -> ImageCache:
    on_gpu = settings.model.n_gpu_layers != 0
    return ImageCache(MediaModel(path, model, n_threads=settings.n_threads, use_gpu=on_gpu))


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
    if settings.model.n_gpu_layers >= 0 or gpu_free_bytes(lib()) == 0:
        return None
    try:
        identity = identity_of(path, settings.model)
        owner = settings.fingerprint(identity, rope_limit_of(path))
    except (OSError, ModelFileError):
        return None  # opening the model will say it
    if not Arena.is_left(fd, owner, settings.ram_bytes):
        return None
    arena = Arena(fd, owner, settings.ram_bytes, 0)
    return Memory(identity, arena, _pinning(arena, settings, on_gpu=True))


def _open_left_on_host(model: Model, settings: EngineSettings, fd: int) -> Memory | None:
    """The same where no GPU copies from it: then nothing is pinned, and it can be opened before sizes are decided."""
    owner = settings.fingerprint(model.identity, model.rope_limit)
    if is_on_gpu(model) or not Arena.is_left(fd, owner, settings.ram_bytes):
        return None
    return Memory(model.identity, Arena(fd, owner, settings.ram_bytes, 0), None)


def _open_memory(model: Model, settings: EngineSettings, sizes: Sizes, fd: int) -> Memory:
    arena = Arena(fd, settings.fingerprint(model.identity, model.rope_limit), settings.ram_bytes, sizes.ram_bytes)
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
