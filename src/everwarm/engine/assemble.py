"""Putting a core together: the model, its context, what is remembered and where. The one place that knows all parts."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path

from everwarm.engine.admission import Admission
from everwarm.engine.archive import Archive
from everwarm.engine.core import Core
from everwarm.engine.fetch import Fetcher
from everwarm.engine.gallery import Gallery
from everwarm.engine.keeper import Keeper
from everwarm.engine.ram import Ram
from everwarm.engine.restore import Restorer
from everwarm.engine.scheduler import Budget
from everwarm.engine.settings import EngineSettings
from everwarm.engine.sizes import Sizes, decide_sizes
from everwarm.engine.slots import Slot
from everwarm.engine.text import words_of
from everwarm.llama.context import Context
from everwarm.llama.media import MediaModel
from everwarm.llama.model import Model, Progress
from everwarm.state.arena import Arena, memory_file
from everwarm.state.tree import Tree
from everwarm.types import SeqId


def assemble(path: Path, settings: EngineSettings, progress: Progress | None = None, memory: int | None = None) -> Core:
    """``memory`` is the RAM tier's file. What an earlier engine of the same model left in it is known from the start."""
    with contextlib.ExitStack() as undo:
        model = undo.enter_context(Model(path, settings.model, progress))
        gallery = None if settings.mmproj is None else _open_gallery(Path(settings.mmproj), model, settings)
        if gallery is not None:
            undo.callback(gallery.close)
        sizes = decide_sizes(model, settings)
        arena = _open_arena(model, settings, sizes, memory)
        context = Context(model, settings.context(sizes.n_spares))
        undo.pop_all()  # all is well: the core closes them
    tree = Tree()
    ram = Ram(arena, tree, model.memory_kind)
    context.place = ram.place
    slots = [Slot(SeqId(i), tree.root("")) for i in range(settings.n_slots)]
    for slot in slots:
        tree.hold(slot.node)
    keeper = Keeper(context, tree, slots, sizes.spacing, arena.budget_bytes, 1e-3, settings.namespace_share)
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
    parts = (keeper, restorer, slots, admission, budget, ram, archive, fetcher, gallery)
    return Core(model, settings, sizes, context, tree, *parts)


def _open_gallery(path: Path, model: Model, settings: EngineSettings) -> Gallery:
    on_gpu = settings.model.n_gpu_layers != 0
    return Gallery(MediaModel(path, model, n_threads=settings.n_threads, use_gpu=on_gpu))


def _open_arena(model: Model, settings: EngineSettings, sizes: Sizes, memory: int | None) -> Arena:
    fd = memory_file() if memory is None else memory
    try:
        return Arena(fd, settings.fingerprint(model.identity), settings.ram_bytes, sizes.ram_bytes)
    finally:
        os.close(fd)  # the mapping holds on to it
